"""The only module that the forkserver process imports by name: it ends with its parent even while it imports torch.

Its children, each a fork, find unused objects among their own: what is imported here
stays.
"""

import gc
import importlib

from scalebench.system.parent_watch import PRELOADED, end_with_parent

end_with_parent()
gc.disable()
for name in PRELOADED:
    importlib.import_module(name)
gc.freeze()
gc.enable()
