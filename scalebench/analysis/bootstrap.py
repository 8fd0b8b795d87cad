"""Bootstrap intervals, from BOOTSTRAP_FROM repetitions.

The percentile bootstrap (Efron, Annals of Statistics 7, 1979) of the 20 % trimmed mean of logs, the combination that
Wilcox recommends (Introduction to Robust Estimation and Hypothesis Testing, 2017, section 4.4): at 20 values it covers
93 to 96 %, with and without odd runs. The bootstrap of the mean covers 75 to 87 % where one run in ten is slow, and 75
to 83 % at 3 to 5 lognormal values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd

from scalebench.analysis.intervals import LEVEL, Array, percentile_interval
from scalebench.analysis.loading import Results, table_by_cell
from scalebench.analysis.rounds import MEASURED, runs_by_cell
from scalebench.errors import UsageError
from scalebench.formatting import counted
from scalebench.measured import UNKNOWN, Measured

BOOTSTRAP_FROM = 20
RESAMPLES = 10_000
BOOTSTRAP = "95 % bootstrap interval"
_TRIMMED = 0.2  # of the values, at either end
_AT_ONCE = 4_000_000  # values resampled at a time: 32 MB


def bootstrap_interval(
    seconds: Sequence[float], level: float = LEVEL, *, resamples: int = RESAMPLES, seed: int = 0
) -> Measured:
    """Trimmed geometric mean of positive times or paired ratios, with its percentile bootstrap interval.

    Raises:
        UsageError: fewer than BOOTSTRAP_FROM values.
    """
    if len(seconds) < BOOTSTRAP_FROM:
        raise UsageError(
            f"no bootstrap of {counted(len(seconds), 'repetition')}: it is offered from {BOOTSTRAP_FROM}, as with "
            "fewer its interval is too narrow (3 to 5 cover 75 to 83 % instead of 95); use the t interval, or "
            f"--repetitions {BOOTSTRAP_FROM}"
        )
    random = np.random.default_rng([seed, len(seconds)])
    found = bootstrap_intervals(np.log([list(seconds)]), level, resamples=resamples, random=random)
    return Measured(found.value[0], found.low[0], found.high[0], found.n).map(math.exp)


def bootstrap_cells(results: Results, *, resamples: int = RESAMPLES, seed: int = 0) -> pd.DataFrame:
    """Trimmed means of measured times with bootstrap intervals, one row per cell.

    Columns: CELL, `n`, `trimmed_s`, `low_s`, `high_s`, `interval`, `note`. Cells below
    BOOTSTRAP_FROM repetitions have a note instead of numbers.

    Raises:
        UsageError: no cell has enough repetitions.
    """
    cells = [cell for cell in runs_by_cell(results) if cell.execution in MEASURED]
    most = max((len(cell.seconds) for cell in cells), default=0)
    if most < BOOTSTRAP_FROM:
        raise UsageError(
            f"no bootstrap: the most repetitions of a native or paced time are {most}, and it is offered from "
            f"{BOOTSTRAP_FROM}; the t intervals of `cells` hold from 2, or run with --repetitions {BOOTSTRAP_FROM}"
        )
    rows: list[dict[str, object]] = []
    for cell in cells:
        seconds, n = list(cell.seconds.values()), len(cell.seconds)
        enough = n >= BOOTSTRAP_FROM
        found = bootstrap_interval(seconds, resamples=resamples, seed=seed) if enough else UNKNOWN
        why = {"interval": BOOTSTRAP if enough else "", "note": "" if enough else f"offered from {BOOTSTRAP_FROM}"}
        rows.append(cell.at._asdict() | {"n": n} | found.named("trimmed_s", "low_s", "high_s") | why)
    return table_by_cell(rows, list(rows[0]))


def bootstrap_intervals(
    logs: Array, level: float = LEVEL, *, resamples: int = RESAMPLES, random: np.random.Generator
) -> Measured:
    """Trimmed mean of every row of `logs` (samples, n) with the quantiles of its resampled trimmed means."""
    n = logs.shape[1]
    at_once = max(1, _AT_ONCE // (n * resamples))
    found = []
    for first in range(0, len(logs), at_once):
        part = logs[first : first + at_once]
        drawn = part[np.arange(len(part))[:, None, None], random.integers(n, size=(len(part), resamples, n))]
        found.append(_trimmed_mean(drawn))
    return percentile_interval(_trimmed_mean(logs), np.concatenate(found).T, level)._replace(n=n)


def _trimmed_mean(values: Array) -> Array:
    n = values.shape[-1]
    cut = int(_TRIMMED * n)
    mean: Array = np.sort(values, axis=-1)[..., cut : n - cut].mean(axis=-1)
    return mean
