"""Closed forms of collective operations on the levels of a group of ranks.

Notation: n bytes, p ranks, latency a (s), bandwidth B (bytes/s), gamma seconds per byte
reduced, lg = log2. Formulas: Thakur, Rabenseifner, Gropp, "Optimization of Collective
Communication Operations in MPICH", IJHPCA 19(1), 2005; tree: Besch, Pohl, PDP 1995 (a
reconstruction from its abstract); server: Barrachina et al., Computing 2021. Each is
written for one kind of link. A group that spans nodes climbs two *levels*, g ranks
inside a node and m nodes, and pays each level's own latency and bandwidth; where all g
ranks of a node send at the same time they share its network cards.

Every cost grows with n and with p (ranks taken in order), and no allreduce is faster
than 2 (p-1)/p n/B on its narrowest link. For p that is not a power of two the
logarithms are rounded up: that covers folding the surplus ranks in, while the copy back
to them, a + n/B, is assumed to be hidden. NCCL's allreduce, below, is priced by the
model with which that library chooses its algorithm and protocol.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

# MPICH's MPIR_CVAR_ALLREDUCE_SHORT_MSG_SIZE and MPIR_CVAR_REDUCE_SHORT_MSG_SIZE; up to
# it latency counts, above it bandwidth. Open MPI 5's table
# (coll_tuned_decision_fixed.c, an average over its developers' clusters) puts the same
# switch, recursive doubling to Rabenseifner, between 128 bytes and 256 KiB, at 4 or 8
# KiB for most rank counts.
SHORT_MESSAGE = 2048
# MPICH's MPIR_CVAR_ALLGATHER_SHORT_MSG_SIZE, in bytes gathered
_SHORT_ALLGATHER = 81920
# bytes/s; assumption: PCIe 5.0 x16 has 63e9, the NVLinks of a P100 have 80e9
_NVLINK_FROM = 64e9
# of the bandwidth, for an allreduce by trees: NCCL's src/graph/tuning.cc
_TREE_SHARE = 0.92


class Level(NamedTuple):
    """One level of a group: `ranks` members connected by links of this latency (s) and bandwidth (bytes/s).

    `shared` is the bandwidth of each member if all ranks below it use the link at the
    same time, `total` the sum of the members' bandwidths, which differ where some links
    are slow; `across`: the members are nodes.
    """

    ranks: int
    latency_s: float
    bandwidth: float
    shared: float
    total: float
    across: bool


# inside a node, then between nodes; without levels of one rank
Levels = tuple[Level, ...]


def recursive_doubling(n: float, levels: Levels, gamma: float) -> float:
    """ceil(lg p) (a + n/B + n gamma): each rank exchanges the buffer with partners at doubling distances."""
    return sum(
        _lg(level.ranks) * (level.latency_s + n / level.shared + n * gamma)
        for level in levels
    )


def rabenseifner(n: float, levels: Levels, gamma: float) -> float:
    """2 ceil(lg p) a + 2 (p-1)/p n/B + (p-1)/p n gamma: recursive halving, then doubling, nearest partners first."""
    return _scatter_gather(n, levels, gamma, lambda ranks: 2 * _lg(ranks))


def hierarchical(n: float, levels: Levels, gamma: float) -> float:
    """Rings in rings, g ranks in each of m nodes.

    2(g-1) a1 + 2(g-1)/g n/B1 + 2(m-1) a2 + 2(m-1)/m (n/g)/B2, and (p-1)/p n gamma for
    the sums.
    """
    return _scatter_gather(n, levels, gamma, lambda ranks: 2 * (ranks - 1))


def ring(n: float, levels: Levels, gamma: float) -> float:
    """2(p-1) a + 2(p-1)/p n/B + (p-1)/p n gamma, at the pace of the slowest link; one flow crosses each card."""
    p, link = _ranks_of(levels), levels[-1]
    return 2 * (p - 1) * link.latency_s + (p - 1) / p * n * (
        2 / _slowest(levels) + gamma
    )


def tree(n: float, levels: Levels, gamma: float) -> float:
    """2 ceil(lg p)(a + n/B) + ceil(lg p) n gamma: binomial reduce, then binomial broadcast."""
    return sum(
        _lg(level.ranks) * (2 * (level.latency_s + n / level.bandwidth) + n * gamma)
        for level in levels
    )


def server(n: float, levels: Levels, gamma: float, shards: int = 1) -> float:
    """2a + max(2n/B, 2pn/(S B)): p workers push n bytes to, and pull them from, S shards on separate links."""
    # Pushed to the server and pulled from it, by all workers through its link.
    pushes = 2 * _ranks_of(levels) * n / (shards * _slowest(levels))
    return 2 * levels[-1].latency_s + max(_own_link(n, levels), pushes)


def sharded_server(n: float, levels: Levels, gamma: float) -> float:
    """2a + max(2n/B, 2pn/(m B)): the server's state in equal shards, one on each of m nodes."""
    return server(n, levels, gamma, levels[-1].ranks if levels[-1].across else 1)


