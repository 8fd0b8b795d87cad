"""Measures the step times of virtual runs: real steps, under the load they stand for.

As many processes as a node holds workers run the loop of a run (same replica, same data access, same threads), warm,
and book each phase of each step, in windows: some reference steps, then some steps. In each round process 0 looks at
the reference step alone, before all processes of the load go through some windows together. A step costs

    (step / reference step of its window) x (reference step of windows / alone)

reference steps, the medians over all windows: neither follows the speed of a core, which on a shared machine changes
within milliseconds.
Loads 1, 2, 4, ... up to a full node are measured for every batch size that occurs, until each median is precise or the
budget is spent. Only undisturbed windows count. No run of the study is used.
"""

from __future__ import annotations

import gc
import itertools
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from scalebench.errors import DisturbedError, RunError
from scalebench.study.spec import Run
from scalebench.system.background_load import BackgroundLoad, own_s
from scalebench.system.clock import Ledger, Task
from scalebench.system.parent_watch import follow, preloaded_forkserver, unheard
from scalebench.system.stopwatch import FEWEST, Stopwatch, Typical, typical
from scalebench.training.reference_step import Gauge
from scalebench.virtual.step_times import STEP_TASKS, BatchTimes, StepTable

BLOCKS = 20
JITTER_KEPT = 4096
JITTER_WITHIN = 4.0  # robust standard deviations from the median, beyond which a step is an outlier of this machine
_WARM_UP = (3, 30)  # steps, at least and at most
_RELEASES = (5, 50)  # backward passes whose gradients are watched, likewise
_BEFORE_S = 0.5  # for each of the two; large models take the fewest steps
_STEPS = 4  # of a window, if they take less than _FAST_S; a slow model has one step in a window
_FAST_S, _ROUND_S = 5e-3, 0.02
_ROUNDS, _ROUNDS_FAST = 8, 40  # at least, of slow and of fast models
_QUARTER = 0.31864  # standard deviations within which a quarter of a normal distribution lies
_GROUP = 16  # consecutive steps within which jitter is told from the drift of the machine


class LapClock:
    """Keeps laps one by one, where the wall clock would add them up."""

    def __init__(self) -> None:
        self.ledger = Ledger()
        self.running = True
        self.laps: dict[Task, list[float]] = {task: [] for task in Task}
        self._mark = time.perf_counter()

    def start(self) -> None:
        """Forget the laps so far."""
        for laps in self.laps.values():
            laps.clear()
        self.resume()

    def resume(self) -> None:
        """Begin the next lap now."""
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


class Budget(NamedTuple):
    """Limits of a calibration: seconds for all of it, and whether disturbed windows count where no other exist."""

    seconds: float
    noisy: bool = False


class Measured(NamedTuple):
    """Step tables, the reference step in seconds while they were measured, and what was not measured precisely."""

    tables: list[StepTable]
    reference_s: float
    imprecise: list[str]


class _Windows(NamedTuple):
    """One process's windows of steps at one batch size and load.

    `rounds` (windows,) is the round of each, `seconds` (4, windows) a step's mean by task, `references` (windows,) the
    reference step, `undisturbed` (windows,); `steps` (windows, steps of a window) the whole steps. `alone` (rounds,) is
    the reference step of process 0 alone, in seconds and NaN where it was disturbed; empty of other processes.
    """

    load: int
    size: int
    rounds: NDArray[np.int64]
    seconds: NDArray[np.float64]
    undisturbed: NDArray[np.bool_]
    steps: NDArray[np.float64]
    shuffle_s_per_sample: float
    release: list[float]
    references: NDArray[np.float64]
    alone: NDArray[np.float64]

    def slower_together(self) -> NDArray[np.float64]:
        """(rounds,) the reference step of the round's undisturbed windows over that of process 0 alone."""
        found = []
        for number, alone in enumerate(self.alone):
            own = self.references[(self.rounds == number) & self.undisturbed]
            found.append(np.median(own) / alone if len(own) else math.nan)
        return np.array(found)


def loads_up_to(node_workers: int) -> list[int]:
    """How many workers of a node are made to compute at the same time: 1, 2, 4, ... and all."""
    return sorted({min(1 << power, node_workers) for power in range(node_workers.bit_length() + 1)})


def measure_steps(run: Run, folder: Path, batch_sizes: set[int], node_workers: int, budget: Budget) -> Measured:
    """Step tables of `run`'s model and data for loads 1, 2, 4, ... `node_workers` of this machine.

    Raises:
        DisturbedError: no window was undisturbed, and the `budget` does not allow others.
        RunError: a measuring process died.
    """
    loads = loads_up_to(node_workers)
    context = preloaded_forkserver()
    barrier, going = context.Barrier(node_workers), context.Value("b", 0)
    results: Any = context.SimpleQueue()
    each_s = budget.seconds / (len(batch_sizes) * len(loads))
    arguments = (run, folder, sorted(batch_sizes), loads, each_s, barrier, going, results)
    processes = [
        context.Process(target=_measure, args=(index, *arguments), daemon=True) for index in range(node_workers)
    ]
    with unheard():
        for process in processes:
            process.start()
    found: list[_Windows] = []
    spent: dict[int, float] = {}  # processor seconds of each measuring process
    background = BackgroundLoad(lambda: own_s() + sum(spent.values()))  # the preloaded process has imported by now
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
    return _evaluated(found, loads, others, noisy=budget.noisy)


