"""Independent virtual runs with `--jobs 2` against `--jobs 1`: how many times as many runs in the same time.

    python benchmarks/jobs.py

The same runs, once in one process and once in two; the start of the processes counts,
that of the one they are forked from does not: the command starts it before it checks
and calibrates. Goal: at least 1.8 on two idle cores. What others compute on the machine
meanwhile is taken from two jobs more than from one.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from ratios import Finding, Goal, finding, show
from virtual_overhead import make_run, stated_machine

from scalebench.data.catalog import prepare
from scalebench.study.spec import Run, Training
from scalebench.system.hardware import cores
from scalebench.system.parent_watch import start_forkserver
from scalebench.training.outcome import Outcome
from scalebench.virtual.pool import Simulator, run_virtual

RUNS, EPOCHS = 24, 6
GOAL = Goal(">=", 1.8)


def main() -> Iterator[Finding]:
    start_forkserver()
    training = Training(epochs=EPOCHS, evaluate_every=0)
    one = make_run(training, "epoch_average")
    runs = [
        one.model_copy(update={"run_id": f"run-{seed}", "seed": seed})
        for seed in range(RUNS)
    ]
    folders = {one.workers: prepare(training, one.workers)}
    alone = seconds_of(runs, folders, jobs=1)
    together = seconds_of(runs, folders, jobs=2)
    name = f"{RUNS} virtual runs, --jobs 2 / --jobs 1, {cores()} cores"
    ratio = alone / together
    yield finding(
        name,
        ratio,
        GOAL,
        f"{ratio:.2f} times the throughput",
        f"{together:.1f} s",
        f"{alone:.1f} s",
    )


def seconds_of(runs: list[Run], folders: dict[int, Path], jobs: int) -> float:
    """Wall seconds from the first run's start to the last one's end."""
    ended: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="scalebench-benchmark-") as folder:
        began = time.perf_counter()
        run_virtual(
            runs,
            Simulator(stated_machine(), folders, Path(folder)),
            jobs=jobs,
            on_start=lambda run: None,
            on_outcome=lambda run, outcome: ended.append(outcome),
        )
        seconds = time.perf_counter() - began
    failed = [outcome.error for outcome in ended if outcome.status != "completed"]
    if failed or len(ended) != len(runs):
        raise SystemExit(
            f"{len(ended)} of {len(runs)} runs ended, {len(failed)} failed: {failed[:1]}"
        )
    return seconds


if __name__ == "__main__":
    show(main())