def flexible_server(n: float, levels: Levels, gamma: float) -> float:
    """2a + max(2n/B, 2pn/sum_j B_j): as `sharded_server`, each shard as large as the bandwidth of its node allows.

    The cost of equal shards where all links are equally fast.
    """
    *below, top = levels
    if not top.across:
        return server(n, levels, gamma)
    total = min([top.total, *(top.ranks * level.bandwidth for level in below)])
    return 2 * top.latency_s + max(
        _own_link(n, levels), 2 * _ranks_of(levels) * n / total
    )


def broadcast(n: float, levels: Levels, gamma: float) -> float:
    """Binomial, ceil(lg p)(a + n/B), while short; scatter and allgather, 2 ceil(lg p) a + 2(p-1)/p n/B, above."""
    if n <= SHORT_MESSAGE:
        return sum(
            _lg(level.ranks) * (level.latency_s + n / level.bandwidth)
            for level in levels
        )
    return rabenseifner(n, levels, 0.0)


def reduce(n: float, levels: Levels, gamma: float) -> float:
    """Binomial, ceil(lg p)(a + n/B + n gamma), while short; above it reduce-scatter and gather cost an allreduce."""
    if n <= SHORT_MESSAGE:
        return sum(
            _lg(level.ranks) * (level.latency_s + n / level.bandwidth + n * gamma)
            for level in levels
        )
    return rabenseifner(n, levels, gamma)


def reduce_scatter(n: float, levels: Levels, gamma: float) -> float:
    """Sum n bytes of each rank, an n/p part at each: ceil(lg p) a + (p-1)/p (n/B + n gamma), recursive halving."""
    return _scatter_gather(n, levels, gamma, _lg, passes=1)


def allgather(n: float, levels: Levels, gamma: float) -> float:
    """n bytes from each rank: ceil(lg p) a + (p-1) n/B (Bruck) while short; (p-1)(a + n/B), a ring, above."""
    p = _ranks_of(levels)
    transfer = (p - 1) * n / _slowest(levels)
    if p * n <= _SHORT_ALLGATHER:
        return sum(_lg(level.ranks) * level.latency_s for level in levels) + transfer
    return (p - 1) * levels[-1].latency_s + transfer


def alltoallv(n: float, levels: Levels, gamma: float) -> float:
    """(p-1) a + n/B, n the largest number of bytes sent or received by a rank; ranks of a node share its cards."""
    return (_ranks_of(levels) - 1) * levels[-1].latency_s + n / min(
        level.shared for level in levels
    )


def _ranks_of(levels: Levels) -> int:
    """Return p, with every node as full as the fullest."""
    return math.prod(level.ranks for level in levels)