def _measure(
    index: int,
    run: Run,
    folder: Path,
    sizes: list[int],
    loads: list[int],
    each_s: float,
    barrier: Any,
    going: Any,
    results: Any,
) -> None:
    follow()
    import torch

    from scalebench.data.dataset import open_dataset

    torch.set_num_threads(run.threads_per_worker)
    dataset = open_dataset(folder)
    gauge = Gauge()
    for size in sizes:  # one replica at a time: large models would not fit into memory together
        replica = _replica(run, dataset, size)
        take_steps(replica, bounded(*_WARM_UP, _BEFORE_S))
        release = _release_shares(replica) if index == 0 else []
        for load in loads:
            replica.reset()
            gc.collect()
            windows = _Rounds(replica, gauge, index, load, barrier, going).run(size, release, each_s)
            if windows is not None:
                results.put((windows, index, time.process_time()))
        del replica


class _Rounds:
    """The rounds of one process at one batch size and load."""

    def __init__(self, replica: Any, gauge: Gauge, index: int, load: int, barrier: Any, going: Any) -> None:
        self._replica, self._gauge, self._index, self._load = replica, gauge, index, load
        self._barrier, self._going = barrier, going
        self._batches = (batch for epoch in itertools.count() for batch in replica.batches(epoch))
        self._stopwatch = Stopwatch()
        self._rows: list[tuple[int, NDArray[np.float64], float, bool]] = []  # round, (4, steps), reference, undisturbed
        self._alone: list[float] = []

    def run(self, size: int, release: list[float], each_s: float) -> _Windows | None:
        """Rounds until process 0 has a precise median or `each_s` are over; None of a process beyond the load."""
        clock: LapClock = self._replica.clock
        clock.start()
        step_s = self._warm()
        fast = step_s < _FAST_S
        per_window = _STEPS if fast else 1
        per_round = max(1, min(20, round(_ROUND_S / (2 * per_window * step_s))))
        least = _ROUNDS_FAST if fast else _ROUNDS
        end = time.perf_counter() + each_s
        for number in itertools.count():
            self._barrier.wait()
            if self._index == 0:
                self._alone.append(self._gauge.seconds() or math.nan)
                in_time = time.perf_counter() < end
                going = number < _ROUNDS or (in_time and (number < least or not self._precise()))
                self._going.value = going
            self._barrier.wait()
            if not self._going.value:
                break
            if self._index < self._load:
                for _ in range(per_round):
                    self._window(number, per_window, warm=fast)
        if self._index >= self._load:
            return None
        shuffles = clock.laps[Task.SHUFFLE]
        return _Windows(
            self._load,
            size,
            np.array([number for number, _, _, _ in self._rows]),
            np.array([laps.mean(axis=1) for _, laps, _, _ in self._rows]).T,
            np.array([undisturbed for _, _, _, undisturbed in self._rows]),
            np.array([laps.sum(axis=0) for _, laps, _, _ in self._rows]),
            float(np.median(shuffles)) / self._replica.plan.n if shuffles else 0.0,
            release,
            np.array([reference for _, _, reference, _ in self._rows]),
            np.array(self._alone[:number]),
        )

    def _warm(self) -> float:
        """Seconds of one step, roughly."""
        self._step()
        began = time.perf_counter()
        self._step()
        return time.perf_counter() - began

    def _step(self) -> None:
        self._replica.local_step(next(self._batches))

    def _window(self, number: int, steps: int, *, warm: bool) -> None:
        """A window of reference steps and `steps`, both after some that are not timed if `warm`."""
        clock: LapClock = self._replica.clock
        self._stopwatch.start()
        self._gauge.steps(_STEPS if warm else 1)  # reading the counters cools the caches
        reference_s = self._gauge.steps(_STEPS)
        if warm:
            self._step()
        clock.resume()
        for _ in range(steps):
            self._step()
        undisturbed = self._stopwatch.stop().undisturbed
        laps = np.array([clock.laps[task][-steps:] for task in STEP_TASKS])
        self._rows.append((number, laps, reference_s, undisturbed))

    def _precise(self) -> bool:
        return typical([laps.sum() / laps.shape[1] / own for _, laps, own, kept in self._rows if kept]).precise


