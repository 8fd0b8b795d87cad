"""What the data cannot carry: too few runs, wide spread, two groups, drift, a simulation that nothing checked.

Each rule looks at all cells of an execution and makes one finding at most, so that a large study does not drown its
reader. Virtual times are not judged for spread, groups or drift: their repetitions resample a calibration.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import pandas as pd

from scalebench.analysis.blocks import Cell
from scalebench.analysis.cell_names import PLACE, listed, place
from scalebench.analysis.environment import THIS_MACHINE, states_steps, supposed
from scalebench.analysis.evidence import Evidence
from scalebench.analysis.findings import SEVERITIES, Finding
from scalebench.analysis.intervals import CONFIDENCE, NOTHING_VARIES, t_quantile
from scalebench.analysis.loading import Results
from scalebench.analysis.stability import drift, two_groups_p
from scalebench.analysis.testing import ALPHA, MEASURED, holm
from scalebench.analysis.validation import CHECKED_FROM, virtual_error
from scalebench.formatting import counted, deviation, percent

ENOUGH_RUNS = 5
SPREAD_LIMIT = 0.10
DRIFT_LIMIT = 0.02
VIRTUAL_ERROR_LIMIT = 0.15
_MOST_RUNS = 200  # that anybody would be asked for


Rule = Callable[[Evidence], Iterator[Finding]]


def findings(results: Results) -> list[Finding]:
    """Every reason to doubt what the completed runs seem to say, the gravest first."""
    return doubts(Evidence.of(results))


def doubts(evidence: Evidence) -> list[Finding]:
    """The same, where the tables are there already."""
    found = [finding for rule in RULES for finding in rule(evidence)] if len(evidence.table) else []
    return sorted(found, key=lambda finding: SEVERITIES.index(finding.severity))


def too_few_runs(evidence: Evidence) -> Iterator[Finding]:
    """One run has no interval; below ENOUGH_RUNS an interval of measured times is wide and no test is within reach."""
    of_what = "" if states_steps(evidence.results) else " of the calibration"
    for execution in dict.fromkeys(evidence.table["execution"]):
        own = evidence.table[evidence.table["execution"] == execution]
        single, few = own[own["n"] == 1], own[(own["n"] > 1) & (own["n"] < ENOUGH_RUNS)]
        few = few[few["interval"] != NOTHING_VARIES]
        if len(single):
            yield Finding(
                "warning",
                "few-runs",
                f"{_times(execution, len(single))} on one run: nothing says how far it would repeat",
                place(single),
                f"repeat every point: {_repeated(evidence.results)}",
            )
        if len(few) and execution not in MEASURED:
            yield Finding(
                "note",
                "few-runs",
                f"{_times(execution, len(few))} on {_range(few['n'])} draws{of_what}: "
                "their spread, which the interval is made of, is hardly known",
                place(few),
                f"{_repeated(evidence.results)}, which tells the spread better",
            )
        if len(few) and execution in MEASURED:
            yield Finding(
                "warning",
                "few-runs",
                f"{_times(execution, len(few))} on {_range(few['n'])} runs: intervals are "
                "wide, and no test of a paired difference is within reach",
                place(few),
                f"{_repeated(evidence.results)} for useful intervals; scalebench compare says how many a test needs",
            )


def wide_spread(evidence: Evidence) -> Iterator[Finding]:
    """Cells whose repetitions vary by more than SPREAD_LIMIT (coefficient of variation)."""
    for execution, own in evidence.measured():
        wide = own[own["spread"] > SPREAD_LIMIT].sort_values("spread", ascending=False, kind="stable")
        if len(wide):
            worst = f" ({place(wide[:1])})" if len(wide) > 1 else ""  # else the finding's place says it
            yield Finding(
                "warning",
                "spread",
                f"{_of(len(wide), len(own), f'{execution} cell')} {'vary' if len(wide) > 1 else 'varies'} by "
                f"more than {100 * SPREAD_LIMIT:.0f} % between repetitions, at most by "
                f"{_share(wide['spread'].iloc[0])}{worst}",
                place(wide),
                "look for other work on the machine, bind the processes, or repeat more often and read the medians",
            )


def odd_runs(evidence: Evidence) -> Iterator[Finding]:
    """Cells whose mean lies outside the interval of their median: a few runs were unlike the others."""
    for execution, own in evidence.measured():
        odd = own[(own["train_s"] < own["median_low_s"]) | (own["train_s"] > own["median_high_s"])]
        if len(odd):
            yield Finding(
                "warning",
                "odd-runs",
                f"in {_of(len(odd), len(own), f'{execution} cell')} the mean time lies outside the median's interval: "
                "single runs were unlike the others and move the mean",
                place(odd),
                "quote the median and its interval (median_s, median_low_s, median_high_s)",
            )


def two_groups(evidence: Evidence) -> Iterator[Finding]:
    """Cells whose times fall into two groups, by Holm over all cells of the execution."""
    for execution in MEASURED:
        own = [cell for cell in evidence.runs if cell.execution == execution]
        p = [two_groups_p(list(cell.seconds.values())) for cell in own]
        known = [n for n, value in enumerate(p) if math.isfinite(value)]
        adjusted = holm([p[n] for n in known])
        split = [own[n] for n, value in zip(known, adjusted, strict=True) if value <= ALPHA]
        if split:
            yield Finding(
                "warning",
                "two-groups",
                f"the times of {_of(len(split), len(known), f'{execution} cell')} fall into two groups: the machine "
                "seems to have had two states, and a mean of both describes neither",
                place(_rows(split)),
                "look at the single runs (runs.csv); fix clock frequency, binding and placement, then repeat",
            )


def moving_times(evidence: Evidence) -> Iterator[Finding]:
    """Times that grew or shrank while the study ran."""
    for execution in MEASURED:
        own = [cell for cell in evidence.runs if cell.execution == execution]
        found = drift(own)
        if found and found.p <= ALPHA and abs(found.factor - 1) > DRIFT_LIMIT:
            yield Finding(
                "warning",
                "drift",
                f"{execution} times moved by {percent(found.factor - 1)} from the first run to the last "
                f"(p = {found.p:.2g}): the machine was not the same throughout",
                f"{counted(len(own), 'cell')} of {execution} times",
                "ratios within a block are hardly touched, times are: repeat on an idle, warmed-up machine",
            )


def runs_apart(evidence: Evidence) -> Iterator[Finding]:
    """Ratios that lost their pairs: runs of one block that were made hours apart share none of the machine's noise."""
    table = evidence.compared
    for execution in MEASURED:
        own = table[(table["execution"] == execution) & table["reduction"].notna() & (table["n"] > 1)]
        short = own["left_out"] > 0
        apart = own[short | ~own["paired"]]
        if len(apart):
            yield Finding(
                "warning",
                "runs-apart",
                f"{counted(len(apart), f'{execution} ratio')} lost pairs to runs that were not made side by side: "
                + ", ".join(
                    f"{count} {says if count == 1 else say}"
                    for count, says, say in (
                        (int(short.sum()), "leaves such blocks out", "leave such blocks out"),
                        (int((~own["paired"]).sum()), "takes independent samples", "take independent samples"),
                    )
                    if count
                ),
                place(apart),
                "runs were made again or after a pause; for pairs throughout run the study in one go (--new)",
            )


