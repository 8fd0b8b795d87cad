"""A rank that writes what its launcher told it, and then ends well, waits, exits or is killed."""

import json
import os
import signal
import sys
import time
from pathlib import Path

from scalebench.comm.launchers import named
from scalebench.system.parent_watch import end_with_launcher

end_with_launcher()
launcher = named(sys.argv[1])
folder = Path(sys.argv[2])
how = sys.argv[3]
if launcher.without_mpi:
    rank, size = launcher.rank(), int(os.environ["WORLD_SIZE"])
else:
    from mpi4py import MPI

    rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
facts = {
    "rank": rank,
    "size": size,
    "pid": os.getpid(),
    "said": os.environ.get("SCALEBENCH_SAID"),
    "threads": os.environ["OMP_NUM_THREADS"],
    "cpus": sorted(os.sched_getaffinity(0)),
}
new = folder / f"rank-{rank}.new"
new.write_text(json.dumps(facts))
new.rename(folder / f"rank-{rank}.json")
print(f"rank {rank} on standard output", flush=True)
print(f"rank {rank} on standard error", file=sys.stderr, flush=True)
if how == "killed" and rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
if how == "exits" and rank == 1:
    os._exit(3)
if how != "well":
    time.sleep(100)