def _replica(run: Run, dataset: Any, size: int) -> Any:
    from dataclasses import replace

    from scalebench.data.plan import Plan
    from scalebench.training.replica import Replica

    rows = min(dataset.n_train, max(size, 256 * size))
    rows -= rows % size
    part = replace(dataset, x_train=dataset.x_train[:rows], y_train=dataset.y_train[:rows])
    plan = Plan(rows, 1, seed=run.seed, batch_per_worker=size)
    solo = run.model_copy(update={"workers": 1, "init_weights": None})
    return Replica(solo, part, plan, Alone(), LapClock())  # type: ignore[arg-type]


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


def _evaluated(found: list[_Windows], loads: list[int], others: float | None, *, noisy: bool) -> Measured:
    """The tables of all loads, in seconds at the mean reference step of the whole calibration."""
    references = np.concatenate([windows.alone for windows in found])
    if not np.isfinite(references).any():
        raise _disturbed("the reference step")
    reference_s = float(np.nanmean(references))
    imprecise: list[str] = []
    tables = []
    for load in loads:
        own = [windows for windows in found if windows.load == load]
        table, wide = _table(own, load, reference_s * _slower_together(own), others, noisy=noisy)
        tables.append(table)
        imprecise += wide
    return Measured(tables, reference_s, imprecise)


def _slower_together(found: list[_Windows]) -> float:
    """How many times as long the reference step takes under this load, at least 1: company makes no core faster."""
    if found[0].load == 1:
        return 1.0
    ratios = np.concatenate([windows.slower_together() for windows in found])
    known = typical(ratios[np.isfinite(ratios)].tolist())
    return max(1.0, known.value) if known.n else 1.0


def _disturbed(what: str) -> DisturbedError:
    return DisturbedError(
        f"{what} could not be measured: other programs took the cores in every window; "
        "run it on a quieter machine, or accept what was measured with --noisy"
    )


def _table(
    found: list[_Windows], load: int, reference_s: float, others: float | None, *, noisy: bool
) -> tuple[StepTable, list[str]]:
    """The table of one load, and which of its batch sizes are not known precisely."""
    batches, jitter, removed, imprecise = [], [], [], []
    for size in sorted({windows.size for windows in found}):
        own = [windows for windows in found if windows.size == size]
        units = np.concatenate([windows.seconds / windows.references for windows in own], axis=1)
        order = np.argsort(np.concatenate([windows.rounds for windows in own]), kind="stable")
        kept = np.concatenate([windows.undisturbed for windows in own])
        if kept.sum() < min(FEWEST, _ROUNDS * load):
            if not noisy:
                raise _disturbed(f"a step of {size} samples beside {load - 1} other workers")
            whole = units.sum(axis=0)
            kept = np.abs(whole / np.median(whole) - 1.0) <= 0.25  # noise is in both parts of a ratio
        known = typical(units.sum(axis=0)[kept])
        if not known.precise:
            imprecise.append(f"steps of {size} samples at {load} a node to {_percent(known)}")
        blocks = _blocks(units[:, order[kept[order]]]) * reference_s
        data, forward, backward, update = blocks.tolist()
        batches.append(BatchTimes(samples=size, data_s=data, forward_s=forward, backward_s=backward, update_s=update))
        for windows in own:
            factors, outliers = _jitter(
                windows.steps[windows.undisturbed if windows.undisturbed.any() else slice(None)]
            )
            jitter.append(factors)
            removed.append(outliers)
    everything = np.concatenate(jitter)
    kept_factors = everything[np.linspace(0, len(everything) - 1, min(JITTER_KEPT, len(everything))).astype(int)]
    releases = [windows.release for windows in found if windows.release]
    table = StepTable(
        source=f"this machine, measured with {load} busy worker{'s' if load > 1 else ''}",
        busy_workers=load,
        batches=batches,
        shuffle_s_per_sample=float(np.median([windows.shuffle_s_per_sample for windows in found])),
        release=[float(x) for x in np.median(np.array(releases), axis=0)],
        jitter=(kept_factors / kept_factors.mean()).tolist(),
        outliers=float(np.mean(removed)),
        others_load=others,
    )
    return table, imprecise


def _percent(known: Typical) -> str:
    return f"{100 * known.half_width:.2g} %" if math.isfinite(known.half_width) else "no known precision"


def _blocks(units: NDArray[np.float64]) -> NDArray[np.float64]:
    """(4, blocks): consecutive groups of windows, each the median of its whole steps, split by its mean shares."""
    groups = np.array_split(units, min(BLOCKS, units.shape[1]), axis=1)
    return np.array([np.median(g.sum(axis=0)) * g.mean(axis=1) / g.mean(axis=1).sum() for g in groups]).T


def _jitter(steps: NDArray[np.float64]) -> tuple[NDArray[np.float64], float]:
    """Step times over the median of their neighbours, without outliers, and the share of steps that were outliers.

    `steps` (windows, steps of a window) in order. The standard deviation s is told from the differences of consecutive
    logs of a window: a quarter of those of a normal distribution lie within 0.3186 sqrt(2) s, and events that disturb
    up to three quarters of the steps do not move it. A step beyond `JITTER_WITHIN` of them is an event of this machine,
    such as an interrupt, a page fault or a change of its speed.
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
