"""Discrete-event scheduler of workers written as blocking code.

Each worker is a greenlet with its own virtual time. It switches to the scheduler only
at communication; the scheduler resumes the earliest worker, so that operations take
effect in the order of virtual time, independent of the order in which Python executes
the arithmetic between them.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from greenlet import GreenletExit, greenlet
from torch import Tensor

from scalebench.errors import RunError
from scalebench.pricing.overlap import Stream
from scalebench.system.random_state import put_back, random_state

_DRAWN_AT_ONCE = 256


class Scheduler:
    """Scheduler of one greenlet for each worker.

    Ties in time are broken by a seeded draw (`ties="seeded"`), as a fixed order would
    always favour the same worker, or by rank (`ties="rank"`), for comparisons with a
    reference. Of the random generators `drawn` (names of `system.random_state`), which
    models or strategies draw from while training, each worker has a state of its own.
    """

    def __init__(
        self, *, seed: int, ties: str = "seeded", drawn: Collection[str] = ()
    ) -> None:
        self._heap: list[tuple[float, float, int, int]] = []
        self._greenlets: dict[int, greenlet] = {}
        self._waiting: dict[int, str] = {}
        self._draws = _draws(seed) if ties == "seeded" else None
        self._events = 0
        self.drawn = drawn
        self._generators: dict[int, dict[str, Any]] = {}
        self._grad: dict[int, bool] = {}
        self._hub = greenlet.getcurrent()

    def run(self, programs: Mapping[int, Callable[[], Any]]) -> dict[int, Any]:
        """Run each worker's program from time zero; return their results by rank.

        Raises:
            RunError: deadlock of the remaining workers.
            Exception: an exception of a program, after the others have been ended.
        """
        results: dict[int, Any] = {}
        try:
            for rank, program in programs.items():
                self._add(rank, self._body(rank, program, results))
            self._go_on()
            if len(results) < len(programs):
                waiting = "; ".join(
                    f"worker {rank} in {what}"
                    for rank, what in sorted(self._waiting.items())[:4]
                )
                raise RunError(f"the workers wait for one another for ever: {waiting}")
        finally:
            self.end()
        return results

    def join(self, rank: int, program: Callable[[], None]) -> bool:
        """Run a worker's program beside those that have joined before until none can go on; False: all have ended."""
        self._add(rank, program)
        self._go_on()
        return bool(self._greenlets)

    def end(self) -> None:
        """End the programs that are left."""
        # A greenlet that is left suspended keeps its frames, and so its replica.
        for fiber in self._greenlets.values():
            fiber.parent = greenlet.getcurrent()
            fiber.throw(GreenletExit)
        self._greenlets.clear()

    def _add(self, rank: int, program: Callable[[], None]) -> None:
        self._greenlets[rank] = greenlet(program)
        self.wake(rank, 0.0)

    def _go_on(self) -> None:
        """Resume workers from here until none can go on."""
        self._hub = greenlet.getcurrent()
        # The earliest first: no worker can still do anything before that moment.
        while self._heap or self.awaited():
            self._resume(heapq.heappop(self._heap)[3])

    def awaited(self) -> bool:
        """Wait for an event outside, where no worker can go on, and wake whom it concerns; False: there is none."""
        return False

    def turn(self, rank: int, now: float) -> None:
        """Suspend the calling worker until all events before `now` have happened."""
        self.wake(rank, now)
        self._hub.switch()

    def sleep(self, rank: int, until: float) -> None:
        """Suspend the calling worker, which computes, until that moment; no tie is drawn."""
        self.wake_untied(rank, until)
        self._hub.switch()

    def block(self, rank: int, what: str) -> None:
        """Suspend the calling worker until another one wakes it; `what` is the reason in a deadlock message."""
        self._waiting[rank] = what
        self._hub.switch()
        self._waiting.pop(rank, None)

    def wake(self, rank: int, time: float) -> None:
        """Resume `rank` at `time`."""
        self._events += 1
        tie = float(rank) if self._draws is None else next(self._draws)
        # Of two with equal times and ties the first that was woken goes on first.
        heapq.heappush(self._heap, (time, tie, self._events, rank))

    def wake_untied(self, rank: int, time: float) -> None:
        """Resume `rank`, whose order among others does not matter, at `time`; no tie is drawn."""
        self._events += 1
        # A draw would change those of all later ties, and so which worker comes first.
        heapq.heappush(self._heap, (time, -1.0, self._events, rank))

    def _resume(self, rank: int) -> None:
        # Greenlets share one thread: its grad mode and generator states are swapped for
        # each worker.
        outside_grad = torch.is_grad_enabled()
        outside_states = random_state(self.drawn) if self.drawn else {}
        if self.drawn and rank in self._generators:
            put_back(self._generators[rank])
        _set_grad(self._grad.get(rank, True))
        fiber = self._greenlets[rank]
        fiber.parent = self._hub  # where it goes when it ends
        try:
            fiber.switch()
        finally:
            if fiber.dead:
                del self._greenlets[rank]
            self._grad[rank] = torch.is_grad_enabled()
            _set_grad(outside_grad)
            if self.drawn:
                self._generators[rank] = random_state(self.drawn)
                put_back(outside_states)

    def _body(
        self, rank: int, program: Callable[[], Any], results: dict[int, Any]
    ) -> Callable[[], None]:
        def body() -> None:
            results[rank] = program()

        return body


