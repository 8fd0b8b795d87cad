"""Calibration of virtual runs: real steps measured under the load of a full node.

As many processes as a node holds workers run the training loop (same replica, data access and threads), warm, and
record each phase of each step in windows: some reference steps, then some steps. In each round process 0 measures the
reference step alone, before all processes of the load measure some windows together. The cost of a step in reference
steps, by medians over all windows, is

    (step / reference step of its window) x (reference step of windows / alone)

Both ratios are independent of the speed of a core, which changes within milliseconds on a shared machine.
Loads 1, 2, 4, ... up to a full node are measured for every batch size, until each median is precise or the budget is
spent. Only undisturbed windows count; where there are none, steps are taken from the thread's processor time. Once for
each batch size process 0 measures which share of both passes each layer takes. No run of the study is used.
"""

from __future__ import annotations

import gc
import time
from pathlib import Path
from typing import Any, NamedTuple

from scalebench.calibration.pass_shares import layer_shares, release_shares
from scalebench.calibration.step_statistics import MeasuredTables, step_tables
from scalebench.calibration.step_windows import (
    Rounds,
    SecondsGauge,
    StepWindows,
    bounded,
    single_replica,
    take_steps,
)
from scalebench.errors import RunError
from scalebench.pricing.machine import loads_up_to
from scalebench.study.spec import Run
from scalebench.system.background_load import BackgroundLoad, disturbed, own_s
from scalebench.system.parent_watch import exit_with_parent, preloaded_forkserver, signals_blocked
from scalebench.training.reference_step import Gauge, reference_step_of_now

_WARM_UP = (3, 30)  # least and most warm-up steps
_WARM_UP_S = 0.5


class Budget(NamedTuple):
    """Limits of a calibration: total seconds; `quiet` to refuse what was measured beside busy programs."""

    seconds: float
    quiet: bool = False


def measure_steps(
    run: Run, folder: Path, batch_sizes: set[int], node_workers: int, budget: Budget, device: str = "cpu"
) -> MeasuredTables:
    """Measure step tables of the model and data of `run` for loads 1, 2, 4, ... `node_workers` of this machine.

    On `device` cuda each process has a GPU of its own, and its steps are in seconds instead of reference steps.

    Raises:
        DisturbedError: too few windows were undisturbed and the `budget` asks for `quiet` ones.
        RunError: a measuring process died.
    """
    loads = loads_up_to(node_workers)
    found, others = measure_windows(run, folder, batch_sizes, loads, budget.seconds, device)
    return step_tables(found, loads, others, quiet=budget.quiet)


def measure_windows(
    run: Run, folder: Path, batch_sizes: set[int], loads: list[int], seconds: float, device: str = "cpu"
) -> tuple[list[StepWindows], float | None]:
    """Return the windows of all processes, batch sizes and `loads`, and the share of the cores that others took.

    Raises:
        RunError: a measuring process died.
    """
    node_workers = max(loads)
    context = preloaded_forkserver()
    barrier, going = context.Barrier(node_workers), context.Value("b", 0)
    results: Any = context.SimpleQueue()
    each_s = seconds / (len(batch_sizes) * len(loads))
    arguments = (run, folder, device, sorted(batch_sizes), loads, each_s, barrier, going, results)
    processes = [
        context.Process(target=_measure, args=(index, *arguments), daemon=True) for index in range(node_workers)
    ]
    with signals_blocked():
        for process in processes:
            process.start()
    found: list[StepWindows] = []
    spent: dict[int, float] = {}  # processor seconds of each measuring process
    background = BackgroundLoad(lambda: own_s() + sum(spent.values()))  # after the imports of the forkserver
    try:
        expected = sum(len(batch_sizes) * load for load in loads)
        while len(found) < expected:
            if results.empty():
                if any(process.exitcode not in (None, 0) for process in processes):
                    raise RunError("calibration: a measuring process ended before its time; see its message above")
                time.sleep(0.005)
                continue
            windows, index, spent[index] = results.get()
            found.append(windows)
        others = background.share()
        for process in processes:
            process.join()
    finally:
        for process in processes:
            if process.is_alive():
                process.terminate()
    return found, others


def measure_reference(threads: int) -> float | None:
    """Return seconds of the reference step now, in a process like those that measure steps, while this one waits.

    None if other programs took the cores meanwhile: beside them a step takes more processor time, by half on cores that
    share a unit, for the same reason as it would here, beside whatever still starts.

    Raises:
        RunError: the measuring process died.
    """
    context = preloaded_forkserver()
    results = context.SimpleQueue()
    process = context.Process(target=_measure_reference, args=(threads, results), daemon=True)
    with signals_blocked():
        process.start()
    process.join()
    if process.exitcode != 0:
        raise RunError("calibration: the process that measures the reference step died; see its message above")
    found: float | None = results.get()
    return found


def _measure_reference(threads: int, results: Any) -> None:
    exit_with_parent()
    import torch

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
    import torch

    from scalebench.data.dataset import open_dataset

    torch.set_num_threads(run.threads_per_worker)
    dataset = open_dataset(folder)
    on = torch.device(device, index) if device == "cuda" else torch.device(device)
    if on.type == "cuda":
        torch.cuda.set_device(on)
    gauge = Gauge() if on.type == "cpu" else SecondsGauge()
    for size in sizes:  # one replica at a time, for memory
        replica = single_replica(run, dataset, size, on)
        take_steps(replica, bounded(*_WARM_UP, _WARM_UP_S))
        release = release_shares(replica) if index == 0 else []
        layers = layer_shares(replica) if index == 0 else []
        for load in loads:
            replica.reset()
            gc.collect()
            windows = Rounds(replica, gauge, index, load, barrier, going).run(size, release, each_s)
            if windows is not None:
                results.put((windows._replace(layers=layers), index, time.process_time()))
        del replica
