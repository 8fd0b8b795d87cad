"""Groups of virtual workers and their collective operations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from scalebench.pricing.overlap import Stream


class Rendezvous:
    """One collective operation of `size` workers: payloads by rank in the group, and end."""

    __slots__ = ("end", "latest", "missing", "payloads", "result", "sleepers", "what")

    def __init__(self, what: str, size: int) -> None:
        self.what = what
        self.payloads: list[Any] = [None] * size
        self.result: Any = None  # of the arithmetic, computed once for all
        self.missing = size  # workers that have not arrived yet
        self.latest = 0.0  # arrival of the last worker
        self.sleepers: list[tuple[int, float]] = []  # (world rank, its time)
        self.end: float | None = None

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
    mail: dict[tuple[int, int, int], list[tuple[float, float, Tensor]]] = field(default_factory=dict)  # sent, there
    results: dict[int, list[Any]] = field(default_factory=dict)
    receivers: dict[tuple[int, int, int], int] = field(default_factory=dict)
    stream: Stream = field(default_factory=Stream)
    parts: dict[int, dict[int, Group]] = field(default_factory=dict)  # by split and color

    def part(self, split: int, color: Callable[[int], int], rank: int) -> Group:
        """Return the part with `rank` of the group's `split`, one object for all its members."""
        if split not in self.parts:
            members: dict[int, list[int]] = {}
            for place, world in enumerate(self.ranks):
                members.setdefault(color(place), []).append(world)
            self.parts[split] = {each: Group(tuple(ranks)) for each, ranks in members.items()}
        return self.parts[split][color(rank)]
