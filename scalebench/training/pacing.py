"""Pacing: real steps stretched to the step time of a stated device, so that real communication is measured between
more workers than this machine could feed.

The padding is spread like the work of the device: forward is padded before backward begins, and each gradient is
released at its share of the backward pass, so that overlapped communication of Horovod and DDP starts as on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import median

import torch

from scalebench.study.heterogeneity import STATED, jitter_source
from scalebench.study.spec import Run
from scalebench.system.clock import Task, WallClock, sleep_until

_STEP = (Task.FORWARD, Task.BACKWARD, Task.UPDATE)
_FADING, _MOST_REST = 0.9, 0.1  # decay per step, and upper bound in backward passes, of the time after all gradients
_TOLERANCE = 0.01  # share of a step's time by which it may be late, for the cost of waking up


@dataclass(frozen=True)
class PacedStep:
    """Seconds of one local step on the stated device."""

    forward_s: float
    backward_s: float
    update_s: float

    @property
    def total_s(self) -> float:
        return self.forward_s + self.backward_s + self.update_s

    def of(self, task: Task) -> float:
        """Return seconds of one of the three tasks."""
        return (self.forward_s, self.backward_s, self.update_s)[_STEP.index(task)]


def release_shares(sizes: Sequence[int]) -> list[float]:
    """Return the share of a stated backward pass after which each gradient of these sizes is complete.

    It is the share of all elements from it on, as gradients of the last layer come first.
    """
    done = list(accumulate(reversed(sizes)))
    return [share / done[-1] for share in reversed(done)]


def slowness_of(run: Run, rank: int) -> Callable[[float], float] | None:
    """Return the factor on compute of worker `rank` at a moment of training, by slowdown and slow_windows."""
    always = run.virtual.slowdown.get(rank, 1.0)
    windows = run.virtual.slowness(rank)
    if windows is None and always == 1.0:
        return None
    return lambda now: always * (windows(now) if windows is not None else 1.0)


def jitter_of(run: Run, rank: int) -> Callable[[int], float] | None:
    """Return the factor on each step of worker `rank` by the study's stated jitter, as for a virtual worker."""
    if run.virtual.jitter not in STATED:
        return None
    return jitter_source(run.virtual.jitter, run.virtual.jitter_sigma, seed=run.seed, worker=rank)


