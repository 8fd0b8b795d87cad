"""Timed windows of steps of one process, taken in rounds with the others of a load, and the shares of their passes.

The passes of a step divide into the shares of each layer in both, and the moments at
which each gradient is complete.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from scalebench.calibration.quiet_rounds import Round, Until, quiet_rounds
from scalebench.comm.simulated import lone_communicator
from scalebench.errors import ModelError
from scalebench.models.parts import layers_of, through
from scalebench.pricing.machine import STEP_TASKS, LayerShare
from scalebench.study.spec import Run
from scalebench.system.clock import Ledger, Task
from scalebench.system.disturbance import Stopwatch, typical
from scalebench.training.reference_step import Gauge
from scalebench.training.stage import run_backward

_T = TypeVar("_T")
FEWEST_ROUNDS = 8
_FEWEST_ROUNDS_FAST = 40  # of models with a step below _FAST_S
# of a window if they take less than _FAST_S; slower models have one step in a window
_STEPS = 4
_FAST_S, _ROUND_S = 5e-3, 0.02
_WARM_STEPS = 3
_PASSES = (5, 50)  # least and most that are timed
_PASSES_S = 0.5


class LapClock:
    """Clock that stores individual laps, where the wall clock sums them; `synchronize` waits for the device."""

    def __init__(self, synchronize: Callable[[], None] = lambda: None) -> None:
        self._synchronize = synchronize
        self.ledger = Ledger()
        self.running = True
        self.laps: dict[Task, list[float]] = {task: [] for task in Task}
        self._mark = time.perf_counter()

    def start(self) -> None:
        """Delete all laps and begin the first one."""
        for laps in self.laps.values():
            laps.clear()
        self.resume()

    def resume(self) -> None:
        """Begin the next lap now."""
        self._mark = time.perf_counter()

    def did(self, task: Task, samples: int = 0, share: float = 1.0) -> None:
        self._synchronize()
        now = time.perf_counter()
        self.laps[task].append(now - self._mark)
        self._mark = now

    def work(self, operation: Callable[..., _T], *arguments: object) -> _T:
        return operation(*arguments)

    def elapsed(self) -> float:
        return 0.0

    @contextmanager
    def paused(self) -> Iterator[None]:
        yield


class SecondsGauge:
    """In place of `Gauge` where a step's time does not follow the speed of a core, as on a GPU: one second."""

    def steps(self, count: int) -> float:
        return 1.0

    def seconds(self) -> float:
        return 1.0


