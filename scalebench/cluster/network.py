"""Seconds of messages and collectives on the links of a cluster, by placement of the ranks on nodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from scalebench.cluster import collectives
from scalebench.cluster.cluster_file import Cluster
from scalebench.cluster.operation import Kind, Members, Operation
from scalebench.errors import ClusterError, nearest
from scalebench.study.choices import NCCL

# bytes, levels, seconds per byte reduced
Formula = Callable[[float, collectives.Levels, float], float]

ALLREDUCE: dict[str, Formula] = {
    "ring": collectives.ring,
    "recursive_doubling": collectives.recursive_doubling,
    # reduce-scatter by halving, allgather by doubling: the same algorithm
    "recursive_halving": collectives.rabenseifner,
    "rabenseifner": collectives.rabenseifner,
    # Besch and Pohl's logarithmic tree reduces and broadcasts binomially
    "binomial": collectives.tree,
    "tree": collectives.tree,
    "hierarchical": collectives.hierarchical,
    "server": collectives.server,
    "sharded_server": collectives.sharded_server,
    "flexible_server": collectives.flexible_server,
    NCCL: collectives.nccl,
}

FORMULAS: dict[Kind, Formula] = {  # of other collectives
    Kind.REDUCE: collectives.reduce,
    Kind.REDUCE_SCATTER: collectives.reduce_scatter,
    Kind.BROADCAST: collectives.broadcast,
    Kind.ALLGATHER: collectives.allgather,
    Kind.ALLTOALL: collectives.alltoallv,
    Kind.BARRIER: collectives.recursive_doubling,  # of no bytes
}


def choose(n: float) -> str:
    """Return the allreduce chosen by an MPI library for `n` bytes: MPICH's rule and threshold.

    Both algorithms are priced level by level, as in the node-aware modes of MPI
    libraries.
    """
    return "recursive_doubling" if n <= collectives.SHORT_MESSAGE else "rabenseifner"


def allreduce_name(collective: str) -> str:
    """Return a description of the allreduce `collective`."""
    if collective == "auto":
        return f"recursive doubling up to {collectives.SHORT_MESSAGE // 1024} KiB and Rabenseifner's algorithm above"
    return {NCCL: "NCCL's choice of ring or tree"}.get(
        collective, collective.replace("_", " ")
    )


class Placement(NamedTuple):
    """Nodes of a group, in order of first use by a rank number, and the number of ranks on the fullest one."""

    nodes: range | NDArray[np.int64]
    fullest: int


def place(group: Members, ranks_per_node: int) -> Placement:
    """Return the placement of `group`, with worker i on node i // ranks_per_node.

    In constant time for a range of consecutive ranks, or of strides that are multiples
    or divisors of a node's ranks; vectorised otherwise.
    """
    if isinstance(group, range) and group.step > 0 and len(group):
        step = group.step
        first, last = group[0] // ranks_per_node, group[-1] // ranks_per_node
        # One rank on each node that it meets.
        if step % ranks_per_node == 0:
            return Placement(range(first, last + 1, step // ranks_per_node), 1)
        if ranks_per_node % step == 0:
            # Equally many ranks on each node, but for the first and the last.
            whole = ranks_per_node // step
            # on the first node, if there are others
            head = -(-((first + 1) * ranks_per_node - group[0]) // step)
            tail = (group[-1] - last * ranks_per_node) // step + 1
            between = last - first
            if between == 0:
                fullest = len(group)
            elif between == 1:
                fullest = max(head, tail)
            else:  # a node between the first and the last is full
                fullest = whole
            return Placement(range(first, last + 1), fullest)
    nodes, counts = np.unique(
        np.asarray(group, dtype=np.int64) // ranks_per_node, return_counts=True
    )
    return Placement(nodes, int(counts.max()))


class Network:
    """Costs (s) on the links of a cluster, with worker i on node i // ranks_per_node.

    `collective` is the allreduce of operations that name none, by default that of
    `choose`.
    """

    def __init__(
        self,
        cluster: Cluster,
        ranks_per_node: int | None = None,
        collective: str = "auto",
    ) -> None:
        self.cluster = cluster
        self.ranks_per_node = ranks_per_node or cluster.node.workers_per_node
        self.collective = self._known(collective)
        self._placements: dict[Members, Placement] = {}
        self._levels: dict[Members, collectives.Levels] = {}
        self._times: dict[Operation, float] = {}

    def same_node(self, a: int, b: int) -> bool:
        """Return True if workers `a` and `b` share a node."""
        return a // self.ranks_per_node == b // self.ranks_per_node

    def nodes_of(self, ranks: Members) -> int:
        """Return the number of nodes with `ranks`."""
        return len(self._placement(ranks).nodes)

    def shape_of(self, ranks: Members) -> tuple[int, int, int]:
        """Return the number of `ranks`, of their nodes, and of the ranks on the fullest node, on which costs depend."""
        nodes, fullest = self._placement(ranks)
        return len(ranks), len(nodes), fullest

    def time(self, operation: Operation) -> float:
        """Return the seconds of an operation; those of a collective are computed once."""
        if operation.kind == Kind.SEND:
            return self._message(operation)
        seconds = self._times.get(operation)
        if seconds is None:
            find = self._linear if operation.linear else self._by_formula
            seconds = self._times[operation] = find(operation)
        return seconds

    def _message(self, operation: Operation) -> float:
        """Return a + n/B of the link between two workers; zero for a message to oneself."""
        src, dst = operation.members
        if src == dst:
            return 0.0
        links = self.cluster.links
        if self.same_node(src, dst):
            return (
                links.intra.latency_s
                + operation.nbytes / links.intra.bandwidth_bytes_per_s
            )
        bandwidth = links.bandwidth_between(
            (src // self.ranks_per_node, dst // self.ranks_per_node)
        )
        return links.inter.latency_s + operation.nbytes / bandwidth

    def _by_formula(self, operation: Operation) -> float:
        levels = self._levels.get(operation.members)
        if levels is None:
            levels = self._levels[operation.members] = self._levels_of(
                operation.members
            )
        if not levels:
            return 0.0
        return self._formula(operation)(
            operation.nbytes, levels, self.cluster.reduction.seconds_per_byte
        )

    def _formula(self, operation: Operation) -> Formula:
        if operation.kind != Kind.ALLREDUCE:
            return FORMULAS[operation.kind]
        algorithm = self._known(operation.algorithm or self.collective)
        return ALLREDUCE[choose(operation.nbytes) if algorithm == "auto" else algorithm]

    def _linear(self, operation: Operation) -> float:
        """Return (p-1)(a + n/B): messages between the root and each other member over their own link.

        A reduction adds n gamma to each, which the root sums.
        """
        root, *others = operation.root_first().members
        seconds = self._messages_from(
            root, np.asarray(others, dtype=np.int64), operation.nbytes
        )
        # added one after another
        messages = float(np.cumsum(seconds)[-1]) if len(seconds) else 0.0
        gamma = (
            self.cluster.reduction.seconds_per_byte
            if operation.kind == Kind.REDUCE
            else 0.0
        )
        return messages + len(others) * operation.nbytes * gamma

    def _messages_from(
        self, root: int, others: NDArray[np.int64], nbytes: float
    ) -> NDArray[np.float64]:
        """Return seconds of a message of `nbytes` between `root` and each of the `others`."""
        links, home = self.cluster.links, root // self.ranks_per_node
        nodes = others // self.ranks_per_node
        inside = links.intra.latency_s + nbytes / links.intra.bandwidth_bytes_per_s
        seconds = np.full(
            len(nodes),
            links.inter.latency_s + nbytes / links.bandwidth_between((home,)),
        )
        for node in links.slow_nodes - {home}:
            seconds[nodes == node] = (
                links.inter.latency_s + nbytes / links.bandwidth_between((home, node))
            )
        seconds[nodes == home] = inside
        return seconds

    def _placement(self, group: Members) -> Placement:
        placement = self._placements.get(group)
        if placement is None:
            placement = self._placements[group] = place(group, self.ranks_per_node)
        return placement

    def _levels_of(self, group: Members) -> collectives.Levels:
        """Return the levels of a group; every node is priced as the fullest one, which keeps costs monotone."""
        nodes, inside = self._placement(group)
        intra, inter = self.cluster.links.intra, self.cluster.links.inter
        growth = self.cluster.links.congestion_among(len(nodes))
        # A switch or shared memory serves all pairs of a node at once; network cards
        # are shared by its ranks.
        across = self.cluster.links.bandwidth_between(nodes) / growth
        total = self.cluster.links.total_bandwidth(nodes) / growth
        left = across * min(1.0, self.cluster.node.network_cards / inside)
        within = intra.bandwidth_bytes_per_s / min(inside, intra.shared_by)
        levels = (
            collectives.Level(
                inside,
                intra.latency_s,
                intra.bandwidth_bytes_per_s,
                within,
                inside * within,
                across=False,
            ),
            collectives.Level(
                len(nodes), inter.latency_s * growth, across, left, total, across=True
            ),
        )
        return tuple(level for level in levels if level.ranks > 1)

    @staticmethod
    def _known(collective: str) -> str:
        if collective != "auto" and collective not in ALLREDUCE:
            raise ClusterError(
                f"unknown collective {collective!r}; {nearest(collective, [*ALLREDUCE, 'auto'])}"
            )
        return collective
