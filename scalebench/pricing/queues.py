"""Exchanges with a server or a shared model, by the steady state of a closed queue of equal workers.

A round is the longer one of a worker's own cycle and of serving all. Arrays are
(machines, workers that stand for all).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from scalebench.cluster.operation import Kind, Operation
from scalebench.pricing.costs import Costs, Prices
from scalebench.pricing.program import Program
from scalebench.pricing.schedule import Event, Ints

Floats = NDArray[np.float64]


class Serving(NamedTuple):
    """Parameter server: `shards` answer side by side, after each push or, `in_rounds`, when all pushes have come."""

    shards: int = 1
    in_rounds: bool = False


class Queue:
    """The queue of `workers` for one server, or for shared models; `update` (M,) are seconds of an optimizer's step."""

    def __init__(
        self,
        prices: Prices,
        programs: Sequence[Program],
        workers: int,
        update: Floats,
        serving: Serving | None,
    ) -> None:
        self._prices, self._workers, self._serving = (
            prices,
            workers,
            serving or Serving(),
        )
        events = [
            step.event
            for program in programs
            for epoch in program.epochs
            for step in epoch.steps
        ]
        hosts = {
            event.operation.members[1]
            for event in events
            if event is not None and event.kind == Kind.ACCESS
        }
        self._one_host = len(hosts) == 1  # one for all, or one at each worker
        # end of the exchange before, by first worker of a program
        self._served: dict[int, Floats] = {}
        self._update = update[:, None]
        # where workers wait for one another
        self.bound = np.zeros(len(prices), dtype=bool)

    def exchange(self, event: Event, now: Floats, ranks: Ints) -> tuple[Floats, Floats]:
        """Return the end of an exchange that `ranks` begin `now`, and its seconds without others."""
        before = self._served.get(int(ranks[0]))
        until, alone = (self._access if event.kind == Kind.ACCESS else self._request)(
            event.operation, now, before
        )
        self._served[int(ranks[0])] = until
        return until, alone

    def _access(
        self, access: Operation, now: Floats, before: Floats | None
    ) -> tuple[Floats, Floats]:
        """Exclusive access to a shared model; where one host serves all, between two of a worker lie those of all."""
        access = access._replace(members=(self._workers - 1, access.members[1]))
        alone = everyone = self._prices.time(access)[:, None]
        if self._one_host:
            everyone = self._of_all(access)
        return self._queued(now, before, alone, everyone), alone

    def _request(
        self, request: Operation, now: Floats, before: Floats | None
    ) -> tuple[Floats, Floats]:
        """Push to a server and its reply."""
        shards, ends = self._serving.shards, (self._workers - 1, request.members[1])
        served = self._update / shards
        serve = request._replace(nbytes=request.nbytes / shards, members=ends)
        travel = 2 * self._prices.time(serve._replace(kind=Kind.TRAVEL))[:, None]
        busy, all_busy = self._prices.time(serve)[:, None], self._of_all(serve)
        alone = travel + 2 * busy
        if not self._serving.in_rounds:
            everyone = 2 * all_busy + self._workers * served
            return self._queued(now, before, alone + served, everyone), alone + served
        if before is None:
            return now + travel + 2 * all_busy + served, alone
        # One reply after another: so come the next pushes, each served while others
        # compute.
        self.bound |= (all_busy > now - before).any(axis=1)
        after = np.maximum(
            now + travel + busy + served + all_busy, before + 2 * all_busy + served
        )
        return after, alone

    def _queued(
        self, now: Floats, before: Floats | None, alone: Floats, everyone: Floats
    ) -> Floats:
        """Return the end of an exchange of `alone` seconds, at least `everyone` after the worker's one before."""
        if before is None:
            return now + everyone
        after = np.maximum(now + alone, before + everyone)
        self.bound |= (after > (now + alone) * (1 + 1e-12)).any(axis=1)
        return after

    def _of_all(self, farthest: Operation) -> Floats:
        """Return the sum over all workers of an operation, which differ by node only, from that of the last worker."""
        host = farthest.members[1]

        def total(costs: Costs) -> float:
            inside = min(costs.network.ranks_per_node, self._workers)
            near = sum(
                costs.time(farthest._replace(members=(rank, host)))
                for rank in range(inside)
            )
            outside = self._workers - inside
            return near + (outside * costs.time(farthest) if outside else 0.0)

        return self._prices.each(total, "of all", farthest)[:, None]
