"""The communicator of a replica that nothing is exchanged with: a lone worker, or one that stands in for several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from scalebench.comm.base import Communicator


class _Alone:
    """A worker of `size` that trains by itself; what it would receive from others is what it sends."""

    collectives, bytes_sent = 0, 0
    calls = None

    def __init__(self, size: int = 1, rank: int = 0) -> None:
        self.size, self.rank = size, rank

    def barrier(self) -> None:
        """Nothing to wait for."""

    def alltoallv(self, tensors: Sequence[Any]) -> list[Any]:
        return list(tensors)


def lone_communicator(size: int = 1, rank: int = 0) -> Communicator:
    """Return the communicator of a worker of `size` that trains by itself; it has what such a training calls, only."""
    return cast("Communicator", _Alone(size, rank))
