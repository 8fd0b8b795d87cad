"""Calibration of virtual runs: real steps measured under the load of a full node, and the step tables that follow.

As many processes as a node holds workers run the training loop (same replica, data
access and threads), warm, and record each phase of each step in windows: some reference
steps, then some steps. In each round process 0 measures the reference step alone,
before all processes of the load measure some windows together. The cost of a step in
reference steps, by medians over all windows, is

    (step / reference step of its window) x (reference step of windows / alone)

Both ratios are independent of the speed of a core, which changes within milliseconds on
a shared machine. Loads 1, 2, 4, ... up to a full node are measured for every batch
size, until each median is precise or the budget is spent. Only undisturbed windows
count; where there are none, steps are taken from the thread's processor time. Once for
each batch size process 0 measures which share of both passes each layer takes. No run
of the study is used.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from scalebench.calibration import step_windows
from scalebench.calibration.quiet_rounds import are_enough
from scalebench.errors import DisturbedError, RunError
from scalebench.formatting import counted
from scalebench.pricing.machine import BatchTimes, StepTable, loads_up_to
from scalebench.study.spec import Run
from scalebench.system.disturbance import (
    FEWEST,
    BackgroundLoad,
    Typical,
    disturbed,
    own_s,
    typical,
)
from scalebench.system.parent_watch import (
    exit_with_parent,
    preloaded_forkserver,
    signals_blocked,
)
from scalebench.training.reference_step import Gauge, reference_step_of_now

_WARM_UP = (3, 30)  # least and most warm-up steps
_WARM_UP_S = 0.5
BLOCKS = 20
JITTER_KEPT = 4096
# robust standard deviations from the median, beyond which a step is an outlier of this
# machine
JITTER_WITHIN = 4.0
# standard deviations that contain a quarter of a normal distribution
_QUARTER = 0.31864
# consecutive steps that share a median, which separates jitter from drift of the
# machine
_GROUP = 16


class Budget(NamedTuple):
    """Limits of a calibration: total seconds; `quiet` to refuse what was measured beside busy programs."""

    seconds: float
    quiet: bool = False


def measure_steps(
    run: Run,
    folder: Path,
    batch_sizes: set[int],
    node_workers: int,
    budget: Budget,
    device: str = "cpu",
) -> MeasuredTables:
    """Measure step tables of the model and data of `run` for loads 1, 2, 4, ... `node_workers` of this machine.

    On `device` cuda each process has a GPU of its own, and its steps are in seconds
    instead of reference steps.

    Raises:
        DisturbedError: too few windows were undisturbed and the `budget` asks for `quiet` ones.
        RunError: a measuring process died.
    """
    loads = loads_up_to(node_workers)
    found, others = measure_windows(
        run, folder, batch_sizes, loads, budget.seconds, device
    )
    return step_tables(found, loads, others, quiet=budget.quiet)


def measure_windows(
    run: Run,
    folder: Path,
    batch_sizes: set[int],
    loads: list[int],
    seconds: float,
    device: str = "cpu",
) -> tuple[list[step_windows.StepWindows], float | None]:
    """Return the windows of all processes, batch sizes and `loads`, and the share of the cores that others took.

    Raises:
        RunError: a measuring process died.
    """
    node_workers = max(loads)
    context = preloaded_forkserver()
    barrier, going = context.Barrier(node_workers), context.Value("b", 0)
    results: Any = context.SimpleQueue()
    each_s = seconds / (len(batch_sizes) * len(loads))
    arguments = (
        run,
        folder,
        device,
        sorted(batch_sizes),
        loads,
        each_s,
        barrier,
        going,
        results,
    )
    processes = [
        context.Process(target=_measure, args=(index, *arguments), daemon=True)
        for index in range(node_workers)
    ]
    with signals_blocked():
        for process in processes:
            process.start()
    found: list[step_windows.StepWindows] = []
    spent: dict[int, float] = {}  # processor seconds of each measuring process
    # after the imports of the forkserver
    background = BackgroundLoad(lambda: own_s() + sum(spent.values()))
    try:
        expected = sum(len(batch_sizes) * load for load in loads)
        while len(found) < expected:
            windows, index, spent[index] = _next_of(results, processes)
            found.append(windows)
        others = background.share()
        for process in processes:
            process.join()
    finally:
        for process in processes:
            if process.is_alive():
                process.terminate()
    return found, others


def _next_of(
    results: Any, processes: Sequence[BaseProcess]
) -> tuple[step_windows.StepWindows, int, float]:
    """Return the next windows, of which process, and the processor seconds that it has spent."""
    while results.empty():
        # Without a look at them, a process that died would be waited for without end.
        if any(process.exitcode not in (None, 0) for process in processes):
            raise RunError(
                "calibration: a measuring process ended before its time; see its message above"
            )
        time.sleep(0.005)
    found: tuple[step_windows.StepWindows, int, float] = results.get()
    return found


def measure_reference(threads: int) -> float | None:
    """Return seconds of the reference step now, in a process like those that measure steps, while this one waits.

    None if other programs took the cores meanwhile: beside them a step takes more
    processor time, by half on cores that share a unit, for the same reason as it would
    here, beside whatever still starts.

    Raises:
        RunError: the measuring process died.
    """
    context = preloaded_forkserver()
    results = context.SimpleQueue()
    process = context.Process(
        target=_measure_reference, args=(threads, results), daemon=True
    )
    with signals_blocked():
        process.start()
    process.join()
    if process.exitcode != 0:
        raise RunError(
            "calibration: the process that measures the reference step died; see its message above"
        )
    found: float | None = results.get()
    return found


def _measure_reference(threads: int, results: Any) -> None:
    exit_with_parent()
    torch.set_num_threads(threads)
    background = BackgroundLoad()
    seconds = reference_step_of_now()
    results.put(None if disturbed(background.cores()) else seconds)


def _measure(
    index: int,
    run: Run,
    folder: Path,
    device: str,
    sizes: list[int],
    loads: list[int],
    each_s: float,
    barrier: Any,
    going: Any,
    results: Any,
) -> None:
    exit_with_parent()
    from scalebench.data.dataset import open_dataset

    torch.set_num_threads(run.threads_per_worker)
    dataset = open_dataset(folder)
    # A GPU for each process, as each worker of a run has its own.
    on = torch.device(device, index) if device == "cuda" else torch.device(device)
    if on.type == "cuda":
        torch.cuda.set_device(on)
    gauge = Gauge() if on.type == "cpu" else step_windows.SecondsGauge()
    for size in sizes:  # one replica at a time, for memory
        replica = step_windows.single_replica(run, dataset, size, on)
        step_windows.take_steps(replica, step_windows.bounded(*_WARM_UP, _WARM_UP_S))
        release = step_windows.release_shares(replica) if index == 0 else []
        layers = step_windows.layer_shares(replica) if index == 0 else []
        for load in loads:
            replica.reset()
            # Now, or it would be collected within a window.
            gc.collect()
            windows = step_windows.Rounds(
                replica, gauge, index, load, barrier, going
            ).run(size, release, each_s)
            if windows is not None:
                results.put(
                    (windows._replace(layers=layers), index, time.process_time())
                )
        del replica


class MeasuredTables(NamedTuple):
    """Step tables, seconds of the reference step during the measurement, and descriptions of imprecise medians."""

    tables: list[StepTable]
    reference_s: float
    imprecise: list[str]


def step_tables(
    found: list[step_windows.StepWindows],
    loads: list[int],
    others: float | None,
    *,
    quiet: bool = False,
) -> MeasuredTables:
    """Return the tables of all loads, in seconds at the mean reference step of the calibration.

    A load without enough undisturbed windows has its steps by processor time, and its
    table says that it was `disturbed`.

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
        # Workers of one node slow one another down, by shared caches and memory.
        slower = _slower_together(own, by_processor=bool(disturbed))
        table, wide = _table(
            own, load, reference_s * slower, others, disturbed=bool(disturbed)
        )
        tables.append(table)
        imprecise += wide
    return MeasuredTables(tables, reference_s, imprecise)


