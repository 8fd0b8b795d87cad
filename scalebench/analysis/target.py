"""Time and epochs to the target metric, with the runs that never reach it as censored observations.

A run that ends below the target says that its time to the target is longer than the
run: it is censored, and counts. The runs of a cell end after equally many epochs, so
all are censored at the end of the longest. Where every run of a cell reached the
target, the estimate is the geometric mean. Where some did not, it is the median of the
Kaplan-Meier curve (J. Am. Stat. Assoc. 53, 1958), infinite where at most half did. Both
estimate the median of lognormal times.

Measured times to the target have the t interval of training times. A simulated one is a
training time, which varies with the draw from the calibration, times the share of it
until the target, which varies with the seed. Draws count with s^2 (1 + 1/n) of logs, as
in every calibration interval, seeds with s^2 / n, as in that of the metric.

Its reduction over a baseline at equal worker counts is 1 - T_target(strategy, N) /
T_target(baseline, N), within one execution. Where every run of both reached the target,
the ratio has the pairs and the interval of a ratio of training times (pairing.py).
Where a run of either did not, it is the ratio of the Kaplan-Meier medians, without an
interval. A median that is infinite has no ratio.

Against the global batch B the epochs to the target are E = E0 (1 + B / B_crit), fitted
with intervals, or given. Below the critical batch B_crit a larger batch costs no further
epochs; at it twice as many. McCandlish et al., 2018 (arXiv 1812.06162), section 2, for
the noise scale as B_crit; Shallue et al., JMLR 20(112), 2019, for measurements.
"""

from __future__ import annotations

import io
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from scalebench.analysis import intervals
from scalebench.analysis.comparing import Baseline, Baselines, reduction
from scalebench.analysis.loading import Results, cached, table_by_cell
from scalebench.analysis.pairing import NO_RATIO, Comparer, Ratio
from scalebench.analysis.rounds import MEASURED, CellRuns, runs_by_cell
from scalebench.errors import ResultsError
from scalebench.measured import Measured
from scalebench.study.cell import CELL, SeriesKey
from scalebench.system.file_access import read_bytes

SURVIVAL = "95 % confidence interval of the Kaplan-Meier median"
_OVER_SEEDS = ", and over seeds"
COLUMNS = [
    *CELL,
    "strategy",
    "metric_name",
    "target_metric",
    "oversubscribed",
    "disturbed",
    "n_aimed",
    "n_reached",
    "time_to_target_s",
    "target_low_s",
    "target_high_s",
    "target_interval",
    "epochs_to_target",
]
_HALF = 0.5
_ROUNDING = 1e-12

RATIO_COLUMNS = [
    *CELL,
    "strategy",
    "oversubscribed",
    "disturbed",
    "baseline",
    "baseline_engine",
    "n",
    "time_to_target_s",
    "baseline_s",
    "reduction",
    "reduction_low",
    "reduction_high",
    "interval",
    "note",
]


@cached
def times_to_target(results: Results) -> pd.DataFrame:
    """Times and epochs to the target metric, one row per cell that has a target.

    `n_aimed` runs had the target, `n_reached` of them reached it. `time_to_target_s` is
    infinite where at most half did; its bounds are NaN where no interval is offered,
    and the upper one infinite where the runs exclude none. `epochs_to_target` is the
    median of the Kaplan-Meier curve over epochs.
    """
    comparer = Comparer(results)
    rows = []
    for cell in runs_by_cell(results):
        if not cell.aimed:
            continue
        time = _time_to_target(cell, comparer)
        epochs = survival_median(
            [
                epochs
                for epochs in cell.epochs_to_target.values()
                if not math.isnan(epochs)
            ],
            [cell.epochs] * len(cell.aimed - cell.to_target.keys()),
        )
        rows.append(
            {
                **cell.at._asdict(),
                "strategy": cell.strategy,
                "metric_name": cell.metric_name,
                "target_metric": cell.target,
                "oversubscribed": cell.oversubscribed,
                "disturbed": cell.disturbed,
                "n_aimed": len(cell.aimed),
                "n_reached": len(cell.to_target),
                **time.named("time_to_target_s", "target_low_s", "target_high_s"),
                "target_interval": time.kind,
                "epochs_to_target": epochs.value,
            }
        )
    return table_by_cell(rows, COLUMNS)


def reached_by_all(cell: CellRuns) -> bool:
    """Return True if there is a target, and every run of the cell reached it."""
    return bool(cell.aimed) and cell.aimed == cell.to_target.keys()


