"""Clock of a virtual worker: times of steps and operations are looked up, not measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from scalebench.pricing.machine import STEP_TASKS, OperationTime, StepTimes, name_of
from scalebench.pricing.overlap import hidden_s
from scalebench.pricing.recorders import only_changes_arguments
from scalebench.system.clock import Ledger, Task
from scalebench.training.outcome import Lap

_T = TypeVar("_T")
_CACHED = 2**20  # bytes of rows that are worked on at once


class VirtualClock:
    """Virtual time: steps take `times`, operations of a strategy take `operations`, by name.

    `speed` multiplies every computation of this worker (2.0: half as fast),
    `jitter(step)` those of that step, and `slowness(now)` those that begin at that
    moment.
    """

    def __init__(
        self,
        times: StepTimes,
        *,
        speed: float = 1.0,
        jitter: Callable[[int], float] | None = None,
        slowness: Callable[[float], float] | None = None,
        operations: Mapping[str, OperationTime] | None = None,
    ) -> None:
        self.ledger = Ledger()
        self.now = 0.0
        self._transfer = 0.0  # cost of all communication
        self._operations = operations or {}
        self.running = False
        self.backward_s = 0.0  # of the last step, for overlapped communication
        self._seconds = times.task_seconds
        self._speed = speed
        self._jitter = jitter or (lambda step: 1.0)
        self._slowness = slowness
        # seconds of a step's tasks by its samples
        self._parts: dict[int, list[float]] = {}
        self._step = -1
        self._factor = speed * self._jitter(0)

    def start(self) -> None:
        self.ledger = Ledger()
        self._transfer = 0.0
        self.running = True

    def did(self, task: Task, samples: int = 0, share: float = 1.0) -> None:
        if not self.running:
            return
        if task is Task.DATA:  # a step begins
            self._step += 1
            self._factor = self._speed * self._jitter(self._step)
        # Five times in each step: what is not called here is not paid for.
        seconds = self._seconds(task, samples) * share * self._factor
        if self._slowness is not None:
            seconds *= self._slowness(self.now)
        if task is Task.BACKWARD:
            self.backward_s = seconds
        self.now += seconds
        self.ledger.seconds[task] += seconds

    def took_steps(self, sizes: Sequence[int]) -> None:
        """Advance by local steps on batches of `sizes`: bit for bit `did` of all their tasks, five times as fast."""
        if not self.running:
            return
        if self._slowness is not None:
            # The factor of each task depends on the moment at which it begins.
            self._took_one_by_one(sizes)
            return
        # Added in the order of `did`, as sums of floating-point numbers depend on it.
        seconds, now = self.ledger.seconds, self.now
        data, forward, backward, update = (seconds[task] for task in STEP_TASKS)
        for samples in sizes:
            self._step += 1
            factor = self._speed * self._jitter(self._step)
            if samples not in self._parts:
                self._parts[samples] = [
                    self._seconds(task, samples) for task in STEP_TASKS
                ]
            parts = self._parts[samples]
            data_s, forward_s = parts[0] * factor, parts[1] * factor
            backward_s, update_s = parts[2] * factor, parts[3] * factor
            now = now + data_s + forward_s + backward_s + update_s
            data += data_s
            forward += forward_s
            backward += backward_s
            update += update_s
        self._factor, self.backward_s, self.now = factor, backward_s, now
        for task, total in zip(
            STEP_TASKS, (data, forward, backward, update), strict=True
        ):
            seconds[task] = total

    def _took_one_by_one(self, sizes: Sequence[int]) -> None:
        for samples in sizes:
            for task in STEP_TASKS:
                self.did(task, samples)

    def _slowed(self, seconds: float) -> float:
        # What slows the steps of a worker slows its other computations as well.
        seconds *= self._factor
        return seconds if self._slowness is None else seconds * self._slowness(self.now)

    def execute(self, operation: Callable[..., _T], *arguments: object) -> _T:
        """Call `operation` once for all workers that charge it."""
        return operation(*arguments)

    def execute_by_rows(
        self,
        compute: Callable[..., Sequence[Tensor]],
        rows: Sequence[Sequence[Tensor]],
        *equal: object,
    ) -> list[Sequence[Tensor]]:
        """Return for the rows of each worker those of the results of `compute`, of as many at once as a cache holds."""
        # More rows at once would leave the cache between two operations on them.
        at_once = max(1, _CACHED // sum(row.nbytes for row in rows[0]))
        found: list[Sequence[Tensor]] = []
        for begin in range(0, len(rows), at_once):
            some = rows[begin : begin + at_once]
            matrices = [torch.stack(same) for same in zip(*some, strict=True)]
            found += zip(*compute(*matrices, *equal), strict=True)
        return found

    def rehearse(
        self, operation: Callable[..., object], *arguments: object, times: int = 1
    ) -> None:
        """Call the side-effect free `operation` on a multiple `times` of the messages, only on a measuring clock."""

    def price(self, operation: Callable[..., Any], members: int = 2) -> float:
        """Return seconds of a strategy's `operation` on the messages of `members` workers, on an ordinary worker."""
        if not self.running or not self._operations:
            return 0.0
        found = self._operations.get(name_of(operation))
        return 0.0 if found is None else found.among(members)

    def charge(self, operation: Callable[..., Any], members: int = 2) -> None:
        """Advance by the time of `operation`."""
        seconds = self._slowed(self.price(operation, members))
        self.now += seconds
        self.ledger.seconds[Task.OTHER] += seconds

    def work(self, operation: Callable[..., _T], *arguments: object) -> _T:
        result = self.execute(operation, *arguments)
        self.charge(operation)
        return result

    def seconds_of(self, task: Task, samples: int = 0) -> float:
        """Return seconds of `task` on an ordinary worker without jitter."""
        return self._seconds(task, samples)

    def communicated(
        self, until: float, waited: float, cost: float | None = None
    ) -> None:
        """Record the time up to `until` as communication, `waited` seconds of it as waiting for others.

        `cost`: seconds of what may have begun before, behind compute; by default
        nothing is hidden.
        """
        self._transfer += until - self.now - waited if cost is None else cost
        self.ledger.seconds[Task.COMM] += until - self.now
        self.ledger.wait += waited
        self.now = until

    @property
    def hidden_comm_s(self) -> float:
        """Communication that compute has hidden so far."""
        return hidden_s(
            self._transfer, self.ledger.seconds[Task.COMM] - self.ledger.wait, self.now
        )

    def elapsed(self) -> float:
        return self.now

    @contextmanager
    def paused(self) -> Iterator[None]:
        was_running, self.running = self.running, False
        try:
            yield
        finally:
            self.running = was_running


