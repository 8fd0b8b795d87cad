"""Whether B is slower than A: two studies, or two strategies of one, cell by cell.

Two studies are independent samples: Welch's interval on logs and the rank-sum test. Virtual times of one calibration
are paired by their draw from it, and those of two calibrations vary by both; how far virtual times were from native
ones is inside either interval, where it was measured. Only equal virtual times are equal whatever the simulation's
error. Two strategies of one study are compared as `testing.differences` compares them. Metrics are paired by seed
where seeds are shared. What follows for each cell is said by `verdicts`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from scalebench.analysis.blocks import Cell, by_block, paired_times, spread
from scalebench.analysis.cell_names import place
from scalebench.analysis.comparability import MATCH, changed, refuse_unless_equal
from scalebench.analysis.environment import calibration_of, states_steps
from scalebench.analysis.grouping import EXECUTIONS, strategy_rank
from scalebench.analysis.intervals import (
    NO_INTERVAL,
    Interval,
    Part,
    calibration_interval,
    difference_interval,
    interval_name,
    level_of,
    level_of_ratios,
    mean_interval,
    median_time,
    metric_interval,
    time_interval,
    unpaired_metric,
    unpaired_ratio,
)
from scalebench.analysis.loading import Results
from scalebench.analysis.pairing import ratio_by_draw
from scalebench.analysis.testing import ALPHA, MEASURED, differences, holm, rank_sum_test, repetitions_needed
from scalebench.analysis.validation import VirtualError, virtual_error
from scalebench.analysis.verdicts import (
    COLUMNS,
    METRIC_MARGIN,
    THRESHOLD,
    CellName,
    Comparison,
    Verdict,
    verdict_of_metric,
    verdict_of_time,
)
from scalebench.errors import UsageError, nearest
from scalebench.formatting import is_interval
from scalebench.strategies.registry import is_deterministic


@dataclass(frozen=True)
class _Limits:
    """What all cells of a comparison are judged by."""

    studies: tuple[Mapping[str, Any], Mapping[str, Any]]  # A and B
    threshold: float
    metric_margin: float
    errors: tuple[VirtualError | None, VirtualError | None]  # of the virtual times of A and B
    stated: bool  # the step times of both
    same_draws: bool = True  # whether virtual runs of both have one calibration and seed

    def level(self, n: int) -> float:
        """Of a difference of `n` runs of either that vary independently and have no level of their own."""
        return float(max(level_of(study, n) for study in self.studies))

    def of_time(self, side: int) -> VirtualError | None:
        """What is known of the virtual times of A (0) or B (1); if only one study was checked, it stands for both."""
        own, other = self.errors[side], self.errors[1 - side]
        return other if other and other.known and not (own and own.known) else own or other

    def of_ratio(self) -> Part | None:
        """By how much T_B / T_A may be off: as in `VirtualError.part`, nothing is taken to cancel. Two studies of one
        calibration check it together, so that the fewer checks count."""
        a, b = self.of_time(0), self.of_time(1)
        return VirtualError(math.hypot(a.rms, b.rms), min(a.checks, b.checks)).part() if a and b else None

    def repeats(self, cell: Cell) -> bool:
        """Whether the metric of `cell` has to be that of its counterpart, if nothing was changed but the machine.

        It is another one from run to run where workers merge as they arrive, unless their times are computed alike.
        """
        alike = cell.execution not in MEASURED and self.same_draws
        return alike or cell.workers == 1 or is_deterministic(cell.strategy)

    def interval(self, execution: str, ratio: Interval) -> str:
        """What the interval of a `ratio` is called; empty if it has none."""
        if not math.isfinite(ratio.low):
            return ""
        varies = is_interval(ratio.low, ratio.high)
        return interval_name(execution, checked=self.of_time(0) is not None, varies=varies, stated=self.stated)


# From `differences`.
_TAKEN_OVER = ("paired", "left_out", "interval", "test", "p", "p_adjusted", "repetitions_needed", "note")


def compare_studies(
    a: Results,
    b: Results,
    *,
    threshold: float = THRESHOLD,
    metric_margin: float = METRIC_MARGIN,
    strategies: Collection[str] = (),
    execution: str | None = None,
    ignore: Collection[str] = (),
) -> Comparison:
    """Compare study `b` with the reference study `a`, cell by cell: same execution, engine, strategy and workers.

    `strategies` (labels or names) and `execution` leave the other cells out. Oversubscribed cells get no verdict.

    Raises:
        UsageError: there is nothing in common, or a name is wrong.
        ResultsError: the studies differ in a key that they have to share and that `ignore` does not name.
    """
    first, second = (_chosen(results, strategies, execution) for results in (a, b))
    common = [cell for cell in first if cell in second]
    if not common:
        raise UsageError(
            f"{a.folder} and {b.folder} have no cell in common: {place(_frame(first)) or 'none'} against "
            f"{place(_frame(second)) or 'none'}; "
            "run the same strategies at the same worker counts, with the same execution"
        )
    overridden = refuse_unless_equal(a, b, _frame(common), ignore)
    same_draws = calibration_of(a) == calibration_of(b) and a.study.get("seed") == b.study.get("seed")
    errors, stated = (virtual_error(a), virtual_error(b)), states_steps(a) and states_steps(b)
    limits = _Limits((a.study, b.study), threshold, metric_margin, errors, stated, same_draws)
    rows = [_row(first[cell], second[cell], limits) for cell in common]
    _test(rows, [(first[cell], second[cell]) for cell in common])
    absent = [cell for cell in first if cell not in second]
    tried = {tuple(cell) for cell in b.runs[MATCH].itertuples(index=False)}
    return Comparison(
        str(a.folder),
        str(b.folder),
        threshold,
        metric_margin,
        _ordered(rows),
        missing=[cell for cell in absent if cell not in tried],
        failed=[cell for cell in absent if cell in tried],
        added=[cell for cell in second if cell not in first],
        changed=changed(a, b),
        overridden=overridden,
        virtual_errors=limits.errors,
    )


def compare_strategies(
    results: Results,
    a: str,
    b: str,
    *,
    threshold: float = THRESHOLD,
    metric_margin: float = METRIC_MARGIN,
    execution: str | None = None,
) -> Comparison:
    """Compare strategy `b` with strategy `a` of one study, at each worker count that both have.

    Raises:
        UsageError: `a` or `b` has no completed run, or they have no cell in common.
    """
    labels = [_label(results, name) for name in (a, b)]
    if labels[0] == labels[1]:
        raise UsageError(f"{labels[0]} differs in nothing from itself; name two strategies")
    found = differences(results, labels[1], labels[0])  # its ratio is that of the first to the second
    if execution is not None:
        found = found[found["execution"] == execution]
    if found.empty:
        raise UsageError(f"{labels[0]} and {labels[1]} share no execution, worker count and global batch")
    error = virtual_error(results)
    limits = _Limits((results.study, results.study), threshold, metric_margin, (error, error), states_steps(results))
    cells = {tuple(cell.key[name] for name in MATCH): cell for cell in by_block(results)}
    rows = []
    for row in found.to_dict("records"):
        own = [
            cells[row["execution"], row[f"engine_{x}"], row[f"label_{x}"], row["workers"]] for x in ("b", "a")
        ]  # `differences` has them the other way
        ratio = Interval(row["ratio"], row["ratio_low"], row["ratio_high"], int(row["n"]))
        metric = Interval(row["metric_difference"], row["metric_low"], row["metric_high"], int(row["metric_n"]))
        rows.append(_facts(own[0], own[1], ratio, metric, limits) | {name: row[name] for name in _TAKEN_OVER})
    return Comparison(labels[0], labels[1], threshold, metric_margin, _ordered(rows), virtual_errors=limits.errors)


def _chosen(results: Results, strategies: Collection[str], execution: str | None) -> dict[CellName, Cell]:
    """The cells of a study by name, of these strategies and this execution."""
    every = by_block(results)
    for name in strategies:
        known = {cell.label for cell in every} | {cell.strategy for cell in every}
        if name not in known:
            raise UsageError(f"{results.folder} has no completed run of strategy {name!r}; {nearest(name, known)}")
    return {
        (cell.execution, cell.engine, cell.label, cell.workers): cell
        for cell in every
        if (not strategies or cell.label in strategies or cell.strategy in strategies)
        and execution in (None, cell.execution)
    }


def _frame(cells: Collection[CellName]) -> pd.DataFrame:
    return pd.DataFrame(list(cells), columns=MATCH)


def _label(results: Results, name: str) -> str:
    """The one label that `name` means: itself, or the only variant of that strategy."""
    runs = results.completed
    labels = sorted(runs.loc[runs["strategy"] == name, "label"].unique())
    if name in set(runs["label"]) or not labels:
        return name  # where there is none, `differences` says what there is
    if len(labels) > 1:
        raise UsageError(f"{name} ran with several options: name one of {', '.join(map(repr, labels))}")
    return str(labels[0])


def _row(a: Cell, b: Cell, limits: _Limits) -> dict[str, Any]:
    """Two studies' cells: independent, unless they are virtual and of one calibration."""
    paired = a.execution not in MEASURED and limits.same_draws
    above, below = paired_times(b, a) if paired else (list(b.seconds.values()), list(a.seconds.values()))
    if paired:
        ratio = ratio_by_draw(above, below, limits.of_ratio()) if above else NO_INTERVAL
    elif a.execution in MEASURED:
        ratio = unpaired_ratio(above, below, level_of_ratios(*limits.studies))
    else:
        level = limits.level(min(len(above), len(below)))
        error = limits.of_ratio()
        ratio = difference_interval(np.log(above), np.log(below), level, draws=(True, True), error=error).exp()
    return _facts(a, b, ratio, _metric(a, b), limits) | {"paired": paired}


