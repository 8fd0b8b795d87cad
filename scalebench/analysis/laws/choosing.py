"""Which law: AICc, its weights, and what each law says of the largest worker count when it has not seen it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from scalebench.analysis.laws.drift import drift
from scalebench.analysis.laws.fitting import _NOISELESS, Fit, fit
from scalebench.analysis.laws.forms import Law
from scalebench.analysis.laws.series import FEWEST_COUNTS, Series


@dataclass(frozen=True, eq=False)
class Candidate:
    """A law fitted to a series, and how well it is supported.

    `weight` is its Akaike weight: exp(-(AICc - lowest AICc) / 2), normalised to sum 1 over the candidates.
    """

    fit: Fit
    series: Series
    aicc: float
    weight: float

    @cached_property
    def leave_out_error(self) -> float:
        """T(predicted) / T(measured) - 1 at the largest worker count, by the law fitted to all the others."""
        series = self.series
        largest = series.counts[-1:]
        blind = fit(self.fit.law, series, leave_out=float(largest[0]))
        measured = np.exp(np.mean(np.log(series.seconds[series.at == largest[0]])))
        return float(blind.seconds(largest)[0] / measured - 1)


def candidates(laws: Sequence[Law], series: Series) -> tuple[list[Candidate], list[str]]:
    """The laws that `series` can carry, best first, and why others are not among them."""
    fits, notes = [], []
    counts, runs = len(series.counts), len(series.at)
    for law in laws:
        size = len(law.parameters)
        if counts < size + 1:
            notes.append(f"{law.name} not fitted: {size} parameters want {max(size + 1, FEWEST_COUNTS)} worker counts")
        elif runs < size + 3:
            notes.append(f"{law.name} not fitted: AICc of {size} parameters wants {size + 3} runs, there are {runs}")
        else:
            fitted = fit(law, series)
            if not law.columns(np.ones(1)) @ fitted.coefficients > 0:
                notes.append(f"{law.name} not among them: fitted to these times it has one worker take none")
                continue
            fits.append(fitted)
            notes += law.notes
    # What whole repetitions share is no law's to explain, and would hide what the laws differ by.
    # The draws of one calibration share its error: all of a worker count are one observation of the law.
    observations, shared = (counts, 0.0) if series.execution == "virtual" else (runs, drift(series).squares)
    scores = np.array([aicc(one.squares - shared, one.runs, len(one.coefficients), observations) for one in fits])
    weights = np.exp(-(scores - scores.min()) / 2) if fits else scores
    found = [
        Candidate(one, series, float(score), float(weight / weights.sum()))
        for one, score, weight in zip(fits, scores, weights, strict=True)
    ]
    return sorted(found, key=lambda one: (one.aicc, len(one.fit.coefficients))), notes


def aicc(squares: float, runs: int, coefficients: int, observations: int) -> float:
    """m log(squares / n) + 2 k + 2 k (k + 1) / (n - k - 1) with n = runs, k = coefficients + 1 for the noise.

    C. M. Hurvich and C.-L. Tsai, Biometrika 76(2), 1989, doi:10.1093/biomet/76.2.297. Defined for n > k + 1.
    Runs are m `observations` of the law: m = n where each has noise of its own. Where n / m of them repeat one another,
    that is the factor by which the variance of their mean exceeds 1/n, and the likelihood is divided by it (QAICc;
    K. P. Burnham and D. R. Anderson, Model Selection and Multimodel Inference, 2002, section 2.5). What they say of the
    size of the noise they all say, so that the last term keeps n.
    """
    k = coefficients + 1
    return observations * math.log(max(squares / runs, _NOISELESS**2)) + 2 * k + 2 * k * (k + 1) / (runs - k - 1)
