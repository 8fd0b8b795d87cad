"""Agreement of virtual with native times: the factor common to all virtual times, and the error of their ratios."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, get_args

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from scalebench.analysis import intervals
from scalebench.analysis.environment import calibration_in, charged_engine, supposed
from scalebench.analysis.loading import Results, cached, is_representative
from scalebench.analysis.rounds import timed
from scalebench.calibration.calibration_file import THIS_MACHINE
from scalebench.comm.engines import named as engine_named
from scalebench.formatting import counted, deviation
from scalebench.strategies.registry import preferred_engine
from scalebench.study.cell import BATCH, columns_without
from scalebench.study.choices import EngineName

# Native engine to compare with, if there are several.
PREFERRED_ENGINES = tuple(dict.fromkeys(("mpi", "nccl", "gloo", *get_args(EngineName))))
CHECKED_FROM = 2  # checks
_SAME_SPEED = 0.02  # of two logs of step times
OF_A_MEDIAN = 1.35  # variance of a median of three over that of their mean
NATIVE_ERROR, BESIDE_PROGRAMS = (
    "virtual-native error",
    "error of calibrating beside programs",
)
_COMPARED = [
    "label",
    "strategy",
    "workers",
    "execution",
    "engine",
    "cluster",
    "oversubscribed",
    "disturbed",
    "train_s",
    "wait_s",
    "compute_s",
    "reference_step_s",
]
_COLUMNS = [
    "label",
    "strategy",
    "workers",
    "engine",
    "oversubscribed",
    "disturbed",
    "n_native",
    "n_virtual",
    "native_s",
    "native_median_s",
    "native_deviation",
    "virtual_s",
    "ratio",
    "ratio_at_speed",
    "slowdown",
    "ratio_low",
    "ratio_high",
    "error",
]


# engine -> errors, variance of the native median in each
Checks = Mapping[str, tuple[ArrayLike, ArrayLike]]


@dataclass(frozen=True)
class VirtualError:
    """Errors of virtual times, ln(T_virtual / T_native), over a number of independent `checks`.

    e(cell) = common + of its engine + of its strategy + noise of the native runs

    `rms` is the root mean square of all e, not centred: how far any virtual time is
    off. `common` is the mean error of the engine with the most checks, a factor on all
    virtual times: it cancels in a ratio, is in no interval of a time, and is stated
    once. `offsets` are the further errors of the other engines, by label; `between` is
    the variance of strategies on one engine, without the noise of the native runs, and
    its degrees of freedom (None below two: `variance_between`). `name` says in the
    names of intervals what the error is.

    T_native is the median of the runs, robust to one delayed run of three. All points
    of one worker check the same step time, and count as one check of their engine. From
    CHECKED_FROM checks the interval of a ratio has its nominal coverage
    (docs/statistics.md).
    """

    rms: Any
    checks: int
    common: Any = 0.0
    between: intervals.Part | None = None
    offsets: tuple[tuple[str, Any], ...] = ()
    name: str = NATIVE_ERROR

    @classmethod
    def of(
        cls, errors: ArrayLike, checks: Checks, engines: Mapping[str, str]
    ) -> VirtualError:
        """Estimate the parts from all errors, the `checks` by engine, and the engine of each label.

        Along the last axis, for many samples at once.
        """
        means = {
            engine: intervals.weighted_mean(*own) for engine, own in checks.items()
        }

        def rank(engine: str) -> tuple[int, int]:
            errors_of_it, _ = checks[engine]
            # Of equally many checks the engine that the list names first.
            return np.shape(errors_of_it)[-1], -PREFERRED_ENGINES.index(engine)

        main = max(checks, key=rank)
        return cls(
            rms=np.sqrt(np.mean(np.square(errors), axis=-1)),
            checks=np.shape(errors)[-1],
            common=means[main],
            between=intervals.variance_between(list(checks.values())),
            offsets=tuple(
                (label, means[engine] - means[main])
                for label, engine in engines.items()
            ),
        )

    @property
    def known(self) -> bool:
        """Return True if there are enough checks for the interval of a ratio."""
        return self.checks >= CHECKED_FROM

    @property
    def is_split(self) -> bool:
        """Return True if there are enough checks to tell the common factor from what strategies have of their own."""
        return self.known and self.between is not None

    @property
    def words(self) -> str:
        """How far virtual times are off, `12 % (root mean square of 6 checks)`."""
        return f"{deviation(self.rms)} (root mean square of {counted(self.checks, 'check')})"

    def own(self, label: str = "") -> intervals.Part:
        """Variance, on logs, of a virtual time of the strategy `label` beyond the factor common to all.

        That of a strategy without checks is that of the engine with the most. NaN, and
        so no interval, where the common factor is not known apart: an interval without
        this error would be narrow because less is known.
        """
        # An unknown part makes the whole unknown: NaN goes through every sum.
        if self.between is None or not self.known:
            return intervals.Part(math.nan, math.nan)
        offset = dict(self.offsets).get(label, 0.0)
        return intervals.Part(
            offset**2 + np.asarray(self.between.variance), self.between.freedom
        )

    def whole(self) -> intervals.Part:
        """Variance, on logs, of any virtual time against a native one, the common factor included."""
        return (
            intervals.Part(self.rms**2, self.checks)
            if self.known
            else intervals.Part(math.nan, math.nan)
        )

    def ratio(self, a: str, b: str) -> intervals.Part:
        """Variance, on logs, of a ratio of virtual times of two strategies, in which the common error cancels.

        2 rms^2 where the variance between strategies is unknown: no part of the error
        is assumed to cancel.
        """
        if not self.known:
            return intervals.Part(math.nan, math.nan)
        if self.between is None:
            return intervals.Part(2 * self.rms**2, self.checks)
        offsets = dict(self.offsets)
        apart = offsets.get(a, 0.0) - offsets.get(b, 0.0)
        return intervals.Part(
            apart**2 + 2 * np.asarray(self.between.variance), self.between.freedom
        )


@cached
def agreement(results: Results) -> pd.DataFrame:
    """One row per strategy and worker count with virtual and native runs.

    `ratio` = T_virtual / T_native, `error` = ratio - 1. The interval contains the
    uncertainty of the calibration and the noise of the native runs, as independent
    samples. A strategy that ran on several native engines is compared on the engine
    whose costs the study charges for virtual runs, else on the first of mpi, nccl,
    gloo, horovod. Only virtual runs of the cluster of the native ones are compared, and
    none with stated step times or slow workers on this machine. Oversubscribed and
    disturbed native runs are marked. `ratio_at_speed` compares times corrected for the
    noise of the machine (`_steady`); `native_deviation` is the standard deviation of
    the logs of these native times, and `slowdown` the factor by which steps of the
    native runs took longer than calibrated ones, NaN if unknown.
    """
    # Of all columns those that are compared: a frame is cut for each point.
    runs = timed(results)[_COMPARED]
    both = {kind: runs[runs["execution"] == kind] for kind in ("native", "virtual")}
    if supposed(results):
        # Workers that are slow by statement have no counterpart on this machine.
        both["virtual"] = both["virtual"][both["virtual"]["cluster"] != THIS_MACHINE]
    charged = charged_engine(results)
    rows = []
    for (label, workers), native in both["native"].groupby(
        columns_without("execution", "engine", *BATCH)
    ):
        held = set(native["engine"].unique())
        # A study that names an engine charges its costs: native runs on another one
        # check something else.
        named = results.study.get("engine") not in (None, "auto")
        if charged and charged not in held and named:
            continue
        engine = charged if charged in held else min(held, key=PREFERRED_ENGINES.index)
        native = native[native["engine"] == engine]
        virtual = both["virtual"]
        alike = (virtual["label"] == label) & (virtual["workers"] == workers)
        virtual = virtual[alike & virtual["cluster"].isin(native["cluster"])]
        if len(virtual):
            key = {"label": label, "workers": workers, "engine": engine}
            rows.append(key | _compared(native, virtual))
    return pd.DataFrame(rows, columns=_COLUMNS)


def _compared(native: pd.DataFrame, virtual: pd.DataFrame) -> dict[str, object]:
    """Return the comparison of the virtual with the native runs of one strategy and worker count."""
    # Two ratios: of the times that are shown, and of what calibration is responsible
    # for.
    steady, simulated = _steady(native, virtual)
    apart = intervals.difference_interval(
        np.log(virtual["train_s"]), np.log(native["train_s"]), draws=(True, False)
    )
    ratio = apart.map(math.exp)
    return {
        "strategy": native["strategy"].iloc[0],
        "oversubscribed": bool(native["oversubscribed"].any()),
        "disturbed": bool(native["disturbed"].any()),
        "native_s": intervals.time_interval(native["train_s"].tolist()).value,
        "native_median_s": intervals.median_time(native["train_s"].tolist()).value,
        "virtual_s": intervals.time_interval(virtual["train_s"].tolist()).value,
        **ratio.named("ratio"),
        "native_deviation": float(np.log(steady).std()),
        "ratio_at_speed": float(simulated.median() / steady.median()),
        "slowdown": float(_slowness(native, virtual).median(skipna=False)),
        "n_native": len(native),
        "n_virtual": len(virtual),
        "error": ratio.value - 1,
    }


def _steady(
    native: pd.DataFrame, virtual: pd.DataFrame
) -> tuple[pd.Series[float], pd.Series[float]]:
    """Native and virtual seconds of a cell at equal machine speed, without waiting for other workers.

    The speed of a shared machine changes from run to run. On an engine that
    `computes_apart` it is measured by the run's compute time, which is that of the
    virtual runs; on others, whose steps include their hooks or are not measured, by the
    reference step beside the run. Times
    stay uncorrected where neither is known. Waiting depends on how evenly this machine
    serves its cores, which calibration leaves out: where known it is subtracted on both
    sides.
    """
    slowness = _slowness(native, virtual)
    sides = [runs["train_s"].astype(float) for runs in (native, virtual)]
    waits = [runs["wait_s"].astype(float) for runs in (native, virtual)]
    if all(wait.notna().all() for wait in waits):
        # Before the division by the speed, which is that of computing.
        sides = [seconds - wait for seconds, wait in zip(sides, waits, strict=True)]
    if slowness.notna().all():
        sides[0] = sides[0] / slowness
    return sides[0], sides[1]


def _slowness(native: pd.DataFrame, virtual: pd.DataFrame) -> pd.Series[float]:
    """Return by which factor steps of each native run took longer than those of the virtual runs; NaN if unknown."""
    engine = engine_named(str(native["engine"].iloc[0]))
    column = "compute_s" if engine.computes_apart else "reference_step_s"
    factor = native[column].astype(float) / float(virtual[column].astype(float).mean())
    return factor.where(factor > 0)


@cached
def virtual_error(results: Results) -> VirtualError | None:
    """Errors of the study's virtual times, from `agreement`; None if unchecked."""
    # Crowded and disturbed native runs are slow for reasons that no simulation has.
    fair = checked(agreement(results))
    if fair.empty:
        return None
    # On logs: half as long and twice as long are equally far off.
    errors = np.log(
        fair["virtual_s"].astype(float) / fair["native_median_s"].astype(float)
    )
    alone = fair["workers"] == 1
    # All points of one worker check the same step time: their root mean square is one
    # error.
    one = [math.sqrt((errors[alone] ** 2).mean())] if alone.any() else []
    engines = fair.drop_duplicates("label").set_index("label")["engine"]
    engine_of = {str(label): str(engine) for label, engine in engines.items()}
    found = VirtualError.of([*errors[~alone], *one], _checks(fair), engine_of)
    between = found.between
    if between is not None:
        between = intervals.Part(
            float(np.asarray(between.variance)), int(np.asarray(between.freedom))
        )
    offsets = tuple((label, float(offset)) for label, offset in found.offsets)
    return VirtualError(
        float(found.rms), found.checks, float(found.common), between, offsets
    )


