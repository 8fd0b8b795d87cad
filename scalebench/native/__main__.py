"""`python -m scalebench.native JOB.json`, started on every rank by a launcher."""

import sys
from pathlib import Path

from scalebench.native.rank import main

main(Path(sys.argv[1]))