def _facts(a: Cell, b: Cell, ratio: Interval, metric: Interval, limits: _Limits) -> dict[str, Any]:
    """The columns that both kinds of comparison fill alike."""
    crowded = a.oversubscribed or b.oversubscribed
    verdict: Verdict = "not compared" if crowded else verdict_of_time(ratio, limits.threshold)
    facts: dict[str, Any] = {
        "execution": a.execution,
        "workers": a.workers,
        "interval": limits.interval(a.execution, ratio),
        "verdict": verdict,
        "left_out": 0,
        "test": "",
        "repetitions_needed": 0,
        "metric_name": a.metric_name,
        "metric_n": metric.n,
        "metric_verdict": verdict_of_metric(metric, limits.metric_margin) if metric.n else "not compared",
        "metric_repeats": limits.repeats(a) and limits.repeats(b),
        "note": "oversubscribed" if crowded else "",
    }
    shared = a.metrics.keys() & b.metrics.keys()
    for side, (name, cell) in enumerate((("a", a), ("b", b))):
        facts |= {f"engine_{name}": cell.engine, f"label_{name}": cell.label, f"n_{name}": len(cell.seconds)}
        facts |= dict(zip((f"{name}_s", f"{name}_low", f"{name}_high"), _time(cell, limits, side), strict=True))
        times = list(cell.seconds.values())
        facts |= {f"{name}_median_s": median_time(times).centre, f"{name}_spread": spread(np.log(times))}
        facts[f"metric_{name}"] = mean_interval([cell.metrics[seed] for seed in shared or cell.metrics]).centre
    facts |= dict(zip(("ratio", "ratio_low", "ratio_high"), ratio[:3], strict=True))
    return facts | dict(zip(("metric_difference", "metric_low", "metric_high"), metric[:3], strict=True))