class Slowdown(NamedTuple):
    """The `factor` by which steps of native runs took longer than calibrated ones.

    `left` is the root mean square of ln(T_virtual / T_native) with native times at the
    calibration's speed, without waiting.
    """

    factor: float
    left: float


@cached
def slowdown_of_native_runs(results: Results) -> Slowdown | None:
    """Return the slowdown of native runs that virtual times are off by more than the interval of the ratio.

    Geometric mean over these cells; None if there are none, if the speed is unknown, or
    if it was the calibration's.
    """
    fair = checked(agreement(results))
    low, high = (fair[name].astype(float) for name in ("ratio_low", "ratio_high"))
    off = fair[((low > 1) | (high < 1)) & fair["slowdown"].notna()]
    if off.empty:
        return None
    logs = np.log(off["slowdown"].astype(float))
    if abs(logs.mean()) < _SAME_SPEED:
        return None
    left = np.log(off["ratio_at_speed"].astype(float))
    return Slowdown(math.exp(logs.mean()), math.sqrt((left**2).mean()))


# Logs of virtual times calibrated beside 2 and 8 busy programs over those of the quiet
# machine, less what is common to the strategies on mpi (benchmarks/busy_machine.py;
# docs/measurements.md). Root mean square of these strategies, with its degrees of
# freedom; the same with what is common; and of engines whose threads want cores of
# their own, which were off to different sides.
_OF_A_STRATEGY = intervals.Part(0.041**2, 4)
_OF_ANY = 0.32
_OF_AN_ENGINE = {"horovod": 1.0, "gloo": -1.4, "nccl": -1.4}
_OF_STEPS_ALONE = {
    "horovod": -0.11,
    "gloo": -0.32,
    "nccl": -0.32,
}  # of these where their costs are of a quiet hour


