"""Where virtual workers meet: a group, and one collective operation of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from scalebench.virtual.overlap import Stream


@dataclass
class Meeting:
    """One collective operation: who has come, with what, and when it is over."""

    what: str
    arrivals: dict[int, float] = field(default_factory=dict)  # by rank in the group
    payloads: dict[int, Any] = field(default_factory=dict)
    sleepers: list[tuple[int, float]] = field(default_factory=list)  # (world rank, its time)
    end: float | None = None

    @property
    def latest(self) -> float:
        return max(self.arrivals.values())

    def in_order(self) -> list[Any]:
        return [self.payloads[rank] for rank in sorted(self.payloads)]


@dataclass
class Group:
    """The workers of one communicator, by world rank, their meetings under way and their mail."""

    ranks: tuple[int, ...]
    meetings: dict[int, Meeting] = field(default_factory=dict)
    mail: dict[tuple[int, int, int], list[tuple[float, Tensor]]] = field(default_factory=dict)
    receivers: dict[tuple[int, int, int], int] = field(default_factory=dict)
    stream: Stream = field(default_factory=Stream)
