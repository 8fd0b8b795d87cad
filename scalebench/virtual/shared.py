"""Shared model and server of virtual workers, accessed one at a time in the order of virtual time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

from torch import Tensor

from scalebench.cluster.operation import Kind, Operation
from scalebench.comm.base import ServerRule
from scalebench.system.clock import Task
from scalebench.training.outcome import Lap
from scalebench.virtual.communicator import VirtualCommunicator


class VirtualStore:
    """Shared model behind the `VirtualShared` of all workers."""

    def __init__(self, initial: Tensor, host: int = 0) -> None:
        self.model = initial.clone()
        self.host = host
        self.merges = 0
        self.free_at = 0.0
        self.held = False
        # workers that found it held by a worker waiting for another model
        self.queue: deque[int] = deque()


class VirtualShared:
    """Implements `comm.base.SharedState`: lock, fetch, change, store, unlock; workers queue."""

    # There are a million where a thousand workers each host a model.
    __slots__ = ("_comm", "_store")

    def __init__(self, store: VirtualStore, comm: VirtualCommunicator) -> None:
        self._store, self._comm = store, comm

    @property
    def merges(self) -> int:
        return self._store.merges

    @contextmanager
    def exclusive(self, *, counted: bool = True) -> Iterator[Tensor]:
        store, comm, clock = self._store, self._comm, self._comm.clock
        # All that happens earlier in virtual time has its effect on the model first.
        comm.scheduler.turn(comm.world_rank, clock.now)
        if store.held:
            store.queue.append(comm.world_rank)
            comm.scheduler.block(comm.world_rank, "a shared model")
        store.held = True
        # Its last user has left it in the order of events, maybe later in virtual time.
        begin = max(clock.now, store.free_at)
        access = Operation(
            Kind.ACCESS, store.model.nbytes, (comm.world_rank, store.host)
        )
        clock.communicated(begin + comm.costs.time(access), begin - clock.now)
        if counted:
            comm.count(access)
        yield store.model
        store.merges += 1
        store.free_at = clock.now
        store.held = bool(store.queue)  # it passes to the first in the queue
        if store.queue:
            comm.scheduler.wake(store.queue.popleft(), clock.now)


class VirtualServer:
    """Implements `comm.base.Server`: requests cross the network, queue for the server and are answered by its rule.

    A payload or reply may be any object with `nbytes`.
    """

    in_process = True

    def __init__(self, state: ServerState, comm: VirtualCommunicator) -> None:
        self._state, self._comm = state, comm

    def request(self, payload: Tensor) -> Tensor:
        state, comm, clock = self._state, self._comm, self._comm.clock
        nbytes = payload.nbytes
        if not clock.running:
            return state.answer_now(comm, payload)
        asked = clock.now
        comm.count(Operation(Kind.TRAVEL, nbytes, (comm.world_rank, state.host)))
        # Requests are served in the order in which they arrive, not in that of asking.
        arrival = asked + state.seconds(Kind.TRAVEL, nbytes, comm)
        comm.scheduler.turn(comm.world_rank, arrival)
        state.handle(comm, payload, nbytes, arrival)
        # The rule may keep the reply until others have asked.
        if comm.world_rank not in state.replies:
            comm.scheduler.block(comm.world_rank, "the server's reply")
        until, tensor = state.replies.pop(comm.world_rank)
        clock.communicated(
            max(asked, until), max(0.0, state.released.pop(comm.world_rank) - arrival)
        )
        return tensor


class ServerState:
    """State of the server: `rule` answers requests, `free_at` is the end of its current work.

    A request travels, waits for its turn and occupies the server; replies occupy it and
    travel. A rule may have `shards`, the number of parallel servers, and `updates`, a
    count of optimizer steps, each charged as a worker's. `laps` are the intervals in
    which it was occupied, in a traced run.
    """

    def __init__(
        self, rule: ServerRule, host: int = 0, *, traced: bool = False
    ) -> None:
        self.rule = rule
        self.laps: list[Lap] | None = [] if traced else None
        self.host = host
        self.free_at = 0.0
        self.replies: dict[int, tuple[float, Tensor]] = {}
        self.released: dict[int, float] = {}
        self.shards = getattr(rule, "shards", 1)
        # Of each worker's messages, which have few sizes: every push asks four times.
        self._seconds: dict[tuple[Kind, int, int], float] = {}

    def answer_now(self, comm: VirtualCommunicator, payload: Any) -> Tensor:
        """Return the reply to a request outside the training time; the rule must not defer it."""
        reply: Tensor
        ((worker, reply),) = self.rule(comm.world_rank, payload, comm.clock.now)
        assert worker == comm.world_rank
        return reply

    def seconds(
        self,
        kind: Kind,
        nbytes: int,
        comm: VirtualCommunicator,
        worker: int | None = None,
    ) -> float:
        """Return the seconds of a part of an exchange of `nbytes` with `worker`, by default that of `comm`."""
        rank = comm.world_rank if worker is None else worker
        message = (kind, nbytes, rank)
        if message not in self._seconds:
            # Shards serve their parts of a message at the same time.
            operation = Operation(kind, nbytes / self.shards, (rank, self.host))
            self._seconds[message] = comm.costs.time(operation)
        return self._seconds[message]

    def handle(
        self, comm: VirtualCommunicator, payload: Any, nbytes: int, arrival: float
    ) -> None:
        """Serve one request that arrives at `arrival`, and send every reply that the rule releases."""
        begin = max(arrival, self.free_at)
        updates = getattr(self.rule, "updates", 0)
        replies = comm.clock.execute(self.rule, comm.world_rank, payload, begin)
        steps = getattr(self.rule, "updates", 0) - updates
        self.free_at = begin + self.seconds(Kind.SERVE, nbytes, comm)
        # A measured rule includes its steps; a stated machine knows those alone.
        taken = max(
            steps * comm.clock.seconds_of(Task.UPDATE), comm.clock.price(self.rule)
        )
        self.free_at += taken / self.shards
        for worker, reply in replies:
            size = reply.nbytes
            self.free_at += self.seconds(Kind.SERVE, size, comm, worker)
            until = self.free_at + self.seconds(Kind.TRAVEL, size, comm, worker)
            self.replies[worker] = until, reply
            self.released[worker] = begin
            # what it does next takes no effect before the reply has come
            if worker != comm.world_rank:
                comm.scheduler.wake(worker, arrival)
        if self.laps is not None and self.free_at > begin:
            self.laps.append(Lap("serving", begin, self.free_at))


class Hosts:
    """The shared models and the server of a run, which all workers open in the same order."""

    def __init__(self, *, traced: bool = False) -> None:
        self.stores: list[VirtualStore] = []
        self.server: ServerState | None = None
        self.traced = traced


class HostedState:
    """What a run hosts, as one worker reaches it."""

    def __init__(self, hosts: Hosts, comm: VirtualCommunicator) -> None:
        self._hosts, self._comm, self._opened = hosts, comm, count()

    def shared(self, initial: Tensor, host: int) -> VirtualShared:
        stores, place = self._hosts.stores, next(self._opened)
        if place == len(stores):
            stores.append(VirtualStore(initial, host))
        # The model is that of its host, whichever worker opens it first.
        if self._comm.rank == host:
            stores[place].model.copy_(initial)
        return VirtualShared(stores[place], self._comm)

    def server(self, make: Callable[[], ServerRule]) -> VirtualServer:
        hosts = self._hosts
        # One rule serves all: each of a thousand would copy weights and optimizer.
        if hosts.server is None:
            hosts.server = ServerState(make(), traced=hosts.traced)
        return VirtualServer(hosts.server, self._comm)