@cached
def error_of_times(results: Results) -> VirtualError | None:
    """Errors that intervals of the study's virtual times hold: against native times, else of a disturbed calibration.

    None for a quiet calibration without native runs that check it.
    """
    # Native runs of the study know its error better than other studies beside busy
    # programs.
    disturbed = (results.completed["calibration"] == "disturbed").any()
    return virtual_error(results) or (_beside_programs(results) if disturbed else None)


def _beside_programs(results: Results) -> VirtualError:
    """Return the error of a calibration that other programs disturbed."""
    charged = charged_engine(results)
    strategies = results.completed.drop_duplicates("label").set_index("label")[
        "strategy"
    ]
    engines = {
        str(label): charged or preferred_engine(str(name))
        for label, name in strategies.items()
    }
    calibration = calibration_in(results.folder)
    beside = (
        set(_OF_AN_ENGINE) if calibration is None else calibration.engines.disturbed
    )
    errors = _OF_STEPS_ALONE | {
        name: error for name, error in _OF_AN_ENGINE.items() if name in beside
    }
    offsets = tuple(
        (label, errors[name]) for label, name in engines.items() if name in errors
    )
    return VirtualError(
        _OF_ANY,
        CHECKED_FROM,
        between=_OF_A_STRATEGY,
        offsets=offsets,
        name=BESIDE_PROGRAMS,
    )