def _draws(seed: int) -> Iterator[float]:
    """Yield uniform numbers, drawn many at once: the same ones, in a fifth of the time."""
    random = np.random.default_rng([seed, 0x7135])
    while True:
        yield from random.random(_DRAWN_AT_ONCE).tolist()


def _set_grad(enabled: bool) -> None:
    if torch.is_grad_enabled() != enabled:
        torch.set_grad_enabled(enabled)


class Rendezvous:
    """One collective operation of `size` workers: payloads by rank in the group, and end."""

    __slots__ = (
        "cost",
        "end",
        "latest",
        "missing",
        "payloads",
        "result",
        "sleepers",
        "what",
    )

    def __init__(self, what: str, size: int) -> None:
        self.what = what
        self.payloads: list[Any] = [None] * size
        self.result: Any = None  # of the arithmetic, computed once for all
        self.missing = size  # workers that have not arrived yet
        self.latest = 0.0  # arrival of the last worker
        self.sleepers: list[tuple[int, float]] = []  # (world rank, its time)
        self.end: float | None = None
        self.cost = 0.0  # seconds of the transfer

    def join(self, rank: int, now: float, payload: Any) -> None:
        """Add the arrival of `rank` at `now`."""
        self.payloads[rank] = payload
        self.missing -= 1
        self.latest = max(self.latest, now)


@dataclass
class Group:
    """Workers of one communicator by world rank, with pending rendezvous, messages, and shared results by call:
    [result, number of workers that have not fetched it]."""

    ranks: tuple[int, ...]
    pending: dict[int, Rendezvous] = field(default_factory=dict)
    # sent, there
    mail: dict[tuple[int, int, int], list[tuple[float, float, Tensor]]] = field(
        default_factory=dict
    )
    results: dict[int, list[Any]] = field(default_factory=dict)
    receivers: dict[tuple[int, int, int], int] = field(default_factory=dict)
    stream: Stream = field(default_factory=Stream)
    # by split and color
    parts: dict[int, dict[int, Group]] = field(default_factory=dict)

    def part(self, split: int, color: Callable[[int], int], rank: int) -> Group:
        """Return the part with `rank` of the group's `split`, one object for all its members."""
        if split not in self.parts:
            members: dict[int, list[int]] = {}
            for place, world in enumerate(self.ranks):
                members.setdefault(color(place), []).append(world)
            self.parts[split] = {
                each: Group(tuple(ranks)) for each, ranks in members.items()
            }
        return self.parts[split][color(rank)]