def _until_target(cell: CellRuns) -> CellRuns:
    """The cell with the times to the target of the runs that reached it in place of training times."""
    return replace(cell, seconds=cell.to_target)


def shares(cell: CellRuns) -> dict[int, float]:
    """Time to the target as a share of the training time, by round."""
    return {at: time / cell.seconds[at] for at, time in cell.to_target.items()}


def _time_to_target(cell: CellRuns, comparer: Comparer) -> Measured:
    """Time to the target of a cell, as described above."""
    if not reached_by_all(cell):
        # All runs of a cell end after equally many epochs: censored ones count to the
        # end of the longest.
        end = max((cell.seconds[at] for at in cell.aimed), default=math.nan)
        censored = [end] * len(cell.aimed - cell.to_target.keys())
        return survival_median(list(cell.to_target.values()), censored)
    if cell.execution in MEASURED:
        return comparer.time(_until_target(cell), 0)
    rounds = sorted(cell.to_target)
    error = comparer.error_of(0)
    found = simulated_interval(
        [cell.seconds[at] for at in rounds],
        [shares(cell)[at] for at in rounds],
        error.own(cell.label) if error else None,
        float(intervals.level_of(comparer.studies[0], len(rounds))),
    )
    found = comparer.named(found, cell.execution)
    varies = found.kind and np.ptp(list(shares(cell).values())) > _ROUNDING
    return found._replace(kind=f"{found.kind}{_OVER_SEEDS}") if varies else found


def simulated_interval(
    draws: Sequence[float],
    shares: Sequence[float],
    error: intervals.Part | None,
    level: float = intervals.LEVEL,
) -> Measured:
    """Geometric mean of draws_i x shares_i, where draws vary with the calibration and shares with the seed."""
    x = np.log(draws)
    y = np.log(shares)
    parts = [intervals.of_draw(x), intervals.of_mean(y), *([error] if error else [])]
    centre = float(x.mean() + y.mean())
    half = float(intervals.half_width(parts, level))
    return Measured(centre, centre - half, centre + half, len(x)).map(math.exp)


CENSORED = {
    "*": "*: not every run reached the target; the median counts those as longer (Kaplan-Meier)",
    " of ": "1 of 3: so few of the runs reached the target that their median is unknown",
}


def censor_mark(cell: Mapping[Hashable, Any]) -> str:
    """Return the mark of a time to target in a row of the table of cells; its meaning is in CENSORED.

    A star behind the number where some runs did not reach the target, `1 of 3` in its
    place where most did not.
    """
    if math.isfinite(cell["time_to_target_s"]):
        return "*" if cell["n_reached"] < cell["n_aimed"] else ""
    return (
        f"{cell['n_reached']:.0f} of {cell['n_aimed']:.0f}"
        if cell["n_reached"] > 0
        else ""
    )


def survival_median(
    reached: Sequence[float], censored: Sequence[float], level: float = intervals.LEVEL
) -> Measured:
    """Median of the Kaplan-Meier curve of times `reached` and `censored`, with its interval from MEDIAN_FROM runs.

    The interval holds the times at which the interval of the curve holds one half
    (Brookmeyer and Crowley, Biometrics 38, 1982), with Greenwood's variance on the
    scale of log(-log S), which a curve of 0 does not have. Where the curve equals one
    half from one time to the next, the median is the middle between them.
    """
    n = len(reached) + len(censored)
    if not reached:
        return Measured(math.inf if n else math.nan, math.nan, math.nan, n)
    times, events = np.unique(np.asarray(reached, dtype=float), return_counts=True)
    every = np.sort(np.array([*reached, *censored], dtype=float))
    at_risk = n - np.searchsorted(every, times, side="left")
    curve = np.asarray(np.cumprod(1 - events / at_risk), dtype=float)
    centre = _first(times, curve)
    if math.isfinite(centre) and abs(curve[times == centre][0] - _HALF) <= _ROUNDING:
        # Raised a little, the curve passes one half at the next time.
        centre = (centre + _first(times, curve + 2 * _ROUNDING)) / 2
    # Fewer order statistics than an interval of that level needs.
    if n < intervals.MEDIAN_FROM:
        return Measured(centre, math.nan, math.nan, n)
    from scipy.special import (
        ndtri,
    )  # scipy.stats, which has the curve, takes seconds to import

    with np.errstate(divide="ignore", invalid="ignore"):
        variance = np.cumsum(events / (at_risk * (at_risk - events)))
        half = ndtri((1 + level) / 2) * np.sqrt(variance) / np.abs(np.log(curve))
        low, high = (_first(times, curve ** np.exp(side * half)) for side in (1, -1))
    return Measured(centre, low, high, n, "" if math.isnan(low) else SURVIVAL)