class ModelledClock(VirtualClock):
    """Virtual clock of a worker without arithmetic."""

    def work(self, operation: Callable[..., _T], *arguments: object) -> _T:
        if not only_changes_arguments(operation):
            return super().work(operation, *arguments)
        self.charge(operation)
        return None  # type: ignore[return-value]


class RecordingVirtualClock(VirtualClock):
    """Virtual clock that stores every lap, without overhead for ordinary runs.

    Waiting comes first in an exchange. At a server it lies between request and reply,
    but is recorded at the beginning.
    """

    laps: list[Lap]

    def start(self) -> None:
        super().start()
        self.laps = []

    def did(self, task: Task, samples: int = 0, share: float = 1.0) -> None:
        before = self.now
        super().did(task, samples, share)
        if self.now > before:
            self.laps.append(Lap(task.name.lower(), before, self.now))

    def took_steps(self, sizes: Sequence[int]) -> None:
        self._took_one_by_one(sizes)

    def charge(self, operation: Callable[..., Any], members: int = 2) -> None:
        before = self.now
        super().charge(operation, members)
        if self.now > before:
            self.laps.append(Lap("other", before, self.now))

    def communicated(
        self, until: float, waited: float, cost: float | None = None
    ) -> None:
        before = self.now
        super().communicated(until, waited, cost)
        arrived = min(before + waited, until)
        if arrived > before:
            self.laps.append(Lap("waiting", before, arrived))
        if until > arrived:
            self.laps.append(Lap("communication", arrived, until))
