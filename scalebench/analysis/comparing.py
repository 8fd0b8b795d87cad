"""Comparisons within a study: speedup, efficiency and time reduction over baselines, and tests of two strategies.

Executions are never mixed. The reduction by less frequent synchronisation is against
per-batch `allreduce` on the same engine, that by the engine against the real `horovod`
and `ddp`. A reduction against those two is split into

    engine part     (T_base - T_allreduce) / T_base
    frequency part  (T_allreduce - T_strategy) / T_base

which add up to the signed total 1 - T_strategy / T_base. `serial` runs at one worker,
natively on engine mpi, and is the base of the speedup of every engine of its execution.

The worker counts at which two strategies are compared form one family of tests
(pairing.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import pandas as pd

from scalebench.analysis import pairing
from scalebench.analysis.intervals import time_interval
from scalebench.analysis.loading import Results, cached, table_by_cell
from scalebench.analysis.rounds import CellRuns, runs_by_cell
from scalebench.errors import UsageError, nearest
from scalebench.measured import UNKNOWN, Measured
from scalebench.study.cell import CELL
from scalebench.study.choices import ALLREDUCE, LIBRARY_BASELINES, SERIAL, baselines_of

NO_RUN = "no completed run of"


COLUMNS = [
    *CELL,
    "strategy",
    "oversubscribed",
    "disturbed",
    "baseline",
    "baseline_engine",
    "baseline_workers",
    "n",
    "paired",
    "left_out",
    "train_s",
    "baseline_s",
    "saved_s",
    "ratio",
    "ratio_low",
    "ratio_high",
    "reduction",
    "reduction_low",
    "reduction_high",
    "median_ratio",
    "median_ratio_low",
    "median_ratio_high",
    "interval",
    "note",
    "speedup",
    "efficiency",
    "speedup_low",
    "efficiency_low",
    "speedup_high",
    "efficiency_high",
    "engine_part",
    "frequency_part",
    "split_total",
    "split_note",
]


DIFFERENCES = [
    "execution",
    "label_a",
    "label_b",
    "engine_a",
    "engine_b",
    "workers",
    "oversubscribed",
    "disturbed",
    "paired",
    "n",
    "left_out",
    "a_s",
    "b_s",
    "ratio",
    "ratio_low",
    "ratio_high",
    "interval",
    "test",
    "p",
    "p_adjusted",
    "significant",
    "repetitions_needed",
    "metric_name",
    "metric_n",
    "metric_a",
    "metric_b",
    "metric_difference",
    "metric_low",
    "metric_high",
    "note",
]


class Baseline(NamedTuple):
    """The cell of the baseline `name`, or None with the reason in `fault`."""

    name: str
    cell: CellRuns | None
    engine: str
    workers: int
    fault: str


@cached
def ratios(results: Results) -> pd.DataFrame:
    """Speedups, efficiencies and time reductions, one row per cell and baseline.

    Against `serial`: `ratio` is T(serial, 1) / T, from which `speedup` and
    `efficiency`. In strong scaling the ratio is the speedup and efficiency = speedup /
    workers; in weak scaling the ratio is the efficiency T(1) / T(N) and the scaled
    speedup is workers x efficiency. Against the others, at the same worker count:
    `ratio` is T_baseline / T. `reduction` = 1 - 1 / ratio, signed; `saved_s` =
    `baseline_s` - `train_s`; against `horovod` and `ddp`, `engine_part` and
    `frequency_part` add up to the reduction. `paired`: from `n` common rounds of the
    run order, without the `left_out` rounds in which the two did not run side by side;
    else from all repetitions, as independent samples. `interval` names the interval,
    which contains the noise of both. `median_ratio` is the median of the pairs' ratios,
    with an interval from six pairs. Where a baseline is missing, oversubscribed or
    disturbed the numbers are empty and `note` gives the reason.
    """
    cells = sorted(runs_by_cell(results), key=lambda runs: runs.at.sort_key)
    comparer = pairing.Comparer(results)
    baselines = Baselines(cells)

    def of_times(cell: CellRuns, base: Baseline) -> dict[str, Any]:
        ratio = pairing.NO_RATIO
        if base.cell is not None:
            ratio = comparer.ratio(base.cell, cell)
        row = _times(base, ratio)
        if base.name == "serial":
            row |= _scaling(cell, ratio)
        if base.name in LIBRARY_BASELINES:
            # allreduce on the cell's engine lies between: it synchronises as often as
            # the library does, and by the same engine as the cell.
            row |= _parts(cell, baselines.find(ALLREDUCE, cell), base)
        return row

    return baselines.table(of_times, COLUMNS)


def differences(
    results: Results, a: str, b: str, *, alpha: float = pairing.ALPHA
) -> pd.DataFrame:
    """Differences of strategy `a` from `b` in time and metric, one row per execution, engine and worker count.

    `ratio` is T(a) / T(b) with `paired`, `left_out` and `interval` as in `ratios`.
    `test`, `p`, `p_adjusted` (Holm over the worker counts) and `significant` are empty
    where no test is offered; then `repetitions_needed` is the number of repetitions of
    both from which a test is offered (0 for virtual times), and `note` gives the
    reason. An oversubscribed or disturbed `b` is no baseline: no ratio, no test. Such
    an `a` is not tested. `metric_difference` is metric(a) - metric(b), the mean over
    common seeds with a 95 % t interval.

    Raises:
        UsageError: `a` or `b` has no completed run.
    """
    rows = [difference(one, alpha) for one in compared_strategies(results, a, b, alpha)]
    return pd.DataFrame(rows, columns=DIFFERENCES)


def against(
    results: Results, baseline: str = ALLREDUCE, *, alpha: float = pairing.ALPHA
) -> pd.DataFrame:
    """Differences of every other strategy from `baseline`, as `differences` gives them; empty if that did not run.

    The worker counts of each strategy are a family of their own.
    """
    found = compared_with(results, baseline, alpha)
    return pd.DataFrame([difference(one, alpha) for one in found], columns=DIFFERENCES)


def compared_with(
    results: Results, baseline: str, alpha: float = pairing.ALPHA
) -> list[pairing.CellComparison]:
    """Comparisons of every other strategy with `baseline`; none if that did not run."""
    labels = dict.fromkeys(cell.label for cell in runs_by_cell(results))
    # Studies without it have other tables all the same.
    if baseline not in labels:
        return []
    found = []
    for label in labels:
        if label != baseline:
            found += compared_strategies(results, label, baseline, alpha)
    return found


def compared_strategies(
    results: Results, a: str, b: str, alpha: float = pairing.ALPHA
) -> list[pairing.CellComparison]:
    """Comparisons of strategy `a` (top) with `b` at equal worker counts and global batches.

    On the same engine where both ran on it, else on each other engine of the execution.
    A family is an execution, a pair of engines and all its worker counts.

    Raises:
        UsageError: `a` or `b` has no completed run.
    """
    comparer = pairing.Comparer(results)
    found = []
    first = _labelled(results, a)
    second = _labelled(results, b)
    for (execution, engine), cells_a in _by_engine(first).items():
        others = {
            key: cells
            for key, cells in _by_engine(second).items()
            if key[0] == execution
        }
        same_engine = others.get((execution, engine))
        # A library that has its own engine meets no other strategy there.
        for cells_b in others.values() if same_engine is None else [same_engine]:
            pairs = [(x, y) for x in cells_a for y in cells_b if _same_problem(x, y)]
            # The order of a family is that of its rows.
            pairs.sort(key=lambda pair: pair[0].workers)
            found += comparer.family(pairs, alpha)
    return [_without_unfit_baseline(one) for one in found]


def _same_problem(a: CellRuns, b: CellRuns) -> bool:
    """Return True at equal worker counts and global batches: another batch is another optimisation problem."""
    return (a.workers, a.at.batch_global) == (b.workers, b.at.batch_global)


def _without_unfit_baseline(one: pairing.CellComparison) -> pairing.CellComparison:
    if not one.bottom.unfit:
        return one
    # The times stay in the row; what they would be divided by is no baseline.
    return replace(one, ratio=replace(one.ratio, mean=UNKNOWN))


def _labelled(results: Results, label: str) -> list[CellRuns]:
    cells = runs_by_cell(results)
    found = [cell for cell in cells if cell.label == label]
    if not found:
        raise UsageError(
            f"no completed run of strategy {label!r}; {nearest(label, {cell.label for cell in cells})}"
        )
    return found


def _by_engine(cells: list[CellRuns]) -> dict[tuple[str, str], list[CellRuns]]:
    groups: dict[tuple[str, str], list[CellRuns]] = {}
    for cell in cells:
        groups.setdefault((cell.execution, cell.at.engine), []).append(cell)
    return groups


def difference(
    one: pairing.CellComparison, alpha: float = pairing.ALPHA
) -> dict[str, Any]:
    """Return the row of a comparison under DIFFERENCES."""
    a, b, ratio = one.top, one.bottom, one.ratio
    return one.columns("a", "b") | {
        "oversubscribed": a.oversubscribed or b.oversubscribed,
        "disturbed": a.disturbed or b.disturbed,
        "n": min(len(ratio.top_s), len(ratio.bottom_s)),
        "a_s": time_interval(ratio.top_s).value,
        "b_s": time_interval(ratio.bottom_s).value,
        "significant": bool(one.p_adjusted <= alpha) if one.test else None,
        "note": one.why_untested(alpha),
    }


class Baselines:
    """The cells among which those of a study find their baselines."""

    def __init__(self, cells: Iterable[CellRuns]) -> None:
        self._all = list(cells)
        self._by_strategy: dict[str, list[CellRuns]] = {}
        for cell in self._all:
            self._by_strategy.setdefault(cell.strategy, []).append(cell)

    def table(
        self,
        compare: Callable[[CellRuns, Baseline], dict[str, Any]],
        columns: Sequence[str],
    ) -> pd.DataFrame:
        """Return a row for each cell and each of its baselines: their names, and what `compare` gives."""
        rows = [
            {
                **cell.at._asdict(),
                "strategy": cell.strategy,
                "oversubscribed": cell.oversubscribed,
                "disturbed": cell.disturbed,
                "baseline": base.name,
                "baseline_engine": base.engine,
                "baseline_workers": base.workers,
                **compare(cell, base),
            }
            for cell in self._all
            for base in self.of(cell)
        ]
        return table_by_cell(rows, columns)

    def of(self, cell: CellRuns) -> list[Baseline]:
        """Return the baselines of `cell`, by the table of `study.choices`."""
        return [self.find(name, cell) for name in baselines_of(cell.strategy)]

    def find(self, name: str, cell: CellRuns) -> Baseline:
        """Find the cell of the strategy `name` that `cell` is compared with (`Cell.baseline`)."""
        execution, engine, _, workers, *_ = cell.at.baseline(name)
        on = f" on engine {engine}" if engine else ""
        where = f"{on} at {workers} worker{'s' if workers > 1 else ''} ({execution})"

        def fault(reason: str, engine: str = engine) -> Baseline:
            return Baseline(name, None, engine, workers, reason)

        found = [
            base
            for base in self._by_strategy.get(name, [])
            if (base.execution, base.workers) == (execution, workers)
            and engine in ("", base.at.engine)
        ]
        # at another global batch: another problem
        if name != SERIAL or (cell.parts > 1 and not cell.weak):
            of_batch = [
                base for base in found if base.at.batch_global == cell.at.batch_global
            ]
            # A message of its own: the usual one would say that serial did not run.
            if name == SERIAL and found and not of_batch:
                return fault(_of_another_batch(found, cell))
            found = of_batch
        plain = [base for base in found if base.label == name]
        # with options it is a variant, and a baseline only where the plain one did not
        # run
        found = plain or found
        if len(found) > 1:  # serial, at several batches
            found = [base for base in found if base.batch == cell.batch] or found
        if len(found) != 1:
            what = f"{len(found)} candidates for the baseline" if found else NO_RUN
            return fault(f"{what} {name}{where}")
        (base,) = found
        if base.unfit:
            return fault(
                f"{name}{where} is {base.unfit} {pairing.NO_BASELINE}", base.at.engine
            )
        return Baseline(name, base, base.at.engine, workers, "")


def _of_another_batch(found: Sequence[CellRuns], cell: CellRuns) -> str:
    batches = "/".join(sorted({str(base.at.batch_global) for base in found}))
    return (
        f"no speedup of {cell.label}, whose replicas have several workers: serial ran at a global batch of {batches}; "
        "state batch_global, which all worker counts then share"
    )


def _times(base: Baseline, ratio: pairing.Ratio) -> dict[str, Any]:
    """The columns of the ratio of training times."""
    note = base.fault or (
        "" if ratio.mean.n else f"{base.name} shares no repetition with it"
    )
    baseline = time_interval(ratio.top_s).value
    train = time_interval(ratio.bottom_s).value
    return {
        "n": ratio.mean.n,
        **ratio.columns,
        "train_s": train,
        "baseline_s": baseline,
        "saved_s": baseline - train,
        **reduction(ratio).named("reduction"),
        **ratio.median.named("median_ratio"),
        "note": note,
    }


def reduction(ratio: pairing.Ratio) -> Measured:
    """Return the share of the baseline's time that is saved, of T(baseline) / T."""
    # Monotone, so that the bounds are mapped as the value is.
    return ratio.mean.map(lambda times: 1 - 1 / times)


def _scaling(cell: CellRuns, serial: pairing.Ratio) -> dict[str, float]:
    per_speedup, per_efficiency = (
        (cell.workers, 1.0) if cell.weak else (1, 1 / cell.workers)
    )
    speedup = serial.mean.map(lambda times: times * per_speedup)
    efficiency = serial.mean.map(lambda times: times * per_efficiency)
    return speedup.named("speedup") | efficiency.named("efficiency")


def _parts(cell: CellRuns, allreduce: Baseline, base: Baseline) -> dict[str, object]:
    """Engine and frequency part, and their sum `split_total`, from the repetitions that all three cells have."""
    # Means over other repetitions would not add up: each part divides by the same
    # baseline.
    times = [
        other.seconds if other else {} for other in (cell, allreduce.cell, base.cell)
    ]
    common = sorted(times[0].keys() & times[1].keys() & times[2].keys())
    # Of no common repetition all three are NaN, and so are the parts.
    means = [time_interval([own[r] for r in common]).value for own in times]
    strategy, between, baseline = means
    return {
        "engine_part": (baseline - between) / baseline,
        "frequency_part": (between - strategy) / baseline,
        "split_total": 1 - strategy / baseline,
        "split_note": base.fault or allreduce.fault,
    }
