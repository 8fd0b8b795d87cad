"""Epochs to a target accuracy by the global batch: E = E0 (1 + B / B_crit), fitted with intervals, or given.

Below the critical batch B_crit a larger batch costs no further epochs; at it twice as
many. McCandlish et al., 2018 (arXiv 1812.06162), section 2, for the noise scale as
B_crit; Shallue et al., JMLR 20(112), 2019, for measurements.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from scalebench.analysis.intervals import percentile_interval
from scalebench.analysis.loading import Results, cached
from scalebench.analysis.rounds import runs_by_cell
from scalebench.analysis.target import reached_by_all
from scalebench.errors import ResultsError
from scalebench.measured import Measured
from scalebench.system.file_access import read_bytes

# log residuals beyond it weigh less: entries with another recipe or optimizer, not
# noise
_SPREAD = 0.05
LEAST_BATCHES = 3
_NO_GROWTH = 1e12  # largest critical batch that is fitted


@dataclass(frozen=True)
class EpochsLaw:
    """E0 (1 + B / B_crit) and the laws of resampled rows, which give its intervals; none for a law that is given."""

    epochs_at_zero: float
    critical_batch: float
    resampled: tuple[tuple[float, float], ...] = ()  # (epochs_at_zero, critical_batch)

    def __post_init__(self) -> None:
        for name, value in (
            ("epochs at batch 0", self.epochs_at_zero),
            ("critical batch", self.critical_batch),
        ):
            if not (np.isfinite(value) and value > 0):
                raise ResultsError(
                    f"epochs to target: {name} is {value:g}; expected a number greater than 0"
                )

    def epochs(self, batch: ArrayLike) -> Measured:
        """Return the epochs to target at global batches (n,), or at one; of a law that is given the bounds equal it."""
        x = np.asarray(batch, dtype=np.float64)
        laws = np.array(self.resampled or [(self.epochs_at_zero, self.critical_batch)])
        at_zero, critical = (of.reshape(-1, *[1] * x.ndim) for of in laws.T)
        return percentile_interval(
            self.epochs_at_zero * (1 + x / self.critical_batch),
            at_zero * (1 + x / critical),
        )

    @property
    def critical(self) -> Measured:
        """The critical batch with its interval."""
        return percentile_interval(
            self.critical_batch,
            [critical for _, critical in self.resampled] or [self.critical_batch],
        )


def fit_epochs(
    batches: ArrayLike, epochs: ArrayLike, *, draws: int = 400, seed: int = 0
) -> EpochsLaw:
    """Fit the law to rows (global batch, epochs to target), and to `draws` resamples of them.

    Minimises Cauchy's loss of log residuals: one in ten of MLPerf's entries is off by
    more than 15 %, with an optimizer or a recipe of its own.

    Raises:
        ResultsError: fewer than 3 different batches, or a number that is not positive.
    """
    x = np.asarray(batches, dtype=np.float64)
    y = np.asarray(epochs, dtype=np.float64)
    usable = np.isfinite(x) & (x > 0) & np.isfinite(y) & (y > 0)
    if not usable.all():
        raise ResultsError(
            "epochs to target: a batch or a number of epochs is missing or not greater than 0"
        )
    if (different := len(np.unique(x))) < LEAST_BATCHES:
        raise ResultsError(
            f"epochs to target: {LEAST_BATCHES} or more global batches are needed to fit the critical batch, got "
            f"{different}; run more worker counts or batches, or state both numbers of the law"
        )
    law = _fit(x, y)
    random = np.random.default_rng(seed)
    drawn: list[tuple[float, float]] = []
    while len(drawn) < draws:
        rows = random.integers(len(x), size=len(x))
        if len(np.unique(x[rows])) > 1:
            drawn.append(_fit(x[rows], y[rows]))
    return EpochsLaw(*law, tuple(drawn))


def _fit(x: NDArray[np.float64], y: NDArray[np.float64]) -> tuple[float, float]:
    from scipy.optimize import least_squares  # half a second to import

    scale = np.exp(np.log(x).mean())
    target = np.log(y)
    most = np.log(_NO_GROWTH / scale)

    def residuals(p: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.asarray(p[0] + np.log1p(x / scale * np.exp(-p[1])) - target)

    bounds = ([-np.inf, -most], [np.inf, most])
    found = least_squares(
        residuals,
        (np.median(target), 1.0),
        bounds=bounds,
        loss="cauchy",
        f_scale=_SPREAD,
    )
    return float(np.exp(found.x[0])), float(np.exp(found.x[1]) * scale)


DRAWS = 200  # resamples of a fit
_FAR = 10.0  # a critical batch beyond so many times the largest batch is extrapolation


@dataclass(frozen=True)
class SeriesLaw:
    """The law of one execution, engine and label, fitted to runs at global batches from `least` to `most`."""

    execution: str
    engine: str
    label: str
    law: EpochsLaw
    least: float
    most: float

    @property
    def grows(self) -> bool:
        """Return True if the critical batch is within reach of the measured batches."""
        return self.law.critical_batch <= _FAR * self.most


def critical_batches(results: Results, *, draws: int | None = None) -> list[SeriesLaw]:
    """Fit the law to every series that has LEAST_BATCHES global batches at which every run reached the target.

    A batch at which some run did not is left out: the runs that did alone would show
    too few epochs.
    """
    return list(_fitted_once(results)) if draws is None else _fitted(results, draws)


@cached
def _fitted_once(results: Results) -> list[SeriesLaw]:
    return _fitted(results, DRAWS)


def _fitted(results: Results, draws: int) -> list[SeriesLaw]:
    series: dict[tuple[str, str, str], list[tuple[int, float]]] = {}
    for cell in runs_by_cell(results):
        if reached_by_all(cell) and cell.at.batch_global:
            rows = [
                (cell.at.batch_global, epochs)
                for epochs in cell.epochs_to_target.values()
                if epochs > 0
            ]
            series.setdefault(cell.at.series, []).extend(rows)
    found = []
    for key, rows in series.items():
        batches = [batch for batch, _ in rows]
        epochs = [epochs for _, epochs in rows]
        if len(set(batches)) >= LEAST_BATCHES:
            found.append(
                SeriesLaw(
                    *key,
                    fit_epochs(batches, epochs, draws=draws),
                    min(batches),
                    max(batches),
                )
            )
    return found


def read_law(path: Path, *, draws: int = DRAWS) -> SeriesLaw:
    """Fit the law to a CSV file with the columns `batch_global` and `epochs`; its label is empty: any strategy's.

    Raises:
        ResultsError: the file cannot be read, a cell holds no number, or the rows cannot be fitted.
    """
    try:
        table = pd.read_csv(io.BytesIO(read_bytes(path)), dtype=str)[
            ["batch_global", "epochs"]
        ].astype(float)
    except OSError as error:
        raise ResultsError(f"cannot read {path}: {error.strerror}") from None
    except (KeyError, ValueError):
        raise ResultsError(
            f"{path}: expected numbers in the columns batch_global and epochs"
        ) from None
    batches = table["batch_global"]
    return SeriesLaw(
        "",
        "",
        "",
        fit_epochs(batches, table["epochs"], draws=draws),
        batches.min(),
        batches.max(),
    )
