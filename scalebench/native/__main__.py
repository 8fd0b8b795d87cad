"""`python -m scalebench.native JOB.json`, started on every rank by a launcher."""

import gc
import sys
from pathlib import Path

gc.disable()  # `main` goes on with it: importing torch makes 400,000 objects that stay

from scalebench.native.rank import main  # noqa: E402

main(Path(sys.argv[1]))
