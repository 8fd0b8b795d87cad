"""Seconds of messages and collectives on the links of a cluster, by placement of the ranks on nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from scalebench.cluster.collectives import (
    SHORT_MESSAGE,
    Level,
    Levels,
    allgather,
    alltoallv,
    broadcast,
    flexible_server,
    hierarchical,
    rabenseifner,
    recursive_doubling,
    reduce,
    reduce_scatter,
    ring,
    server,
    sharded_server,
    tree,
)
from scalebench.cluster.nccl import nccl
from scalebench.cluster.spec import Cluster
from scalebench.errors import ClusterError, nearest

ALLREDUCE: dict[str, Callable[[int, Levels, float], float]] = {
    "ring": ring,
    "recursive_doubling": recursive_doubling,
    "recursive_halving": rabenseifner,  # reduce-scatter by halving, allgather by doubling: the same algorithm
    "rabenseifner": rabenseifner,
    "binomial": tree,  # Besch and Pohl's logarithmic tree reduces and broadcasts binomially
    "tree": tree,
    "hierarchical": hierarchical,
    "server": server,
    "sharded_server": sharded_server,
    "flexible_server": flexible_server,
    "nccl": nccl,
}


def choose(n: int) -> str:
    """Return the allreduce chosen by an MPI library for `n` bytes: MPICH's rule and threshold.

    Both algorithms are priced level by level, as in the node-aware modes of MPI libraries.
    """
    return "recursive_doubling" if n <= SHORT_MESSAGE else "rabenseifner"


def allreduce_name(collective: str) -> str:
    """Return a description of the allreduce `collective`."""
    if collective == "auto":
        return f"recursive doubling up to {SHORT_MESSAGE // 1024} KiB and Rabenseifner's algorithm above"
    return {"nccl": "NCCL's choice of ring or tree"}.get(collective, collective.replace("_", " "))


class Placement(NamedTuple):
    """Nodes of a group, in order of first use by a rank number, and the number of ranks on the fullest one."""

    nodes: range | NDArray[np.int64]
    fullest: int


def place(group: Sequence[int], ranks_per_node: int) -> Placement:
    """Return the placement of `group`, with worker i on node i // ranks_per_node.

    In constant time for a range of consecutive ranks, or of strides that are multiples or divisors of a node's ranks;
    vectorised otherwise.
    """
    if isinstance(group, range) and group.step > 0 and len(group):
        step = group.step
        first, last = group[0] // ranks_per_node, group[-1] // ranks_per_node
        if step % ranks_per_node == 0:
            return Placement(range(first, last + 1, step // ranks_per_node), 1)
        if ranks_per_node % step == 0:
            whole = ranks_per_node // step
            head = -(-((first + 1) * ranks_per_node - group[0]) // step)  # on the first node, if there are others
            tail = (group[-1] - last * ranks_per_node) // step + 1
            between = last - first
            fullest = len(group) if not between else max(head, tail) if between == 1 else whole
            return Placement(range(first, last + 1), fullest)
    nodes, counts = np.unique(np.asarray(group, dtype=np.int64) // ranks_per_node, return_counts=True)
    return Placement(nodes, int(counts.max()))


class Network:
    """Costs (s) on the links of a cluster, with worker i on node i // ranks_per_node.

    `ranks` is any sequence of worker numbers (a tuple or a range is looked up fastest). `collective` is the allreduce
    used for `algorithm="auto"`, by default that of `choose`.
    """

    def __init__(self, cluster: Cluster, ranks_per_node: int | None = None, collective: str = "auto") -> None:
        self.cluster = cluster
        self.ranks_per_node = ranks_per_node or cluster.node.workers_per_node
        self.collective = self._known(collective)
        self._placements: dict[Sequence[int], Placement] = {}
        self._levels: dict[Sequence[int], Levels] = {}
        self._costs: dict[tuple[str, int, Sequence[int]], float] = {}

    def same_node(self, a: int, b: int) -> bool:
        """Return True if workers `a` and `b` share a node."""
        return a // self.ranks_per_node == b // self.ranks_per_node

    def nodes_of(self, ranks: Sequence[int]) -> int:
        """Return the number of nodes with `ranks`."""
        return len(self._placement(_hashable(ranks)).nodes)

    def shape_of(self, ranks: Sequence[int]) -> tuple[int, int, int]:
        """Return the number of `ranks`, of their nodes, and of the ranks on the fullest node, on which costs depend."""
        nodes, fullest = self._placement(_hashable(ranks))
        return len(ranks), len(nodes), fullest

    def message(self, nbytes: int, src: int, dst: int) -> float:
        """Return a + n/B of the link between two workers; zero for a message to oneself."""
        if src == dst:
            return 0.0
        links = self.cluster.links
        if self.same_node(src, dst):
            return links.intra.latency_s + nbytes / links.intra.bandwidth_bytes_per_s
        bandwidth = links.bandwidth_between((src // self.ranks_per_node, dst // self.ranks_per_node))
        return links.inter.latency_s + nbytes / bandwidth

    def allreduce(self, nbytes: int, ranks: Sequence[int], algorithm: str = "auto") -> float:
        """Return the cost of summing `nbytes` over `ranks`."""
        collective = self.collective if algorithm == "auto" else self._known(algorithm)
        name = choose(nbytes) if collective == "auto" else collective
        gamma = self.cluster.reduction.seconds_per_byte
        return self._cost(name, nbytes, ranks, lambda levels: ALLREDUCE[name](nbytes, levels, gamma))

    def reduce(self, nbytes: int, ranks: Sequence[int]) -> float:
        """Return the cost of summing `nbytes` over `ranks` at one of them."""
        gamma = self.cluster.reduction.seconds_per_byte
        return self._cost("reduce", nbytes, ranks, lambda levels: reduce(nbytes, levels, gamma))

    def reduce_scatter(self, nbytes: int, ranks: Sequence[int]) -> float:
        """Return the cost of summing `nbytes` over `ranks`, each of which gets an equal part of the sum."""
        gamma = self.cluster.reduction.seconds_per_byte
        return self._cost("reduce_scatter", nbytes, ranks, lambda levels: reduce_scatter(nbytes, levels, gamma))

    def broadcast(self, nbytes: int, ranks: Sequence[int]) -> float:
        """Return the cost of sending `nbytes` of one rank to all `ranks`."""
        return self._cost("broadcast", nbytes, ranks, lambda levels: broadcast(nbytes, levels))

    def linear_reduce(self, nbytes: int, ranks: Sequence[int]) -> float:
        """Return (p-1)(a + n/B + n gamma): the first of `ranks` receives and adds `nbytes` of each other rank."""
        return self._linear("linear_reduce", nbytes, ranks, self.cluster.reduction.seconds_per_byte)

    def linear_broadcast(self, nbytes: int, ranks: Sequence[int]) -> float:
        """Return (p-1)(a + n/B): the first of `ranks` sends `nbytes` to each other rank over its own link."""
        return self._linear("linear_broadcast", nbytes, ranks, 0.0)

    def allgather(self, nbytes: int, ranks: Sequence[int]) -> float:
        """Return the cost of sending `nbytes` of each rank to all `ranks`."""
        return self._cost("allgather", nbytes, ranks, lambda levels: allgather(nbytes, levels))

    def alltoallv(self, nbytes: int, ranks: Sequence[int]) -> float:
        """Return the cost of a full exchange with at most `nbytes` sent or received by a rank."""
        return self._cost("alltoallv", nbytes, ranks, lambda levels: alltoallv(nbytes, levels))

    def barrier(self, ranks: Sequence[int]) -> float:
        """Return ceil(lg p) a per level, the cost of an empty allreduce."""
        return self.allreduce(0, ranks, "recursive_doubling")

    def server(self, nbytes: int, ranks: Sequence[int], shards: int = 1) -> float:
        """Return the cost of one round of pushes and pulls of `nbytes` by all `ranks` at `shards` server shards."""
        return self._cost(f"server/{shards}", nbytes, ranks, lambda levels: server(nbytes, levels, 0.0, shards))

    def _linear(self, name: str, nbytes: int, ranks: Sequence[int], gamma: float) -> float:
        group = _hashable(ranks)
        key = (name, nbytes, group)
        if key not in self._costs:
            seconds = self._messages_from(group[0], np.asarray(group[1:], dtype=np.int64), nbytes)
            self._costs[key] = float(np.cumsum(seconds)[-1]) if len(seconds) else 0.0  # added one after another
            self._costs[key] += (len(group) - 1) * nbytes * gamma
        return self._costs[key]

    def _messages_from(self, root: int, others: NDArray[np.int64], nbytes: int) -> NDArray[np.float64]:
        """Return seconds of a message of `nbytes` between `root` and each of the `others`."""
        links, home = self.cluster.links, root // self.ranks_per_node
        nodes = others // self.ranks_per_node
        inside = links.intra.latency_s + nbytes / links.intra.bandwidth_bytes_per_s
        seconds = np.full(len(nodes), links.inter.latency_s + nbytes / links.bandwidth_between((home,)))
        for node in links.slow_nodes - {home}:
            seconds[nodes == node] = links.inter.latency_s + nbytes / links.bandwidth_between((home, node))
        seconds[nodes == home] = inside
        return seconds

    def _cost(self, name: str, nbytes: int, ranks: Sequence[int], price: Callable[[Levels], float]) -> float:
        group = _hashable(ranks)
        key = (name, nbytes, group)
        cost = self._costs.get(key)
        if cost is None:
            levels = self._levels.get(group)
            if levels is None:
                levels = self._levels[group] = self._levels_of(group)
            cost = self._costs[key] = price(levels) if levels else 0.0
        return cost

    def _placement(self, group: Sequence[int]) -> Placement:
        placement = self._placements.get(group)
        if placement is None:
            placement = self._placements[group] = place(group, self.ranks_per_node)
        return placement

    def _levels_of(self, group: Sequence[int]) -> Levels:
        """Return the levels of a group; every node is priced as the fullest one, which keeps costs monotone."""
        nodes, inside = self._placement(group)
        intra, inter = self.cluster.links.intra, self.cluster.links.inter
        growth = self.cluster.links.congestion_among(len(nodes))
        # A switch or shared memory serves all pairs of a node at once; network cards are shared by its ranks.
        across = self.cluster.links.bandwidth_between(nodes) / growth
        total = self.cluster.links.total_bandwidth(nodes) / growth
        left = across * min(1.0, self.cluster.node.network_cards / inside)
        within = intra.bandwidth_bytes_per_s / min(inside, intra.shared_by)
        levels = (
            Level(inside, intra.latency_s, intra.bandwidth_bytes_per_s, within, inside * within, across=False),
            Level(len(nodes), inter.latency_s * growth, across, left, total, across=True),
        )
        return tuple(level for level in levels if level.ranks > 1)

    @staticmethod
    def _known(collective: str) -> str:
        if collective != "auto" and collective not in ALLREDUCE:
            raise ClusterError(f"unknown collective {collective!r}; {nearest(collective, [*ALLREDUCE, 'auto'])}")
        return collective


def _hashable(ranks: Sequence[int]) -> tuple[int, ...] | range:
    return ranks if isinstance(ranks, tuple | range) else tuple(ranks)