class StepWindows(NamedTuple):
    """Windows of steps of one process at one batch size and load.

    `rounds` (windows,) has the round of each window, `seconds` (4, windows) the mean
    step by task, `references` (windows,) the reference step, `steps` (windows, steps of
    a window) the whole steps. `processor` (2, windows) has the processor seconds of the
    thread in a step and in a reference step, which other programs on its core leave as
    they are. `alone` (rounds,) has the seconds of the reference step of process 0
    alone; it is empty for other processes. `release` and `layers` say how the passes
    divide.
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
    processor: NDArray[np.float64]
    alone: NDArray[np.float64]
    layers: Sequence[LayerShare] = ()

    def slower_together(self, *, by_processor: bool = False) -> NDArray[np.float64]:
        """Return (rounds,) the reference step of undisturbed windows relative to that of process 0 alone.

        With `by_processor`, the processor seconds of all windows; rounds without a
        window are NaN.
        """
        references = self.processor[1] if by_processor else self.references
        counted = np.ones_like(self.undisturbed) if by_processor else self.undisturbed
        found = []
        for number, alone in enumerate(self.alone):
            own = references[(self.rounds == number) & counted]
            # Rounds without a quiet window say nothing.
            found.append(np.median(own) / alone if len(own) else math.nan)
        return np.array(found)

    def units(self, *, by_processor: bool = False) -> NDArray[np.float64]:
        """Return (4, windows) the step by task in reference steps.

        With `by_processor`, whole steps by processor time, divided by the median shares
        of the tasks.
        """
        if not by_processor:
            return self.seconds / self.references
        shares = np.median(
            self.seconds / self.seconds.sum(axis=0), axis=1, keepdims=True
        )
        units: NDArray[np.float64] = (
            shares / shares.sum() * (self.processor[0] / self.processor[1])
        )
        return units


class _Window(NamedTuple):
    """One window: seconds (4, steps) by task, and seconds of a step and of a reference step."""

    laps: NDArray[np.float64]
    reference_s: float
    processor_s: tuple[float, float]
    undisturbed: bool


class Rounds:
    """Rounds of one process at one batch size and load."""

    def __init__(
        self,
        replica: Any,
        gauge: Gauge | SecondsGauge,
        index: int,
        load: int,
        barrier: Any,
        going: Any,
    ) -> None:
        self._replica = replica
        self._gauge = gauge
        self._index = index
        self._load = load
        self._barrier, self._going = barrier, going
        self._batches = (
            batch for epoch in itertools.count() for batch in replica.batches(epoch)
        )
        # the thread of a GPU's step waits for it
        self._stopwatch = Stopwatch(computes=replica.device.type == "cpu")

    def run(self, size: int, release: list[float], each_s: float) -> StepWindows | None:
        """Run rounds until process 0 has a precise median or `each_s` are over; None for a process beyond the load."""
        clock: LapClock = self._replica.clock
        clock.start()
        step_s = self._warm()
        fast = step_s < _FAST_S
        per_window = _STEPS if fast else 1
        # As many as fill a round, with as many reference steps beside; none of a
        # process that is not in the load.
        fitting = round(_ROUND_S / (2 * per_window * step_s))
        per_round = max(1, min(20, fitting)) if self._index < self._load else 0
        least = _FEWEST_ROUNDS_FAST if fast else FEWEST_ROUNDS
        until = Until(each_s, fewest=FEWEST_ROUNDS, least=least, precise=_is_precise)
        rounds = quiet_rounds(
            lambda: [self._window(per_window, warm=fast) for _ in range(per_round)],
            self._reference,
            partial(self._is_over, until),
        )
        if self._index >= self._load:
            return None
        windows = [window for each in rounds for window in each.found]
        shuffles = clock.laps[Task.SHUFFLE]
        return StepWindows(
            self._load,
            size,
            rounds=np.repeat(np.arange(len(rounds)), per_round),
            seconds=np.array([window.laps.mean(axis=1) for window in windows]).T,
            undisturbed=np.array([window.undisturbed for window in windows]),
            steps=np.array([window.laps.sum(axis=0) for window in windows]),
            shuffle_s_per_sample=float(np.median(shuffles)) / self._replica.plan.n
            if shuffles
            else 0.0,
            release=release,
            references=np.array([window.reference_s for window in windows]),
            processor=np.array([window.processor_s for window in windows]).T,
            alone=np.array(
                [each.reference_s for each in rounds] if self._index == 0 else []
            ),
        )

    def _reference(self) -> float:
        """Return the reference step of process 0, for which the others wait; NaN for these."""
        seconds = self._gauge.seconds() if self._index == 0 else math.nan
        self._barrier.wait()
        return seconds

    def _is_over(
        self, until: Until[list[_Window]], rounds: Sequence[Round[list[_Window]]]
    ) -> bool:
        """Let process 0 decide for all, once none of them measures any more."""
        self._barrier.wait()
        if self._index == 0:
            self._going.value = not until(rounds)
        self._barrier.wait()
        return not self._going.value

    def _warm(self) -> float:
        """Return approximate seconds of one step: the shortest of some, as other programs only add to one."""
        self._step()
        moments = [time.perf_counter()]
        for _ in range(_WARM_STEPS):
            self._step()
            moments.append(time.perf_counter())
        return min(after - before for before, after in itertools.pairwise(moments))

    def _step(self) -> None:
        self._replica.local_step(next(self._batches))

    def _window(self, steps: int, *, warm: bool) -> _Window:
        """Time a window of reference steps and `steps`, both after untimed steps if `warm`."""
        clock: LapClock = self._replica.clock
        self._stopwatch.start()
        # Two kinds of steps side by side: their ratio does not depend on the speed of
        # this moment.
        self._gauge.steps(_STEPS if warm else 1)  # reading the counters evicts caches
        moments = [time.thread_time()]
        reference_s = self._gauge.steps(_STEPS)
        moments.append(time.thread_time())
        for _ in range(steps if warm else 0):
            self._step()
        moments.append(time.thread_time())
        clock.resume()
        for _ in range(steps):
            self._step()
        moments.append(time.thread_time())
        undisturbed = self._stopwatch.stop().undisturbed
        laps = np.array([clock.laps[task][-steps:] for task in STEP_TASKS])
        processor_s = (
            (moments[3] - moments[2]) / steps,
            (moments[1] - moments[0]) / _STEPS,
        )
        # the thread waits while the device computes
        if isinstance(self._gauge, SecondsGauge):
            processor_s = float(laps.sum()) / steps, reference_s
        return _Window(laps, reference_s, processor_s, undisturbed)


def _is_precise(rounds: Sequence[Round[list[_Window]]]) -> bool:
    """Return True if the median step of the undisturbed windows is precise, in reference steps."""
    quiet = [window for each in rounds for window in each.found if window.undisturbed]
    return typical(
        [
            window.laps.sum() / window.laps.shape[1] / window.reference_s
            for window in quiet
        ]
    ).precise


def single_replica(run: Run, dataset: Any, size: int, device: torch.device) -> Any:
    from scalebench.data.batch_plan import BatchPlan
    from scalebench.training.replica import Replica

    # At most 256 batches: many processes hold them at once.
    rows = min(dataset.n_train, max(size, 256 * size))
    rows -= rows % size
    part = replace(
        dataset, x_train=dataset.x_train[:rows], y_train=dataset.y_train[:rows]
    )
    plan = BatchPlan(rows, 1, seed=run.seed, batch_per_worker=size)
    clock = (
        LapClock(partial(torch.cuda.synchronize, device))
        if device.type == "cuda"
        else LapClock()
    )
    solo = run.model_copy(update={"workers": 1, "init_weights": None})
    return Replica(solo, part, plan, lone_communicator(), clock, device)


def bounded(least: int, most: int | None, seconds: float) -> Iterator[int]:
    """Yield 0, 1, 2, ...: at least `least` numbers, then up to `most` or until `seconds` are over."""
    end = time.perf_counter() + seconds
    for done in itertools.count():
        if done >= least and (done == most or time.perf_counter() >= end):
            return
        yield done


def take_steps(replica: Any, turns: Iterable[int]) -> int:
    """Take one local step per turn, epoch after epoch; return the number of steps."""
    done = 0
    batches = (batch for epoch in itertools.count() for batch in replica.batches(epoch))
    for _, batch in zip(turns, batches, strict=False):
        replica.local_step(batch)
        done += 1
    return done


def layer_shares(replica: Any) -> list[LayerShare]:
    """Return the shares of each layer in the forward and the backward pass, the median over some steps.

    Layers run one after the other, each backward pass from the gradient of the layer
    behind it, the last from ones. On a CPU the thread's processor time counts, which
    other programs on its core leave as it is. No shares if the model cannot be cut.
    """
    try:
        layers = layers_of(replica.model, str(replica.run.model))
    except ModelError:
        return []
    now, between = _moments(replica.device, time.thread_time)
    x = next(iter(replica.batches(0))).x
    shares = []
    for _ in bounded(*_PASSES, _PASSES_S):
        passes = []
        taken = x
        moments = [now()]
        for place, layer in enumerate(layers):
            # The input of the first layer needs no gradient, as in training.
            leaf = taken.detach().requires_grad_(place > 0)
            made = through(layer, leaf)
            # between two calls of a forward may lie a tuple, or integers
            if not isinstance(made, Tensor) or not made.is_floating_point():
                return []
            passes.append((leaf, made))
            taken = made
            moments.append(now())
        gradient = taken.new_ones(taken.shape)
        moments.append(now())
        for leaf, made in reversed(passes):
            run_backward((made,), (gradient,))
            # The first layer gives none, and none is taken from it.
            gradient = leaf.grad if leaf.grad is not None else leaf
            moments.append(now())
        count = len(layers)
        forward = [
            between(moments[place], moments[place + 1]) for place in range(count)
        ]
        backward = [
            between(moments[-place - 2], moments[-place - 1]) for place in range(count)
        ]
        shares.append([forward, backward])
    middle = np.median(np.array(shares), axis=0)
    # Medians of shares do not add up to the whole.
    middle /= middle.sum(axis=1, keepdims=True)
    return [
        LayerShare(name=layer.name, forward=forward, backward=backward)
        for layer, (forward, backward) in zip(layers, middle.T.tolist(), strict=True)
    ]


def release_shares(replica: Any) -> list[float]:
    """Return the share of the backward pass after which each gradient is complete, the median over some steps."""

    trainable = [
        parameter for parameter in replica.model.parameters() if parameter.requires_grad
    ]
    now, between = _moments(replica.device, time.perf_counter)
    moments: dict[int, Any] = {}
    handles = [
        parameter.register_post_accumulate_grad_hook(
            # Bound now: a closure would see the last index.
            lambda _, index=index: moments.__setitem__(index, now())
        )
        for index, parameter in enumerate(trainable)
    ]
    shares = []
    batch = next(iter(replica.batches(0)))
    for _ in bounded(*_PASSES, _PASSES_S):
        value = replica.batch_loss(batch)
        begin = now()
        value.backward()
        end = now()
        whole = between(begin, end)
        shares.append(
            [
                # A parameter without a gradient is released with the pass.
                between(begin, moments.get(index, end)) / whole
                for index in range(len(trainable))
            ]
        )
    for handle in handles:
        handle.remove()
    return [float(share) for share in np.median(np.array(shares), axis=0)]


def _moments(
    device: torch.device, clock: Callable[[], float]
) -> tuple[Callable[[], Any], Callable[[Any, Any], float]]:
    """Return what marks a moment of the work on `device`, and what gives the time between two, in any unit.

    On a CPU `clock` is read.
    """
    if device.type == "cpu":
        return clock, lambda begin, end: end - begin

    def mark() -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(begin: Any, end: Any) -> float:
        end.synchronize()
        return float(begin.elapsed_time(end))

    return mark, between
