"""One trial of tuning against bare PyTorch loops that take as many steps: the default strategies at 1 to 64 workers.

    python benchmarks/tuning.py

A study that tunes five strategies at seven worker counts in 16 trials computes these 35
runs 16 times. CPU seconds of one thread, in turn; runs whose arithmetic is the same are
computed once, as in a study. Goal: a third of what a trial took before gradients of
virtual workers were computed together, 0.6 of the loops.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable, Iterator, Mapping

import torch
from ratios import Finding, Goal, compare, show
from virtual_overhead import DEFAULTS, bare_loop, make_run, stated_machine

from scalebench.data.catalog import prepare
from scalebench.data.dataset import Dataset, open_dataset
from scalebench.pricing.machine import Machine
from scalebench.study.spec import Run, Training
from scalebench.virtual.pool import alike, simulate_alike

COUNTS, EPOCHS, BATCH, PAIRS = (1, 2, 4, 8, 16, 32, 64), 6, 8, 2
GOAL = Goal("<=", 0.2)


def main() -> Iterator[Finding]:
    torch.set_num_threads(1)
    training = Training(epochs=EPOCHS, batch_per_worker=BATCH)
    machine = stated_machine()
    datasets = {count: open_dataset(prepare(training, count)) for count in COUNTS}
    runs = [
        make_run(training, strategy).model_copy(
            update={"workers": count, "run_id": f"{strategy}-{count}"}
        )
        for count in COUNTS
        for strategy in DEFAULTS
    ]

    gc.freeze()  # what imports have made, as in the processes of `--jobs`

    def loops() -> None:
        for run in runs:
            bare_loop(run, datasets[run.workers])

    comparison = compare(
        lambda: simulate_all(runs, datasets, machine), loops, PAIRS, time.process_time
    )
    yield comparison.finding(f"a trial of {len(runs)} runs / bare loops", GOAL)


def simulate_all(
    runs: Iterable[Run], datasets: Mapping[int, Dataset], machine: Machine
) -> None:
    """Simulate `runs`, those of equal arithmetic once, on the data sets by worker count."""
    pieces: dict[str, list[Run]] = {}
    for run in runs:
        pieces.setdefault(alike(run), []).append(run)
    for piece in pieces.values():
        dataset = datasets[piece[0].workers]
        for run, outcome, _ in simulate_alike(piece, dataset, machine):
            if outcome.status != "completed":
                raise SystemExit(f"{run.run_id}: {outcome.status}: {outcome.error}")


if __name__ == "__main__":
    show(main())
