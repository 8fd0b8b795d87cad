"""CellComparison of two cells: the ratio of their times, a test, and the difference of their metrics.

The one builder of comparison rows, for cells of one study or of two. Within a study,
times are paired by round where the run order put the repetitions side by side, virtual
times by their draw from the calibration. Two studies are independent samples, except
for virtual times of one calibration and seed. The noise of both cells is inside every
interval, whichever of them is the baseline; where native runs check virtual times, so
is the virtual-native error, without what is common to all virtual times of a study, and
else the error of a disturbed calibration.

Paired times are tested by Wilcoxon's signed-rank test of the log ratios, whose smallest
p is 2 / 2^n; independent samples by the rank-sum test (Mann-Whitney), whose smallest p
is 2 / C(n + m, n). Both are two-sided and exact: the distribution is enumerated, ties
included (Hollander, Wolfe and Chicken, Nonparametric Statistical Methods, 2014,
chapters 3 and 4). p is adjusted for a family of hypotheses by Holm's step-down rule
(Scandinavian Journal of Statistics 6, 1979). Other tests are for a machine that was not
in one steady state.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from scalebench.analysis import intervals
from scalebench.analysis.environment import calibration_of, states_steps
from scalebench.analysis.loading import Results, cached
from scalebench.analysis.native_check import VirtualError, error_name, error_of_times
from scalebench.analysis.rounds import (
    MEASURED,
    CellRuns,
    paired_rounds,
    paired_times,
    runs_by_cell,
)
from scalebench.formatting import counted, is_interval
from scalebench.measured import UNKNOWN, Measured

ALPHA = 0.05
ENOUGH_RUNS = 5  # of a cell, for a useful interval
SIGNED_RANK = "Wilcoxon signed-rank"
RANK_SUM = "Wilcoxon rank-sum"
TWO_GROUPS_FROM = 5  # values
_SIMULATED = 20_000


class RankTest(NamedTuple):
    """Two-sided exact p, and the smallest p that samples of this size can reach."""

    name: str
    p: float
    smallest_p: float


def signed_rank_test(top: Sequence[float], bottom: Sequence[float]) -> RankTest:
    """Wilcoxon's signed-rank test of log(top_i / bottom_i); equal pairs are left out."""
    logs = np.log(np.asarray(top, dtype=float)) - np.log(
        np.asarray(bottom, dtype=float)
    )
    # Wilcoxon's own rule: an equal pair says nothing of a sign.
    logs = logs[logs != 0]
    if not len(logs):
        return RankTest(SIGNED_RANK, 1.0, 1.0)
    # Mean ranks of ties are halves; doubled they are places of an array.
    doubled = _doubled_ranks(np.abs(logs))
    ways = np.ones(1)
    for rank in doubled:  # each rank is positive or not, with equal chances
        ways = (np.append(ways, np.zeros(rank)) + np.append(np.zeros(rank), ways)) / 2
    return RankTest(
        SIGNED_RANK,
        _two_sided(ways, int(doubled[logs > 0].sum())),
        smallest_signed_rank_p(len(logs)),
    )


def rank_sum_test(top: Sequence[float], bottom: Sequence[float]) -> RankTest:
    """Wilcoxon-Mann-Whitney test of two independent samples."""
    n = len(top)
    m = len(bottom)
    if not (n and m):
        return RankTest(RANK_SUM, 1.0, 1.0)
    doubled = _doubled_ranks(np.asarray([*top, *bottom], dtype=float))
    # by how many are chosen, and the sum of their doubled ranks
    ways = np.zeros((n + 1, int(doubled.sum()) + 1))
    ways[0, 0] = 1.0
    # the chance that `k` of the first `seen` are of `top`
    for seen, rank in enumerate(doubled, start=1):
        taken = np.zeros_like(ways)
        taken[1:, rank:] = ways[:-1, : ways.shape[1] - rank]
        share = np.arange(n + 1)[:, None] / seen
        ways = ways * (1 - share) + taken * share
    return RankTest(
        RANK_SUM, _two_sided(ways[n], int(doubled[:n].sum())), smallest_rank_sum_p(n, m)
    )


def smallest_signed_rank_p(pairs: int) -> float:
    """2 / 2^n: all differences have one sign."""
    return min(1.0, 2.0 ** (1 - pairs))


