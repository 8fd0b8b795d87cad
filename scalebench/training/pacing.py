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

from scalebench.study.jitter import STATED, jitter_source
from scalebench.study.spec import Run
from scalebench.system.clock import Task, WallClock, sleep_until

_STEP = (Task.FORWARD, Task.BACKWARD, Task.UPDATE)
_FADING, _MOST_REST = 0.9, 0.1  # per step; of the backward pass: so much of it is kept for what follows its gradients
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

    Each task ends when it would on the device; a task that took longer shortens the padding of the step's next ones.
    `overrun` is the share of steps that ended late all the same.
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
        self._behind = 0.0  # seconds by which the present step is behind the device's
        self._waiting_gradients = 0
        self._gradients = 0
        self._waits_in_backward = False
        self._released = self._rest = 0.0  # when the last gradient was, and how long the pass goes on after it

    @property
    def step_time(self) -> StepTime:
        """The split in use."""
        if self._target is None:
            self._target = self._split()
        return self._target

    @property
    def overrun(self) -> float | None:
        """Share of steps that took longer than the device's; None before the first."""
        return (self._late_steps + self._is_late) / self._steps if self._steps else None

    @property
    def _is_late(self) -> bool:
        return self._behind > _TOLERANCE * self._total

    def attach(self, model: torch.nn.Module, *, waits_in_backward: bool = False) -> None:
        """Hold back each parameter's gradient until its share of the backward pass is over.

        The share is that of the parameters behind it, in reverse order: the last layer's gradients come first. The
        hooks run before those of Horovod and DDP, which act on the accumulated gradient. What the pass still computes
        after the last of them is left out of the time that they share, as long as it was in the steps before.
        `waits_in_backward`: the pass ends with communication (the real DDP), so that all behind the last gradient
        counts as that.
        """
        self._waits_in_backward = waits_in_backward
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
                self._late_steps += self._is_late
                self._behind = 0.0
            released = task == Task.BACKWARD and self._gradients > 0 and self._waiting_gradients <= 0
            due = self._due(self.step_time.of(task))
            if not (released and self._waits_in_backward):
                now = self._read()
                self._behind = max(0.0, now - due)
                if released:
                    self._rest = min(max(now - self._released, _FADING * self._rest), _MOST_REST * (due - self.mark))
            sleep_until(due)
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
            if not self.running:
                return
            self._waiting_gradients -= 1
            due = self._due(self.step_time.backward_s)
            if self._waits_in_backward and not self._waiting_gradients:
                self._behind = max(0.0, self._read() - due)
            sleep_until(self.mark + share * (due - self._rest - self.mark))
            self._released = self._read()

        return hold

    def _due(self, seconds: float) -> float:
        """When a task of `seconds` that began at the last mark is over on the device, as slow as this worker is."""
        seconds *= self._factor
        if self._slowness is not None:
            seconds *= self._slowness(self.ledger.total_s)
        return self.mark - self._behind + seconds

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