def _time(cell: Cell, limits: _Limits, side: int) -> tuple[float, float, float]:
    seconds = list(cell.seconds.values())
    level = float(level_of(limits.studies[side], len(seconds)))
    if cell.execution in MEASURED:
        return time_interval(seconds, level)[:3]
    error = limits.of_time(side)
    return calibration_interval(np.log(seconds), error.part(cell.label) if error else None, level).exp()[:3]


def _metric(a: Cell, b: Cell) -> Interval:
    """M_B - M_A: paired by the seeds that both have; without any, Welch's."""
    seeds = sorted(a.metrics.keys() & b.metrics.keys())
    if seeds:
        return metric_interval([b.metrics[seed] - a.metrics[seed] for seed in seeds])
    if not (a.metrics and b.metrics):
        return Interval(math.nan, math.nan, math.nan, 0)
    return unpaired_metric(list(b.metrics.values()), list(a.metrics.values()))


def _test(rows: list[dict[str, Any]], pairs: list[tuple[Cell, Cell]]) -> None:
    """Fill in the rank-sum tests of measured cells, each strategy's worker counts being one family."""
    families: dict[tuple[object, ...], list[int]] = {}
    for n, (a, _) in enumerate(pairs):
        if a.execution in MEASURED and rows[n]["verdict"] != "not compared":
            families.setdefault((a.execution, a.engine, a.label), []).append(n)
    for members in families.values():
        tests = [
            rank_sum_test(list(b.seconds.values()), list(a.seconds.values())) for a, b in (pairs[n] for n in members)
        ]
        offered = [test.smallest_p <= ALPHA / len(members) for test in tests]
        p = [test.p if able else math.nan for test, able in zip(tests, offered, strict=True)]
        for n, test, able, adjusted in zip(members, tests, offered, holm(p), strict=True):
            if able:
                rows[n] |= {"test": test.name, "p": test.p, "p_adjusted": adjusted}
            else:
                rows[n]["repetitions_needed"] = repetitions_needed(len(members), paired=False)


def _ordered(rows: list[dict[str, Any]]) -> pd.DataFrame:
    rank = [(EXECUTIONS.index(r["execution"]), strategy_rank(r["label_a"]), r["engine_a"], r["workers"]) for r in rows]
    return pd.DataFrame([rows[n] for n in sorted(range(len(rows)), key=rank.__getitem__)], columns=COLUMNS)
