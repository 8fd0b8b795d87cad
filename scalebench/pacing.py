"""Compute at the pace of a stated device: real steps, stretched to its step time, so that real communication can be
measured between more workers than this machine could feed.

The padding is spread as the device would spread its work: forward is padded before backward begins, and each gradient
is released at its share of the backward pass, so that what Horovod and DDP do behind it starts when it would there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

from scalebench.clock import Task, WallClock, sleep_until
from scalebench.jitter import STATED, jitter_source
from scalebench.study.spec import Run

_STEP = (Task.FORWARD, Task.BACKWARD, Task.UPDATE)
_TOLERANCE = 0.01  # a step this share over its time is not called late: it is what waking up costs


@dataclass(frozen=True)
class StepTime:
    """Seconds of one local step on the stated device."""

    forward_s: float
    backward_s: float
    update_s: float

    @property
    def total_s(self) -> float:
        return self.forward_s + self.backward_s + self.update_s

    def of(self, task: Task) -> float:
        """Seconds of one of the three tasks."""
        return (self.forward_s, self.backward_s, self.update_s)[_STEP.index(task)]


def slowness_of(run: Run, rank: int) -> Callable[[float], float] | None:
    """How much slower worker `rank` is at a moment of training, by the study's slowdown and slow_windows."""
    always, windows = run.virtual.slowdown.get(rank, 1.0), run.virtual.slowness(rank)
    if windows is None and always == 1.0:
        return None
    return lambda now: always * (windows(now) if windows is not None else 1.0)


def jitter_of(run: Run, rank: int) -> Callable[[int], float] | None:
    """The factor on each step of worker `rank`, by the study's stated jitter: the one that a virtual worker has."""
    if run.virtual.jitter not in STATED:
        return None
    return jitter_source(run.virtual.jitter, run.virtual.jitter_sigma, seed=run.seed, worker=rank)


class PacedClock(WallClock):
    """A wall clock on which a step lasts as long as on the stated device.

    `target` is either the device's step split into its tasks, or its whole seconds: these are then split as this
    machine's own warm-up steps are.

    `slowness(now)` is the factor on a task that begins `now` seconds after training began: a slow worker;
    `jitter(step)` that on all of a step's tasks, a step beginning with its batch as a virtual one does.

    `overrun` is the share of steps whose computing already took longer than the device's.
    """

    def __init__(
        self,
        target: StepTime | float,
        synchronise: Callable[[], None] | None = None,
        slowness: Callable[[float], float] | None = None,
        jitter: Callable[[int], float] | None = None,
    ) -> None:
        super().__init__(synchronise)
        self._slowness, self._jitter = slowness, jitter
        self._batches, self._factor = 0, 1.0  # begun so far; of the present one
        self._target = target if isinstance(target, StepTime) else None
        self._total = target.total_s if isinstance(target, StepTime) else target
        self._laps: dict[Task, list[float]] = {task: [] for task in _STEP}
        self._steps = 0
        self._late_steps = 0
        self._is_late = False
        self._waiting_gradients = 0
        self._gradients = 0

    @property
    def step_time(self) -> StepTime:
        """The split in use."""
        if self._target is None:
            self._target = self._split()
        return self._target

    @property
    def overrun(self) -> float | None:
        """Share of steps that were already slower than the device's; None before the first."""
        return self._late_steps / self._steps if self._steps else None

    def attach(self, model: torch.nn.Module) -> None:
        """Hold back each parameter's gradient until its share of the backward pass is over.

        The share is that of the parameters behind it, in reverse order: the last layer's gradients come first. The
        hooks run before those of Horovod and DDP, which act on the accumulated gradient.
        """
        trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        total = sum(parameter.numel() for parameter in trainable)
        done = 0
        for parameter in reversed(trainable):
            done += parameter.numel()
            parameter.register_hook(self._holding(done / total))  # type: ignore[no-untyped-call]
        self._gradients = len(trainable)

    def start(self) -> None:
        _ = self.step_time  # settled by the warm-up laps, before the first paced step
        super().start()
        self._steps = self._late_steps = self._batches = 0
        self._factor = 1.0 if self._jitter is None else self._jitter(0)
        self._waiting_gradients = self._gradients

    def did(self, task: Task, samples: int = 0) -> None:
        if task in _STEP:
            if not self.running:
                self._learn(task)
                return
            if task == Task.FORWARD:
                self._is_late = False
            released = task == Task.BACKWARD and self._gradients > 0 and self._waiting_gradients <= 0
            self._pad(self.mark + self._slowed(self.step_time.of(task)), may_be_late=released)
            if task == Task.BACKWARD:
                self._waiting_gradients = self._gradients
                self._steps += 1  # the update of some is a server's
        elif not self.running:
            self.mark = self._read()
        elif task == Task.DATA and self._jitter is not None:
            self._factor = self._jitter(self._batches)
            self._batches += 1
        super().did(task, samples)

    def _holding(self, share: float) -> Callable[[torch.Tensor], None]:
        def hold(gradient: torch.Tensor) -> None:
            if self.running:
                self._waiting_gradients -= 1
                self._pad(self.mark + share * self._slowed(self.step_time.backward_s))

        return hold

    def _slowed(self, seconds: float) -> float:
        """`seconds` of a task that began at the last mark, as long as this worker takes for it."""
        seconds *= self._factor
        return seconds if self._slowness is None else seconds * self._slowness(self.ledger.total_s)

    def _pad(self, until: float, may_be_late: bool = False) -> None:
        """Wait until `until`. `may_be_late`: the gradients were in time, what came after them was communication."""
        left = until - self._read()
        if left < -_TOLERANCE * self._total and not may_be_late and not self._is_late:
            self._is_late = True
            self._late_steps += 1
        sleep_until(until)

    def _learn(self, task: Task) -> None:
        now = self._read()
        if self.mark:
            self._laps[task].append(now - self.mark)
        self.mark = now

    def _split(self) -> StepTime:
        own = [median(self._laps[task]) if self._laps[task] else 0.0 for task in _STEP]
        if not sum(own):
            # No warm-up: forward costs one pass over the network, backward two, and the update neither.
            return StepTime(self._total / 3, self._total * 2 / 3, 0.0)
        forward, backward, update = (self._total * seconds / sum(own) for seconds in own)
        return StepTime(forward, backward, update)
