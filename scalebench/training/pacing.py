"""Pacing: real steps stretched to the step time of a stated device, so that real communication is measured between
more workers than this machine could feed.

The padding is spread like the work of the device: forward is padded before backward
begins, and each gradient is released at its share of the backward pass, so that
overlapped communication of Horovod and DDP starts as on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import fmean, median

import torch

from scalebench.study.heterogeneity import STATED, jitter_source
from scalebench.study.spec import Run
from scalebench.system.clock import (
    BACKWARD_SHARE,
    FORWARD_SHARE,
    Task,
    WallClock,
    sleep_until,
)

_STEP = (Task.FORWARD, Task.BACKWARD, Task.UPDATE)
_FADING, _MOST_REST = (
    0.9,
    0.1,
)  # decay per step, and upper bound in backward passes, of the time after all gradients
# share of a step's time by which it may be late, for the cost of waking up
_TOLERANCE = 0.01


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

    It is the share of all elements from it on, as gradients of the last layer come
    first.
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
    return jitter_source(
        run.virtual.jitter, run.virtual.jitter_sigma, seed=run.seed, worker=rank
    )


class PacedClock(WallClock):
    """Wall clock on which a step takes as long as on the stated device.

    `target` is the device's step split into tasks, or its total seconds: an update then
    takes as long as in the warm-up steps of this machine, and the passes divide the
    rest, one part forward and two back as for virtual workers. Where it is that of a
    batch of so many `samples`, other batches take time in proportion to theirs.

    `slowness(now)` is the factor on a task that begins `now` seconds after training
    began; `jitter(step)` is the factor on all tasks of a step, which begins with its
    batch as for a virtual worker.

    Each task ends when it would on the device; a late task shortens the padding of the
    step's next ones, as far as no communication between has taken as long, in which
    others may have waited for it, or it for others. `overrun` is the share of steps
    that end late nevertheless. Of a micro-batch in a part of the model a task takes its
    share.
    """

    def __init__(
        self,
        target: PacedStep | float,
        synchronise: Callable[[], None] | None = None,
        slowness: Callable[[float], float] | None = None,
        jitter: Callable[[int], float] | None = None,
        samples: int = 0,
    ) -> None:
        super().__init__(synchronise)
        self._samples_of_target = samples
        self._slowness, self._jitter = slowness, jitter
        self._factor = 1.0  # of the present step
        self._samples = 0  # of the present batch
        self._target = target if isinstance(target, PacedStep) else None
        self._total = target.total_s if isinstance(target, PacedStep) else target
        self._updates: list[float] = []  # seconds of those in the warm-up
        self._updated = 1.0  # share of the parameters that they were of
        self._steps = 0
        self._late_steps = 0
        self._behind = 0.0  # seconds of the current step behind the device
        self._lost = 0.0  # of these, what no later task of the step makes up for
        self._waiting_gradients = 0
        self._gradients = 0
        self._waits_in_backward = False
        # time of the last gradient, and duration of the pass after it
        self._released = self._rest = 0.0

    @property
    def step_time(self) -> PacedStep:
        """Step time split into tasks."""
        if self._target is None:
            self._target = self._split()
        return self._target

    def agree(self, splits: Sequence[PacedStep]) -> None:
        """Take the mean of the `splits` of all workers, which have one kind of device."""
        self._target = PacedStep(
            *(fmean(each.of(task) for each in splits) for task in _STEP)
        )

    @property
    def overrun(self) -> float | None:
        """Share of steps that took longer than on the device; None before the first step."""
        return (self._late_steps + self._is_late) / self._steps if self._steps else None

    @property
    def _is_late(self) -> bool:
        return self._behind + self._lost > _TOLERANCE * self._total

    def attach(
        self, model: torch.nn.Module, *, waits_in_backward: bool = False
    ) -> None:
        """Delay each parameter's gradient until its share of the backward pass is over (`release_shares`).

        The pass goes through the whole model at once: of one that is made layer by
        layer, each takes its own time. The hooks run before those of Horovod and DDP,
        which act on the accumulated gradient. The time of the pass after its last
        gradient, estimated from previous steps, is not distributed.
        `waits_in_backward`: the pass ends with communication (the real DDP), so that
        the time after the last gradient is communication.
        """
        self._waits_in_backward = waits_in_backward
        trainable = [
            parameter for parameter in model.parameters() if parameter.requires_grad
        ]
        shares = release_shares([parameter.numel() for parameter in trainable])
        for parameter, share in zip(reversed(trainable), reversed(shares), strict=True):
            parameter.register_hook(self._holding(share))
        self._gradients = len(trainable)

    def start(self) -> None:
        _ = self.step_time  # determined from the warm-up laps
        super().start()
        self._steps = self._late_steps = 0
        self._behind = self._lost = 0.0
        self._factor = 1.0 if self._jitter is None else self._jitter(0)
        self._waiting_gradients = self._gradients

    def did(self, task: Task, samples: int = 0, share: float = 1.0) -> None:
        if task in _STEP:
            if not self.running:
                self._learn(task, share)
                return
            released = (
                task == Task.BACKWARD
                and self._gradients > 0
                and self._waiting_gradients <= 0
            )
            # A micro-batch takes its share of the step.
            piece = samples / self._samples if samples and self._samples else 1.0
            due = self._due(self.step_time.of(task) * share * piece)
            # Otherwise the pass ended with communication, which the hook of the last
            # gradient has told apart.
            if not (released and self._waits_in_backward):
                now = self._read()
                self._behind = max(0.0, now - due)
                if released:
                    self._rest = min(
                        max(now - self._released, _FADING * self._rest),
                        _MOST_REST * (due - self.mark),
                    )
            sleep_until(due)
            if task == Task.BACKWARD:
                self._waiting_gradients = self._gradients
        elif task == Task.DATA:
            self._begin_step(samples)
        before = self.mark
        if not self.running:
            self.mark = self._read()
        super().did(task, samples, share)
        if task == Task.COMM:
            absorbed = min(self._behind, self.mark - before)
            self._behind -= absorbed
            self._lost += absorbed

    def _begin_step(self, samples: int) -> None:
        """Begin the step of a batch, on the device at this moment however late the one before was."""
        self._samples = samples
        if not self.running:
            return
        self._late_steps += self._is_late
        self._steps += 1
        self._behind = self._lost = 0.0
        if self._jitter is not None:
            self._factor = self._jitter(self._steps - 1)

    def _holding(self, share: float) -> Callable[[torch.Tensor], None]:
        def hold(gradient: torch.Tensor) -> None:
            if not self.running:
                return
            self._waiting_gradients -= 1
            due = self._due(self.step_time.backward_s)
            if self._waits_in_backward and not self._waiting_gradients:
                self._behind = max(0.0, self._read() - due)
            # The gradients share the pass without its rest, the time that it takes
            # after the last of them.
            sleep_until(self.mark + share * (due - self._rest - self.mark))
            self._released = self._read()

        return hold

    def _due(self, seconds: float) -> float:
        """Return the end on the device of a task of `seconds` from the last mark, with this worker's slowness."""
        seconds *= self._factor
        if self._samples_of_target and self._samples:
            seconds *= self._samples / self._samples_of_target
        if self._slowness is not None:
            seconds *= self._slowness(self.ledger.total_s)
        # Time lost before is made up: the device would have begun earlier.
        return self.mark - self._behind + seconds

    def _learn(self, task: Task, share: float) -> None:
        now = self._read()
        if task == Task.UPDATE and self.mark:
            self._updates.append(now - self.mark)
            self._updated = share
        self.mark = now

    def _split(self) -> PacedStep:
        own = min(self._total, median(self._updates)) if self._updates else 0.0
        passes = self._total - own
        return PacedStep(
            passes * FORWARD_SHARE, passes * BACKWARD_SHARE, own / self._updated
        )
