"""What a law is fitted to: the times of one strategy on one engine of one execution, oversubscribed runs left out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pandas as pd

from scalebench.analysis.environment import states_steps
from scalebench.analysis.grouping import EXECUTIONS, strategy_rank, timed
from scalebench.analysis.laws.workload import Workload, workload_of
from scalebench.analysis.loading import Results
from scalebench.analysis.validation import VirtualError, virtual_error
from scalebench.formatting import counted

Array: TypeAlias = npt.NDArray[np.float64]

FEWEST_COUNTS = 4
_SAME_TIME = 1e-9  # of logs: sums of the same steps in another order


@dataclass(frozen=True)
class Base:
    """`serial` on one worker, the base of speedup and efficiency here as in the figures.

    `variance` is that of `log_seconds`, the mean log of its times, without what its repetitions share with those of
    the series; NaN where fewer than two are common to both.
    """

    log_seconds: float
    variance: float
    freedom: int


@dataclass(frozen=True, eq=False)
class Series:
    """The runs of one curve T(N): `seconds[i]` was measured at `at[i]` workers in repetition `repetition[i]`.

    `workload` tells what a worker does at N, or is the reason why the rows do not tell it. `notes` say what was left
    out. Executions, engines and strategies with other options are other series. `error` is that of virtual times
    against native ones, if enough of them check it. Without a `base` efficiency is that against the law's own T(1).
    """

    execution: str
    engine: str
    label: str
    weak: bool
    at: Array
    seconds: Array
    repetition: npt.NDArray[np.int64]
    workload: Workload | str
    most_workers: float = float("inf")
    notes: tuple[str, ...] = field(default_factory=tuple)
    error: VirtualError | None = None
    stated: bool = False  # its step times
    base: Base | None = None

    @property
    def counts(self) -> Array:
        """The distinct worker counts, ascending."""
        return np.unique(self.at)

    @property
    def varies(self) -> bool:
        """Whether repetitions differ at any worker count; of stated step times without jitter they do not."""
        logs = np.log(self.seconds)
        return any(float(np.ptp(logs[self.at == count])) > _SAME_TIME for count in self.counts)

    @property
    def refusal(self) -> str:
        """Why no law can be fitted, empty if one can."""
        counts = self.counts
        if len(counts) >= FEWEST_COUNTS:
            return ""
        measured = counted(len(counts), "worker count")
        listed = f" ({', '.join(f'{count:.0f}' for count in counts)})" if len(counts) else ""
        return (
            f"{measured}{listed} that {'was' if len(counts) == 1 else 'were'} not oversubscribed; "
            f"a law wants {FEWEST_COUNTS}: run more with --workers"
        )


def series_of(results: Results) -> list[Series]:
    """Every series of `results` but those of `serial`, which has one worker by definition."""
    runs = timed(results)
    serial = runs[(runs["strategy"] == "serial") & (runs["workers"] == 1)]
    runs = runs[runs["strategy"] != "serial"]
    found = [
        _series(str(execution), str(engine), str(label), group, serial[serial["execution"] == execution], results)
        for (execution, engine, label), group in runs.groupby(["execution", "engine", "label"], sort=False)
    ]
    return sorted(found, key=lambda one: (EXECUTIONS.index(one.execution), strategy_rank(one.label), one.engine))


def _series(
    execution: str, engine: str, label: str, runs: pd.DataFrame, serial: pd.DataFrame, results: Results
) -> Series:
    notes = []
    crowded = runs["oversubscribed"].astype(bool)
    if crowded.any():
        notes.append(f"oversubscribed runs left out, at {_listed(runs.loc[crowded, 'workers'])}")
    runs = runs[~crowded]
    if (runs["batch_policy"] == "per_worker").any() and runs["batch_per_worker"].notna().any():
        usual = runs["batch_per_worker"].mode().max()
        small = (runs["batch_per_worker"] != usual).fillna(False).astype(bool)
        if small.any():
            notes.append(f"another batch than {usual}, and so left out: {_listed(runs.loc[small, 'workers'])}")
        runs = runs[~small]
    weak = bool((runs["scaling"] == "weak").any())
    base = _base(serial, runs)
    if base is None:
        notes.append(
            "efficiency is against its own time at one worker, by its law: there is no serial run to divide by"
        )
    return Series(
        execution,
        engine,
        label,
        weak,
        runs["workers"].to_numpy(dtype=float),
        runs["train_s"].to_numpy(dtype=float),
        runs["repetition"].to_numpy(dtype=np.int64),
        workload_of(runs) if len(runs) else "no runs",
        _most_workers(runs) if not weak else float("inf"),
        tuple(notes),
        virtual_error(results) if execution == "virtual" else None,
        states_steps(results),
        base,
    )


def _base(serial: pd.DataFrame, runs: pd.DataFrame) -> Base | None:
    """The base of `runs`, by the rules of `comparing.ratios`: the plain one, one only, and not oversubscribed."""
    plain = serial[serial["label"] == "serial"]
    serial = plain if len(plain) else serial
    if not len(serial) or serial["label"].nunique() > 1 or serial["oversubscribed"].astype(bool).any():
        return None
    own = serial.assign(log=np.log(serial["train_s"])).groupby("repetition")["log"].mean()
    logs = np.log(runs["train_s"])
    shared = (logs - logs.groupby(runs["workers"]).transform("mean")).groupby(runs["repetition"]).mean()
    apart = (own - shared).dropna()
    variance = float(apart.var(ddof=1)) / len(apart) if len(apart) > 1 else float("nan")
    return Base(float(own.mean()), variance, max(len(apart) - 1, 1))


def _most_workers(runs: pd.DataFrame) -> float:
    """Beyond these a worker has less than one whole batch, and training becomes another one."""
    batches = runs["n_train"] / runs["batch_per_worker"]
    if not len(runs) or batches.isna().any() or runs["batch_policy"].iloc[0] != "per_worker":
        return float(runs["n_train"].min()) if len(runs) and runs["n_train"].notna().all() else float("inf")
    return max(float(batches.min()), float(runs["workers"].max()))


def _listed(counts: pd.Series[int]) -> str:
    several = sorted(set(counts))
    return f"{', '.join(map(str, several))} worker{'' if several == [1] else 's'}"
