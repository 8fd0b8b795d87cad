"""Data of a law: times and workload of one strategy on one engine of one execution at one batch.

Without oversubscribed or disturbed runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pandas as pd

from scalebench.analysis.comparing import Baselines
from scalebench.analysis.environment import states_steps
from scalebench.analysis.loading import Results, cached, cells_in, rows_where
from scalebench.analysis.native_check import VirtualError, error_of_times
from scalebench.analysis.rounds import CellRuns, runs_by_cell, timed
from scalebench.formatting import counted
from scalebench.study.cell import (
    EXECUTIONS,
    SERIES,
    Cell,
    SeriesKey,
    batch_in_words,
    strategy_rank,
)
from scalebench.study.choices import SERIAL
from scalebench.study.spec import SIMULATED

Array: TypeAlias = npt.NDArray[np.float64]

FEWEST_COUNTS = 4
_SAME_TIME = 1e-9  # of logs: rounding of sums in another order
_COUNTED = ["optimizer_steps", "syncs", "bytes_sent_per_worker"]


@dataclass(frozen=True, eq=False)
class SeriesWork:
    """Steps, synchronisations and bytes of a whole run of one worker at the measured worker `counts`.

    Between counts each is interpolated as a power of N. Beyond the last count steps are
    extrapolated as N^`steps_power` (-1 in strong scaling at a fixed batch per worker,
    else 0), synchronisations in proportion to the part that follows the steps, and the
    bytes of one synchronisation linearly in log2 N. One worker does not synchronise.
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
        counts = self.counts[self._shared]
        syncs = self.measured_syncs[self._shared]
        steps = self.measured_steps[self._shared]
        nearest = np.clip(n, counts[0], counts[-1])
        inside = _power_law(nearest, counts, syncs, 0.0)
        # Per batch they follow the steps, per epoch they are constant: the line through
        # both tells which part is which.
        follows, constant = (
            np.polyfit(steps, syncs, 1) if np.ptp(steps) > 0 else (0.0, syncs.mean())
        )
        outside = np.maximum(constant + follows * self.steps(n), 0.0)
        edge = np.maximum(constant + follows * self.steps(nearest), 1e-300)
        return _for_several(n, inside * np.where(outside > 0, outside / edge, 1.0))

    def bytes_sent(self, n: Array) -> Array:
        """Payload of one worker at `n` workers."""
        each = self.measured_bytes[self._shared] / self.measured_syncs[self._shared]
        log = np.log2(self.counts[self._shared])
        log_n = np.log2(np.maximum(n, 1.0))
        at = np.interp(log_n, log, each)
        if len(log) > 1:
            slope = (each[-1] - each[-2]) / (log[-1] - log[-2])
            at = at + slope * np.maximum(log_n - log[-1], 0.0)
        return np.maximum(at, 0.0) * self.syncs(n)

    @property
    def _shared(self) -> npt.NDArray[np.bool_]:
        return (self.counts > 1) & (self.measured_syncs > 0)


@dataclass(frozen=True)
class Base:
    """`serial` on one worker, the base of speedup and efficiency here as in the figures.

    `variance` is that of `log_seconds`, the mean log of its times, without the noise
    shared with the repetitions of the series; NaN below two common repetitions.
    """

    log_seconds: float
    variance: float
    freedom: int


