"""Collectives spelled out over smaller operations: a binomial tree, and two levels (inside a node, between nodes)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scalebench.strategies.base import Worker
from scalebench.strategies.compression import Reducer

if TYPE_CHECKING:
    from torch import Tensor


class Tree(Reducer):
    """Binomial reduce to worker 0, then binomial broadcast: 2 ceil(lg p)(a + n/B) + ceil(lg p) n gamma.

    Besch and Pohl, PDP 1995 (only the abstract is public: a reconstruction). A virtual run charges exactly this where
    p is a power of two; elsewhere up to one message less, for a worker's sends do not wait for each other there.
    """

    def __init__(self, worker: Worker) -> None:
        self._comm = worker.comm

    def mean_(self, vector: Tensor) -> None:
        comm, rank, size = self._comm, self._comm.rank, self._comm.size
        comm.count(0)  # one synchronisation; its messages count their bytes
        stride = 1
        while stride < size and rank % (2 * stride) == 0:
            if rank + stride < size:
                comm.recv_(vector, rank + stride, add=True)
            stride *= 2
        if rank > 0:  # `stride` is now the lowest set bit of the rank: where it hangs in the tree
            comm.send(vector, rank - stride)
            comm.recv_(vector, rank - stride)
        else:
            vector.div_(size)
        stride //= 2
        while stride:
            if rank + stride < size:
                comm.send(vector, rank + stride)
            stride //= 2


class TwoLevel(Reducer):
    """Sum onto the first worker of each node, allreduce between those, broadcast inside each node.

    Inside the nodes the n bytes cross fast links only; between them each node sends once, however many workers it has.
    """

    def __init__(self, worker: Worker) -> None:
        self._size, node = worker.size, worker.workers_per_node
        self._node = worker.comm.split(lambda rank: rank // node)
        self._leaders = worker.comm.split(lambda rank: min(1, rank % node))

    def mean_(self, vector: Tensor) -> None:
        if self._node.size > 1:
            self._node.reduce_(vector, 0)
        if self._node.rank == 0 and self._leaders.size > 1:
            self._leaders.allreduce_(vector)
        if self._node.size > 1:
            self._node.broadcast_(vector, 0)
        vector.div_(self._size)
