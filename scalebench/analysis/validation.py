"""How far virtual times are from native ones, and what follows for virtual times that nothing checks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from scalebench.analysis.cached import cached
from scalebench.analysis.environment import THIS_MACHINE, charged_engine, supposed
from scalebench.analysis.intervals import (
    Part,
    difference_interval,
    median_time,
    time_interval,
    variance_between,
    weighted_mean,
)
from scalebench.analysis.loading import Results
from scalebench.analysis.rounds import timed

PREFERRED_ENGINES = ("mpi", "nccl", "gloo", "horovod")  # which native engine stands for a strategy that has several
CHECKED_FROM = 2  # checks
OF_A_MEDIAN = 1.35  # variance of a median of three over that of their mean
_COLUMNS = [
    *("label", "strategy", "workers", "engine", "oversubscribed", "n_native", "n_virtual"),
    *(
        "native_s",
        "native_median_s",
        "native_deviation",
        "virtual_s",
        "ratio",
        "ratio_at_speed",
        "ratio_low",
        "ratio_high",
        "error",
    ),
]


Checks = Mapping[str, tuple[ArrayLike, ArrayLike]]  # engine -> errors, variance of the native median in each


@dataclass(frozen=True)
class VirtualError:
    """Errors of virtual times, ln(T_virtual / T_native), over so many independent `checks`.

    e(cell) = common + of its engine + of its strategy + noise of the native runs

    `rms` is the root mean square of all e, not centred: what is known of any virtual time. `common` is the mean error
    of the engine with the most checks, which cancels in a ratio; `offsets` are those of the other engines beyond it,
    by label; `between` is the variance of strategies on one engine, without the noise of the native runs, and its
    degrees of freedom (None below two: `variance_between`).

    T_native is the median of the runs, which a delayed one among three does not move. All points of one worker check
    the same step time, and count as one check of their engine. One check tells that there is an error, and hardly how
    large it is: from CHECKED_FROM on a time covers what it says (docs/statistics.md).
    """

    rms: Any
    checks: int
    common: Any = 0.0
    between: Part | None = None
    offsets: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def of(cls, errors: ArrayLike, checks: Checks, engines: Mapping[str, str]) -> VirtualError:
        """From the errors as they are, their `checks` by engine, and the engine of each label.

        Along the last axis, so that simulations have many at once.
        """
        means = {engine: weighted_mean(*own) for engine, own in checks.items()}
        main = max(checks, key=lambda engine: (np.shape(checks[engine][0])[-1], -PREFERRED_ENGINES.index(engine)))
        return cls(
            rms=np.sqrt(np.mean(np.square(errors), axis=-1)),
            checks=np.shape(errors)[-1],
            common=means[main],
            between=variance_between(list(checks.values())),
            offsets=tuple((label, means[engine] - means[main]) for label, engine in engines.items()),
        )

    @property
    def known(self) -> bool:
        """Whether it is known well enough to be part of an interval."""
        return self.checks >= CHECKED_FROM

    def part(self, label: str = "") -> Part:
        """Variance, on logs, of a virtual time of the strategy `label`; of any strategy if that is not checked.

        NaN below CHECKED_FROM checks, so that there is no interval: one without this error would be narrow because less
        is known.
        """
        if not self.known:
            return Part(math.nan, math.nan)
        if self.between is None or label not in dict(self.offsets):
            return Part(self.rms**2, self.checks)
        error = self.common + dict(self.offsets)[label]
        return Part(error**2 + np.asarray(self.between.variance), self.between.freedom)

    def ratio(self, a: str, b: str) -> Part:
        """Variance, on logs, of a ratio of virtual times of two strategies, in which the common error cancels.

        Where nothing tells strategies from one another, 2 rms^2: none of the error is taken to cancel.
        """
        if not self.known:
            return Part(math.nan, math.nan)
        if self.between is None:
            return Part(2 * self.rms**2, self.checks)
        offsets = dict(self.offsets)
        apart = offsets.get(a, 0.0) - offsets.get(b, 0.0)
        return Part(apart**2 + 2 * np.asarray(self.between.variance), self.between.freedom)


@cached
def agreement(results: Results) -> pd.DataFrame:
    """One row per strategy and worker count that ran both ways: `ratio` = T_virtual / T_native, `error` = ratio - 1.

    Its interval holds how far the calibration may be off and the noise of the native runs; the
    two have nothing in common that would pair them. A strategy that ran on several native engines is compared on the
    one by which the study charges virtual runs, else on the first of mpi, nccl, gloo, horovod. Only virtual runs of the
    cluster that the native ones had are compared, and on this machine only such as stand for it: stated step times and
    slow workers are not what its native runs have. Oversubscribed native runs are marked: there the machine is not the
    one that virtual workers stand for.
    `ratio_at_speed` compares what is left when the machine's noise is taken out of the native times (`_steady`), and
    `native_deviation` is the standard deviation of the logs of those.
    """
    runs = timed(results)
    both = {kind: runs[runs["execution"] == kind] for kind in ("native", "virtual")}
    if supposed(results):
        both["virtual"] = both["virtual"][both["virtual"]["cluster"] != THIS_MACHINE]
    rows, charged = [], charged_engine(results)
    for (label, workers), native in both["native"].groupby(["label", "workers"]):
        held = set(native["engine"])
        if charged and charged not in held and results.study.get("engine") not in (None, "auto"):
            continue
        engine = charged if charged in held else min(held, key=PREFERRED_ENGINES.index)
        native = native[native["engine"] == engine]
        virtual = both["virtual"]
        alike = (virtual["label"] == label) & (virtual["workers"] == workers)
        virtual = virtual[alike & virtual["cluster"].isin(native["cluster"])]
        if virtual.empty:
            continue
        steady, simulated = _steady(native, virtual)
        ratio = difference_interval(np.log(virtual["train_s"]), np.log(native["train_s"]), draws=(True, False)).exp()
        rows.append(
            {
                "label": label,
                "strategy": native["strategy"].iloc[0],
                "workers": workers,
                "engine": engine,
                "oversubscribed": bool(native["oversubscribed"].any()),
                "native_s": time_interval(native["train_s"].tolist()).centre,
                "native_median_s": median_time(native["train_s"].tolist()).centre,
                "virtual_s": time_interval(virtual["train_s"].tolist()).centre,
                "ratio": ratio.centre,
                "ratio_low": ratio.low,
                "ratio_high": ratio.high,
                "native_deviation": float(np.log(steady).std()),
                "ratio_at_speed": float(simulated.median() / steady.median()),
                "n_native": len(native),
                "n_virtual": len(virtual),
                "error": ratio.centre - 1,
            }
        )
    return pd.DataFrame(rows, columns=_COLUMNS)


def _steady(native: pd.DataFrame, virtual: pd.DataFrame) -> tuple[pd.Series[float], pd.Series[float]]:
    """Native and virtual seconds of a cell at one machine speed, without waiting for other workers.

    The speed of a shared machine changes from run to run. On mpi the run's own compute tells it: forward and backward
    pass and update are those of the virtual runs. The steps of other engines hold work of their hooks, or are not
    measured: there the reference step beside the run tells it. Where neither is known the times are as they are.
    Workers wait for one another as unevenly as the machine treats its cores, of which jitter holds no more than other
    machines would share: waiting is left out of both sides where it is known, and a saving shows its part of it.
    """
    column = "compute_s" if native["engine"].iloc[0] == "mpi" else "reference_step_s"
    speed = native[column].astype(float) / float(virtual[column].astype(float).mean())
    sides = [runs["train_s"].astype(float) for runs in (native, virtual)]
    waits = [runs["wait_s"].astype(float) for runs in (native, virtual)]
    if all(wait.notna().all() for wait in waits):
        sides = [seconds - wait for seconds, wait in zip(sides, waits, strict=True)]
    if speed.notna().all() and (speed > 0).all():
        sides[0] = sides[0] / speed
    return sides[0], sides[1]


def median_error(table: pd.DataFrame) -> float | None:
    """Median of |ln(T_virtual / T_native)|, by which half as long is as far off as twice as long, over `agreement`.

    Over the cells whose native runs were not oversubscribed; None if all were.
    """
    fair = _fair(table)
    return float(fair["ratio"].astype(float).map(math.log).abs().median()) if len(fair) else None


@cached
def virtual_error(results: Results) -> VirtualError | None:
    """The errors of the study's virtual times, from `agreement`; None where nothing checks them."""
    fair = _fair(agreement(results))
    if fair.empty:
        return None
    errors = np.log(fair["virtual_s"].astype(float) / fair["native_median_s"].astype(float))
    alone = fair["workers"] == 1
    one = [math.sqrt((errors[alone] ** 2).mean())] if alone.any() else []
    engines = fair.drop_duplicates("label").set_index("label")["engine"]
    found = VirtualError.of([*errors[~alone], *one], _checks(fair), {str(k): str(v) for k, v in engines.items()})
    between = None if found.between is None else Part(float(found.between.variance), int(found.between.freedom))  # type: ignore[arg-type]
    offsets = tuple((label, float(offset)) for label, offset in found.offsets)
    return VirtualError(float(found.rms), found.checks, float(found.common), between, offsets)


def _checks(fair: pd.DataFrame) -> dict[str, tuple[list[float], list[float]]]:
    """By engine, the errors and the variances of the native medians of its checks; the points of one worker are one.

    The variance of a median of three is 1.35 s^2 / 3. Three runs hardly tell s: half of s^2 is the cell's own, half the
    mean over the engine's cells. Cells of one run have the mean.
    """
    own = fair["native_deviation"].astype(float) ** 2
    mean = own.groupby(fair["engine"]).transform("mean").fillna(0.0)
    variance = OF_A_MEDIAN * (own.fillna(mean) + mean) / 2 / fair["n_native"].astype(float)
    errors = np.log(fair["ratio_at_speed"].astype(float))
    found = {}
    for engine, group in fair.groupby("engine"):
        alone = group.index[group["workers"] == 1]
        others = group.index.difference(alone)
        own_errors, own_variances = errors[others].tolist(), variance[others].tolist()
        if len(alone):
            own_errors.append(float(errors[alone].mean()))
            own_variances.append(float(variance[alone].mean() / len(alone)))
        found[str(engine)] = own_errors, own_variances
    return found


def _fair(table: pd.DataFrame) -> pd.DataFrame:
    return table[~table["oversubscribed"].astype(bool)]
