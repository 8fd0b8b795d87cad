"""Rules about times: repetitions, their spread and stability, errors of a simulation, clock, warm-up, other load.

Hoefler and Belli 2015, rules 5 to 8 and 10. A rule about repetitions looks at all cells of an execution and makes at
most one finding, so that the report of a large study stays short. Virtual times are not judged for spread, groups or
drift: their repetitions resample a calibration.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pandas as pd

from scalebench.analysis import pairing
from scalebench.analysis.environment import states_steps, supposed
from scalebench.analysis.grouping import DISTURBED_BY, crowding
from scalebench.analysis.intervals import NOTHING_VARIES
from scalebench.analysis.loading import cells_in
from scalebench.analysis.methodology import Evidence, Finding, finding, rule
from scalebench.analysis.native_check import CHECKED_FROM
from scalebench.analysis.native_check import virtual_error as error_against_native
from scalebench.analysis.rounds import MEASURED, runs_by_cell
from scalebench.calibration.calibration_file import THIS_MACHINE
from scalebench.formatting import counted, percent, seconds, share
from scalebench.study.cell import CELL, in_words
from scalebench.study.spec import SIMULATED

_DECIMALS = range(6)  # of coarse clocks and rounded times
_FEWEST = 4  # different times needed to detect a tick


@rule("every cell was repeated often enough for an interval")
def few_runs(evidence: Evidence) -> Iterator[Finding]:
    """Rule 5 of the twelve: nondeterministic times need intervals, and intervals need repetitions."""
    option = pairing.repeat_option(
        evidence.results, pairing.enough_runs(evidence.results)
    )
    for execution in dict.fromkeys(evidence.cells["execution"]):
        own = evidence.cells[evidence.cells["execution"] == execution]
        single = own[own["n"] == 1]
        few = own[(own["n"] > 1) & (own["n"] < pairing.ENOUGH_RUNS)]
        # More repetitions would give the same time.
        few = few[few["interval"] != NOTHING_VARIES]
        if len(single):
            yield finding(
                "warning",
                f"{counted(len(single), f'{execution} cell')} of one run: nothing says how far it would repeat",
                single,
                f"repeat every point: {option}",
            )
        if len(few):
            low = few["n"].min()
            high = few["n"].max()
            runs = f"{low if low == high else f'{low} to {high}'} {'runs' if execution in MEASURED else 'repetitions'}"
            yield finding(
                "warning" if execution in MEASURED else "note",
                f"{counted(len(few), f'{execution} cell')} of {runs}: their spread, which the interval is made of, is "
                "hardly known",
                few,
                f"{option} for useful intervals",
            )


@rule(
    "the repetitions of a cell lie within 10 % of each other (coefficient of variation)"
)
def spread(evidence: Evidence, most: float = 0.1) -> Iterator[Finding]:
    """Rule 8 of the twelve: a mean of widely spread values says little."""
    for execution, own in _repeated_cells(evidence):
        wide = own[own["spread"] > most].sort_values(
            "spread", ascending=False, kind="stable"
        )
        if len(wide):
            # else the finding's place says it
            worst = f" ({in_words(cells_in(wide[:1]))})" if len(wide) > 1 else ""
            yield finding(
                "warning",
                f"the times of {len(wide)} of {counted(len(own), f'{execution} cell')} vary by more than "
                f"{100 * most:.0f} % between repetitions, at most by {share(wide['spread'].iloc[0])}{worst}",
                wide,
                "look for other work on the machine, bind the processes, or repeat more often and read the medians",
            )


@rule("no cell's mean time lies outside the interval of its median")
def odd_runs(evidence: Evidence) -> Iterator[Finding]:
    """Rule 8 of the twelve: where single runs move the mean, report the median."""
    for execution, own in _repeated_cells(evidence):
        odd = own[
            (own["train_s"] < own["median_low_s"])
            | (own["train_s"] > own["median_high_s"])
        ]
        if len(odd):
            yield finding(
                "warning",
                f"in {len(odd)} of {counted(len(own), f'{execution} cell')} the mean time lies outside the median's "
                "interval: single runs were unlike the others and move the mean",
                odd,
                "quote the median and its interval (median_s, median_low_s, median_high_s)",
            )


@rule("no cell's times fall into two groups")
def two_groups(evidence: Evidence) -> Iterator[Finding]:
    """Rule 6 of the twelve: bimodal times are not normal on any scale.

    Adjusted by Holm over the cells of an execution.
    """
    for execution in MEASURED:
        own = [
            cell
            for cell in runs_by_cell(evidence.results)
            if cell.execution == execution
        ]
        p = [pairing.two_groups_p(list(cell.seconds.values())) for cell in own]
        known = [n for n, value in enumerate(p) if math.isfinite(value)]
        # Among a hundred cells some look split by chance.
        adjusted = pairing.holm([p[n] for n in known])
        split = [
            own[n]
            for n, value in zip(known, adjusted, strict=True)
            if value <= pairing.ALPHA
        ]
        if split:
            yield finding(
                "warning",
                f"the times of {len(split)} of {counted(len(known), f'{execution} cell')} fall into two groups: the "
                "machine seems to have had two states, and a mean of both describes neither",
                in_words(runs.at for runs in split),
                "look at the single runs (runs.csv); fix clock frequency, binding and placement, then repeat",
            )


@rule("times neither grow nor shrink while the study runs")
def drift(evidence: Evidence, most: float = 0.02) -> Iterator[Finding]:
    """Rule 6 of the twelve: repetitions are a sample only of a machine in a steady state."""
    for execution in MEASURED:
        own = [
            cell
            for cell in runs_by_cell(evidence.results)
            if cell.execution == execution
        ]
        found = pairing.time_trend(own)
        # Of many runs the test sees drifts that are too small to matter.
        if found and found.p <= pairing.ALPHA and abs(found.factor - 1) > most:
            yield finding(
                "warning",
                f"{execution} times moved by {percent(found.factor - 1)} from the first run to the last "
                f"(p = {found.p:.2g}): the machine was not the same throughout",
                f"{counted(len(own), 'cell')} of {execution} times",
                "ratios within a round are hardly touched, times are: repeat on an idle, warmed-up machine",
            )


@rule("runs of one round were made side by side")
def runs_apart(evidence: Evidence) -> Iterator[Finding]:
    """Rule 7 of the twelve: only runs made side by side share the state of the machine and are paired."""
    table = evidence.ratios
    for execution in MEASURED:
        own = table[
            (table["execution"] == execution)
            & table["reduction"].notna()
            & (table["n"] > 1)
        ]
        short = own["left_out"] > 0
        apart = own[short | ~own["paired"]]
        if len(apart):
            yield finding(
                "warning",
                f"{counted(len(apart), f'{execution} ratio')} lost pairs to runs that were not made side by side: "
                f"{int(short.sum())} without such rounds, {int((~own['paired']).sum())} of independent samples",
                apart,
                "runs were made again or after a pause; for pairs throughout run the study in one go (--new)",
            )


@rule("native runs check the virtual times, and lie within 15 % of them")
def virtual_error(evidence: Evidence, most: float = 0.15) -> Iterator[Finding]:
    """A simulation is as credible as its comparison with native runs."""
    virtual = evidence.cells[evidence.cells["execution"].isin(SIMULATED)]
    if virtual.empty:
        return
    spread = (
        "spread over repetitions"
        if states_steps(evidence.results)
        else "calibration's spread"
    )
    error = error_against_native(evidence.results)
    where = f"{counted(len(virtual), 'cell')} of virtual times"
    if error is None:
        yield finding(
            "note",
            "no native point checks the virtual times: "
            + (
                "step times are stated, so that nothing varies and they have no interval"
                if virtual["interval"].eq(NOTHING_VARIES).all()
                else f"their interval holds the {spread} only"
            ),
            where,
            "run natively what this machine can hold: --execution auto"
            if (virtual["cluster"] == THIS_MACHINE).all()
            and not supposed(evidence.results)
            else "quote them as virtual times, which native runs on this machine could not check",
        )
    elif not error.known:
        yield finding(
            "warning",
            f"virtual times are off native ones by {error.words}, too few: they and their ratios are given without "
            "interval",
            where,
            f"run natively at {CHECKED_FROM} worker counts or more, as far as the cores go",
        )
    elif error.rms > math.log1p(most):
        yield finding(
            "warning",
            f"virtual times are off native ones by {error.words}"
            + (
                "; what is common to all of them is in no interval"
                if error.is_split
                else ""
            ),
            where,
            "see `scalebench plot --figure agreement` for where; calibrate on an idle machine",
        )


def _repeated_cells(evidence: Evidence) -> Iterator[tuple[str, pd.DataFrame]]:
    """Cells of more than one run, for each measured execution that has any."""
    for execution in MEASURED:
        own = evidence.cells[
            (evidence.cells["execution"] == execution) & (evidence.cells["n"] > 1)
        ]
        if len(own):
            yield execution, own


@rule(
    "measured times are positive and far longer than the tick of the clock that took them"
)
def clock_resolution(
    evidence: Evidence,
    most: float = 0.001,  # of the shortest time
) -> Iterator[Finding]:
    """Times that are all multiples of one tick were read from a coarse clock, or rounded."""
    none = evidence.runs[~(evidence.runs["train_s"] > 0)]
    if len(none):
        yield finding(
            "error",
            f"{counted(len(none), 'completed run')} without a positive training time, in no statistic",
            none,
            "make the epochs longer than the clock can resolve, or repair the rows",
        )
    runs = evidence.measured[evidence.measured["train_s"] > 0]
    tick = _tick(runs["train_s"].to_numpy(dtype=float))
    if tick is not None and tick > most * runs["train_s"].min():
        coarse = runs[runs["train_s"] * most < tick]
        yield finding(
            "warning",
            f"all times are multiples of {seconds(tick)}, up to {100 * tick / runs['train_s'].min():.2g} % of the "
            "time measured",
            coarse,
            "keep the digits that were written, use a finer clock, or train for more epochs",
        )


@rule("measured runs take at least a tenth of a second")
def short_runs(evidence: Evidence, least_s: float = 0.1) -> Iterator[Finding]:
    """The time of a run of a few time slices depends on the scheduler."""
    runs = evidence.measured
    short = runs[(runs["train_s"] > 0) & (runs["train_s"] < least_s)]
    if len(short):
        yield finding(
            "warning",
            f"{counted(len(short), 'run')} took less than {seconds(least_s)}, the shortest "
            f"{seconds(short['train_s'].min())}: one time slice of another process (some ms) shows",
            short,
            "train for more epochs (--epochs), or take a larger data set",
        )


@rule(
    "measured runs take warm-up steps before the clock starts, and their first epoch is not slower"
)
def warm_up(
    evidence: Evidence,
    most: float = 0.25,  # by which the first epoch may exceed the later ones
    least_share: float = 0.5,  # of the runs
) -> Iterator[Finding]:
    """The first steps allocate, compile and connect, and have to run before the clock starts."""
    runs = evidence.measured
    cold = runs[~(runs["warmup_steps"].fillna(0) > 0)]
    if len(cold):
        yield finding(
            "warning",
            f"{counted(len(cold), 'run')} without warm-up steps before the clock started",
            cold,
            "--set warmup_steps=10 (the default)",
        )
    slower = _first_epochs(evidence, runs)
    slow = slower[slower > 1 + most]
    # Single slow first epochs are delays of the machine.
    if len(slower) and len(slow) >= least_share * len(slower):
        yield finding(
            "warning",
            f"the first epoch is slower than the later ones by {percent(slow.median() - 1)} (median) in "
            f"{len(slow)} of {counted(len(slower), 'run')}: the warm-up is too short",
            runs[runs["run_id"].isin(slow.index)],
            "more warm-up steps (--set warmup_steps=...), or more epochs",
        )


@rule(
    "no measured point has more workers than cores, or misses its pace; where one does, it is marked"
)
def oversubscribed(evidence: Evidence) -> Iterator[Finding]:
    """Workers that share a core, or paced ones that miss their pace, do not represent separate devices."""
    crowded = evidence.measured[evidence.measured["oversubscribed"].astype(bool)]
    if len(crowded):
        yield finding(
            "warning",
            f"{counted(len(crowded[CELL].drop_duplicates()), 'cell')} with {crowding(crowded)}",
            crowded,
            "draw them as such, fit nothing to them, compare nothing with them; leave them out"
            + (
                "; or state a longer device_step_time (--new)"
                if crowded["execution"].eq("paced").any()
                else ""
            ),
        )


@rule(
    "other programs took at most a quarter of the cores beside each measured point; where not, it is marked"
)
def disturbed(evidence: Evidence) -> Iterator[Finding]:
    """Times beside programs that take the cores are not those of this machine."""
    marked = evidence.cells[evidence.cells["disturbed"].astype(bool)]
    if len(marked):
        yield finding(
            "warning",
            f"{counted(len(marked), 'cell')} disturbed in all runs, as {DISTURBED_BY}",
            marked,
            "draw them as such, fit nothing to them, compare nothing with them; measure them again (--new) when the "
            "programs have ended",
        )


@rule(
    "other programs took less than a tenth of the cores while runs, or the calibration, were measured"
)
def busy_machine(evidence: Evidence, most: float = 0.1) -> Iterator[Finding]:
    """A share s of the cores taken by other programs lengthens runs on all cores by about s / (1 - s).

    From a tenth this exceeds the spread of 10 % that `spread` warns of. The mean over a
    cell's runs is judged, because the kernel's ticks blur a single short run. For
    virtual times the load during calibration counts.
    """
    runs = evidence.runs
    simulated = runs[runs["execution"].isin(SIMULATED)]
    for what, own in (
        ("measured cells", evidence.measured),
        ("virtual cells when they were calibrated", simulated),
    ):
        known = own[own["others_load"].notna()]
        loads = known.groupby(CELL, dropna=False)["others_load"].mean()
        busy = loads[loads > most]
        if len(busy):
            yield finding(
                "warning",
                f"other programs took {100 * most:.0f} % or more of the cores in {len(busy)} of {len(loads)} "
                f"{what}: {100 * busy.median():.0f} % (median), up to {100 * busy.max():.0f} %",
                known[known.set_index(CELL).index.isin(busy.index)],
                "measure again (--new), or `scalebench recalibrate`, on a machine that nobody else uses",
            )


def _tick(times: np.ndarray[tuple[int], np.dtype[np.float64]]) -> float | None:
    """Coarsest decimal tick in s of which all `times` are multiples; None without one, or with too few times."""
    if len(np.unique(times)) < _FEWEST:
        return None
    for digits in _DECIMALS:
        # From coarse to fine: the first that fits is the tick.
        if np.allclose(times, times.round(digits), rtol=1e-9):
            return 10.0**-digits
    return None


def _first_epochs(evidence: Evidence, runs: pd.DataFrame) -> pd.Series[float]:
    """Time of the first epoch over the median of the later ones, by run with at least two later epochs."""
    epochs = evidence.results.epochs
    epochs = epochs[epochs["run_id"].isin(runs["run_id"]) & (epochs["epoch_s_max"] > 0)]
    first = epochs[epochs["epoch"] == 0].set_index("run_id")["epoch_s_max"]
    later = epochs[epochs["epoch"] > 0].groupby("run_id")["epoch_s_max"]
    # One later epoch has no median that a single delay does not move.
    return (first / later.median()[later.count() >= 2]).dropna()