@dataclass(frozen=True, eq=False)
class Series:
    """Runs of one curve T(N): `seconds[i]` at `at[i]` workers in repetition `repetition[i]`.

    One execution, engine and strategy with options (`key`), and one `batch`, of a worker or of all by
    the `batch_policy` (None where it is unknown); `among_batches` where the study has
    several of them. `notes` list runs left out. `error` is the virtual-native error, if
    known. Without a `base` efficiency is relative to the law's T(1).
    """

    key: SeriesKey
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
    batch_policy: str = "per_worker"
    batch: int | None = None
    among_batches: bool = False

    @property
    def at_batch(self) -> str:
        """The batch in words, by which series of one strategy are told apart; empty where the study has one batch."""
        if not self.among_batches:
            return ""
        return batch_in_words(self.batch_policy, self.batch)

    @property
    def name(self) -> str:
        """`epoch_average`, or with its batch `epoch_average, batch 16 per worker`."""
        return ", ".join(filter(None, [self.key.label, self.at_batch]))

    @property
    def counts(self) -> Array:
        """Distinct worker counts, ascending."""
        return np.unique(self.at)

    @property
    def varies(self) -> bool:
        """Return True if repetitions differ at any worker count; at stated step times without jitter they do not."""
        logs = np.log(self.seconds)
        return any(
            float(np.ptp(logs[self.at == count])) > _SAME_TIME for count in self.counts
        )

    @property
    def refusal(self) -> str:
        """Reason for a missing fit, empty if a law can be fitted."""
        counts = self.counts
        if len(counts) >= FEWEST_COUNTS:
            return ""
        measured = counted(len(counts), "worker count")
        listed = (
            f" ({', '.join(f'{count:.0f}' for count in counts)})" if len(counts) else ""
        )
        return (
            f"{measured}{listed} that {'was' if len(counts) == 1 else 'were'} neither oversubscribed nor disturbed; "
            f"a law wants {FEWEST_COUNTS}: run more with --workers"
        )


@cached
def series_of(results: Results) -> list[Series]:
    """Every series of `results` except `serial`, which has one worker by definition.

    A strategy has a series at each batch with FEWEST_COUNTS worker counts, and at its
    usual batch where none has.
    """
    cells = {cell.at: cell for cell in runs_by_cell(results)}
    baselines = Baselines(cells.values())
    runs = timed(results)
    runs = runs.assign(cell=pd.Series(cells_in(runs), runs.index, dtype=object))
    found = [
        series
        for _, own in runs[runs["strategy"] != SERIAL].groupby(SERIES, sort=False)
        for series in _by_batch(own, cells, baselines, results)
    ]
    return sorted(
        found,
        key=lambda one: (
            EXECUTIONS.index(one.key.execution),
            strategy_rank(one.key.label),
            one.key.engine,
        ),
    )


def _by_batch(
    runs: pd.DataFrame,
    cells: Mapping[Cell, CellRuns],
    baselines: Baselines,
    results: Results,
) -> Iterator[Series]:
    """Yield the series of one execution, engine and label, by ascending batch."""
    key = runs["cell"].iloc[0].series
    notes = []
    for what in ("oversubscribed", "disturbed"):
        marked = runs[what].astype(bool)
        if marked.any():
            notes.append(
                f"{what} runs left out, at {_listed(runs.loc[marked, 'workers'])}"
            )
        runs = rows_where(runs, ~marked)
    batch_of = runs["cell"].map(lambda cell: cells[cell].batch).astype("Int64")
    batches = _with_a_law(runs["workers"], batch_of)
    for batch in batches:
        own = runs
        if batch:
            own = rows_where(runs, batch_of.eq(batch).fillna(True).astype(bool))
        others = runs[~batch_of.isin([*batches, pd.NA])]
        left_out = (
            [
                f"another batch than {batch}, and so left out: {_listed(others['workers'])}"
            ]
            if len(others)
            else []
        )
        serial, fault = _serial(own, cells, baselines)
        if serial is None:
            left_out.append(
                f"efficiency is against its own time at one worker, by its law: {fault}"
            )
        weak = bool((own["scaling"] == "weak").any())
        yield Series(
            key,
            weak,
            own["workers"].to_numpy(dtype=float),
            own["train_s"].to_numpy(dtype=float),
            own["repetition"].to_numpy(dtype=np.int64),
            workload_of(own),
            _most_workers(own) if not weak else float("inf"),
            (*notes, *left_out),
            error_of_times(results) if key.execution in SIMULATED else None,
            states_steps(results),
            _base(serial.seconds, own) if serial else None,
            str(own["batch_policy"].iloc[0]) if len(own) else "per_worker",
            batch,
            len(batches) > 1,
        )


