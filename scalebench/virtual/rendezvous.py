"""Where virtual workers meet: a group, and one collective operation of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from scalebench.virtual.overlap import Stream


class Rendezvous:
    """One collective operation of `size` workers: what they brought, by rank in the group, and when it is over."""

    __slots__ = ("end", "latest", "missing", "payloads", "result", "sleepers", "what")

    def __init__(self, what: str, size: int) -> None:
        self.what = what
        self.payloads: list[Any] = [None] * size
        self.result: Any = None  # of the arithmetic, which is done once for all
        self.missing = size  # workers that have not come yet
        self.latest = 0.0  # when the last one came
        self.sleepers: list[tuple[int, float]] = []  # (world rank, its time)
        self.end: float | None = None

    def join(self, rank: int, now: float, payload: Any) -> None:
        """`rank` comes at `now`."""
        self.payloads[rank] = payload
        self.missing -= 1
        self.latest = max(self.latest, now)


@dataclass
class Group:
    """The workers of one communicator, by world rank, their meetings under way, their mail, and what one of them
    computed for all: [result, how many have not taken it yet], by call."""

    ranks: tuple[int, ...]
    meetings: dict[int, Rendezvous] = field(default_factory=dict)
    mail: dict[tuple[int, int, int], list[tuple[float, float, Tensor]]] = field(default_factory=dict)  # sent, there
    results: dict[int, list[Any]] = field(default_factory=dict)
    receivers: dict[tuple[int, int, int], int] = field(default_factory=dict)
    stream: Stream = field(default_factory=Stream)
