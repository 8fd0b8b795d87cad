"""How far virtual times are from native ones, and what follows for virtual times that nothing checks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from scalebench.analysis.blocks import timed
from scalebench.analysis.bounds import Part
from scalebench.analysis.intervals import median_time, time_interval, virtual_native_ratio
from scalebench.analysis.once import once
from scalebench.analysis.reading import Results
from scalebench.analysis.surroundings import THIS_MACHINE, charged_engine, supposed

PREFERRED_ENGINES = ("mpi", "nccl", "gloo", "horovod")  # which native engine stands for a strategy that has several
CHECKED_FROM = 2  # checks
_COLUMNS = [
    *("label", "strategy", "workers", "engine", "oversubscribed", "n_native", "n_virtual"),
    *("native_s", "native_median_s", "virtual_s", "ratio", "ratio_low", "ratio_high", "error"),
]


@dataclass(frozen=True)
class VirtualError:
    """The error of virtual times: root mean square of ln(T_virtual / T_native) over so many independent `checks`.

    T_native is the median of the runs, which a delayed one among three does not move. It is not centred: an error that
    all share is an error. The noise of the native runs is in it, which makes it too large rather than too small. All
    points of one worker check the same step time, and count as one.

    As nothing is centred, the mean square of k checks has k degrees of freedom. From CHECKED_FROM of them on a time
    covers what it says (docs/statistics.md). One check tells that there is an error, and hardly how large it is.
    """

    rms: float
    checks: int

    @classmethod
    def of(cls, squares: Sequence[float]) -> VirtualError:
        """From the square of ln(T_virtual / T_native) of every check."""
        return cls(math.sqrt(sum(squares) / len(squares)), len(squares))

    @property
    def known(self) -> bool:
        """Whether it is known well enough to be part of an interval."""
        return self.checks >= CHECKED_FROM

    def part(self, times: int = 1) -> Part:
        """What it adds to the variance, on logs, of a result made of so many virtual times: rms^2 times.

        Not known (NaN) below CHECKED_FROM checks, so that there is no interval: one without this error would be narrow
        because less is known.

        A ratio is made of two. What their errors have in common cancels in it, such as a step time that was measured
        too short; none of it is taken to cancel, and none to point in opposite directions: independent errors add up
        to sqrt(2) times one.
        """
        return Part(self.rms**2 * times, self.checks) if self.known else Part(math.nan, math.nan)


@once
def agreement(results: Results) -> pd.DataFrame:
    """One row per strategy and worker count that ran both ways: `ratio` = T_virtual / T_native, `error` = ratio - 1.

    Its interval holds how far the calibration may be off and the noise of the native runs (`virtual_native_ratio`); the
    two have nothing in common that would pair them. A strategy that ran on several native engines is compared on the
    one by which the study charges virtual runs, else on the first of mpi, nccl, gloo, horovod. Only virtual runs of the
    cluster that the native ones had are compared, and on this machine only such as stand for it: stated step times and
    slow workers are not what its native runs have. Oversubscribed native runs are marked: there the machine is not the
    one that virtual workers stand for.
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
        ratio = virtual_native_ratio(virtual["train_s"].tolist(), native["train_s"].tolist())
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
                "n_native": len(native),
                "n_virtual": len(virtual),
                "error": ratio.centre - 1,
            }
        )
    return pd.DataFrame(rows, columns=_COLUMNS)


def median_error(table: pd.DataFrame) -> float | None:
    """Median of |ln(T_virtual / T_native)|, by which half as long is as far off as twice as long, over `agreement`.

    Over the cells whose native runs were not oversubscribed; None if all were.
    """
    fair = _fair(table)
    return float(fair["ratio"].astype(float).map(math.log).abs().median()) if len(fair) else None


@once
def virtual_error(results: Results) -> VirtualError | None:
    """What `agreement` says of all virtual times of the study; None where nothing checks them."""
    fair = _fair(agreement(results))
    squares = np.log(fair["virtual_s"].astype(float) / fair["native_median_s"].astype(float)) ** 2
    alone = fair["workers"] == 1
    checks = [*squares[~alone], *([squares[alone].mean()] if alone.any() else [])]
    return VirtualError.of(checks) if checks else None


def _fair(table: pd.DataFrame) -> pd.DataFrame:
    return table[~table["oversubscribed"].astype(bool)]
