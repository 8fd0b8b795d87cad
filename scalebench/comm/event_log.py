"""When a worker communicated: what each writes down for itself, so that afterwards it is known who waited for whom.

Nothing is asked of the others while training goes on. All moments are of `time.perf_counter`, which the processes of
one host share. What follows from the journals of all: native/waiting.py.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import TypeAlias

Group = tuple[Hashable, ...]  # which communicator: () is the world, a split adds its number and color
Mail = tuple[Group, int, int, int]  # group, source, destination (ranks of the group), tag
Numbers: TypeAlias = "array[float]"  # entry after entry, 8 bytes a number: a long run has millions


def numbers() -> Numbers:
    """An empty list of entries."""
    return array("d")


@dataclass
class EventLog:
    """One worker's. Entries are in the order of time; so are its peers' of the same group, mail or vector."""

    meetings: defaultdict[Group, Numbers] = field(default_factory=lambda: defaultdict(numbers))
    """Collectives: when it brought its part; from when it stood still (later, if that does not block); when it left."""
    sent: defaultdict[Mail, Numbers] = field(default_factory=lambda: defaultdict(numbers))
    """Messages: when it began to send; when it could go on."""
    received: defaultdict[Mail, Numbers] = field(default_factory=lambda: defaultdict(numbers))
    """Messages: when it began to receive; when it had it."""
    visits: list[Numbers] = field(default_factory=list)
    """Of each shared vector: when it asked; got in; left; and how many accesses by anybody came before."""
    requests: Numbers = field(default_factory=numbers)
    """To the server: which of its requests, from 0; when it asked; when it had the reply."""
    complete: bool = True
    """False: something else carried a synchronisation, at a moment unknown here."""


Served = dict[int, Numbers]
"""A server's own, by worker, request after request: when it was done with what came before; when it took this one up;
and when it took up the one upon which its rule let the reply go."""
