"""Measures what virtual steps cost: real steps, under the load they stand for.

As many processes as a node holds workers run the very loop that a run consists of (same replica, same data access,
same threads), warm, and book each phase of each step. Loads 1, 2, 4, ... up to a full node are measured, for every
batch size that occurs. No run of the study is used.
"""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scalebench.clock import Ledger, Task
from scalebench.elsewhere import Elsewhere, own_s
from scalebench.errors import RunError
from scalebench.lifeline import follow, nursery, unheard
from scalebench.study.spec import Run
from scalebench.virtual.step_times import STEP_TASKS, BatchTimes, StepTable

BLOCKS = 20
JITTER_KEPT = 4096
_WARM_UP = (3, 30)  # steps, at least and at most
_RELEASES = (5, 50)  # backward passes whose gradients are watched, likewise
_BEFORE_S = 0.5  # for each of the two; large models take the fewest steps


class LapClock:
    """Books laps one by one, where the wall clock would add them up."""

    def __init__(self) -> None:
        self.ledger = Ledger()
        self.running = True
        self.laps: dict[Task, list[float]] = {task: [] for task in Task}
        self._mark = time.perf_counter()

    def start(self) -> None:
        for laps in self.laps.values():
            laps.clear()
        self._mark = time.perf_counter()

    def did(self, task: Task, samples: int = 0) -> None:
        now = time.perf_counter()
        self.laps[task].append(now - self._mark)
        self._mark = now

    def elapsed(self) -> float:
        return 0.0

    @contextmanager
    def paused(self) -> Iterator[None]:
        yield


class Alone:
    """The communicator of a worker that has nobody to talk to."""

    rank, size, collectives, bytes_sent = 0, 1, 0, 0
    calls = None

    def alltoallv(self, tensors: Sequence[Any]) -> list[Any]:
        return list(tensors)


def loads_up_to(node_workers: int) -> list[int]:
    """How many workers of a node are made to compute at the same time: 1, 2, 4, ... and all."""
    return sorted({min(1 << power, node_workers) for power in range(node_workers.bit_length() + 1)})


def measure_steps(
    run: Run, folder: Path, batch_sizes: set[int], node_workers: int, seconds_each: float = 0.6
) -> list[StepTable]:
    """Step tables of `run`'s model and data for loads 1, 2, 4, ... `node_workers` of this machine.

    `seconds_each` is the time spent on one batch size under one load.
    """
    loads = loads_up_to(node_workers)
    context = nursery()
    barrier = context.Barrier(node_workers)
    results: Any = context.SimpleQueue()
    arguments = (run, folder, sorted(batch_sizes), loads, seconds_each, barrier, results)
    processes = [
        context.Process(target=_measure, args=(index, *arguments), daemon=True) for index in range(node_workers)
    ]
    with unheard():
        for process in processes:
            process.start()
    found: list[tuple[int, int, _Laps]] = []
    spent: dict[int, float] = {}  # processor seconds of each measuring process
    elsewhere = Elsewhere(lambda: own_s() + sum(spent.values()))  # the nursery has imported by now
    try:
        expected = sum(len(batch_sizes) * load for load in loads)
        while len(found) < expected:
            if results.empty():
                if any(process.exitcode not in (None, 0) for process in processes):
                    raise RunError("calibration: a measuring process ended before its time; see its message above")
                time.sleep(0.005)
                continue
            load, size, laps, index, spent[index] = results.get()
            found.append((load, size, laps))
        others = elsewhere.share()
        for process in processes:
            process.join()
    finally:
        for process in processes:
            if process.is_alive():
                process.terminate()
    return [_table([item for item in found if item[0] == load], load, others) for load in loads]


class _Laps:
    """One process's laps at one batch size: (4, steps) seconds in the order of STEP_TASKS."""

    def __init__(self, seconds: NDArray[np.float64], shuffle_s_per_sample: float, release: list[float]) -> None:
        self.seconds, self.shuffle_s_per_sample, self.release = seconds, shuffle_s_per_sample, release


def _measure(
    index: int,
    run: Run,
    folder: Path,
    sizes: list[int],
    loads: list[int],
    seconds_each: float,
    barrier: Any,
    results: Any,
) -> None:
    follow()
    import torch

    from scalebench.data.dataset import open_dataset

    torch.set_num_threads(run.threads_per_worker)
    dataset = open_dataset(folder)
    for size in sizes:  # one replica at a time: large models would not fit into memory together
        replica = _replica(run, dataset, size)
        for load in loads:
            barrier.wait()
            if index < load:
                results.put((load, size, _run_steps(replica, seconds_each), index, time.process_time()))
        del replica