class PacedClock(WallClock):
    """Wall clock on which a step takes as long as on the stated device.

    `target` is the device's step split into tasks, or its total seconds, split in proportion to the warm-up steps of
    this machine.

    `slowness(now)` is the factor on a task that begins `now` seconds after training began; `jitter(step)` is the factor
    on all tasks of a step, which begins with its batch as for a virtual worker.

    Each task ends when it would on the device; a late task shortens the padding of the step's next ones. `overrun` is
    the share of steps that end late nevertheless. Of a micro-batch in a part of the model a task takes its share.
    """

    def __init__(
        self,
        target: PacedStep | float,
        synchronise: Callable[[], None] | None = None,
        slowness: Callable[[float], float] | None = None,
        jitter: Callable[[int], float] | None = None,
    ) -> None:
        super().__init__(synchronise)
        self._slowness, self._jitter = slowness, jitter
        self._batches, self._factor = 0, 1.0  # begun so far; of the present one
        self._samples = 0  # of the present batch
        self._target = target if isinstance(target, PacedStep) else None
        self._total = target.total_s if isinstance(target, PacedStep) else target
        self._laps: dict[Task, list[float]] = {task: [] for task in _STEP}
        self._steps = 0
        self._late_steps = 0
        self._behind = 0.0  # seconds of the current step behind the device
        self._waiting_gradients = 0
        self._gradients = 0
        self._waits_in_backward = False
        self._released = self._rest = 0.0  # time of the last gradient, and duration of the pass after it

    @property
    def step_time(self) -> PacedStep:
        """Step time split into tasks."""
        if self._target is None:
            self._target = self._split()
        return self._target

    @property
    def overrun(self) -> float | None:
        """Share of steps that took longer than on the device; None before the first step."""
        return (self._late_steps + self._is_late) / self._steps if self._steps else None

    @property
    def _is_late(self) -> bool:
        return self._behind > _TOLERANCE * self._total

    def attach(self, model: torch.nn.Module, *, waits_in_backward: bool = False) -> None:
        """Delay each parameter's gradient until its share of the backward pass is over (`release_shares`).

        The hooks run before those of Horovod and DDP, which act on the accumulated gradient. The time of the pass after
        its last gradient, estimated from previous steps, is not distributed. `waits_in_backward`: the pass ends with
        communication (the real DDP), so that the time after the last gradient is communication.
        """
        self._waits_in_backward = waits_in_backward
        trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        shares = release_shares([parameter.numel() for parameter in trainable])
        for parameter, share in zip(reversed(trainable), reversed(shares), strict=True):
            parameter.register_hook(self._holding(share))
        self._gradients = len(trainable)

    def start(self) -> None:
        _ = self.step_time  # determined from the warm-up laps
        super().start()
        self._steps = self._late_steps = self._batches = 0
        self._factor = 1.0 if self._jitter is None else self._jitter(0)
        self._waiting_gradients = self._gradients

    def did(self, task: Task, samples: int = 0, share: float = 1.0) -> None:
        if task in _STEP:
            if not self.running:
                self._learn(task)
                return
            # A step begins with its forward pass: the one before it is judged now, update included.
            if task == Task.FORWARD:
                self._late_steps += self._is_late
                self._behind = 0.0
            released = task == Task.BACKWARD and self._gradients > 0 and self._waiting_gradients <= 0
            # A micro-batch takes its share of the step.
            piece = samples / self._samples if samples and self._samples else 1.0
            due = self._due(self.step_time.of(task) * share * piece)
            # Otherwise the pass ended with communication, which the hook of the last gradient has told apart.
            if not (released and self._waits_in_backward):
                now = self._read()
                self._behind = max(0.0, now - due)
                if released:
                    self._rest = min(max(now - self._released, _FADING * self._rest), _MOST_REST * (due - self.mark))
            sleep_until(due)
            if task == Task.BACKWARD:
                self._waiting_gradients = self._gradients
                self._steps += 1  # counted here, as some strategies update on a server
        elif not self.running:
            self.mark = self._read()
        elif task == Task.DATA:
            self._samples = samples
            if self._jitter is not None:
                self._factor = self._jitter(self._batches)
                self._batches += 1
        super().did(task, samples, share)

    def _holding(self, share: float) -> Callable[[torch.Tensor], None]:
        def hold(gradient: torch.Tensor) -> None:
            if not self.running:
                return
            self._waiting_gradients -= 1
            due = self._due(self.step_time.backward_s)
            if self._waits_in_backward and not self._waiting_gradients:
                self._behind = max(0.0, self._read() - due)
            # The gradients share the pass without its rest, the time that it takes after the last of them.
            sleep_until(self.mark + share * (due - self._rest - self.mark))
            self._released = self._read()

        return hold

    def _due(self, seconds: float) -> float:
        """Return the end on the device of a task of `seconds` from the last mark, with this worker's slowness."""
        seconds *= self._factor
        if self._slowness is not None:
            seconds *= self._slowness(self.ledger.total_s)
        # Time lost before is made up: the device would have begun earlier.
        return self.mark - self._behind + seconds

    def _learn(self, task: Task) -> None:
        now = self._read()
        if self.mark:
            self._laps[task].append(now - self.mark)
        self.mark = now

    def _split(self) -> PacedStep:
        own = [median(self._laps[task]) if self._laps[task] else 0.0 for task in _STEP]
        if not sum(own):
            # Without warm-up, assume one pass over the network for forward, two for backward, none for the update.
            return PacedStep(self._total / 3, self._total * 2 / 3, 0.0)
        forward, backward, update = (self._total * seconds / sum(own) for seconds in own)
        return PacedStep(forward, backward, update)
