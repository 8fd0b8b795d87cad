"""Series of times that follow a known law."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from scalebench.analysis.laws.candidates import (
    Law,
    amdahl,
    gustafson,
    mechanistic,
    universal,
)
from scalebench.analysis.laws.series import Series, SeriesWork
from scalebench.study.cell import SeriesKey

COUNTS = (1, 2, 4, 8, 16, 32, 64)
STEPS, BYTES = 5400.0, 38440.0
Noise = Literal["lognormal", "drift", "outliers"]


def workload(
    counts: Sequence[int] = COUNTS,
    *,
    every: Literal["batch", "epoch"] = "epoch",
    weak: bool = False,
) -> SeriesWork:
    """Of a strategy that synchronises 6 times in all, or in every step; `weak`: with as many samples per worker."""
    n = np.array(counts, dtype=float)
    steps = STEPS * np.ones_like(n) if weak else STEPS / n
    syncs = np.where(n > 1, steps if every == "batch" else 6.0, 0.0)
    return SeriesWork(n, steps, syncs, BYTES * syncs, 0.0 if weak else -1.0)


def law_named(name: str, load: SeriesWork) -> Law:
    """`amdahl`, `gustafson`, `usl`, `weak-usl`, `mechanistic-log` or `mechanistic-linear`."""
    if name.startswith("mechanistic"):
        return mechanistic(load, name)
    return {
        "amdahl": amdahl,
        "gustafson": gustafson,
        "usl": lambda: universal(weak=False),
        "weak-usl": lambda: universal(weak=True),
    }[name]()


# A serial share of 3 %, peaks at 45 and 14 workers, trees and servers of 2 and 0.2 ms a
# hop, trees of 0.1 ms.
TRUTHS: dict[str, tuple[str, tuple[float, ...], Literal["batch", "epoch"]]] = {
    "amdahl": ("amdahl", (1.94, 0.06), "epoch"),
    "usl": ("usl", (2.0, 0.04, 0.001), "epoch"),
    "usl, early peak": ("usl", (2.0, 0.1, 0.01), "epoch"),
    "trees, each epoch": ("mechanistic-log", (3e-4, 2e-3, 1e-8), "epoch"),
    "servers, each epoch": ("mechanistic-linear", (3e-4, 2e-4, 2e-7), "epoch"),
    "trees, each batch": ("mechanistic-log", (3e-4, 1e-4, 1e-9), "batch"),
}
# A serial share of 6 %, times that grow threefold by 64 workers, trees and servers of
# 20 and 5 ms a hop.
WEAK_TRUTHS: dict[str, tuple[str, tuple[float, ...], Literal["batch", "epoch"]]] = {
    "weak, gustafson": ("gustafson", (0.47, 0.03), "epoch"),
    "weak, usl": ("weak-usl", (2.0, 0.02, 0.0005), "epoch"),
    "weak, trees each epoch": ("mechanistic-log", (3e-4, 2e-2, 1e-8), "epoch"),
    "weak, servers each epoch": ("mechanistic-linear", (3e-4, 5e-3, 1e-8), "epoch"),
}


def following(
    law: Law,
    coefficients: Sequence[float],
    counts: Sequence[int] = COUNTS,
    *,
    repetitions: int = 3,
    load: SeriesWork | None = None,
    noise: float = 0.0,
    kind: Noise = "lognormal",
    random: np.random.Generator | None = None,
    execution: str = "native",
    **changes: Any,
) -> Series:
    """A native series with `repetitions` of each count, whose log times deviate from `law` with standard deviation
    `noise`: independently, by whole repetitions (`drift`), or with one run in twenty 30
    % slower (`outliers`)."""
    n = np.array(counts, dtype=float)
    logs = np.tile(law.log_seconds(n, np.array(coefficients)), (repetitions, 1))
    if random is not None:
        logs = logs + random.normal(0, noise, logs.shape) * (
            0.5 if kind == "drift" else 1
        )
        if kind == "drift":
            logs = logs + random.normal(0, noise, (repetitions, 1))
        if kind == "outliers":  # which also shift the mean of all
            logs = logs + math.log(1.3) * ((random.random(logs.shape) < 0.05) - 0.05)
    engine = "mpi" if execution == "native" else execution
    values: dict[str, Any] = {
        "key": SeriesKey(execution, engine, "epoch_average"),
        "weak": law.name == "gustafson",
        "at": np.tile(n, repetitions),
        "seconds": np.exp(logs).ravel(),
        "repetition": np.repeat(np.arange(repetitions), len(n)),
        "workload": load,
    }
    return Series(**{**values, **changes})
