"""The scaling laws of a study, one result per strategy, engine and execution."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from scalebench.analysis.laws.advice import Advice, advise
from scalebench.analysis.laws.bands import no_band, no_extrapolation, parameter_interval
from scalebench.analysis.laws.fitting import Candidate, candidates, shared_noise
from scalebench.analysis.laws.forms import Parameter, laws_for
from scalebench.analysis.laws.series import Series, series_of
from scalebench.analysis.loading import Results
from scalebench.analysis.rounds import MEASURED
from scalebench.errors import ResultsError, UsageError, nearest
from scalebench.measured import Measured

EFFICIENCY = 0.5
POOR_FIT = 0.1
POOR_FORECAST = 0.25


@dataclass(frozen=True, eq=False)
class Scaling:
    """Laws of one series, best first, or the reason for the missing fit in `refusal`; parameters of the best law."""

    series: Series
    candidates: Sequence[Candidate] = ()
    parameters: Sequence[tuple[Parameter, Measured]] = ()
    advice: Advice | None = None
    refusal: str = ""
    notes: tuple[str, ...] = field(default_factory=tuple)

    @property
    def best(self) -> Candidate:
        """Law of the lowest AICc; only without a `refusal`."""
        return self.candidates[0]


def scaling_laws(results: Results, *, strategies: Sequence[str] = (), efficiency: float = EFFICIENCY) -> list[Scaling]:
    """Laws of every series of `results`, or of `strategies` by name or label.

    Raises:
        UsageError: `efficiency` is not in (0, 1], or a strategy is not in the results.
        ResultsError: no strategy but serial completed a run.
    """
    if not 0 < efficiency <= 1:
        raise UsageError(f"an efficiency lies above 0 and is at most 1, got {efficiency:g}")
    found = series_of(results)
    if not found:
        raise ResultsError(f"{results.folder} holds no completed run of a strategy but serial; nothing there scales")
    for name in strategies:
        known = {one.label for one in found} | {one.label.partition("(")[0] for one in found}
        if name == "serial":
            raise UsageError("strategy serial runs at one worker, and no law is fitted to it; name another --strategy")
        if name not in known:
            raise UsageError(f"no completed run of strategy {name!r} in {results.folder}; {nearest(name, known)}")
    if strategies:
        found = [one for one in found if {one.label, one.label.partition("(")[0]} & set(strategies)]
    return [scaling_of(one, efficiency) for one in found]


def scaling_of(series: Series, efficiency: float = EFFICIENCY) -> Scaling:
    """Fit laws to one series, choose one, and recommend worker counts."""
    if series.refusal:
        return Scaling(series, refusal=series.refusal, notes=series.notes)
    laws, notes = laws_for(series)
    found, more = candidates(laws, series)
    notes = [*series.notes, *notes, *more]
    if not found:
        reason = f"{len(series.at)} runs are too few to choose between laws; add repetitions with --repetitions"
        return Scaling(series, refusal=reason, notes=tuple(notes))
    best = found[0].fit
    unsure = no_band(series)
    if unsure:
        notes.append(unsure)
    elif series.execution in MEASURED and shared_noise(series).variance > 0:
        notes.append("whole repetitions were slower or faster than others, and the intervals are wider for it")
    if not unsure and no_extrapolation(series):
        notes.append(no_extrapolation(series))
    if best.misfit > POOR_FIT:
        worst = int(np.argmax(np.abs(best.residuals)))
        notes.append(
            f"no law fits well: {best.law.name} misses the means by {100 * best.misfit:.0f} % typically and "
            f"{100 * np.expm1(best.residuals[worst]):+.0f} % at {best.counts[worst]:.0f} workers"
        )
    if abs(found[0].leave_out_error) > POOR_FORECAST:
        notes.append(
            f"not to be trusted beyond what was measured: fitted without {best.counts[-1]:.0f} workers, "
            f"{best.law.name} misses them by {100 * found[0].leave_out_error:+.0f} %"
        )
    estimated = [
        (one, Measured(one.of(best.coefficients)) if unsure else parameter_interval(best, series, one))
        for one in best.law.parameters
    ]
    return Scaling(series, found, estimated, advise(found, series, efficiency), notes=tuple(notes))
