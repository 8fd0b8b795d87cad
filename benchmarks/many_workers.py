"""1,024 virtual workers, 5 epochs of 65,536 synthetic samples, a model of 9,010 parameters: CPU time and memory.

    python benchmarks/many_workers.py

Each strategy in a process of its own, from its start to its outcome, evaluation after
every epoch included; the data set is prepared before. Goals: 5 s of CPU time and
540 MiB.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import time
from collections.abc import Iterator

from ratios import Finding, Goal, finding, show
from virtual_overhead import make_run, stated_machine

from scalebench.data.catalog import prepare
from scalebench.data.dataset import open_dataset
from scalebench.study.spec import Component, Training

WORKERS, EPOCHS, SAMPLES = 1024, 5, 65_536
STRATEGIES = (
    "allreduce",
    "horovod",
    "epoch_average",
    "epoch_async",
    "local_sgd",
    "asp",
    "daso-heat",
    "gossip",
)
TIME, MEMORY = Goal("<=", 5, "s"), Goal("<=", 540, "MiB")
TRAINING = Training(
    epochs=EPOCHS,
    dataset=Component(name="synthetic", options={"n_train": SAMPLES, "features": 64}),
    model=Component(name="mlp", options={"hidden": [120]}),
)


def main() -> Iterator[Finding]:
    prepare(TRAINING, WORKERS)
    for strategy in STRATEGIES:
        began = time.perf_counter()
        done = subprocess.run(
            [sys.executable, __file__, strategy],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        wall_s = time.perf_counter() - began
        found = json.loads(done.stdout)
        name = f"{WORKERS:,} workers, {EPOCHS} epochs: {strategy}"
        yield finding(
            name,
            found["cpu_s"],
            TIME,
            f"{found['cpu_s']:.1f} s CPU",
            f"{found['cpu_s']:.1f} s CPU",
            f"{wall_s:.1f} s",
        )
        yield finding(
            f"{name}, memory", found["peak_mib"], MEMORY, f"{found['peak_mib']:.0f} MiB"
        )


def simulate_here(strategy: str) -> dict[str, float]:
    """One run in this process: its CPU seconds and its peak memory."""
    import resource

    from scalebench.virtual.pool import simulate_alike

    gc.freeze()  # what imports have made, as in the processes of `--jobs`
    run = make_run(TRAINING, strategy).model_copy(update={"workers": WORKERS})
    ((_, outcome, _),) = simulate_alike(
        [run], open_dataset(prepare(TRAINING, WORKERS)), stated_machine()
    )
    if outcome.status != "completed":
        raise SystemExit(f"{strategy}: {outcome.status}: {outcome.error}")
    used = resource.getrusage(resource.RUSAGE_SELF)
    return {"cpu_s": used.ru_utime + used.ru_stime, "peak_mib": used.ru_maxrss / 1024}


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(simulate_here(sys.argv[1])))
    else:
        show(main())