def _first(times: intervals.Array, curve: intervals.Array) -> float:
    """The first time at which the curve is at most one half; infinite if it never is."""
    below = np.flatnonzero(curve <= _HALF + _ROUNDING)
    return float(times[below[0]]) if below.size else math.inf


@cached
def target_ratios(results: Results) -> pd.DataFrame:
    """Reductions of the time to the target, one row per cell and baseline; `note` says why one is missing.

    `n` is the number of ratios behind an interval, 0 for a ratio of Kaplan-Meier
    medians.
    """
    cells = [cell for cell in runs_by_cell(results) if cell.aimed]
    compare = partial(_times_to_target, Comparer(results))
    return Baselines(cells).table(compare, RATIO_COLUMNS)


def _simulated_ratio(
    ratio: Ratio, base: CellRuns, cell: CellRuns, comparer: Comparer
) -> Ratio:
    """The ratio of simulated times, with the spread of draws and that of seeds apart (`simulated_interval`)."""
    rounds = sorted(base.to_target.keys() & cell.to_target.keys())
    # Equal draws: one computation made twice, without any spread.
    if not rounds or ratio.top_s == ratio.bottom_s:
        return ratio
    parts = [shares(one) for one in (base, cell)]
    mean = simulated_interval(
        [base.seconds[at] / cell.seconds[at] for at in rounds],
        [parts[0][at] / parts[1][at] for at in rounds],
        comparer.error_of_ratio(base, cell),
    )
    kind = ratio.mean.kind
    return replace(
        ratio, mean=mean._replace(kind=f"{kind}{_OVER_SEEDS}" if kind else "")
    )


def _times_to_target(
    comparer: Comparer, cell: CellRuns, base: Baseline
) -> dict[str, Any]:
    """The columns of the ratio of times to the target."""
    ratio, note = NO_RATIO, base.fault
    own, other = _time_to_target(cell, comparer).value, math.nan
    if base.cell is not None:
        other = _time_to_target(base.cell, comparer).value
        if math.isinf(own) or math.isinf(other):
            times = ((cell.label, own), (base.name, other))
            never = " and ".join(label for label, time in times if math.isinf(time))
            note = f"at most half of the runs of {never} reached the target"
        elif reached_by_all(cell) and reached_by_all(base.cell):
            ratio = comparer.ratio(_until_target(base.cell), _until_target(cell))
            if cell.execution not in MEASURED:
                ratio = _simulated_ratio(ratio, base.cell, cell, comparer)
    saved = reduction(ratio)
    # Of two medians there is a value, but no interval.
    if not ratio.mean.n and not note:
        saved = saved._replace(value=1 - own / other)
    return {
        "n": ratio.mean.n,
        "time_to_target_s": own,
        "baseline_s": other,
        **saved.named("reduction"),
        "interval": saved.kind,
        "note": note,
    }


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
        return intervals.percentile_interval(
            self.epochs_at_zero * (1 + x / self.critical_batch),
            at_zero * (1 + x / critical),
        )

    @property
    def critical(self) -> Measured:
        """The critical batch with its interval."""
        return intervals.percentile_interval(
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
        # A resample of one batch has no slope.
        if len(np.unique(x[rows])) > 1:
            drawn.append(_fit(x[rows], y[rows]))
    return EpochsLaw(*law, tuple(drawn))


def _fit(x: NDArray[np.float64], y: NDArray[np.float64]) -> tuple[float, float]:
    from scipy.optimize import least_squares  # half a second to import

    # In units of the middle batch both parameters are of the order of one.
    scale = np.exp(np.log(x).mean())
    # Errors of epochs are relative.
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


ANY_SERIES = SeriesKey("", "", "")


@dataclass(frozen=True)
class SeriesLaw:
    """The law of one series, fitted to runs at global batches from `least` to `most`."""

    series: SeriesKey
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
    series: dict[SeriesKey, list[tuple[int, float]]] = {}
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
                    key,
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
        ANY_SERIES,
        fit_epochs(batches, table["epochs"], draws=draws),
        batches.min(),
        batches.max(),
    )
