"""Seconds of each operation between virtual workers: cost of the engine and of the network.

Inside one node the measured engine cost of n bytes among m ranks is charged, scaled to p ranks by the network model.
Between nodes the same holds if the engine was measured there, on the links that are fitted to its allreduce. Otherwise
the cost is that of the network model, which assumes an algorithm, plus that of the engine's software: a small operation
ceil(lg p) times, and the excess of n bytes over that and over the links inside a node ((p-1)/p) / ((m-1)/m) times, the
ratio of transfers of each byte. Both factors are assumptions; the first may be 1 to p.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from scalebench.cluster.engine_costs import EngineCost, EngineCosts
from scalebench.cluster.fitting import fit_engine
from scalebench.cluster.network import Network
from scalebench.cluster.spec import Cluster

ONE_SIDED = "mpi-onesided"
SERVER, SERVER_BUSY = "mpi-server", "mpi-server-busy"  # request and reply; the server's part of them
_PRICES_KEPT = 1 << 14
_ByPair = Callable[[float, int, int], float]  # bytes, one worker, the other; looked up at every step
Floats = NDArray[np.float64]
Model = Callable[[int, Sequence[int]], float]


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
        fit = fit_engine(engines, engine)
        self._measured_on = network.cluster
        if fit is not None:
            self._measured_on = fit.on(measured_on or network.cluster)
            collective = fit.algorithm if network.collective == "auto" else network.collective
            network = Network(fit.on(network.cluster, measured_on), network.ranks_per_node, collective)
        self.network, self.engines = network, engines
        self.engine = engine
        self.gradients, self.cycle = list(gradients), cycle
        self._memo: dict[tuple[str, int, Sequence[int], str], float] = {}

    # Each cache is made when it is asked for: predictions make tens of thousands of `Costs`, most without messages.
    @cached_property
    def message(self) -> _ByPair:
        return lru_cache(_PRICES_KEPT)(self.network.message)

    @cached_property
    def occupancy(self) -> _ByPair:
        return lru_cache(_PRICES_KEPT)(self._occupancy)

    @cached_property
    def under_way(self) -> _ByPair:
        return lru_cache(_PRICES_KEPT)(self._under_way)

    @cached_property
    def exclusive(self) -> _ByPair:
        return lru_cache(_PRICES_KEPT)(self._exclusive)

    @cached_property
    def _within(self) -> Network:
        """All ranks on one node, as engines are measured there."""
        return Network(self.network.cluster, sys.maxsize, self.network.collective)

    @cached_property
    def _alike(self) -> Cluster:
        """The cluster as measured nodes are joined: by the fitted links, of which none is slow."""
        links = self._measured_on.links.model_copy(update={"slow": {}})
        return self._measured_on.model_copy(update={"links": links})

    def allreduce(self, nbytes: int, ranks: Sequence[int], engine: str = "") -> float:
        return self._priced(self.network.allreduce, nbytes, ranks, engine or self.engine)

    def reduce(self, nbytes: int, ranks: Sequence[int]) -> float:
        return self._own_or_alike(self.network.reduce, nbytes, ranks, "reduce")

    def reduce_scatter(self, nbytes: int, ranks: Sequence[int]) -> float:
        return self._own_or_alike(self.network.reduce_scatter, nbytes, ranks, "reduce-scatter")

    def broadcast(self, nbytes: int, ranks: Sequence[int]) -> float:
        return self._own_or_alike(self.network.broadcast, nbytes, ranks, "broadcast")

    def linear_reduce(self, nbytes: int, ranks: Sequence[int]) -> float:
        return self._own_or_alike(self.network.linear_reduce, nbytes, ranks, "linear-reduce")

    def linear_broadcast(self, nbytes: int, ranks: Sequence[int]) -> float:
        return self._own_or_alike(self.network.linear_broadcast, nbytes, ranks, "linear-broadcast")

    def allgather(self, nbytes: int, ranks: Sequence[int]) -> float:
        return self._own_or_alike(self.network.allgather, nbytes, ranks, "allgather")

    def barrier(self, ranks: Sequence[int]) -> float:
        return self.allreduce(0, ranks)

    def alltoallv(self, sizes: Sequence[Sequence[int]], ranks: Sequence[int]) -> float:
        """Return the cost of an exchange of `sizes[i][j]` bytes from worker i to j, by the busiest worker."""
        sent = [sum(row) - row[i] for i, row in enumerate(sizes)]
        received = [sum(column) - column[j] for j, column in enumerate(zip(*sizes, strict=True))]
        measured = self.cost_of(self.engine)
        small = measured.small_s(_levels(len(ranks))) if measured else 0.0
        return self.network.alltoallv(max(*sent, *received), ranks) + small

    def adding(self, nbytes: int) -> float:
        """Return n gamma, the seconds in which a worker adds `nbytes` to a vector."""
        return nbytes * self.network.cluster.reduction.seconds_per_byte

    def _occupancy(self, nbytes: float, worker: int, host: int) -> float:
        """Return seconds in which a request or reply of `nbytes` occupies a server at `host`: link and software."""
        busy = self.cost_of(SERVER_BUSY)
        if busy is not None and self.network.same_node(worker, host):
            return busy.seconds(nbytes) / 2
        link = self.message(int(nbytes), worker, host) - self.message(0, worker, host)
        return link + (busy.alpha_s / 2 if busy else 0.0)

    def _under_way(self, nbytes: float, worker: int, host: int) -> float:
        """Return seconds of a request or reply beyond `_occupancy`, in which the server may serve others."""
        whole, busy = self.cost_of(SERVER), self.cost_of(SERVER_BUSY)
        link = self.message(0, worker, host)
        if whole is None or busy is None:
            return link
        if self.network.same_node(worker, host):
            return max(0.0, whole.seconds(nbytes) - busy.seconds(nbytes)) / 2
        return link + max(0.0, whole.alpha_s - busy.alpha_s) / 2

    def _exclusive(self, nbytes: int, worker: int, host: int) -> float:
        """Return seconds of lock, fetch, store and unlock of a shared vector of `nbytes` at `host`."""
        measured = self.cost_of(ONE_SIDED)
        if measured is not None and self.network.same_node(worker, host):
            return measured.seconds(nbytes)
        crossing = 2 * self.message(nbytes, worker, host) + 2 * self.message(0, worker, host)
        return crossing + (measured.alpha_s if measured else 0.0)

    def cost_of(self, engine: str, ranks: int = 2, nodes: int = 1) -> EngineCost | None:
        """Return the measured cost of `engine` on one node, or between several; None if not measured."""
        return self.engines.of(engine, ranks, nodes) if self.engines.has(engine, nodes) else None

    def _priced(self, model: Model, nbytes: int, ranks: Sequence[int], entry: str) -> float:
        """Return the cost by `model` of `nbytes` among `ranks`, corrected by the measured `entry`."""
        key = (model.__name__, nbytes, ranks, entry)
        seconds = self._memo.get(key)
        if seconds is None:
            seconds = self._memo[key] = self._price(model, nbytes, ranks, entry)
        return seconds

    def _price(self, model: Model, nbytes: int, ranks: Sequence[int], entry: str) -> float:
        modelled, nodes = model(nbytes, ranks), self.network.nodes_of(ranks)
        if len(ranks) < 2:
            return modelled
        measured = self.cost_of(entry, len(ranks), nodes)
        if measured is not None:
            alike = self._as_measured(model, nbytes, ranks, measured)
            return measured.seconds(nbytes) * (modelled / alike if alike > 0 else 1.0)
        inside = self.cost_of(entry, len(ranks))
        return modelled + (self._software(inside, model.__name__, nbytes, len(ranks)) if inside else 0.0)

    def _as_measured(self, model: Model, nbytes: int, ranks: Sequence[int], measured: EngineCost) -> float:
        """Return model seconds at the ranks and nodes of `measured`."""
        if measured.nodes == 1:
            return model(nbytes, ranks[: measured.ranks])
        place = Network(self._alike, -(-measured.ranks // measured.nodes), self.network.collective)
        priced: Model = getattr(place, model.__name__)
        return priced(nbytes, range(measured.ranks))

    def _own_or_alike(self, model: Model, nbytes: int, ranks: Sequence[int], operation: str) -> float:
        """Return the cost by the engine's entry of `operation`, else in proportion to its allreduce."""
        entry = f"{self.engine}-{operation}"
        if self.engines.has(entry) or self.engines.has(entry, self.network.nodes_of(ranks)):
            return self._priced(model, nbytes, ranks, entry)
        whole = self.network.allreduce(nbytes, ranks)
        return self.allreduce(nbytes, ranks) * (model(nbytes, ranks) / whole) if whole > 0 else 0.0

    def _software(self, measured: EngineCost, operation: str, nbytes: int, ranks: int) -> float:
        """Return the engine's addition to the network time among `ranks` on several nodes."""
        links: Model = getattr(self._within, operation)
        inside = range(measured.ranks)
        per_byte = measured.seconds(nbytes) - measured.alpha_s - (links(nbytes, inside) - links(0, inside))
        messages, sendings = _levels(ranks), 1.0
        if measured.ranks > 1:
            sendings = ((ranks - 1) / ranks) / ((measured.ranks - 1) / measured.ranks)
        if operation.startswith("linear"):  # the root takes part in every message
            messages, sendings = ranks - 1, (ranks - 1) / max(1, measured.ranks - 1)
        return measured.small_s(messages) + max(0.0, per_byte) * sendings