def error_name(error: VirtualError | None) -> str:
    """Name of an error in the names of intervals, empty without one."""
    return error.name if error else ""


def _checks(fair: pd.DataFrame) -> dict[str, tuple[list[float], list[float]]]:
    """Errors and variances of the native medians by engine; all points of one worker are one check.

    The variance of a median of three is 1.35 s^2 / 3. Three runs estimate s poorly, so
    s^2 is averaged with the mean over the engine's cells; cells of one run have the
    mean.
    """
    own = fair["native_deviation"].astype(float) ** 2
    mean = own.groupby(fair["engine"]).transform("mean").fillna(0.0)
    variance = (
        OF_A_MEDIAN * (own.fillna(mean) + mean) / 2 / fair["n_native"].astype(float)
    )
    errors = np.log(fair["ratio_at_speed"].astype(float))
    found = {}
    for engine, group in fair.groupby("engine"):
        alone = group.index[group["workers"] == 1]
        others = group.index.difference(alone)
        own_errors = errors[others].tolist()
        own_variances = variance[others].tolist()
        if len(alone):
            # One worker does not communicate: all its points say the same of the step
            # time.
            own_errors.append(float(errors[alone].mean()))
            own_variances.append(float(variance[alone].mean() / len(alone)))
        found[str(engine)] = own_errors, own_variances
    return found


def checked(table: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of `agreement` that check virtual times."""
    return table[is_representative(table)]