def _lacking(found: list[step_windows.StepWindows], load: int) -> str:
    """Name a batch size without enough undisturbed windows; empty if there is none."""
    for size in sorted({windows.size for windows in found}):
        undisturbed = sum(
            int(windows.undisturbed.sum()) for windows in found if windows.size == size
        )
        if not are_enough(undisturbed, step_windows.FEWEST_ROUNDS * load):
            beside = (
                f"beside {counted(load - 1, 'other worker')}" if load > 1 else "alone"
            )
            return f"a step of {counted(size, 'sample')} {beside}"
    return ""


def _slower_together(
    found: list[step_windows.StepWindows], *, by_processor: bool
) -> float:
    """Return the reference step under this load relative to alone, at least 1."""
    if found[0].load == 1:
        return 1.0
    ratios = np.concatenate(
        [windows.slower_together(by_processor=by_processor) for windows in found]
    )
    known = typical(ratios[np.isfinite(ratios)].tolist())
    return max(1.0, known.value) if known.n else 1.0


def _table(
    found: list[step_windows.StepWindows],
    load: int,
    reference_s: float,
    others: float | None,
    *,
    disturbed: bool,
) -> tuple[StepTable, list[str]]:
    """Return the table of one load and descriptions of its imprecise medians."""
    batches = []
    imprecise = []
    for size in sorted({windows.size for windows in found}):
        own = [windows for windows in found if windows.size == size]
        units = np.concatenate(
            [windows.units(by_processor=disturbed) for windows in own], axis=1
        )
        # Of all processes in the order of rounds, so that a block is of one stretch of
        # time.
        order = np.argsort(
            np.concatenate([windows.rounds for windows in own]), kind="stable"
        )
        # By processor time all windows count.
        kept = np.concatenate([windows.undisturbed | disturbed for windows in own])
        known = typical(units.sum(axis=0)[kept])
        if not known.precise:
            imprecise.append(
                f"steps of {size} samples at {load} a node to {_percent(known)}"
            )
        blocks = _blocks(units[:, order[kept[order]]]) * reference_s
        data, forward, backward, update = blocks.tolist()
        times = {
            "data_s": data,
            "forward_s": forward,
            "backward_s": backward,
            "update_s": update,
        }
        # Process 0 alone has measured these.
        released = next((windows.release for windows in own if windows.release), [])
        layers = next((list(windows.layers) for windows in own if windows.layers), [])
        batches.append(
            BatchTimes(samples=size, **times, release=released, layers=layers)
        )
    factors, outliers = _jitter_of_all(found)
    table = StepTable(
        source=f"this machine, measured with {load} busy worker{'s' if load > 1 else ''}",
        busy_workers=load,
        batches=batches,
        shuffle_s_per_sample=float(
            np.median([windows.shuffle_s_per_sample for windows in found])
        ),
        jitter=factors,
        outliers=outliers,
        others_load=others,
        disturbed=disturbed,
    )
    return table, imprecise