def unchecked_simulation(evidence: Evidence) -> Iterator[Finding]:
    """Virtual times that no native ones check, or that lie far from them."""
    virtual = evidence.table[evidence.table["execution"] == "virtual"]
    if virtual.empty:
        return
    spread = "spread over draws" if states_steps(evidence.results) else "calibration's spread"
    error, where = virtual_error(evidence.results), f"{counted(len(virtual), 'cell')} of virtual times"
    if error is None:
        yield Finding(
            "note",
            "virtual-error",
            "no native point checks the virtual times: "
            + (
                "step times are stated, so that nothing varies and they have no interval"
                if virtual["interval"].eq(NOTHING_VARIES).all()
                else f"their interval holds the {spread} only"
            ),
            where,
            _to_check(evidence.results),
        )
    elif not error.known:
        yield Finding(
            "warning",
            "virtual-error",
            f"the error of virtual times is known from {counted(error.checks, 'check')} only "
            f"({deviation(error.rms)}): they and their ratios are given without interval",
            where,
            f"run natively at {CHECKED_FROM} worker counts or more, as far as the cores go",
        )
    elif error.rms > math.log1p(VIRTUAL_ERROR_LIMIT):
        yield Finding(
            "warning",
            "virtual-error",
            f"virtual times differ from native ones by {deviation(error.rms)} (root mean square of "
            f"{counted(error.checks, 'check')})",
            where,
            "see `scalebench plot --figure agreement` for where; calibrate on an idle machine",
        )


