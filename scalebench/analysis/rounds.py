"""Single runs of each cell, and the pairs among them by round of the run order.

A repetition is a round of the run order: one run of every cell, in random order. A
temporary slowdown of the machine affects a whole round, so runs of one round are
paired, unless one of them was repeated hours later. Runs with equal seeds share batches
and initial weights: their metrics are paired, the noise of their times is not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import compress, pairwise
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from scalebench.analysis.loading import Results, cached, cells_in, rows_where
from scalebench.study.cell import CELL, Cell

MEASURED = (
    "native",
    "paced",
)  # executions whose times are samples of a machine's times
PAIRED_FROM, PAIRED_FROM_IF_TORN = (
    2,
    3,
)  # rounds; the latter where other common rounds are left out

_NEEDED = [
    *CELL,
    "strategy",
    "scaling",
    "batch_policy",
    "repetition",
    "run_order",
    "attempt",
    "started_utc",
]
_NEEDED += [
    "train_s",
    "eval_s",
    "oversubscribed",
    "disturbed",
    "seed",
    "metric_name",
    "final_metric",
    "epochs",
]
_NEEDED += [
    "target_metric",
    "time_to_target_s",
    "epochs_to_target",
    "pipeline_parallel",
    "tensor_parallel",
]
_NEEDED += ["syncs", "optimizer_steps"]


@dataclass(frozen=True)
class CellRuns:
    """Repetitions of one cell: seconds and place in the run order by round, metric by seed.

    `started` are start times in seconds after the first run of the execution (NaN if
    unknown). `again` are rounds whose run did not take place at its number in the run
    order: a later attempt, or a number shared with another run. `reach_s` is the
    largest distance in time of two runs made side by side. Of runs that were disturbed
    beside undisturbed ones only the `metrics` are here. `target` is the target metric
    of the last run (NaN without one), `aimed` are the rounds with this target,
    `to_target` and `epochs_to_target` seconds and epochs until it in those that reached
    it. `parts` are the workers of a replica. `seldom` is False where workers
    synchronised in every step.
    """

    at: Cell
    strategy: str
    weak: bool
    batch_policy: str
    metric_name: str
    seconds: dict[int, float] = field(default_factory=dict)
    order: dict[int, int] = field(default_factory=dict)
    metrics: dict[int, float] = field(default_factory=dict)
    oversubscribed: bool = False
    disturbed: bool = False
    started: dict[int, float] = field(default_factory=dict)
    again: set[int] = field(default_factory=set)
    reach_s: float = math.inf
    epochs: int = 0
    target: float = math.nan
    aimed: set[int] = field(default_factory=set)
    to_target: dict[int, float] = field(default_factory=dict)
    epochs_to_target: dict[int, float] = field(default_factory=dict)
    parts: int = 1
    seldom: bool = True

    @property
    def execution(self) -> str:
        return self.at.execution

    @property
    def label(self) -> str:
        return self.at.label

    @property
    def workers(self) -> int:
        return self.at.workers

    @property
    def batch(self) -> int | None:
        """The batch that does not depend on the worker count."""
        return (
            self.at.batch_per_worker
            if self.batch_policy == "per_worker"
            else self.at.batch_global
        )

    @property
    def unfit(self) -> str:
        """Reason why the cell is no baseline, in one word; empty if it may be one."""
        if self.oversubscribed:
            return "oversubscribed"
        return "disturbed" if self.disturbed else ""


@cached
def trained(results: Results) -> pd.DataFrame:
    """Completed runs with a positive training time."""
    runs = results.completed
    # Logarithms of times are taken everywhere behind this line.
    return rows_where(runs, runs["train_s"] > 0)


@cached
def timed(results: Results) -> pd.DataFrame:
    """Runs whose times count: those of `trained` without runs that were disturbed beside others of their cell.

    A cell of disturbed runs alone keeps them, and is marked. The choice follows from
    the load, not from the times.
    """
    runs = trained(results)
    return rows_where(runs, _counts(runs))


def _counts(runs: pd.DataFrame) -> pd.Series[bool]:
    quiet = ~runs["disturbed"].astype(bool)
    # A cell without a quiet run would vanish: it is shown, and marked.
    beside = quiet.groupby([runs[name] for name in CELL], dropna=False).transform("any")
    return quiet | ~beside


@cached
def runs_by_cell(results: Results) -> list[CellRuns]:
    """Runs of every cell of the completed runs."""
    # Of all columns those that a cell needs: a frame is cut for each of them.
    runs = trained(results)[_NEEDED]
    if runs.empty:
        return []
    # Executions run one after the other, each with an order of its own.
    parts = [_with_times(own) for _, own in runs.groupby("execution", sort=False)]
    until = runs["epochs_to_target"].astype(float)  # NaN where unknown
    found = pd.Series(cells_in(runs), runs.index, dtype=object)
    counts = _counts(runs)
    # in the order of the rows: the last target of a cell is the latest
    runs = pd.concat(parts).loc[runs.index]
    runs = runs.assign(cell=found, counts=counts, epochs_to_target=until)
    return [_cell_runs(own) for _, own in runs.groupby(CELL, dropna=False, sort=False)]


def _cell_runs(runs: pd.DataFrame) -> CellRuns:
    first = runs.iloc[0]
    metrics = zip(
        runs["seed"].astype(int).tolist(), runs["final_metric"].tolist(), strict=True
    )
    # Metrics of disturbed runs count: load changes times, not weights.
    known = np.isfinite(runs["final_metric"].to_numpy(dtype=float))
    counts = runs["counts"].to_numpy(dtype=bool)
    targets = runs["target_metric"].to_numpy(dtype=float)
    # A target that was changed later: earlier runs aimed at another one.
    target = float(targets[counts][-1])
    aimed = counts & (targets == target)
    reached = aimed & runs["time_to_target_s"].notna().to_numpy(dtype=bool)
    again = counts & ((runs["attempt"] > 1) | runs["shared"]).to_numpy(dtype=bool)
    rounds = runs["repetition"].astype(int).tolist()

    def by_round(name: str, chosen: NDArray[np.bool_] = counts) -> dict[int, Any]:
        return dict(compress(zip(rounds, runs[name].tolist(), strict=True), chosen))

    return CellRuns(
        at=first["cell"],
        strategy=first["strategy"],
        weak=first["scaling"] == "weak",
        batch_policy=first["batch_policy"],
        metric_name="" if pd.isna(first["metric_name"]) else first["metric_name"],
        seconds=by_round("train_s"),
        order=by_round("order"),
        metrics=dict(compress(metrics, known)),
        oversubscribed=bool(runs["oversubscribed"].to_numpy()[counts].any()),
        disturbed=bool(runs["disturbed"].to_numpy()[counts].all()),
        started=by_round("began"),
        again=set(by_round("attempt", again)),
        reach_s=float(first["reach_s"]),
        epochs=int(first["epochs"]),
        target=target,
        aimed=set(by_round("attempt", aimed)),
        to_target=by_round("time_to_target_s", reached),
        epochs_to_target=by_round("epochs_to_target", reached),
        parts=_parts(first),
        seldom=_seldom(first),
    )


def _parts(first: pd.Series[Any]) -> int:
    """Workers of a replica; one where rows were written before they had these columns."""
    stages = first["pipeline_parallel"]
    shares = first["tensor_parallel"]
    return 1 if pd.isna(stages) or pd.isna(shares) else int(stages) * int(shares)


def _seldom(first: pd.Series[Any]) -> bool:
    """Whether workers synchronised in fewer steps than they made; assumed where a row does not tell."""
    syncs = first["syncs"]
    steps = first["optimizer_steps"]
    # Rows of other writers may not count them.
    return pd.isna(syncs) or pd.isna(steps) or bool(syncs < steps)


def spread(logs: Sequence[float] | NDArray[np.float64]) -> float:
    """Coefficient of variation of lognormal times, sqrt(exp(s^2) - 1) with s the deviation of logs.

    NaN for one value, infinite where exp(s^2) overflows.
    """
    if len(logs) < 2:
        return math.nan
    # Times of a broken clock may differ by hundreds of orders of magnitude.
    with np.errstate(over="ignore"):
        return math.sqrt(np.expm1(np.var(logs, ddof=1)))


def paired_rounds(a: CellRuns, b: CellRuns) -> list[int] | None:
    """Rounds in which both cells ran side by side; None where their repetitions are independent samples.

    Two runs of a round are side by side if they began within `reach_s` of each other. Runs of different rounds must not
    interleave: that distinguishes rounds from two launches one after the other. At least PAIRED_FROM such rounds are
    required, and PAIRED_FROM_IF_TORN where other common rounds are left out.

    Simulated runs are paired in every common round: they share the draw from the
    calibration.
    """
    common = sorted(a.seconds.keys() & b.seconds.keys())
    # No machine was in a state: the draw of the repetition is what they share.
    if a.execution == b.execution and a.execution not in MEASURED:
        return common
    beside = [number for number in common if _side_by_side(a, b, number)]
    ends = sorted(sorted((a.order[number], b.order[number])) for number in beside)
    # Launches one after the other also have numbers of rounds in common.
    mixed = any(last > first for (_, last), (first, _) in pairwise(ends))
    # Where rounds were torn, two that look whole may be so by chance.
    least = PAIRED_FROM if len(beside) == len(common) else PAIRED_FROM_IF_TORN
    return None if mixed or len(beside) < least else beside


def _side_by_side(a: CellRuns, b: CellRuns, number: int) -> bool:
    apart = abs(a.started[number] - b.started[number])
    if math.isnan(apart):  # start times are unknown
        return number not in a.again and number not in b.again
    return apart <= min(a.reach_s, b.reach_s)


def paired_times(a: CellRuns, b: CellRuns) -> tuple[list[float], list[float]]:
    """Times of both cells in their paired rounds; all times where they are not paired."""
    rounds = paired_rounds(a, b)
    if rounds is None:
        return list(a.seconds.values()), list(b.seconds.values())
    return [a.seconds[number] for number in rounds], [
        b.seconds[number] for number in rounds
    ]


def _with_times(runs: pd.DataFrame) -> pd.DataFrame:
    """Add `order`, `shared` (an order that two runs have), `began` (s, NaN if unknown) and `reach_s` to one execution.

    `order` is the planned one, or that of start times, if known, where runs were
    repeated or numbers were given twice (a study extended by an older version).
    `reach_s` is twice the duration of the longest round with usual pauses.
    """
    began = pd.to_datetime(
        runs["started_utc"], utc=True, errors="coerce", format="ISO8601"
    )
    seconds = (began - began.min()).dt.total_seconds()
    known = bool(seconds.notna().all())
    order = runs["run_order"].astype(int)
    shared = order.duplicated(keep=False)
    if known and (shared.any() or (runs["attempt"] > 1).any()):
        # The planned order no longer says which runs were neighbours.
        order = seconds.rank(method="first").astype(int) - 1
    reach = math.inf
    if known and len(runs) > 1:
        took = runs["train_s"] + runs["eval_s"].fillna(0.0)
        # Between runs lie evaluation, set-up and other cells: the median leaves out
        # nights.
        pauses = (seconds.sort_values().diff().shift(-1) - took).dropna()
        rounds = (took + max(0.0, pauses.median())).groupby(runs["repetition"]).sum()
        reach = 2 * float(rounds.max())
    return runs.assign(order=order, shared=shared, began=seconds, reach_s=reach)