def _scatter_gather(
    n: float,
    levels: Levels,
    gamma: float,
    messages: Callable[[int], int],
    passes: int = 2,
) -> float:
    """Cost of reduce-scatter up the levels and allgather down: each level handles the share of the level below.

    One of the two `passes` is a reduce-scatter alone.
    """
    cost, share = 0.0, float(n)
    for level in levels:
        part = (level.ranks - 1) / level.ranks * share
        cost += messages(level.ranks) * level.latency_s + part * (
            passes / level.shared + gamma
        )
        share /= level.ranks
    return cost


def _own_link(n: float, levels: Levels) -> float:
    """Seconds in which a worker pushes n bytes and pulls as many, at the same time as the others of its node."""
    return 2 * n / min(level.shared for level in levels)


def _lg(ranks: int) -> int:
    return (ranks - 1).bit_length()


def _slowest(levels: Levels) -> float:
    return min(level.bandwidth for level in levels)


class _Latency(NamedTuple):
    """Seconds of the start, and of a hop over NVLink, PCIe and the network."""

    start: float
    hops: tuple[float, float, float]


class _Protocol(NamedTuple):
    """Share of the bandwidth, and latencies of ring and tree."""

    share: float
    ring: _Latency
    tree: _Latency


_PROTOCOLS = {
    "LL": _Protocol(
        0.5,
        _Latency(6.6e-6, (0.6e-6, 1.0e-6, 2.7e-6)),
        _Latency(6.8e-6, (0.6e-6, 1.0e-6, 5.0e-6)),
    ),
    "LL128": _Protocol(
        0.92,
        _Latency(14.0e-6, (1.9e-6, 2.5e-6, 4.0e-6)),
        _Latency(14.0e-6, (1.25e-6, 1.9e-6, 8.5e-6)),
    ),
    "Simple": _Protocol(
        1.0,
        _Latency(8.4e-6, (3.4e-6, 5.7e-6, 14.0e-6)),
        _Latency(0.0, (4.0e-6, 4.0e-6, 14.0e-6)),
    ),
}


def nccl(n: float, levels: Levels, gamma: float) -> float:
    """Return the least seconds among ring and tree with the protocols LL, LL128 and Simple; sums are included."""
    return min(nccl_times(n, levels).values())


def nccl_times(n: float, levels: Levels) -> dict[tuple[str, str], float]:
    """Return the seconds of each algorithm (ring or tree) and protocol between which NCCL chooses for n bytes."""
    inside = next((level for level in levels if not level.across), None)
    between = next((level for level in levels if level.across), None)
    p = _ranks_of(levels)
    g = inside.ranks if inside else 1
    m = between.ranks if between else 1
    bandwidth = min(level.shared * (g if level.across else 1) for level in levels)
    nvlink = inside is not None and inside.bandwidth >= _NVLINK_FROM
    kind = 0 if nvlink else 1
    # Stated latencies beyond the quickest hop of NCCL's table are added to each hop.
    quickest = _PROTOCOLS["LL"].ring.hops
    slower_hop = max(0.0, inside.latency_s - quickest[kind]) if inside else 0.0
    slower_far = max(0.0, between.latency_s - quickest[2]) if between else 0.0
    times = {}
    for name, protocol in _PROTOCOLS.items():
        if name == "LL128" and not nvlink:
            continue
        rate = protocol.share * bandwidth
        hop = protocol.ring.hops[kind] + slower_hop
        far = protocol.ring.hops[2] + slower_far
        latency = protocol.ring.start + 2 * (p - m) * hop + 2 * (m - 1) * far
        times["ring", name] = latency + 2 * (p - 1) / p * n / rate
        hop = protocol.tree.hops[kind] + slower_hop
        far = protocol.tree.hops[2] + slower_far
        latency = (
            protocol.tree.start + 2 * (g - 1) * hop + 2 * (m.bit_length() - 1) * far
        )
        times["tree", name] = latency + 2 * n / (_TREE_SHARE * rate)
    return times
