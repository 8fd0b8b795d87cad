"""Operations by their usual words, for tests that ask what they cost."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from scalebench.cluster.operation import Kind, Operation


def _collective(
    kind: Kind,
    nbytes: float,
    ranks: Sequence[int],
    algorithm: str = "",
    linear: bool = False,
) -> Operation:
    return Operation(
        kind,
        nbytes,
        ranks if isinstance(ranks, range) else tuple(ranks),
        0,
        linear,
        "",
        algorithm,
    )


def _pair(kind: Kind, nbytes: float, worker: int, other: int) -> Operation:
    return Operation(kind, nbytes, (worker, other))


def barrier(ranks: Sequence[int]) -> Operation:
    return _collective(Kind.BARRIER, 0, ranks)


allreduce = partial(_collective, Kind.ALLREDUCE)
reduce = partial(_collective, Kind.REDUCE)
broadcast = partial(_collective, Kind.BROADCAST)
alltoallv = partial(_collective, Kind.ALLTOALL)
linear_reduce = partial(_collective, Kind.REDUCE, linear=True)
linear_broadcast = partial(_collective, Kind.BROADCAST, linear=True)
message = partial(_pair, Kind.SEND)
exclusive = partial(_pair, Kind.ACCESS)
occupancy = partial(_pair, Kind.SERVE)
under_way = partial(_pair, Kind.TRAVEL)
