"""What one worker does at N workers, read off the rows: steps, samples, synchronisations, bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pandas as pd

Array: TypeAlias = npt.NDArray[np.float64]

_COUNTED = ["optimizer_steps", "syncs", "bytes_sent_per_worker"]


@dataclass(frozen=True, eq=False)
class Workload:
    """Steps, synchronisations and bytes of a whole run of one worker at the measured worker `counts`.

    At a count in between, each is interpolated as a power of N; beyond the last, steps go on as `steps_power` says
    (-1 in strong scaling at a fixed batch per worker, else 0), synchronisations as the part of them that follows the
    steps, and the bytes of one synchronisation linearly in log2 N. One worker synchronises with nobody.
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
        """Samples that one worker processes; only where its batch changes with N."""
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


def workload_of(runs: pd.DataFrame) -> Workload | str:
    """The workload that `runs` of one series recorded, or why they do not tell it."""
    missing = [name for name in _COUNTED if runs[name].isna().any()]
    if missing:
        return f"the rows have no {', '.join(missing)}"
    table = runs.groupby("workers")[_COUNTED].mean().astype(float)
    counts = table.index.to_numpy(dtype=float)
    steps, syncs, sent = (table[name].to_numpy() for name in _COUNTED)
    if (steps <= 0).any():
        return "some runs took no optimizer step"
    if not (syncs[counts > 1] > 0).all():
        return "no synchronisations were counted"
    if not (counts > 1).any():
        return "one worker alone"
    fixed_batch = runs["batch_policy"].iloc[0] == "per_worker"
    strong = runs["scaling"].iloc[0] == "strong"
    samples = None
    if not fixed_batch:
        if runs["batch_per_worker"].isna().any():
            return "the rows have no batch_per_worker"
        samples = steps * runs.groupby("workers")["batch_per_worker"].mean().to_numpy(dtype=float)
    return Workload(counts, steps, syncs, sent, -1.0 if strong and fixed_batch else 0.0, samples)


def _power_law(n: Array, counts: Array, values: Array, beyond: float) -> Array:
    """`values` at `counts`, a straight line between them in log-log, with the slope `beyond` outside."""
    log, at = np.log(counts), np.log(n)
    inside = np.interp(at, log, np.log(values))
    outside = np.maximum(at - log[-1], 0.0) + np.minimum(at - log[0], 0.0)
    return np.asarray(np.exp(inside + beyond * outside))


def _for_several(n: Array, values: Array) -> Array:
    """`values` from two workers up, nothing at one, a straight line in log2 N between (where there are no workers)."""
    return np.asarray(values * np.clip(np.log2(np.maximum(n, 1.0)), 0.0, 1.0))
