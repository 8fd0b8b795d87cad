"""CellComparison of two cells: the ratio of their times, a test, and the difference of their metrics.

The one builder of comparison rows, for cells of one study or of two. Within a study,
times are paired by round where the run order put the repetitions side by side, virtual
times by their draw from the calibration. Two studies are independent samples, except
for virtual times of one calibration and seed. The noise of both cells is inside every
interval, whichever of them is the baseline; where native runs check virtual times, so
is the virtual-native error, without what is common to all virtual times of a study, and
else the error of a disturbed calibration.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from scalebench.analysis.environment import calibration_of, states_steps
from scalebench.analysis.intervals import (
    LEVEL,
    Part,
    calibration_interval,
    difference_interval,
    interval_name,
    level_of,
    level_of_ratios,
    mean_interval,
    median_ratio,
    metric_difference,
    paired_ratio,
    time_interval,
    unpaired_metric,
    unpaired_ratio,
)
from scalebench.analysis.loading import Results
from scalebench.analysis.native_check import VirtualError, error_name, error_of_times
from scalebench.analysis.rounds import MEASURED, CellRuns, paired_rounds, paired_times
from scalebench.analysis.significance import (
    ALPHA,
    RankTest,
    holm,
    rank_sum_test,
    repetitions_needed,
    signed_rank_test,
)
from scalebench.formatting import counted, is_interval
from scalebench.measured import UNKNOWN, Measured

NO_BASELINE = "and so no baseline"


@dataclass(frozen=True)
class Ratio:
    """Ratio of two cells' times: `mean` of geometric means, `median` of pairs (with an interval from six pairs).

    `top_s` and `bottom_s` are the times used: those of common rounds where `paired`,
    else all. `left_out` counts common rounds in which the two did not run side by side.
    """

    mean: Measured
    median: Measured
    top_s: list[float]
    bottom_s: list[float]
    paired: bool
    left_out: int = 0

    @property
    def columns(self) -> dict[str, object]:
        """The columns that every table of ratios has."""
        facts = {
            "paired": self.paired,
            "left_out": self.left_out,
            "interval": self.mean.kind,
        }
        return facts | self.mean.named("ratio")


NO_RATIO = Ratio(UNKNOWN, UNKNOWN, [], [], False)


@dataclass(frozen=True)
class CellComparison:
    """Cell `top` against cell `bottom`; `test` is None where no test can reach its level, among `family` worker counts.

    `repetitions_needed` is the number from which a test is offered (0 where it is never
    offered, or is offered now).
    """

    top: CellRuns
    bottom: CellRuns
    ratio: Ratio
    metric: Measured  # top - bottom
    test: RankTest | None
    p_adjusted: float
    repetitions_needed: int
    family: int

    def columns(self, top: str, bottom: str) -> dict[str, Any]:
        """The columns that every table of comparisons has; `top` and `bottom` are suffixes of columns, a or b."""
        row: dict[str, Any] = {
            "execution": self.top.execution,
            "workers": self.top.workers,
            **self.ratio.columns,
            "test": self.test.name if self.test else "",
            "p": self.test.p if self.test else math.nan,
            "p_adjusted": self.p_adjusted,
            "repetitions_needed": self.repetitions_needed,
            "metric_name": self.top.metric_name,
            "metric_n": self.metric.n,
        }
        shared = self.top.metrics.keys() & self.bottom.metrics.keys()
        for cell, suffix in ((self.top, top), (self.bottom, bottom)):
            metrics = [cell.metrics[seed] for seed in sorted(shared) or cell.metrics]
            row |= {
                f"engine_{suffix}": cell.at.engine,
                f"label_{suffix}": cell.label,
                f"n_{suffix}": len(cell.seconds),
            }
            row[f"metric_{suffix}"] = mean_interval(metrics).value
        return row | self.metric.named("metric_difference", "metric_low", "metric_high")

    def why_untested(self, alpha: float) -> str:
        """Reason for a missing test, empty if there is one."""
        a, b = self.top, self.bottom
        if b.unfit:
            return f"{b.label} is {b.unfit} at {counted(b.workers, 'worker')} {NO_BASELINE}"
        if a.unfit:
            return f"{a.label} is {a.unfit} at {counted(a.workers, 'worker')} and so not tested"
        if a.execution not in MEASURED:
            return f"{a.execution} times get no test"
        if self.test is not None:
            return ""
        needed = f"needs {self.repetitions_needed} repetitions to reach {alpha:g}"
        return f"a test of {counted(self.family, 'worker count')} {needed}"


class Comparer:
    """Compares cells of study `b` with cells of study `a`, or cells of one study."""

    def __init__(self, a: Results, b: Results | None = None) -> None:
        self.one_study = b is None
        both = (a, b or a)
        self.studies = tuple(results.study for results in both)
        # of ratios: no run waits for a ratio to be narrow
        self.level = level_of_ratios(*self.studies)
        self.errors: tuple[VirtualError | None, ...] = tuple(
            error_of_times(results) for results in both
        )
        self.stated = all(states_steps(results) for results in both)
        # Equal calibrations and seeds give a repetition equal draws, which cancel in a
        # ratio.
        draws = [
            (calibration_of(results), results.study.get("seed")) for results in both
        ]
        self.same_draws = draws[0] == draws[1]

    def error_of(self, side: int) -> VirtualError | None:
        """Virtual-native error of study a (0) or b (1); the other study's if only that one is checked well enough."""
        own = self.errors[side]
        other = self.errors[1 - side]
        own_is_known = own is not None and own.known
        if other and other.known and not own_is_known:
            return other
        return own or other

    def ratio(self, top: CellRuns, bottom: CellRuns) -> Ratio:
        """T(top) / T(bottom); of two studies `top` is of study b."""
        simulated = top.execution not in MEASURED
        if self.one_study:
            paired = bool(paired_rounds(top, bottom))
        else:
            paired = simulated and self.same_draws
        if self.one_study or paired:
            above, below = paired_times(top, bottom)
        else:
            above = list(top.seconds.values())
            below = list(bottom.seconds.values())
        mean = (
            self._mean(top, bottom, above, below, paired)
            if above and below
            else UNKNOWN
        )
        median = median_ratio(above, below) if paired and above else UNKNOWN
        # order statistics of draws say nothing about the error of the calibration
        if simulated:
            median = median._replace(low=math.nan, high=math.nan)
        left_out = (
            len(top.seconds.keys() & bottom.seconds.keys()) - len(above)
            if paired
            else 0
        )
        return Ratio(
            self.named(mean, top.execution), median, above, below, paired, left_out
        )

    def named(self, found: Measured, execution: str, side: int = 0) -> Measured:
        """`found` with the name of its interval, empty without one."""
        if not math.isfinite(found.low):
            return found
        error = error_name(self.error_of(side))
        varies = is_interval(found.low, found.high)
        return found._replace(
            kind=interval_name(
                execution, error=error, varies=varies, stated=self.stated
            )
        )

    def family(
        self, pairs: Sequence[tuple[CellRuns, CellRuns]], alpha: float = ALPHA
    ) -> list[CellComparison]:
        """Compare (top, bottom) pairs of one execution, tested as one family that leaves unfit cells out.

        Measured times are tested where the smallest p of the test can reach alpha /
        family, the first step of Holm's rule. Virtual times are not tested: with enough
        draws of a calibration any difference would be significant.
        """
        ratios = [self.ratio(*pair) for pair in pairs]
        asked = [
            n
            for n, (top, bottom) in enumerate(pairs)
            if not (top.unfit or bottom.unfit)
        ]
        tests = {n: _test(pairs[n][0], ratios[n], alpha / len(asked)) for n in asked}
        p = [test.p if test else math.nan for test in tests.values()]
        adjusted = dict(zip(asked, holm(p), strict=True))
        found = []
        for n, ((top, bottom), ratio) in enumerate(zip(pairs, ratios, strict=True)):
            test = tests.get(n)
            needed = 0
            if n in tests and test is None and top.execution in MEASURED:
                # more runs will be paired
                alone = (
                    self.one_study and min(len(ratio.top_s), len(ratio.bottom_s)) < 2
                )
                needed = repetitions_needed(
                    len(asked), paired=ratio.paired or alone, alpha=alpha
                )
            metric = self._metric(top, bottom)
            p_adjusted = adjusted.get(n, math.nan)
            found.append(
                CellComparison(
                    top, bottom, ratio, metric, test, p_adjusted, needed, len(asked)
                )
            )
        return found

    def time(self, cell: CellRuns, side: int) -> Measured:
        """Geometric mean of a cell's times, of study a (0) or b (1)."""
        seconds = list(cell.seconds.values())
        level = float(level_of(self.studies[side], len(seconds)))
        if cell.execution in MEASURED:
            return self.named(time_interval(seconds, level), cell.execution)
        error = self.error_of(side)
        logs = calibration_interval(
            np.log(seconds), error.own(cell.label) if error else None, level
        )
        return self.named(logs.map(math.exp), cell.execution, side)

    def _mean(
        self,
        top: CellRuns,
        bottom: CellRuns,
        above: list[float],
        below: list[float],
        paired: bool,
    ) -> Measured:
        if top.execution in MEASURED:
            of = paired_ratio if paired else unpaired_ratio
            return of(above, below, self.level)
        error = self.error_of_ratio(top, bottom)
        if paired or self.one_study:
            if (
                above == below
                # one computation made twice, such as averaging once per epoch and serial at
                # one worker
            ):
                return Measured(1.0, 1.0, 1.0, len(above))
            return calibration_interval(
                np.log(above) - np.log(below), error, LEVEL
            ).map(math.exp)
        fewest = min(len(above), len(below))
        level = float(max(level_of(study, fewest) for study in self.studies))
        logs = difference_interval(
            np.log(above), np.log(below), level, draws=(True, True), error=error
        )
        return logs.map(math.exp)

    def error_of_ratio(self, top: CellRuns, bottom: CellRuns) -> Part | None:
        """Variance of a ratio of virtual times from the virtual-native error.

        Within a study the common error cancels. Between studies no part is assumed to
        cancel; two studies of one calibration check it together, so the smaller number
        of checks counts.
        """
        b = self.error_of(1)
        a = self.error_of(0)
        if not (a and b):
            return None
        if self.one_study:
            return a.ratio(top.label, bottom.label)
        return VirtualError(math.hypot(a.rms, b.rms), min(a.checks, b.checks)).whole()

    def _metric(self, top: CellRuns, bottom: CellRuns) -> Measured:
        """metric(top) - metric(bottom), paired by common seeds; Welch's for two studies without any."""
        seeds = sorted(top.metrics.keys() & bottom.metrics.keys())
        if seeds or self.one_study or not (top.metrics and bottom.metrics):
            return metric_difference(
                [top.metrics[seed] - bottom.metrics[seed] for seed in seeds]
            )
        return unpaired_metric(
            list(top.metrics.values()), list(bottom.metrics.values())
        )


def _test(cell: CellRuns, ratio: Ratio, level: float) -> RankTest | None:
    """The rank test of a ratio; None for simulated times, or where its p cannot reach `level`."""
    if cell.execution not in MEASURED:
        return None
    of = signed_rank_test if ratio.paired else rank_sum_test
    test = of(ratio.top_s, ratio.bottom_s)
    return test if test.smallest_p <= level else None
