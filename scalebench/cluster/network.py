"""Network cost model: closed forms for point-to-point and collective operations, by placement of the ranks.

Notation: n bytes, p ranks, latency a (s), bandwidth B (bytes/s), gamma seconds per byte reduced, lg = log2. Formulas:
Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH", IJHPCA 19(1), 2005; tree:
Besch, Pohl, PDP 1995; server: Barrachina et al., Computing 2021. Each is written for one kind of link. A group that
spans nodes climbs two *levels*, g ranks inside a node and m nodes, and pays each level's own latency and bandwidth;
where all g ranks of a node send at the same time they share its network cards.

Every cost grows with n and with p (ranks taken in order). For p that is not a power of two the logarithms are rounded
up: that covers folding the surplus ranks in, while the copy back to them, a + n/B, is assumed to be hidden.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from scalebench.cluster.spec import Cluster
from scalebench.errors import ClusterError, nearest

# MPICH's MPIR_CVAR_ALLREDUCE_SHORT_MSG_SIZE and MPIR_CVAR_REDUCE_SHORT_MSG_SIZE; up to it latency counts, above it
# bandwidth. Open MPI 5's table (coll_tuned_decision_fixed.c, an average over its developers' clusters) puts the same
# switch, recursive doubling to Rabenseifner, between 128 bytes and 256 KiB, at 4 or 8 KiB for most rank counts.
SHORT_MESSAGE = 2048
SHORT_ALLGATHER = 81920  # MPICH's MPIR_CVAR_ALLGATHER_SHORT_MSG_SIZE, in bytes gathered


class Level(NamedTuple):
    """One level of a group: `ranks` members connected by links of this latency (s) and bandwidth (bytes/s).

    `shared` is the bandwidth of each member if all ranks below it use the link at the same time.
    """

    ranks: int
    latency_s: float
    bandwidth: float
    shared: float


Levels = tuple[Level, ...]  # inside a node, then between nodes; without levels of one rank


def recursive_doubling(n: int, levels: Levels, gamma: float) -> float:
    """ceil(lg p) (a + n/B + n gamma): each rank exchanges the buffer with partners at doubling distances."""
    return sum(_lg(level.ranks) * (level.latency_s + n / level.shared + n * gamma) for level in levels)


def rabenseifner(n: int, levels: Levels, gamma: float) -> float:
    """2 ceil(lg p) a + 2 (p-1)/p n/B + (p-1)/p n gamma: recursive halving, then doubling, nearest partners first."""
    return _scatter_gather(n, levels, gamma, lambda ranks: 2 * _lg(ranks))


def hierarchical(n: int, levels: Levels, gamma: float) -> float:
    """Rings in rings, g ranks in each of m nodes.

    2(g-1) a1 + 2(g-1)/g n/B1 + 2(m-1) a2 + 2(m-1)/m (n/g)/B2, and (p-1)/p n gamma for the sums.
    """
    return _scatter_gather(n, levels, gamma, lambda ranks: 2 * (ranks - 1))


def ring(n: int, levels: Levels, gamma: float) -> float:
    """2(p-1) a + 2(p-1)/p n/B + (p-1)/p n gamma, at the pace of the slowest link; one flow crosses each card."""
    p, link = _ranks(levels), levels[-1]
    return 2 * (p - 1) * link.latency_s + (p - 1) / p * n * (2 / _slowest(levels) + gamma)


def tree(n: int, levels: Levels, gamma: float) -> float:
    """2 ceil(lg p)(a + n/B) + ceil(lg p) n gamma: binomial reduce, then binomial broadcast."""
    return sum(_lg(level.ranks) * (2 * (level.latency_s + n / level.bandwidth) + n * gamma) for level in levels)


def server(n: int, levels: Levels, gamma: float, shards: int = 1) -> float:
    """2a + max(2n/B, 2pn/(S B)): p workers push n bytes to, and pull them from, S shards on separate links."""
    p = _ranks(levels)
    return 2 * levels[-1].latency_s + 2 * n / _slowest(levels) * max(1.0, p / shards)


ALLREDUCE: dict[str, Callable[[int, Levels, float], float]] = {
    "ring": ring,
    "recursive_doubling": recursive_doubling,
    "rabenseifner": rabenseifner,
    "tree": tree,
    "hierarchical": hierarchical,
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
    return collective.replace("_", " ")


def broadcast(n: int, levels: Levels) -> float:
    """Binomial, ceil(lg p)(a + n/B), while short; scatter and allgather, 2 ceil(lg p) a + 2(p-1)/p n/B, above."""
    if n <= SHORT_MESSAGE:
        return sum(_lg(level.ranks) * (level.latency_s + n / level.bandwidth) for level in levels)
    return rabenseifner(n, levels, 0.0)


def reduce(n: int, levels: Levels, gamma: float) -> float:
    """Binomial, ceil(lg p)(a + n/B + n gamma), while short; above it reduce-scatter and gather cost an allreduce."""
    if n <= SHORT_MESSAGE:
        return sum(_lg(level.ranks) * (level.latency_s + n / level.bandwidth + n * gamma) for level in levels)
    return rabenseifner(n, levels, gamma)


def allgather(n: int, levels: Levels) -> float:
    """n bytes from each rank: ceil(lg p) a + (p-1) n/B (Bruck) while short; (p-1)(a + n/B), a ring, above."""
    p = _ranks(levels)
    transfer = (p - 1) * n / _slowest(levels)
    if p * n <= SHORT_ALLGATHER:
        return sum(_lg(level.ranks) * level.latency_s for level in levels) + transfer
    return (p - 1) * levels[-1].latency_s + transfer


def alltoallv(n: int, levels: Levels) -> float:
    """(p-1) a + n/B, n the largest number of bytes sent or received by a rank; ranks of a node share its cards."""
    return (_ranks(levels) - 1) * levels[-1].latency_s + n / min(level.shared for level in levels)


class Network:
    """Costs (s) on the links of a cluster, with worker i on node i // ranks_per_node.

    `ranks` is any sequence of worker numbers (a tuple or a range is looked up fastest). `collective` is the allreduce
    used for `algorithm="auto"`, by default that of `choose`.
    """

    def __init__(self, cluster: Cluster, ranks_per_node: int | None = None, collective: str = "auto") -> None:
        self.cluster = cluster
        self.ranks_per_node = ranks_per_node or cluster.node.workers_per_node
        self.collective = self._known(collective)
        self._levels: dict[Sequence[int], Levels] = {}
        self._costs: dict[tuple[str, int, Sequence[int]], float] = {}

    def same_node(self, a: int, b: int) -> bool:
        """Return True if workers `a` and `b` share a node."""
        return a // self.ranks_per_node == b // self.ranks_per_node

    def nodes_of(self, ranks: Sequence[int]) -> int:
        """Return the number of nodes with `ranks`."""
        return len({rank // self.ranks_per_node for rank in ranks})

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
        group = ranks if isinstance(ranks, tuple | range) else tuple(ranks)
        key = (name, nbytes, group)
        if key not in self._costs:
            messages = sum(self.message(nbytes, group[0], rank) for rank in group[1:])
            self._costs[key] = messages + (len(group) - 1) * nbytes * gamma
        return self._costs[key]

    def _cost(self, name: str, nbytes: int, ranks: Sequence[int], price: Callable[[Levels], float]) -> float:
        group = ranks if isinstance(ranks, tuple | range) else tuple(ranks)
        key = (name, nbytes, group)
        cost = self._costs.get(key)
        if cost is None:
            levels = self._levels.get(group)
            if levels is None:
                levels = self._levels[group] = self._place(group)
            cost = self._costs[key] = price(levels) if levels else 0.0
        return cost

    def _place(self, group: Sequence[int]) -> Levels:
        """Return the levels of a group; every node is priced as the fullest one, which keeps costs monotone."""
        members = Counter(rank // self.ranks_per_node for rank in group)
        inside, nodes = max(members.values()), len(members)
        intra, inter = self.cluster.links.intra, self.cluster.links.inter
        # A switch or shared memory serves all pairs of a node at once; network cards are shared by its ranks.
        across = self.cluster.links.bandwidth_between(members)
        left = across * min(1.0, self.cluster.node.network_cards / inside)
        levels = (
            Level(inside, intra.latency_s, intra.bandwidth_bytes_per_s, intra.bandwidth_bytes_per_s),
            Level(nodes, inter.latency_s, across, left),
        )
        return tuple(level for level in levels if level.ranks > 1)

    @staticmethod
    def _known(collective: str) -> str:
        if collective != "auto" and collective not in ALLREDUCE:
            raise ClusterError(f"unknown collective {collective!r}; {nearest(collective, [*ALLREDUCE, 'auto'])}")
        return collective


def _scatter_gather(n: int, levels: Levels, gamma: float, messages: Callable[[int], int]) -> float:
    """Cost of reduce-scatter up the levels and allgather down: each level handles the share of the level below."""
    cost, share = 0.0, float(n)
    for level in levels:
        part = (level.ranks - 1) / level.ranks * share
        cost += messages(level.ranks) * level.latency_s + part * (2 / level.shared + gamma)
        share /= level.ranks
    return cost


def _lg(ranks: int) -> int:
    return (ranks - 1).bit_length()


def _ranks(levels: Levels) -> int:
    return math.prod(level.ranks for level in levels)


def _slowest(levels: Levels) -> float:
    return min(level.bandwidth for level in levels)
