"""The runs of each cell one by one, and which of them the run order puts side by side.

A repetition is a block of the run order: one run of every cell, in an order drawn anew. What slows the machine for a
while slows a block, so that two cells of one block are paired; a seed that two runs share pairs their batches and
weights, and with them their metrics, but not the noise of their times.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from scalebench.analysis.once import once
from scalebench.analysis.reading import Results

CELL = ["execution", "engine", "label", "workers", "batch_per_worker", "batch_global"]


@dataclass(frozen=True)
class Cell:
    """One cell's repetitions: seconds and place in the run order by block, metric by seed."""

    key: dict[str, object]  # CELL -> value
    strategy: str
    label: str
    execution: str
    engine: str
    workers: int
    batch_global: int | None
    weak: bool
    metric_name: str
    seconds: dict[int, float] = field(default_factory=dict)
    order: dict[int, int] = field(default_factory=dict)
    metrics: dict[int, float] = field(default_factory=dict)
    crowded: list[bool] = field(default_factory=list)

    @property
    def oversubscribed(self) -> bool:
        """Whether any of its runs was."""
        return any(self.crowded)


@once
def timed(results: Results) -> pd.DataFrame:
    """The completed runs that have a positive training time."""
    runs = results.completed
    return runs[runs["train_s"] > 0]


@once
def by_block(results: Results) -> list[Cell]:
    """Every cell of the completed runs."""
    found: dict[tuple[object, ...], Cell] = {}
    names = [*CELL, "strategy", "scaling", "repetition", "run_order", "seed", "train_s", "oversubscribed"]
    for run in timed(results)[[*names, "metric_name", "final_metric"]].to_dict("records"):
        identity = tuple(None if pd.isna(run[name]) else run[name] for name in CELL)
        if identity not in found:
            found[identity] = Cell(
                key={name: run[name] for name in CELL},
                strategy=run["strategy"],
                label=run["label"],
                execution=run["execution"],
                engine=run["engine"],
                workers=int(run["workers"]),
                batch_global=None if pd.isna(run["batch_global"]) else int(run["batch_global"]),
                weak=run["scaling"] == "weak",
                metric_name="" if pd.isna(run["metric_name"]) else run["metric_name"],
            )
        cell, block = found[identity], int(run["repetition"])
        cell.seconds[block], cell.order[block] = float(run["train_s"]), int(run["run_order"])
        cell.crowded.append(bool(run["oversubscribed"]))
        if math.isfinite(run["final_metric"]):
            cell.metrics[int(run["seed"])] = float(run["final_metric"])
    return list(found.values())


def spread(logs: Sequence[float] | NDArray[np.float64]) -> float:
    """The coefficient of variation of lognormal times, sqrt(exp(s^2) - 1) with s the deviation of logs; NaN of one."""
    return math.sqrt(math.expm1(float(np.var(logs, ddof=1)))) if len(logs) > 1 else math.nan


def share_blocks(a: Cell, b: Cell) -> bool:
    """Whether a's and b's repetitions lie in common blocks of the run order: none of either before the other's last.

    Virtual runs always do, whenever they were computed: what their repetitions share is a draw from the calibration.
    """
    if a.execution == b.execution == "virtual":
        return True
    blocks = sorted(a.order.keys() & b.order.keys())
    ends = [sorted((a.order[block], b.order[block])) for block in blocks]
    return all(last <= first for (_, last), (first, _) in pairwise(ends))


def paired_times(a: Cell, b: Cell) -> tuple[list[float], list[float]]:
    """The times of both in the blocks that both have."""
    blocks = sorted(a.seconds.keys() & b.seconds.keys())
    return [a.seconds[block] for block in blocks], [b.seconds[block] for block in blocks]