def _replica(run: Run, dataset: Any, size: int) -> Any:
    from dataclasses import replace

    from scalebench.data.plan import Plan
    from scalebench.worker import Replica

    rows = min(dataset.n_train, max(size, 256 * size))
    rows -= rows % size
    part = replace(dataset, x_train=dataset.x_train[:rows], y_train=dataset.y_train[:rows])
    plan = Plan(rows, 1, seed=run.seed, batch_per_worker=size)
    solo = run.model_copy(update={"workers": 1, "init_weights": None})
    return Replica(solo, part, plan, Alone(), LapClock())  # type: ignore[arg-type]


def _run_steps(replica: Any, seconds: float) -> _Laps:
    clock: LapClock = replica.clock
    take_steps(replica, bounded(*_WARM_UP, _BEFORE_S))
    release = _release_shares(replica)
    replica.reset()
    gc.collect()
    clock.start()
    take_steps(replica, bounded(BLOCKS, None, seconds))
    steps = len(clock.laps[Task.UPDATE])
    laps = np.array([clock.laps[task][:steps] for task in STEP_TASKS])
    shuffles, samples = clock.laps[Task.SHUFFLE], replica.plan.n
    shuffle = float(np.median(shuffles)) / samples if shuffles else 0.0
    return _Laps(laps, shuffle, release)


def bounded(least: int, most: int | None, seconds: float) -> Iterator[int]:
    """0, 1, 2, ... up to `least` of them, and on until there are `most` or `seconds` are over."""
    end = time.perf_counter() + seconds
    for done in itertools.count():
        if done >= least and (done == most or time.perf_counter() >= end):
            return
        yield done


def take_steps(replica: Any, turns: Iterable[int]) -> int:
    """One local step a turn, epoch after epoch; how many there were."""
    done = 0
    batches = (batch for epoch in itertools.count() for batch in replica.batches(epoch))
    for _, batch in zip(turns, batches, strict=False):
        replica.local_step(batch)
        done += 1
    return done


def _release_shares(replica: Any) -> list[float]:
    """After which share of the backward pass each parameter's gradient was there, the median over some steps."""
    import torch

    trainable = [parameter for parameter in replica.model.parameters() if parameter.requires_grad]
    moments: dict[int, float] = {}
    handles = [
        parameter.register_post_accumulate_grad_hook(
            lambda _, index=index: moments.__setitem__(index, time.perf_counter())
        )
        for index, parameter in enumerate(trainable)
    ]
    shares = []
    batch = next(iter(replica.batches(0)))
    loss = torch.nn.functional.cross_entropy if replica.task == "classification" else torch.nn.functional.mse_loss
    for _ in bounded(*_RELEASES, _BEFORE_S):
        value = loss(replica.model(batch.x), batch.y)
        begin = time.perf_counter()
        value.backward()  # type: ignore[no-untyped-call]
        whole = time.perf_counter() - begin
        shares.append([(moments.get(index, begin + whole) - begin) / whole for index in range(len(trainable))])
    for handle in handles:
        handle.remove()
    return [float(share) for share in np.median(np.array(shares), axis=0)]


def _table(found: list[tuple[int, int, _Laps]], load: int, others: float | None) -> StepTable:
    batches, jitter = [], []
    for size in sorted({size for _, size, _ in found}):
        laps = [item for _, s, item in found if s == size]
        blocks = np.concatenate([_block_means(item.seconds) for item in laps], axis=1)
        data, forward, backward, update = blocks.tolist()
        batches.append(BatchTimes(samples=size, data_s=data, forward_s=forward, backward_s=backward, update_s=update))
        for item in laps:
            whole = item.seconds.sum(axis=0)
            jitter.append(whole / whole.mean())
    everything = np.concatenate(jitter)
    kept = everything[np.linspace(0, len(everything) - 1, min(JITTER_KEPT, len(everything))).astype(int)]
    return StepTable(
        source=f"this machine, measured with {load} busy worker{'s' if load > 1 else ''}",
        busy_workers=load,
        batches=batches,
        shuffle_s_per_sample=float(np.median([item.shuffle_s_per_sample for _, _, item in found])),
        release=[float(x) for x in np.median(np.array([item.release for _, _, item in found]), axis=0)],
        jitter=(kept / kept.mean()).tolist(),
        others_load=others,
    )


def _block_means(seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    """(4, BLOCKS): the means of consecutive blocks of steps."""
    steps = seconds.shape[1] // BLOCKS * BLOCKS
    means: NDArray[np.float64] = seconds[:, :steps].reshape(len(STEP_TASKS), BLOCKS, -1).mean(axis=2)
    return means
