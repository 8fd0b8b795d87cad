"""The schedule of a worker: its compute, collectives and messages in order, without any time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


class Event(NamedTuple):
    """One entry of a schedule.

    `amount`: samples of compute (`data`, `shuffle`, `forward`, `backward`, `update`), bytes of communication, the
    position in the schedule of what a `wait` waits for. `members`: ranks of a collective; the peer of a message.
    """

    kind: str
    amount: int = 0
    members: tuple[int, ...] = ()
    blocking: bool = True
    name: str = ""  # of a strategy's own operation


@dataclass
class Schedule:
    """Everything that worker `rank` does in a training."""

    rank: int
    events: list[Event] = field(default_factory=list)
    syncs: int = 0  # synchronisations in which the worker takes part
    bytes_sent: int = 0  # payload that the worker hands over
    memory_bytes: int = 0  # parameters, gradients, optimizer state and the strategy's own tensors
