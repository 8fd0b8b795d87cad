"""Seconds of predicting all strategies at 1 to 65,536 workers, of a what-if of 10,000 cells, of modelled runs, and of
new times for a study of 108 runs, none of which is trained again.

    python benchmarks/prediction.py

Goals: 2 s, 5 s, 60 s for 4,096 asynchronous workers x 90 epochs on the event engine,
and 5 s.
"""

from __future__ import annotations

import gc
import subprocess
import sys
import tempfile
import time

import numpy as np
from virtual_overhead import make_run

from scalebench.cluster.cluster_file import load_cluster
from scalebench.cluster.device import load_device
from scalebench.cluster.engine_costs import EngineCosts
from scalebench.data.catalog import prepare
from scalebench.data.dataset import open_dataset
from scalebench.errors import UsageError
from scalebench.models.zoo.layers import load_layers
from scalebench.pricing.axes import Axis
from scalebench.pricing.devices import Roofline
from scalebench.pricing.machine import Machine, stated_table
from scalebench.pricing.platform import Platform
from scalebench.pricing.prediction import Case, Predictor
from scalebench.pricing.what_if import what_if
from scalebench.pricing.workload import SERIAL, Workload
from scalebench.strategies import registry
from scalebench.study.spec import Component, Training
from scalebench.virtual.engine import model_time

COUNTS = [1 << power for power in range(17)]
FACTORS = tuple(np.geomspace(0.1, 10, 100).tolist())
PLANES = (
    ("latency", "network-bandwidth"),
    ("flops", "memory-bandwidth"),
    ("network-bandwidth", "flops"),
)


def fresh() -> Predictor:
    """Return a predictor of ResNet-50 without kept recordings."""
    platform = Platform(
        load_cluster("juwels-booster"), Roofline(load_device("a100-40gb"))
    )
    predictor = Predictor(
        Workload(load_layers("resnet50"), 1_281_167, 90, 64), platform
    )
    predictor.times(SERIAL, 1, [Case(platform, 64)])
    return predictor


def grid() -> None:
    """Print the seconds of all strategies at all counts, with what binds each point."""
    names = registry.names()
    for name in names:  # imports what it needs
        fresh().times(
            Component(name=name),
            8 if name != "serial" else 1,
            [Case(fresh().platform, 64)],
        )
    predictor, points = fresh(), 0
    platform = predictor.platform
    cases = [
        Case(each, 64)
        for each in (platform, *map(platform.improved, platform.components))
    ]
    began, computed = time.perf_counter(), time.process_time()
    for name in names:
        for workers in COUNTS:
            try:
                predictor.times(Component(name=name), workers, cases)
                points += 1
            except UsageError:  # does not suit the strategy
                continue
    took = f"{time.perf_counter() - began:.2f} s, {time.process_time() - computed:.2f} s of the processor"
    print(f"{len(names)} strategies, 1 to 65,536 workers, {points} points: {took}")


def planes() -> None:
    """Print the seconds of planes of 10,000 cells."""
    for names in PLANES:
        predictor = fresh()
        began, computed = time.perf_counter(), time.process_time()
        what_if(
            predictor,
            Component(name="allreduce"),
            64,
            [
                Axis(name, FACTORS, relative=name == "network-bandwidth")
                for name in names
            ],
        )
        took = f"{time.perf_counter() - began:.2f} s, {time.process_time() - computed:.2f} s of the processor"
        print(f"10,000 cells of {' and '.join(names)}: {took}")


def modelled(strategy: str, workers: int, epochs: int) -> None:
    """Print the seconds of one modelled run of four steps an epoch."""
    training = Training(
        epochs=epochs,
        dataset=Component(
            name="synthetic",
            options={"n_train": 16 * workers, "n_test": 8, "features": 8},
        ),
        model=Component(name="mlp", options={"hidden": [16]}),
        batch_per_worker=4,
        device_step_time=0.01,
    )
    cluster = load_cluster("juwels-booster").model_copy(update={"nodes": workers})
    machine = Machine(cluster, EngineCosts(), [stated_table(training, cluster, 4)])
    run = make_run(training, strategy).model_copy(
        update={"workers": workers, "execution": "modelled"}
    )
    dataset = open_dataset(prepare(training, workers))
    began, computed = time.perf_counter(), time.process_time()
    outcome = model_time(run, dataset, machine)
    took = f"{time.perf_counter() - began:.1f} s, {time.process_time() - computed:.1f} s of the processor"
    print(
        f"{strategy}, {workers:,} workers x {epochs} epochs, {outcome.status}: {took}"
    )


def repriced() -> None:
    """Print the seconds of `scalebench recalibrate` for three repetitions of six strategies at 1 to 64 workers."""
    names = ("serial", "allreduce", "horovod", "ddp", "local_sgd", "epoch_average")
    strategies = [f"--strategy={name}" for name in names]
    with tempfile.TemporaryDirectory(prefix="scalebench-benchmark-") as folder:
        command = [sys.executable, "-m", "scalebench", "--quiet"]
        machine = [
            "--cluster",
            "juwels-booster",
            "--device-step-time",
            "0.001",
            "--set",
            "virtual.jitter=lognormal",
        ]
        study = [
            "--name",
            "mine",
            "--workers",
            "1..64",
            "--execution",
            "virtual",
            *machine,
            "--output",
            folder,
        ]
        subprocess.run(
            [*command, "run", *study, *strategies],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        began = time.perf_counter()
        subprocess.run(
            [*command, "recalibrate", f"{folder}/mine", "--jitter", "none"], check=True
        )
        print(f"new times for 108 runs: {time.perf_counter() - began:.1f} s")


if __name__ == "__main__":
    gc.disable()  # as `scalebench predict` does
    grid()
    planes()
    gc.enable()
    modelled("epoch_average", 1024, 90)
    modelled("epoch_async", 4096, 90)
    repriced()
