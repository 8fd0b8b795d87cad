"""Seconds of predicting all strategies at 1 to 65,536 workers, and of a what-if of 10,000 cells."""

from __future__ import annotations

import time

import numpy as np

from scalebench.cluster.device import load_device
from scalebench.cluster.load import load_cluster
from scalebench.errors import UsageError
from scalebench.models.layers import load_layers
from scalebench.pricing.devices import Roofline
from scalebench.pricing.platform import Platform
from scalebench.pricing.prediction import SERIAL, Case, Predictor, Workload
from scalebench.pricing.what_if import Axis, what_if
from scalebench.strategies import registry
from scalebench.study.spec import Component

COUNTS = [1 << power for power in range(17)]
QUEUES = ("asp", "ssp", "dssp", "bsp", "bsp_backup", "elastic_bsp", "epoch_async", "dislib-compat-async", "ad_psgd")
FACTORS = tuple(np.geomspace(0.1, 10, 100).tolist())
PLANES = (("latency", "link-bandwidth"), ("flops", "memory-bandwidth"), ("link-bandwidth", "flops"))


def fresh() -> Predictor:
    """Return a predictor of ResNet-50 without kept recordings."""
    platform = Platform(load_cluster("juwels-booster"), Roofline(load_device("a100-40gb")))
    predictor = Predictor(Workload(load_layers("resnet50"), 1_281_167, 90, 64), platform)
    predictor.times(SERIAL, 1, [Case(platform, 64)])
    return predictor


def grid() -> None:
    """Print the seconds of all lock-step strategies at all counts, with what binds each point."""
    names = [name for name in registry.names() if name not in QUEUES]
    for name in names:  # imports what it needs
        fresh().times(Component(name=name), 8 if name != "serial" else 1, [Case(fresh().platform, 64)])
    predictor, points = fresh(), 0
    platform = predictor.platform
    cases = [Case(each, 64) for each in (platform, *map(platform.improved, platform.components))]
    began, computed = time.perf_counter(), time.process_time()
    for name in names:
        for workers in COUNTS:
            try:
                predictor.times(Component(name=name), workers, cases)
                points += 1
            except UsageError:  # does not suit the strategy
                continue
    took = f"{time.perf_counter() - began:.2f} s, {time.process_time() - computed:.2f} s of the processor"
    print(f"{len(names)} lock-step strategies, 1 to 65,536 workers, {points} points: {took}")


def planes() -> None:
    """Print the seconds of planes of 10,000 cells."""
    for names in PLANES:
        predictor = fresh()
        began, computed = time.perf_counter(), time.process_time()
        what_if(predictor, Component(name="allreduce"), 64, [Axis(name, FACTORS) for name in names])
        took = f"{time.perf_counter() - began:.2f} s, {time.process_time() - computed:.2f} s of the processor"
        print(f"10,000 cells of {' and '.join(names)}: {took}")


if __name__ == "__main__":
    grid()
    planes()
