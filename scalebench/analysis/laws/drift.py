"""What whole repetitions of a series share: a machine that is slower for a while, a calibration drawn anew.

The mean square between repetitions is MS, and an F test at the 15 % level says whether there is any drift: as high as
that because a test that misses a drift costs coverage, and a drift that is not there a little width (T. A. Bancroft,
Ann. Math. Statist. 15(2), 1944, doi:10.1214/aoms/1177731284). It shifts the curve as a whole, by a variance of MS /
(counts x repetitions). Virtual repetitions are draws of one calibration, which more draws do not make surer: there it
is MS / counts (1 + 1 / repetitions).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from scalebench.analysis.laws.series import Series

_SEEN = 0.15


@dataclass(frozen=True)
class Drift:
    """`variance` of log T that repetitions share, after averaging over them, with its degrees of `freedom`.

    `squares` is what it adds, beyond noise, to the sum of squares of all runs around any law. 0 where none is seen.
    """

    variance: float
    freedom: int
    squares: float = 0.0


def drift(series: Series) -> Drift:
    """What the repetitions of `series` share over all worker counts."""
    from scipy.special import fdtrc

    logs = np.log(series.seconds)
    _, cell, number = np.unique(series.at, return_inverse=True, return_counts=True)
    _, block, size = np.unique(series.repetition, return_inverse=True, return_counts=True)
    deviation = logs - (np.bincount(cell, logs) / number)[cell]
    shared = np.bincount(block, deviation) / size
    repetitions, counts = len(size), len(number)
    if repetitions < 2:
        return Drift(0.0, 1)
    squares = float(np.sum(size * shared**2))
    rest = max(float(np.sum(deviation**2)) - squares, 0.0)
    freedom, other = repetitions - 1, (repetitions - 1) * (counts - 1)
    mean_square = squares / freedom
    if squares <= 0 or (rest > 0 and fdtrc(freedom, other, mean_square / (rest / other)) > _SEEN):
        return Drift(0.0, freedom)
    share = 1 + 1 / repetitions if series.execution == "virtual" else 1 / repetitions
    return Drift(
        mean_square / counts * share, freedom, max(squares - freedom * rest / other, 0.0) if other else squares
    )