def _jitter_of_all(found: list[step_windows.StepWindows]) -> tuple[list[float], float]:
    """Return the kept factors of the steps of all windows, of mean 1, and the share of steps that are outliers."""
    jitter, removed = [], []
    for windows in sorted(found, key=lambda each: each.size):
        quiet = windows.undisturbed if windows.undisturbed.any() else slice(None)
        factors, outliers = _jitter(windows.steps[quiet])
        jitter.append(factors)
        removed.append(outliers)
    everything = np.concatenate(jitter)
    most = min(JITTER_KEPT, len(everything))
    # Spread evenly: the first ones would be of the smallest batch alone.
    kept = everything[np.linspace(0, len(everything) - 1, most).astype(int)]
    return (kept / kept.mean()).tolist(), float(np.mean(removed))


def _percent(known: Typical) -> str:
    return (
        f"{100 * known.half_width:.2g} %"
        if math.isfinite(known.half_width)
        else "no known precision"
    )


def _blocks(units: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return (4, blocks): medians of whole steps of consecutive windows, split by their mean shares."""
    blocks = []
    for group in np.array_split(units, min(BLOCKS, units.shape[1]), axis=1):
        step = np.median(group.sum(axis=0))
        by_task = group.mean(axis=1)
        blocks.append(step * by_task / by_task.sum())
    return np.array(blocks).T


def _jitter(steps: NDArray[np.float64]) -> tuple[NDArray[np.float64], float]:
    """Return step times relative to the median of their neighbours, without outliers, and the share of outliers.

    `steps` (windows, steps of a window) in order. The standard deviation s is estimated
    from the differences of consecutive logs of a window: a quarter of those of a normal
    distribution lie within 0.3186 sqrt(2) s, which is robust to disturbances of up to
    three quarters of the steps. A step beyond `JITTER_WITHIN` deviations is an event of
    this machine, such as an interrupt, a page fault or a change of its speed.
    """
    flat = steps.ravel()
    if len(flat) < FEWEST:
        return np.ones(1), 0.0
    differences = np.diff(np.log(steps if steps.shape[1] > 1 else flat), axis=-1)
    groups = np.array_split(flat, max(1, len(flat) // _GROUP))
    factors = np.concatenate([group / np.median(group) for group in groups])
    deviation = float(np.quantile(np.abs(differences), 0.25)) / (
        _QUARTER * math.sqrt(2)
    )
    near = np.abs(factors - 1.0) <= JITTER_WITHIN * deviation
    return factors[near], float(1 - near.mean())
