"""The time of an allreduce of MPI among all ranks: `mpirun -n P python -m scalebench...allreduce_probe SPEC`.

Without torch, whose import on every rank would take longer than what is measured.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from statistics import median

import numpy as np
from mpi4py import MPI

from scalebench.system.clock import sleep_until
from scalebench.system.parent_watch import end_with_launcher

# before an operation, as a step computes before it: links and acknowledgements come to
# rest
PAUSE_S = 0.02
_FEWEST, _MOST = 3, 50  # repetitions


def between_steps(
    group: MPI.Comm, operation: Callable[[], object], repetitions: int
) -> list[float]:
    """Time an operation that all ranks leave together, each after a pause, with no other message in between.

    A barrier before it would let ranks go at different moments, and its
    acknowledgements share the links.
    """
    operation()
    ends = [time.perf_counter()]
    for _ in range(repetitions):
        sleep_until(ends[-1] + PAUSE_S)
        operation()
        ends.append(time.perf_counter())
    means: list[float] = (
        group.allreduce(np.diff(ends)) / group.size - PAUSE_S
    ).tolist()
    return means


def _measure(world: MPI.Comm, nbytes: int, seconds: float) -> float:
    """Return the median time of an allreduce of `nbytes`, from repetitions that take about `seconds`."""
    values = np.zeros(nbytes // 4, dtype=np.float32)

    def allreduce() -> None:
        world.Allreduce(MPI.IN_PLACE, values)

    allreduce()  # connects the ranks
    world.Barrier()
    began = time.perf_counter()
    allreduce()
    one = time.perf_counter() - began + PAUSE_S
    repetitions = world.bcast(int(min(_MOST, max(_FEWEST, seconds / one))))
    return median(between_steps(world, allreduce, repetitions))


def main(text: str) -> None:
    """Measure what the JSON `text` asks for; the first rank prints ranks and seconds, after the `mark` in it."""
    end_with_launcher()
    spec = json.loads(text)
    mark = spec.pop("mark")  # among other lines of mpirun
    world = MPI.COMM_WORLD
    measured = _measure(world, **spec)
    if world.rank == 0:
        print(
            f"{mark}{json.dumps({'ranks': world.size, 'seconds': measured})}",
            flush=True,
        )


if __name__ == "__main__":
    main(sys.argv[1])
