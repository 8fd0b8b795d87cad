"""Event log of one worker's communication, from which waiting times are computed after the run.

Logging needs no communication. All moments are of `time.perf_counter`, which the processes of one host share.
native/waiting.py evaluates the logs of all workers.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import TypeAlias

Group = tuple[Hashable, ...]  # communicator: () is the world, a split adds its number and color
Mail = tuple[Group, int, int, int]  # group, source, destination (ranks of the group), tag
Numbers: TypeAlias = "array[float]"  # entry after entry, 8 bytes a number: a long run has millions


def numbers() -> Numbers:
    """An empty list of entries."""
    return array("d")


@dataclass
class EventLog:
    """Event log of one worker. Entries are in order of time, equal for all members of a group, mail or vector."""

    collectives: defaultdict[Group, Numbers] = field(default_factory=lambda: defaultdict(numbers))
    """Collectives: arrival; begin of waiting (later if non-blocking); end."""
    sent: defaultdict[Mail, Numbers] = field(default_factory=lambda: defaultdict(numbers))
    """Messages: begin and end of sending."""
    received: defaultdict[Mail, Numbers] = field(default_factory=lambda: defaultdict(numbers))
    """Messages: begin and end of receiving."""
    accesses: list[Numbers] = field(default_factory=list)
    """Accesses to each shared vector: request; lock; end; number of previous accesses by all workers."""
    requests: Numbers = field(default_factory=numbers)
    """Requests to the server: number from 0; request; reply."""
    complete: bool = True
    """False after a synchronisation outside the communicator, at an unknown moment."""


Served = dict[int, Numbers]
"""Requests at a server by worker, in order: end of the previous request; begin of this one; begin of the request upon
which the rule released the reply."""
