"""Rules about measuring time: resolution, warm-up and other load (Hoefler and Belli 2015, rule 10)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pandas as pd

from scalebench.analysis.grouping import DISTURBED_BY, crowding
from scalebench.analysis.methodology import Evidence, Finding, finding, rule
from scalebench.formatting import counted, percent, seconds
from scalebench.study.cell import CELL
from scalebench.study.spec import SIMULATED

_DECIMALS = range(6)  # of coarse clocks and rounded times
_FEWEST = 4  # different times needed to detect a tick


@rule("measured times are positive and far longer than the tick of the clock that took them")
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


@rule("measured runs take warm-up steps before the clock starts, and their first epoch is not slower")
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
    if len(slower) and len(slow) >= least_share * len(slower):
        yield finding(
            "warning",
            f"the first epoch is slower than the later ones by {percent(slow.median() - 1)} (median) in "
            f"{len(slow)} of {counted(len(slower), 'run')}: the warm-up is too short",
            runs[runs["run_id"].isin(slow.index)],
            "more warm-up steps (--set warmup_steps=...), or more epochs",
        )


@rule("no measured point has more workers than cores, or misses its pace; where one does, it is marked")
def oversubscribed(evidence: Evidence) -> Iterator[Finding]:
    """Workers that share a core, or paced ones that miss their pace, do not represent separate devices."""
    crowded = evidence.measured[evidence.measured["oversubscribed"].astype(bool)]
    if len(crowded):
        yield finding(
            "warning",
            f"{counted(len(crowded[CELL].drop_duplicates()), 'cell')} with {crowding(crowded)}",
            crowded,
            "draw them as such, fit nothing to them, compare nothing with them; leave them out"
            + ("; or state a longer device_step_time (--new)" if crowded["execution"].eq("paced").any() else ""),
        )


@rule("other programs took at most a quarter of the cores beside each measured point; where not, it is marked")
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


@rule("other programs took less than a tenth of the cores while runs, or the calibration, were measured")
def busy_machine(evidence: Evidence, most: float = 0.1) -> Iterator[Finding]:
    """A share s of the cores taken by other programs lengthens runs on all cores by about s / (1 - s).

    From a tenth this exceeds the spread of 10 % that `spread` warns of. The mean over a cell's runs is judged, because
    the kernel's ticks blur a single short run. For virtual times the load during calibration counts.
    """
    runs = evidence.runs
    simulated = runs[runs["execution"].isin(SIMULATED)]
    for what, own in (("measured cells", evidence.measured), ("virtual cells when they were calibrated", simulated)):
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
    return next((10.0**-digits for digits in _DECIMALS if np.allclose(times, times.round(digits), rtol=1e-9)), None)


def _first_epochs(evidence: Evidence, runs: pd.DataFrame) -> pd.Series[float]:
    """Time of the first epoch over the median of the later ones, by run with at least two later epochs."""
    epochs = evidence.results.epochs
    epochs = epochs[epochs["run_id"].isin(runs["run_id"]) & (epochs["epoch_s_max"] > 0)]
    first = epochs[epochs["epoch"] == 0].set_index("run_id")["epoch_s_max"]
    later = epochs[epochs["epoch"] > 0].groupby("run_id")["epoch_s_max"]
    return (first / later.median()[later.count() >= 2]).dropna()