def _with_a_law(workers: pd.Series[int], batches: pd.Series[int]) -> list[int | None]:
    """Return the batches that have worker counts enough for a law, else the usual one; None where none is known.

    At another batch a worker computes something else: shards too small for a whole
    batch are such points.
    """
    counts = workers.groupby(batches).nunique()
    enough = counts.index[counts >= FEWEST_COUNTS]
    if len(enough):
        return [int(batch) for batch in enough]
    return [int(batches.mode().max())] if len(counts) else [None]


def _serial(
    runs: pd.DataFrame, cells: Mapping[Cell, CellRuns], baselines: Baselines
) -> tuple[CellRuns | None, str]:
    """Return the baseline `serial` of the runs of a series, as in `comparing.ratios` but at their batch, or why not."""
    if runs.empty:
        return None, "none of its runs counts"
    cell = cells[runs["cell"].iloc[0]]
    # By the rule of the table of ratios: text and figures must have one efficiency.
    found = baselines.find(SERIAL, cell)
    if found.cell and found.cell.batch != cell.batch:
        return None, f"serial ran at another batch than {cell.batch}"
    return found.cell, found.fault


def _base(serial: Mapping[int, float], runs: pd.DataFrame) -> Base:
    """Return the base with the seconds of `serial` by repetition, for the `runs` of a series."""
    own = np.log(pd.Series(serial))
    logs = np.log(runs["train_s"])
    # Noise that a repetition has at all worker counts moves serial and the curve alike,
    # and cancels in a speedup.
    around = logs - logs.groupby(runs["workers"]).transform("mean")
    shared = around.groupby(runs["repetition"]).mean()
    apart = (own - shared).dropna()
    variance = float(apart.var(ddof=1)) / len(apart) if len(apart) > 1 else float("nan")
    return Base(float(own.mean()), variance, max(len(apart) - 1, 1))


def _most_workers(runs: pd.DataFrame) -> float:
    """Largest worker count with a whole batch per worker."""
    batches = runs["n_train"] / runs["batch_per_worker"]
    if (
        not len(runs)
        or batches.isna().any()
        or runs["batch_policy"].iloc[0] != "per_worker"
    ):
        known = len(runs) > 0 and runs["n_train"].notna().all()
        return float(runs["n_train"].min()) if known else float("inf")
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
    if runs[_COUNTED].isna().any(axis=None) or not several.any():
        return None
    if not (steps > 0).all() or not (syncs[several] > 0).all():
        return None  # the law divides by both
    fixed_batch = runs["batch_policy"].iloc[0] == "per_worker"
    strong = runs["scaling"].iloc[0] == "strong"
    if fixed_batch:
        return SeriesWork(counts, steps, syncs, sent, -1.0 if strong else 0.0)
    samples = steps * runs.groupby("workers")["batch_per_worker"].mean().to_numpy(
        dtype=float
    )
    return (
        SeriesWork(counts, steps, syncs, sent, 0.0, samples)
        if np.isfinite(samples).all()
        else None
    )


def _power_law(n: Array, counts: Array, values: Array, beyond: float) -> Array:
    """Interpolate `values` at `counts` linearly in log-log, with slope `beyond` outside."""
    log = np.log(counts)
    at = np.log(n)
    inside = np.interp(at, log, np.log(values))
    # np.interp is constant there; the power goes on.
    outside = np.maximum(at - log[-1], 0.0) + np.minimum(at - log[0], 0.0)
    return np.asarray(np.exp(inside + beyond * outside))


def _for_several(n: Array, values: Array) -> Array:
    """Scale `values` by log2 N between one worker (0) and two (1); unchanged above."""
    return np.asarray(values * np.clip(np.log2(np.maximum(n, 1.0)), 0.0, 1.0))