def smallest_rank_sum_p(n: int, m: int) -> float:
    """2 / C(n + m, n): the two samples do not overlap."""
    return min(1.0, 2.0 / math.comb(n + m, n))


def repetitions_needed(family: int, *, paired: bool, alpha: float = ALPHA) -> int:
    """Smallest number of repetitions at which a test of `family` worker counts can reach its level."""
    # A loop over few numbers: p falls by half with each pair.
    n = 1
    while (
        smallest_signed_rank_p(n) if paired else smallest_rank_sum_p(n, n)
    ) > alpha / family:
        n += 1
    return n


@cached
def enough_runs(results: Results) -> int:
    """Number of repetitions that every command advises: for useful intervals, and a test of any two strategies."""
    fit = [
        cell
        for cell in runs_by_cell(results)
        if cell.execution in MEASURED and not cell.unfit
    ]
    families = []
    for execution in MEASURED:
        counts = {cell.workers for cell in fit if cell.execution == execution}
        families.append(len(counts))
    # Cells of one study run in rounds, and so are paired.
    needed = [repetitions_needed(family, paired=True) for family in families if family]
    return max([ENOUGH_RUNS, *needed])


def repeat_option(results: Results, runs: int) -> str:
    """Return the option that makes `runs` repetitions of every point of the study."""
    return f"{'--set until.at_least=' if results.study.get('until') else '--repetitions '}{runs}"


def holm(p: Sequence[float]) -> list[float]:
    """Adjust p by Holm: the k-th smallest of m times m - k + 1, made monotone.

    NaN stands for a hypothesis of the family that was not tested: it counts in m and
    stays NaN.
    """
    values = np.asarray(p, dtype=float)
    order = np.argsort(values, kind="stable")  # NaN last
    # The smallest p is multiplied by m, the next by m - 1, and so on.
    steps = np.minimum(1.0, values[order] * (len(values) - np.arange(len(values))))
    adjusted = np.full(len(values), math.nan)
    adjusted[order] = np.maximum.accumulate(steps)
    return [float(x) for x in adjusted]


class Trend(NamedTuple):
    """Time of the last run over the time it would have had as the first, and the two-sided p of no trend."""

    factor: float
    p: float


def two_groups_p(seconds: Sequence[float]) -> float:
    """Probability of as clear a split of values from one group; NaN below TWO_GROUPS_FROM values.

    Clearness is the largest share of the logs' squared deviations that one cut
    explains, with at least a quarter of the values, and two, on either side. The
    reference distribution is uniform, for which the share is larger than for normal,
    exponential, Laplace or Student's samples: the test is conservative for those
    (docs/statistics.md), like Hartigan's dip (Annals of Statistics 13, 1985).
    """
    n = len(seconds)
    if n < TWO_GROUPS_FROM:
        return math.nan
    simulated = _uniform_shares(n)
    share = float(explained_by_a_cut(np.log(np.asarray(seconds, dtype=float))))
    return (1 + len(simulated) - int(np.searchsorted(simulated, share))) / (
        1 + len(simulated)
    )


def explained_by_a_cut(values: ArrayLike) -> intervals.Array:
    """Largest share of squared deviations that one cut explains, along the last axis; 0 where all values are equal."""
    x = np.sort(np.asarray(values, dtype=float), axis=-1)
    n = x.shape[-1]
    x = x - x.mean(axis=-1, keepdims=True)
    least = max(2, math.ceil(n / 4))
    left = np.arange(least, n - least + 1)  # values below the cut
    below = np.cumsum(x, axis=-1)[..., left - 1]
    between = (below**2 * n / (left * (n - left))).max(axis=-1)
    total = (x**2).sum(axis=-1)
    share: intervals.Array = np.divide(
        between, total, out=np.zeros_like(total), where=total > 0
    )
    return share


