"""The runs of each cell one by one, and which of them the run order puts side by side.

A repetition is a block of the run order: one run of every cell, in an order drawn anew. What slows the machine for a
while slows a block, so that two cells of one block are paired, if they ran in it and not hours later. A seed that two
runs share pairs their batches and weights, and with them their metrics, but not the noise of their times.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from scalebench.analysis.cached import cached
from scalebench.analysis.loading import CELL, Results

PAIRED_FROM, PAIRED_FROM_IF_TORN = 2, 3  # blocks; where others are left out


_NEEDED = [*CELL, "strategy", "scaling", "repetition", "run_order", "attempt", "started_utc", "train_s", "eval_s"]
_NEEDED += ["oversubscribed", "seed", "metric_name", "final_metric"]


@dataclass(frozen=True)
class Cell:
    """One cell's repetitions: seconds and place in the run order by block, metric by seed.

    `started` says when each began, in seconds after the first of its execution (NaN where that is unknown), `again`
    which did not run at the place their number says, as far as that tells: they were not the first attempt, or others
    have the number too. `reach_s` is within which time two runs were side by side.
    """

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
    started: dict[int, float] = field(default_factory=dict)
    again: set[int] = field(default_factory=set)
    reach_s: float = math.inf

    @property
    def oversubscribed(self) -> bool:
        """Whether any of its runs was."""
        return any(self.crowded)


@cached
def timed(results: Results) -> pd.DataFrame:
    """The completed runs that have a positive training time."""
    runs = results.completed
    return runs[runs["train_s"] > 0]


@cached
def by_block(results: Results) -> list[Cell]:
    """Every cell of the completed runs."""
    runs = timed(results)[_NEEDED]
    if runs.empty:
        return []
    parts = [_in_time(own) for _, own in runs.groupby("execution", sort=False)]
    runs = pd.concat(parts).loc[runs.index]
    return [_cell(own) for _, own in runs.groupby(CELL, dropna=False, sort=False)]


def _cell(runs: pd.DataFrame) -> Cell:
    first = runs.iloc[0]
    blocks = runs["repetition"].astype(int).tolist()
    again = (runs["attempt"] > 1) | runs["shared"]
    known = runs[np.isfinite(runs["final_metric"])]
    return Cell(
        key={name: first[name] for name in CELL},
        strategy=first["strategy"],
        label=first["label"],
        execution=first["execution"],
        engine=first["engine"],
        workers=int(first["workers"]),
        batch_global=None if pd.isna(first["batch_global"]) else int(first["batch_global"]),
        weak=first["scaling"] == "weak",
        metric_name="" if pd.isna(first["metric_name"]) else first["metric_name"],
        seconds=dict(zip(blocks, runs["train_s"].tolist(), strict=True)),
        order=dict(zip(blocks, runs["order"].tolist(), strict=True)),
        metrics=dict(zip(known["seed"].astype(int).tolist(), known["final_metric"].tolist(), strict=True)),
        crowded=runs["oversubscribed"].astype(bool).tolist(),
        started=dict(zip(blocks, runs["began"].tolist(), strict=True)),
        again={block for block, redone in zip(blocks, again.tolist(), strict=True) if redone},
        reach_s=float(first["reach_s"]),
    )


def spread(logs: Sequence[float] | NDArray[np.float64]) -> float:
    """The coefficient of variation of lognormal times, sqrt(exp(s^2) - 1) with s the deviation of logs; NaN of one.

    Infinite where exp(s^2) is beyond floating-point numbers: times that lie ten orders of magnitude apart.
    """
    if len(logs) < 2:
        return math.nan
    with np.errstate(over="ignore"):
        return math.sqrt(np.expm1(np.var(logs, ddof=1)))


def paired_blocks(a: Cell, b: Cell) -> list[int] | None:
    """The blocks in which both ran side by side; None where their repetitions are independent samples.

    Two runs of a block are side by side if they began within `reach_s` of each other: one that was made again hours
    later is paired with nothing of that day. No run of either in one block may lie between those of another, which
    tells two launches, one after the other, from one. PAIRED_FROM such blocks have to be there, and where others are
    left out PAIRED_FROM_IF_TORN: a single pair has no spread, and no neighbour to show that its place is right.

    Virtual runs always are, whenever they were computed: what their repetitions share is a draw from the calibration.
    """
    common = sorted(a.seconds.keys() & b.seconds.keys())
    if a.execution == b.execution == "virtual":
        return common
    beside = [block for block in common if _side_by_side(a, b, block)]
    ends = sorted(sorted((a.order[block], b.order[block])) for block in beside)
    mixed = any(last > first for (_, last), (first, _) in pairwise(ends))
    least = PAIRED_FROM if len(beside) == len(common) else PAIRED_FROM_IF_TORN
    return None if mixed or len(beside) < least else beside


def _side_by_side(a: Cell, b: Cell, block: int) -> bool:
    apart = abs(a.started[block] - b.started[block])
    if math.isnan(apart):  # nobody knows when: as planned, unless it was made again
        return block not in a.again and block not in b.again
    return apart <= min(a.reach_s, b.reach_s)


def paired_times(a: Cell, b: Cell) -> tuple[list[float], list[float]]:
    """The times of both in the blocks that pair them; of all blocks where none do."""
    blocks = paired_blocks(a, b)
    if blocks is None:
        return list(a.seconds.values()), list(b.seconds.values())
    return [a.seconds[block] for block in blocks], [b.seconds[block] for block in blocks]


def _in_time(runs: pd.DataFrame) -> pd.DataFrame:
    """`runs` of one execution with `order`, `shared` (with another run), `began` (s, NaN if unknown) and `reach_s`.

    The order is the planned one; where runs were made again, or places given twice (a study that was extended by an
    older version), it is the one in which they began, if that is known. `reach_s` is twice the time that the runs of
    the longest block take, with the usual pause after each of them.
    """
    began = pd.to_datetime(runs["started_utc"], utc=True, errors="coerce", format="ISO8601")
    seconds = (began - began.min()).dt.total_seconds()
    known = bool(seconds.notna().all())
    order = runs["run_order"].astype(int)
    shared = order.duplicated(keep=False)
    if known and (shared.any() or (runs["attempt"] > 1).any()):
        order = seconds.rank(method="first").astype(int) - 1
    reach = math.inf
    if known and len(runs) > 1:
        took = runs["train_s"] + runs["eval_s"].fillna(0.0)
        pauses = (seconds.sort_values().diff().shift(-1) - took).dropna()
        blocks = (took + max(0.0, pauses.median())).groupby(runs["repetition"]).sum()
        reach = 2 * float(blocks.max())
    return runs.assign(order=order, shared=shared, began=seconds, reach_s=reach)
