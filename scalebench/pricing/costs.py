"""Seconds of each operation between virtual workers: cost of the engine and of the network.

Inside one node the measured engine cost of n bytes among m ranks is charged, scaled to
p ranks by the network model. Between nodes the same holds if the engine was measured
there, on the links that are fitted to its allreduce. Otherwise the cost is that of the
network model, which assumes an algorithm, plus that of the engine's software: a small
operation ceil(lg p) times, and the excess of n bytes over that and over the links
inside a node ((p-1)/p) / ((m-1)/m) times, the ratio of transfers of each byte. Both
factors are assumptions; the first may be 1 to p.

An engine without ranks (tasks) sends the n bytes of each worker to its process and back
through one command, which has p of them in hand one after the other: T = t_1(n) + (p -
1) (t_2(n) - t_1(n)), by the entries of 1 and 2 workers, and 2 (a + n / B) for each
worker on another node than the command's. A stated entry knows few bytes only, so that
the links inside the command's node are charged, too. All that is exchanged lies in the
command then, and costs no more.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from scalebench.cluster.cluster_file import Cluster
from scalebench.cluster.engine_costs import EngineCost, EngineCosts
from scalebench.cluster.link_fit import fit_engine
from scalebench.cluster.network import Network
from scalebench.cluster.operation import Kind, Operation
from scalebench.comm.engines import NAMES, named

ONE_SIDED = "mpi-onesided"
SERVER, SERVER_BUSY = (
    "mpi-server",
    "mpi-server-busy",
)  # request and reply; the server's part of them
_TIMES_KEPT = 1 << 14
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class GradientTensor:
    """Gradient of a parameter: size, and share of the backward pass after which it is complete."""

    nbytes: int
    release: float


class Costs:
    """Costs of one run, whose collectives use `engine`; the links of the network may differ from `measured_on`.

    `cycle` multiplies the time between the turns of Horovod's loop.
    """

    def __init__(
        self,
        network: Network,
        engines: EngineCosts,
        engine: str,
        gradients: Sequence[GradientTensor] = (),
        measured_on: Cluster | None = None,
        cycle: float = 1.0,
    ) -> None:
        # Links that a cluster file states are not those that were measured: latency,
        # bandwidth and congestion are fitted, if the engine was measured between nodes.
        fit = fit_engine(engines, engine)
        self._measured_on = network.cluster
        if fit is not None:
            self._measured_on = fit.on(measured_on or network.cluster)
            collective = (
                fit.algorithm if network.collective == "auto" else network.collective
            )
            # The changes of a what-if apply to the fitted links: `measured_on` has them
            # unchanged.
            network = Network(
                fit.on(network.cluster, measured_on), network.ranks_per_node, collective
            )
        self.network, self.engines = network, engines
        self.engine = engine
        self.gradients, self.cycle = list(gradients), cycle

    @cached_property
    def time(self) -> Callable[[Operation], float]:
        """Seconds of an operation, as a function that remembers them.

        It is made when it is asked for: predictions make tens of thousands of `Costs`,
        most without communication.
        """
        return lru_cache(_TIMES_KEPT)(self._time)

    def _time(self, operation: Operation) -> float:
        # Before the table by kind: without ranks there are no collectives.
        if self._through_command is not None:
            return self._round_of_blocks(operation, *self._through_command)
        # Behind this line the first member is the root.
        return _SECONDS[operation.kind](self, operation.root_first())

    @cached_property
    def _within(self) -> Network:
        """All ranks on one node, as engines are measured there."""
        # No node is so large that a rank lies on a second one.
        return Network(self.network.cluster, sys.maxsize, self.network.collective)

    @cached_property
    def _alike(self) -> Cluster:
        """The cluster as measured nodes are joined: by the fitted links, of which none is slow."""
        links = self._measured_on.links.model_copy(update={"slow": {}})
        return self._measured_on.model_copy(update={"links": links})

    @cached_property
    def _through_command(self) -> tuple[EngineCost, EngineCost] | None:
        """Costs of one and of two workers if all that workers exchange passes through one command."""
        if (
            self.engine not in NAMES
            # Engines with ranks exchange among these, whatever their backend.
            or named(self.engine).has_ranks
            or not self.engines.has(self.engine)
        ):
            return None
        return self.engines.of(self.engine, 1), self.engines.of(self.engine, 2)

    def _round_of_blocks(
        self, operation: Operation, alone: EngineCost, two: EngineCost
    ) -> float:
        """Return seconds of the blocks before an exchange on their ways to processes and back."""
        if operation.kind not in _AFTER_BLOCKS:
            return 0.0
        first = alone.seconds(operation.nbytes)
        workers = (
            operation.members[:1]
            if operation.kind == Kind.ACCESS
            else operation.members
        )
        # One command handles all blocks, one after the other: each further worker adds
        # what the second one did.
        by_engine = first + (len(workers) - 1) * max(
            0.0, two.seconds(operation.nbytes) - first
        )
        ways = [
            self._way(operation.nbytes, worker, charges_near=alone.stated)
            for worker in workers
        ]
        # There and back.
        return by_engine + 2 * sum(ways)

    def _way(self, nbytes: float, worker: int, *, charges_near: bool) -> float:
        """Return seconds of the link between a worker and the command, which is on the node of worker 0."""
        if not self.network.same_node(0, worker):
            return self.network.time(Operation(Kind.SEND, nbytes, (0, worker)))
        near = self.network.cluster.links.intra
        return (
            near.latency_s + nbytes / near.bandwidth_bytes_per_s
            if charges_near
            else 0.0
        )

    def _message(self, operation: Operation) -> float:
        """Return the cost of a message, by the engine if its messages were measured, else by the network alone."""
        entry = f"{self.engine}-send"
        return (
            self._corrected(operation, entry)
            if self.engines.has(entry)
            else self.network.time(operation)
        )

    def _by_engine(self, operation: Operation) -> float:
        """Return the cost of an allreduce, by the engine that carries it."""
        return self._corrected(operation, operation.engine or self.engine)

    def _barrier(self, operation: Operation) -> float:
        # No engine was measured at barriers; an allreduce of nothing waits for
        # everyone, too.
        return self.time(operation._replace(kind=Kind.ALLREDUCE, nbytes=0))

    def _own_or_alike(self, operation: Operation) -> float:
        """Return the cost by the engine's entry of the operation, else in proportion to its allreduce."""
        entry = f"{self.engine}-{'linear-' if operation.linear else ''}{operation.kind.replace('_', '-')}"
        if self.engines.has(entry) or self.engines.has(
            entry, self.network.nodes_of(operation.members)
        ):
            return self._corrected(operation, entry)
        allreduce = Operation(Kind.ALLREDUCE, operation.nbytes, operation.members)
        # An engine's software has its share in every collective: the ratio of the
        # model's times says what kind and algorithm change.
        whole = self.network.time(allreduce)
        return (
            self.time(allreduce) * (self.network.time(operation) / whole)
            if whole > 0
            else 0.0
        )

    def _exchange(self, operation: Operation) -> float:
        """Return the cost of a full exchange, by the busiest member."""
        measured = self.cost_of(self.engine)
        # Its messages differ in size, so that no measured entry fits: the model has the
        # links, the engine its software.
        small = measured.small_s(_levels(len(operation.members))) if measured else 0.0
        return self.network.time(operation) + small

    def _occupancy(self, operation: Operation) -> float:
        """Return seconds in which a request or reply occupies a server: link and software."""
        busy = self.cost_of(SERVER_BUSY)
        if busy is not None and self.network.same_node(*operation.members):
            # Measured was a request with its reply, of which this is one.
            return busy.seconds(operation.nbytes) / 2
        # Bytes occupy the link of the server; latency passes beside other requests.
        link = self._link(operation, int(operation.nbytes)) - self._link(operation, 0)
        return link + (busy.alpha_s / 2 if busy else 0.0)

    def _under_way(self, operation: Operation) -> float:
        """Return seconds of a request or reply beyond `_occupancy`, in which the server may serve others."""
        whole, busy = self.cost_of(SERVER), self.cost_of(SERVER_BUSY)
        link = self._link(operation, 0)
        if whole is None or busy is None:
            return link
        if self.network.same_node(*operation.members):
            return (
                max(
                    0.0,
                    whole.seconds(operation.nbytes) - busy.seconds(operation.nbytes),
                )
                / 2
            )
        return link + max(0.0, whole.alpha_s - busy.alpha_s) / 2

    def _exclusive(self, operation: Operation) -> float:
        """Return seconds of lock, fetch, store and unlock of a shared vector."""
        measured = self.cost_of(ONE_SIDED)
        if measured is not None and self.network.same_node(*operation.members):
            return measured.seconds(operation.nbytes)
        # Fetch and store carry the vector, lock and unlock nothing.
        crossing = 2 * self._link(operation, operation.nbytes) + 2 * self._link(
            operation, 0
        )
        return crossing + (measured.alpha_s if measured else 0.0)

    def _link(self, operation: Operation, nbytes: float) -> float:
        """Return seconds of a message of `nbytes` between the two members."""
        return self.time(Operation(Kind.SEND, nbytes, operation.members))

    def adding(self, nbytes: float) -> float:
        """Return n gamma, the seconds in which a worker adds `nbytes` to a vector."""
        return nbytes * self.network.cluster.reduction.seconds_per_byte

    def cost_of(self, engine: str, ranks: int = 2, nodes: int = 1) -> EngineCost | None:
        """Return the measured cost of `engine` on one node, or between several; None if not measured."""
        return (
            self.engines.of(engine, ranks, nodes)
            if self.engines.has(engine, nodes)
            else None
        )

    def _corrected(self, operation: Operation, entry: str) -> float:
        """Return the cost by the network model, corrected by the measured `entry`."""
        members = operation.members
        modelled, ranks, nodes = (
            self.network.time(operation),
            len(members),
            self.network.nodes_of(members),
        )
        # A lone worker sends nothing, so that no measured entry counts.
        if ranks < 2:
            return modelled
        measured = self.cost_of(entry, ranks, nodes)
        if measured is not None:
            alike = self._as_measured(operation, measured)
            # The model says how the cost grows from the measured ranks to these; the
            # measurement says how large it is.
            return measured.seconds(operation.nbytes) * (
                modelled / alike if alike > 0 else 1.0
            )
        # Not measured between nodes: only the software, as found inside a node, is
        # added to the links.
        inside = self.cost_of(entry, ranks)
        return modelled + (self._software(inside, operation) if inside else 0.0)

    def _as_measured(self, operation: Operation, measured: EngineCost) -> float:
        """Return model seconds at the ranks and nodes of `measured`."""
        if measured.nodes == 1:
            # This operation is inside a node, too, where any members cost the same.
            return self.network.time(
                operation._replace(members=operation.members[: measured.ranks])
            )
        place = Network(
            self._alike, -(-measured.ranks // measured.nodes), self.network.collective
        )
        return place.time(operation._replace(members=range(measured.ranks)))

    def _software(self, measured: EngineCost, operation: Operation) -> float:
        """Return the engine's addition to the network time on several nodes."""
        ranks, inside = (
            len(operation.members),
            operation._replace(members=range(measured.ranks)),
        )
        # The links inside a node are in the measured time; those between nodes replace
        # them.
        links = self._within.time(inside) - self._within.time(inside._replace(nbytes=0))
        per_byte = measured.seconds(operation.nbytes) - measured.alpha_s - links
        messages, sendings = _levels(ranks), 1.0
        # In a ring as in halving and doubling a rank sends 2 (p - 1) / p of the bytes:
        # the ratio of both counts of ranks.
        if measured.ranks > 1:
            sendings = ((ranks - 1) / ranks) / ((measured.ranks - 1) / measured.ranks)
        if operation.linear:  # the root takes part in every message
            messages, sendings = ranks - 1, (ranks - 1) / max(1, measured.ranks - 1)
        return measured.small_s(messages) + max(0.0, per_byte) * sendings


# Exchanges for which the blocks before them have come back; a broadcast behind a
# reduction finds everything there.
_AFTER_BLOCKS = (Kind.ALLREDUCE, Kind.REDUCE, Kind.ALLGATHER, Kind.ACCESS)

_SECONDS: dict[Kind, Callable[[Costs, Operation], float]] = {
    Kind.ALLREDUCE: Costs._by_engine,
    Kind.REDUCE: Costs._own_or_alike,
    Kind.REDUCE_SCATTER: Costs._own_or_alike,
    Kind.BROADCAST: Costs._own_or_alike,
    Kind.ALLGATHER: Costs._own_or_alike,
    Kind.ALLTOALL: Costs._exchange,
    Kind.BARRIER: Costs._barrier,
    Kind.SEND: Costs._message,
    Kind.ACCESS: Costs._exclusive,
    Kind.SERVE: Costs._occupancy,
    Kind.TRAVEL: Costs._under_way,
}


class Prices:
    """Costs of communication on M machines; those that share theirs ask them once."""

    def __init__(self, costs: Sequence[Costs]) -> None:
        places = {each: place for place, each in enumerate(dict.fromkeys(costs))}
        self.costs, self.distinct = list(costs), list(places)
        # Machines of one what-if share their network in thousands of cells.
        self._which = np.array([places[each] for each in costs])
        self._kept: dict[object, Floats] = {}

    def __len__(self) -> int:
        return len(self.costs)

    def each(self, seconds: Callable[[Costs], float], *key: object) -> Floats:
        """Return `seconds` of the costs of each machine, (M,), which `key` identifies."""
        # A program asks for the same operation in every step.
        if key not in self._kept:
            self._kept[key] = np.array([seconds(costs) for costs in self.distinct])[
                self._which
            ]
        return self._kept[key]

    def time(self, operation: Operation) -> Floats:
        """Return the seconds of an operation, (M,)."""
        return self.each(lambda costs: costs.time(operation), operation)

    def of_engine(self, engine: str, name: str) -> Floats:
        """Return a measured time of an engine, zero where it was not measured, (M,)."""
        # cost_of is None for what was not measured, which has no such name either.
        return self.each(
            lambda costs: getattr(costs.cost_of(engine), name, 0.0), engine, name
        )


def _levels(ranks: int) -> int:
    return (ranks - 1).bit_length()