def time_trend(cells: Sequence[CellRuns]) -> Trend | None:
    """Slope of log times over the run order within cells; None below ten degrees of freedom.

    Least squares with an intercept for every cell, ln T = c(cell) + b order. p is
    Student's of b / se(b), with runs - cells - 1 degrees of freedom.
    """
    from scipy.special import stdtr

    several = [cell for cell in cells if len(cell.seconds) > 1]
    order = [
        np.array([cell.order[number] for number in cell.seconds], dtype=float)
        for cell in several
    ]
    logs = [np.log(list(cell.seconds.values())) for cell in several]
    freedom = sum(len(own) - 1 for own in logs) - 1
    # With fewer, single odd runs make a slope.
    if freedom < 10:
        return None
    # Centred within each cell, whose intercept is gone so.
    at = np.concatenate([own - own.mean() for own in order])
    y = np.concatenate([own - own.mean() for own in logs])
    squares = float(at @ at)
    slope = float(at @ y) / squares if squares else 0.0
    rest = y - slope * at
    error = math.sqrt(float(rest @ rest) / freedom / squares) if squares else 0.0
    span = max(own.max() for own in order) - min(own.min() for own in order)
    p = float(2 * stdtr(freedom, -abs(slope / error))) if error else 1.0
    return Trend(math.exp(slope * span), p)


@cache
def _uniform_shares(n: int) -> intervals.Array:
    return np.sort(explained_by_a_cut(np.random.default_rng(n).random((_SIMULATED, n))))


def _doubled_ranks(values: NDArray[np.float64]) -> NDArray[np.int64]:
    """Twice the ranks 1..n: integers even where ties share their mean rank."""
    ordered = np.sort(values)
    below = np.searchsorted(ordered, values, "left")
    upto = np.searchsorted(ordered, values, "right")
    return (below + upto + 1).astype(np.int64)


def _two_sided(chances: NDArray[np.float64], seen: int) -> float:
    at_most = chances[: seen + 1].sum()
    at_least = chances[seen:].sum()
    return float(min(1.0, 2 * min(at_most, at_least)))


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
            row[f"metric_{suffix}"] = intervals.mean_interval(metrics).value
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
        self.level = intervals.level_of_ratios(*self.studies)
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
        # Cells without a common repetition have no ratio, and no error in place of one.
        mean = (
            self._mean(top, bottom, above, below, paired)
            if above and below
            else UNKNOWN
        )
        median = intervals.median_ratio(above, below) if paired and above else UNKNOWN
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
            kind=intervals.interval_name(
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
        # An unfit cell is not in the family: it would raise the p of the others.
        asked = [
            n
            for n, (top, bottom) in enumerate(pairs)
            if not (top.unfit or bottom.unfit)
        ]
        # Holm's first step divides by the whole family: a test that cannot pass it is
        # not offered.
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
        level = float(intervals.level_of(self.studies[side], len(seconds)))
        if cell.execution in MEASURED:
            return self.named(intervals.time_interval(seconds, level), cell.execution)
        error = self.error_of(side)
        logs = intervals.calibration_interval(
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
            of = intervals.paired_ratio if paired else intervals.unpaired_ratio
            return of(above, below, self.level)
        error = self.error_of_ratio(top, bottom)
        # Virtual times of one study are draws of one calibration, paired or not.
        if paired or self.one_study:
            if (
                above == below
                # one computation made twice, such as averaging once per epoch and serial at
                # one worker
            ):
                return Measured(1.0, 1.0, 1.0, len(above))
            return intervals.calibration_interval(
                np.log(above) - np.log(below), error, intervals.LEVEL
            ).map(math.exp)
        fewest = min(len(above), len(below))
        # The wider one: either study may have stopped at a favourable sample.
        level = float(max(intervals.level_of(study, fewest) for study in self.studies))
        logs = intervals.difference_interval(
            np.log(above), np.log(below), level, draws=(True, True), error=error
        )
        return logs.map(math.exp)

    def error_of_ratio(self, top: CellRuns, bottom: CellRuns) -> intervals.Part | None:
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
        # Equal seeds mean equal batches and initial weights.
        seeds = sorted(top.metrics.keys() & bottom.metrics.keys())
        if seeds or self.one_study or not (top.metrics and bottom.metrics):
            return intervals.metric_difference(
                [top.metrics[seed] - bottom.metrics[seed] for seed in seeds]
            )
        return intervals.unpaired_metric(
            list(top.metrics.values()), list(bottom.metrics.values())
        )


def _test(cell: CellRuns, ratio: Ratio, level: float) -> RankTest | None:
    """The rank test of a ratio; None for simulated times, or where its p cannot reach `level`."""
    if cell.execution not in MEASURED:
        return None
    of = signed_rank_test if ratio.paired else rank_sum_test
    test = of(ratio.top_s, ratio.bottom_s)
    return test if test.smallest_p <= level else None
