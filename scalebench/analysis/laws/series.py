"""Data of a law: times and workload of one strategy on one engine of one execution, without oversubscribed or disturbed
runs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pandas as pd

from scalebench.analysis.environment import states_steps
from scalebench.analysis.grouping import timed
from scalebench.analysis.loading import Results, is_representative
from scalebench.analysis.native_check import VirtualError, error_of_times
from scalebench.formatting import counted
from scalebench.study.cell import EXECUTIONS, SERIES, strategy_rank
from scalebench.study.spec import SIMULATED

Array: TypeAlias = npt.NDArray[np.float64]

FEWEST_COUNTS = 4
_SAME_TIME = 1e-9  # of logs: rounding of sums in another order
_COUNTED = ["optimizer_steps", "syncs", "bytes_sent_per_worker"]


@dataclass(frozen=True, eq=False)
class SeriesWork:
    """Steps, synchronisations and bytes of a whole run of one worker at the measured worker `counts`.

    Between counts each is interpolated as a power of N. Beyond the last count steps are extrapolated as N^`steps_power`
    (-1 in strong scaling at a fixed batch per worker, else 0), synchronisations in proportion to the part that follows
    the steps, and the bytes of one synchronisation linearly in log2 N. One worker does not synchronise.
    """

    counts: Array
    measured_steps: Array
    measured_syncs: Array
    measured_bytes: Array
    steps_power: float
    samples: Array | None = None

    def steps(self, n: Array) -> Array:
        """Optimizer steps of one worker at `n` workers."""
        return _power_law(n, self.counts, self.measured_steps, self.steps_power)

    def samples_seen(self, n: Array) -> Array:
        """Samples that one worker processes; only where the batch per worker changes with N."""
        assert self.samples is not None
        return _power_law(n, self.counts, self.samples, -1.0)

    def syncs(self, n: Array) -> Array:
        """Synchronisations at `n` workers."""
        counts, syncs, steps = (part[self._shared] for part in (self.counts, self.measured_syncs, self.measured_steps))
        inside = _power_law(np.clip(n, counts[0], counts[-1]), counts, syncs, 0.0)
        follows, constant = np.polyfit(steps, syncs, 1) if np.ptp(steps) > 0 else (0.0, syncs.mean())
        outside = np.maximum(constant + follows * self.steps(n), 0.0)
        edge = np.maximum(constant + follows * self.steps(np.clip(n, counts[0], counts[-1])), 1e-300)
        return _for_several(n, inside * np.where(outside > 0, outside / edge, 1.0))

    def bytes_sent(self, n: Array) -> Array:
        """Payload of one worker at `n` workers."""
        counts, syncs, sent = (part[self._shared] for part in (self.counts, self.measured_syncs, self.measured_bytes))
        each, log = sent / syncs, np.log2(counts)
        at = np.interp(np.log2(np.maximum(n, 1.0)), log, each)
        if len(counts) > 1:
            slope = (each[-1] - each[-2]) / (log[-1] - log[-2])
            at = at + slope * np.maximum(np.log2(np.maximum(n, 1.0)) - log[-1], 0.0)
        return np.maximum(at, 0.0) * self.syncs(n)

    @property
    def _shared(self) -> npt.NDArray[np.bool_]:
        return (self.counts > 1) & (self.measured_syncs > 0)


@dataclass(frozen=True)
class Base:
    """`serial` on one worker, the base of speedup and efficiency here as in the figures.

    `variance` is that of `log_seconds`, the mean log of its times, without the noise shared with the repetitions of the
    series; NaN below two common repetitions.
    """

    log_seconds: float
    variance: float
    freedom: int


@dataclass(frozen=True, eq=False)
class Series:
    """Runs of one curve T(N): `seconds[i]` at `at[i]` workers in repetition `repetition[i]`.

    One execution, engine and strategy with options. `notes` list runs left out. `error` is the virtual-native error, if
    known. Without a `base` efficiency is relative to the law's T(1).
    """

    execution: str
    engine: str
    label: str
    weak: bool
    at: Array
    seconds: Array
    repetition: npt.NDArray[np.int64]
    workload: SeriesWork | None
    most_workers: float = float("inf")
    notes: tuple[str, ...] = field(default_factory=tuple)
    error: VirtualError | None = None
    stated: bool = False  # step times are stated
    base: Base | None = None

    @property
    def counts(self) -> Array:
        """Distinct worker counts, ascending."""
        return np.unique(self.at)

    @property
    def varies(self) -> bool:
        """Return True if repetitions differ at any worker count; at stated step times without jitter they do not."""
        logs = np.log(self.seconds)
        return any(float(np.ptp(logs[self.at == count])) > _SAME_TIME for count in self.counts)

    @property
    def refusal(self) -> str:
        """Reason for a missing fit, empty if a law can be fitted."""
        counts = self.counts
        if len(counts) >= FEWEST_COUNTS:
            return ""
        measured = counted(len(counts), "worker count")
        listed = f" ({', '.join(f'{count:.0f}' for count in counts)})" if len(counts) else ""
        return (
            f"{measured}{listed} that {'was' if len(counts) == 1 else 'were'} neither oversubscribed nor disturbed; "
            f"a law wants {FEWEST_COUNTS}: run more with --workers"
        )


def series_of(results: Results) -> list[Series]:
    """Every series of `results` except `serial`, which has one worker by definition."""
    runs = timed(results)
    serial = runs[(runs["strategy"] == "serial") & (runs["workers"] == 1)]
    runs = runs[runs["strategy"] != "serial"]
    found = [
        _series(str(execution), str(engine), str(label), group, serial[serial["execution"] == execution], results)
        for (execution, engine, label), group in runs.groupby(SERIES, sort=False)
    ]
    return sorted(found, key=lambda one: (EXECUTIONS.index(one.execution), strategy_rank(one.label), one.engine))


def _series(
    execution: str, engine: str, label: str, runs: pd.DataFrame, serial: pd.DataFrame, results: Results
) -> Series:
    notes = []
    for what in ("oversubscribed", "disturbed"):
        marked = runs[what].astype(bool)
        if marked.any():
            notes.append(f"{what} runs left out, at {_listed(runs.loc[marked, 'workers'])}")
        runs = runs[~marked]
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
        workload_of(runs),
        _most_workers(runs) if not weak else float("inf"),
        tuple(notes),
        error_of_times(results) if execution in SIMULATED else None,
        states_steps(results),
        base,
    )


def _base(serial: pd.DataFrame, runs: pd.DataFrame) -> Base | None:
    """Base of `runs` by the rules of `comparing.ratios`: without options, unique, representative."""
    plain = serial[serial["label"] == "serial"]
    serial = plain if len(plain) else serial
    if not len(serial) or serial["label"].nunique() > 1 or not is_representative(serial).all():
        return None
    own = serial.assign(log=np.log(serial["train_s"])).groupby("repetition")["log"].mean()
    logs = np.log(runs["train_s"])
    shared = (logs - logs.groupby(runs["workers"]).transform("mean")).groupby(runs["repetition"]).mean()
    apart = (own - shared).dropna()
    variance = float(apart.var(ddof=1)) / len(apart) if len(apart) > 1 else float("nan")
    return Base(float(own.mean()), variance, max(len(apart) - 1, 1))


def _most_workers(runs: pd.DataFrame) -> float:
    """Largest worker count with a whole batch per worker."""
    batches = runs["n_train"] / runs["batch_per_worker"]
    if not len(runs) or batches.isna().any() or runs["batch_policy"].iloc[0] != "per_worker":
        return float(runs["n_train"].min()) if len(runs) and runs["n_train"].notna().all() else float("inf")
    return max(float(batches.min()), float(runs["workers"].max()))


def _listed(counts: pd.Series[int]) -> str:
    several = sorted(set(counts))
    return f"{', '.join(map(str, several))} worker{'' if several == [1] else 's'}"


def workload_of(runs: pd.DataFrame) -> SeriesWork | None:
    """Workload recorded by `runs` of one series; None where steps, synchronisations or bytes were not counted."""
    table = runs.groupby("workers")[_COUNTED].mean().astype(float)
    counts = table.index.to_numpy(dtype=float)
    steps, syncs, sent = (table[name].to_numpy() for name in _COUNTED)
    several = counts > 1
    if (
        runs[_COUNTED].isna().any(axis=None)
        or not several.any()
        or not ((steps > 0).all() and (syncs[several] > 0).all())
    ):
        return None
    fixed_batch = runs["batch_policy"].iloc[0] == "per_worker"
    strong = runs["scaling"].iloc[0] == "strong"
    if fixed_batch:
        return SeriesWork(counts, steps, syncs, sent, -1.0 if strong else 0.0)
    samples = steps * runs.groupby("workers")["batch_per_worker"].mean().to_numpy(dtype=float)
    return SeriesWork(counts, steps, syncs, sent, 0.0, samples) if np.isfinite(samples).all() else None


def _power_law(n: Array, counts: Array, values: Array, beyond: float) -> Array:
    """Interpolate `values` at `counts` linearly in log-log, with slope `beyond` outside."""
    log, at = np.log(counts), np.log(n)
    inside = np.interp(at, log, np.log(values))
    outside = np.maximum(at - log[-1], 0.0) + np.minimum(at - log[0], 0.0)
    return np.asarray(np.exp(inside + beyond * outside))


def _for_several(n: Array, values: Array) -> Array:
    """Scale `values` by log2 N between one worker (0) and two (1); unchanged above."""
    return np.asarray(values * np.clip(np.log2(np.maximum(n, 1.0)), 0.0, 1.0))
