"""Step tables from the timed windows of a calibration: medians, blocks and jitter."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from scalebench.calibration.quiet_rounds import are_enough
from scalebench.calibration.step_windows import FEWEST_ROUNDS, StepWindows
from scalebench.errors import DisturbedError
from scalebench.formatting import counted
from scalebench.pricing.step_times import BatchTimes, StepTable
from scalebench.system.stopwatch import FEWEST, Typical, typical

BLOCKS = 20
JITTER_KEPT = 4096
JITTER_WITHIN = 4.0  # robust standard deviations from the median, beyond which a step is an outlier of this machine
_QUARTER = 0.31864  # standard deviations that contain a quarter of a normal distribution
_GROUP = 16  # consecutive steps that share a median, which separates jitter from drift of the machine


class MeasuredTables(NamedTuple):
    """Step tables, seconds of the reference step during the measurement, and descriptions of imprecise medians."""

    tables: list[StepTable]
    reference_s: float
    imprecise: list[str]


def step_tables(
    found: list[StepWindows], loads: list[int], others: float | None, *, quiet: bool = False
) -> MeasuredTables:
    """Return the tables of all loads, in seconds at the mean reference step of the calibration.

    A load without enough undisturbed windows has its steps by processor time, and its table says that it was
    `disturbed`.

    Raises:
        DisturbedError: a load was disturbed although the tables have to be `quiet`.
    """
    reference_s = float(np.mean(np.concatenate([windows.alone for windows in found])))
    imprecise: list[str] = []
    tables = []
    for load in loads:
        own = [windows for windows in found if windows.load == load]
        disturbed = _lacking(own, load)
        if disturbed and quiet:
            raise DisturbedError(
                f"{disturbed} could not be measured: other programs took the cores in every window; run it on a "
                "quieter machine, or leave out --require-quiet"
            )
        slower = _slower_together(own, by_processor=bool(disturbed))
        table, wide = _table(own, load, reference_s * slower, others, disturbed=bool(disturbed))
        tables.append(table)
        imprecise += wide
    return MeasuredTables(tables, reference_s, imprecise)


def _lacking(found: list[StepWindows], load: int) -> str:
    """Name a batch size without enough undisturbed windows; empty if there is none."""
    for size in sorted({windows.size for windows in found}):
        undisturbed = sum(int(windows.undisturbed.sum()) for windows in found if windows.size == size)
        if not are_enough(undisturbed, FEWEST_ROUNDS * load):
            beside = f"beside {counted(load - 1, 'other worker')}" if load > 1 else "alone"
            return f"a step of {size} samples {beside}"
    return ""


def _slower_together(found: list[StepWindows], *, by_processor: bool) -> float:
    """Return the reference step under this load relative to alone, at least 1."""
    if found[0].load == 1:
        return 1.0
    ratios = np.concatenate([windows.slower_together(by_processor=by_processor) for windows in found])
    known = typical(ratios[np.isfinite(ratios)].tolist())
    return max(1.0, known.value) if known.n else 1.0


def _table(
    found: list[StepWindows], load: int, reference_s: float, others: float | None, *, disturbed: bool
) -> tuple[StepTable, list[str]]:
    """Return the table of one load and descriptions of its imprecise medians."""
    batches, jitter, removed, imprecise = [], [], [], []
    for size in sorted({windows.size for windows in found}):
        own = [windows for windows in found if windows.size == size]
        units = np.concatenate([windows.units(by_processor=disturbed) for windows in own], axis=1)
        order = np.argsort(np.concatenate([windows.rounds for windows in own]), kind="stable")
        kept = np.concatenate([windows.undisturbed | disturbed for windows in own])
        known = typical(units.sum(axis=0)[kept])
        if not known.precise:
            imprecise.append(f"steps of {size} samples at {load} a node to {_percent(known)}")
        blocks = _blocks(units[:, order[kept[order]]]) * reference_s
        data, forward, backward, update = blocks.tolist()
        times = {"data_s": data, "forward_s": forward, "backward_s": backward, "update_s": update}
        released = next((windows.release for windows in own if windows.release), [])
        layers = next((list(windows.layers) for windows in own if windows.layers), [])
        batches.append(BatchTimes(samples=size, **times, release=released, layers=layers))
        for windows in own:
            factors, outliers = _jitter(
                windows.steps[windows.undisturbed if windows.undisturbed.any() else slice(None)]
            )
            jitter.append(factors)
            removed.append(outliers)
    everything = np.concatenate(jitter)
    kept_factors = everything[np.linspace(0, len(everything) - 1, min(JITTER_KEPT, len(everything))).astype(int)]
    table = StepTable(
        source=f"this machine, measured with {load} busy worker{'s' if load > 1 else ''}",
        busy_workers=load,
        batches=batches,
        shuffle_s_per_sample=float(np.median([windows.shuffle_s_per_sample for windows in found])),
        jitter=(kept_factors / kept_factors.mean()).tolist(),
        outliers=float(np.mean(removed)),
        others_load=others,
        disturbed=disturbed,
    )
    return table, imprecise


def _percent(known: Typical) -> str:
    return f"{100 * known.half_width:.2g} %" if math.isfinite(known.half_width) else "no known precision"


def _blocks(units: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return (4, blocks): medians of whole steps of consecutive windows, split by their mean shares."""
    groups = np.array_split(units, min(BLOCKS, units.shape[1]), axis=1)
    return np.array([np.median(g.sum(axis=0)) * g.mean(axis=1) / g.mean(axis=1).sum() for g in groups]).T


def _jitter(steps: NDArray[np.float64]) -> tuple[NDArray[np.float64], float]:
    """Return step times relative to the median of their neighbours, without outliers, and the share of outliers.

    `steps` (windows, steps of a window) in order. The standard deviation s is estimated from the differences of
    consecutive logs of a window: a quarter of those of a normal distribution lie within 0.3186 sqrt(2) s, which is
    robust to disturbances of up to three quarters of the steps. A step beyond `JITTER_WITHIN` deviations is an event of
    this machine, such as an interrupt, a page fault or a change of its speed.
    """
    flat = steps.ravel()
    if len(flat) < FEWEST:
        return np.ones(1), 0.0
    differences = np.diff(np.log(steps if steps.shape[1] > 1 else flat), axis=-1)
    groups = np.array_split(flat, max(1, len(flat) // _GROUP))
    factors = np.concatenate([group / np.median(group) for group in groups])
    deviation = float(np.quantile(np.abs(differences), 0.25)) / (_QUARTER * math.sqrt(2))
    near = np.abs(factors - 1.0) <= JITTER_WITHIN * deviation
    return factors[near], float(1 - near.mean())