class Prices:
    """Costs of communication on M machines; those that share theirs ask them once."""

    def __init__(self, costs: Sequence[Costs]) -> None:
        distinct = {id(each): each for each in costs}
        places = {key: place for place, key in enumerate(distinct)}
        self.costs, self.distinct = list(costs), list(distinct.values())
        self._which = np.array([places[id(each)] for each in costs])
        self._kept: dict[object, Floats] = {}

    def __len__(self) -> int:
        return len(self.costs)

    def each(self, seconds: Callable[[Costs], float], *key: object) -> Floats:
        """Return `seconds` of the costs of each machine, (M,), which `key` identifies."""
        if key not in self._kept:
            self._kept[key] = np.array([seconds(costs) for costs in self.distinct])[self._which]
        return self._kept[key]

    def collective(self, kind: str, nbytes: int, members: Sequence[int], root: int = 0) -> Floats:
        """Return the seconds of a collective, named as the method of `Costs`, among `members`, (M,)."""
        if root:
            members = (members[root], *members[:root], *members[root + 1 :])
        if kind == "barrier":
            return self.each(lambda costs: costs.barrier(members), kind, members)
        return self.each(lambda costs: getattr(costs, kind)(nbytes, members), kind, nbytes, members)

    def message(self, nbytes: int, source: int, to: int) -> Floats:
        """Return the seconds of a message between two workers, (M,)."""
        return self.each(lambda costs: costs.message(nbytes, source, to), "message", nbytes, source, to)

    def engine_allreduce(self, nbytes: int, ranks: Sequence[int], engine: str) -> Floats:
        """Return the seconds of an allreduce by `engine`, (M,)."""
        return self.each(lambda costs: costs.allreduce(nbytes, ranks, engine), engine, nbytes, ranks)

    def of_engine(self, engine: str, name: str) -> Floats:
        """Return a measured time of an engine, zero where it was not measured, (M,)."""
        return self.each(lambda costs: getattr(costs.cost_of(engine), name, 0.0), engine, name)


def _levels(ranks: int) -> int:
    return (ranks - 1).bit_length()
