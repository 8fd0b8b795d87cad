"""Imported first by the process that children are forked from: it ends with the command that started it.

While it imports torch it would not see that nobody can ask it for children any more.
"""

from scalebench.system.parent_watch import end_with_parent

end_with_parent()