def unsettled_signs(evidence: Evidence) -> Iterator[Finding]:
    """Headline reductions, against allreduce on the same engine, whose interval holds zero."""
    table = evidence.compared
    headline = table[(table["baseline"] == "allreduce") & (table["workers"] > 1) & ~table["oversubscribed"]]
    open_ = headline[(headline["reduction_low"] < 0) & (headline["reduction_high"] > 0)]
    for execution in dict.fromkeys(open_["execution"]):
        own = open_[open_["execution"] == execution]
        several = int((headline["execution"] == execution).sum())
        yield Finding(
            "note",
            "unsettled",
            f"whether time is saved against allreduce is open in {_of(len(own), several, f'{execution} comparison')}: "
            "the interval of the reduction holds zero",
            place(own),
            _to_settle(own),
        )


RULES: tuple[Rule, ...] = (
    too_few_runs,
    wide_spread,
    odd_runs,
    two_groups,
    moving_times,
    runs_apart,
    unchecked_simulation,
    unsettled_signs,
)


def _repeated(results: Results) -> str:
    """How the study is told to make ENOUGH_RUNS of every point."""
    return f"{'--set until.at_least=' if results.study.get('until') else '--repetitions '}{ENOUGH_RUNS}"


def _to_settle(table: pd.DataFrame) -> str:
    """How many repetitions would narrow the first comparison's interval to its own distance from zero."""
    first = table.iloc[0]
    if first["interval"] != CONFIDENCE:
        return "more repetitions do not narrow it: calibrate better, or measure natively"
    distance, half, n = abs(math.log(first["ratio"])), math.log(first["ratio_high"] / first["ratio"]), int(first["n"])
    scatter = half * math.sqrt(n) / float(t_quantile(n - 1))
    enough = next(
        (k for k in range(n + 1, _MOST_RUNS) if float(t_quantile(k - 1)) * scatter / math.sqrt(k) < distance), 0
    )
    if not enough:
        return "the difference, if there is one, is too small for repetitions to show: say that none was found"
    return f"if the difference is what it seems, about {enough} repetitions would show it at the first of these"


def _to_check(results: Results) -> str:
    """How virtual times could be checked: this machine can run natively what stands for itself only."""
    runs = results.completed
    other = sorted(set(runs.loc[runs["execution"] == "virtual", "cluster"].dropna()) - {THIS_MACHINE})
    if other:
        return f"quote them as a simulation; only native runs on {listed(other)} itself could check it"
    if said := supposed(results):
        return f"state {said} beside these times; native runs take this machine as it is, and could not check them"
    return "run natively what this machine can hold: --execution auto"


def _times(execution: str, count: int) -> str:
    return f"{counted(count, 'cell')} of {execution} times {'rest' if count > 1 else 'rests'}"


def _of(count: int, total: int, noun: str) -> str:
    return f"{count} of {counted(total, noun)}" if total > 1 else f"the only {noun}"


def _share(value: float) -> str:
    return percent(float(value)).lstrip("+")


def _range(numbers: pd.Series[int]) -> str:
    low, high = int(numbers.min()), int(numbers.max())
    return f"{low}" if low == high else f"{low} to {high}"


def _rows(own: Sequence[Cell]) -> pd.DataFrame:
    return pd.DataFrame([(cell.execution, cell.engine, cell.label, cell.workers) for cell in own], columns=PLACE)
