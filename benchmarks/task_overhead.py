"""What an epoch costs as a task, beside its training: a model of 38 kB, its momentum, processes of this node.

    python benchmarks/task_overhead.py

The time of an epoch without compute and data, on the worker that waits least for
others: packing, the way to the process and back, and the average. Median over the
epochs of five runs. Goal: 3 ms.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from contextlib import closing

from ratios import Finding, Goal, finding, show

from scalebench.data.catalog import prepare
from scalebench.study.spec import Component, Run
from scalebench.tasks.run import TaskRuns

EPOCHS, RUNS = 20, 5
GOAL = Goal("<=", 3e-3, "s")


def main() -> Iterator[Finding]:
    for strategy, workers in (("serial", 1), ("epoch_average", 2)):
        run = task_run(strategy, workers)
        seconds: list[float] = []
        with closing(TaskRuns({workers: prepare(run, workers)}, workers)) as tasks:
            for _ in range(RUNS):
                outcome = tasks.execute(run)
                if outcome.status != "completed":
                    raise SystemExit(f"{strategy}: {outcome.error}")
                for epochs in zip(
                    *(worker.epochs for worker in outcome.workers), strict=True
                ):
                    seconds.append(
                        min(
                            each.epoch_s - each.compute_s - each.data_s
                            for each in epochs
                        )
                    )
        overhead = statistics.median(seconds)
        low, _, high = statistics.quantiles(seconds, n=4)
        said = f"{overhead * 1e3:.1f} ms an epoch (quartiles {low * 1e3:.1f} to {high * 1e3:.1f})"
        yield finding(f"{strategy} at {workers}, processes", overhead, GOAL, said)


def task_run(strategy: str, workers: int) -> Run:
    """A run of the default model, 9,610 parameters in float32."""
    return Run(
        study="benchmark",
        run_id="benchmark",
        config_hash="",
        execution="native",
        engine="tasks",
        strategy=Component(name=strategy),
        workers=workers,
        repetition=0,
        seed=0,
        epochs=EPOCHS,
        dataset=Component(name="digits"),
        evaluate_every=0,
    )


if __name__ == "__main__":
    show(main())
