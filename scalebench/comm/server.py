"""Models shared by real ranks: on server ranks that answer requests, or by one-sided communication.

The ranks of a communicator after its workers run a `ServerLoop`. Workers send them the
rule at opening, requests are handled one by one in the order of arrival, and a reply is
sent when the rule releases it.

A rule over several servers (`shards`) has a part for each of them, with the whole state
machine and a piece of the vector. The first server orders requests by arrival and sends
order and times to the others, so that all parts make the same decisions.

Asynchronous merging needs no server rank (`OneSidedState`): a worker locks a window on
a training rank, fetches, changes, stores and unlocks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor

from scalebench.cluster.operation import Kind, Operation
from scalebench.comm.base import ServerRule
from scalebench.comm.counters import Served, SlowLinks, linger, numbers
from scalebench.comm.mpi import MpiCommunicator
from scalebench.errors import RunError
from scalebench.system.clock import Task

_OPEN, _CLOSE, _PAYLOAD, _REPLY, _ORDER = range(1, 6)  # message tags
_SPIN_S, _NAP_S = (
    1e-3,
    5e-5,
)  # seconds of polling without pause, then the pause between polls
_HEADER = 64  # bytes before the vector: the number of accesses, padded for alignment


class RankServer:
    """Implements `comm.base.Server` for a worker.

    `link` is an MPI communicator of all workers and, as its last ranks, the servers.
    All workers construct it together, with the same `rule`; that of worker 0 is sent,
    so it must be picklable: an object of a module's class.
    """

    def __init__(
        self,
        comm: MpiCommunicator,
        link: MPI.Comm,
        rule: ServerRule,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self._comm = comm
        self._link = link
        self._dtype = dtype
        self._hosts = range(comm.size, link.size)
        shards = getattr(rule, "shards", 1)
        assert shards == len(self._hosts), (
            "as many servers as the strategy asks for are started"
        )
        spread: Any = rule
        self._spread = spread if shards > 1 else None
        self._asked = 0
        if comm.rank == 0:
            for place, host in enumerate(self._hosts):
                link.send(
                    self._spread.part(place) if self._spread else rule, host, _OPEN
                )

    def request(self, payload: Tensor) -> Tensor:
        """Send `payload` (flat or not) and wait for the reply: flat, in the server's dtype."""
        clock = self._comm.clock
        clock.did(Task.OTHER)
        asked, number = clock.mark, self._asked
        self._asked += 1
        members = (self._comm.rank, self._hosts[0])
        self._comm.count(Operation(Kind.SERVE, payload.nbytes, members))
        # All servers at once: each gets its piece of the payload.
        parts = self._spread.parted(payload) if self._spread else [payload]
        sending = [
            self._link.Isend(_bytes_of(part), host, _PAYLOAD)
            for part, host in zip(parts, self._hosts, strict=True)
        ]
        replies = [
            _receive(self._link, host, _REPLY, self._dtype) for host in self._hosts
        ]
        # Over by now, as the replies show.
        MPI.Request.Waitall(sending)
        reply: Tensor = self._spread.joined(replies) if self._spread else replies[0]
        clock.did(Task.COMM)
        if clock.running:
            self._comm.event_log.requests.extend((number, asked, clock.mark))
        return reply.to(payload.device)

    def close(self) -> None:
        """End the requests of this worker; the servers' loops end when all workers have closed."""
        self._link.Send(np.empty(0, dtype=np.uint8), self._hosts[0], _CLOSE)


class ServerLoop:
    """Loop of each of the `servers`: `serve` returns when every worker has closed, and can then be called again.

    `busy_s` are the seconds spent on requests, from arrival to the last released reply;
    `served` has the begin and reply of each request, and `laps`, if `traced`, begin and
    end of each. `slow_links` delay received and sent messages. Replies are
    non-blocking, so that a late worker does not delay others. `beat` is called at each
    poll.
    """

    def __init__(
        self,
        link: MPI.Comm,
        dtype: torch.dtype,
        servers: int = 1,
        now: Callable[[], float] = time.perf_counter,
        beat: Callable[[], None] = lambda: None,
        *,
        traced: bool = False,
        slow_links: SlowLinks | None = None,
    ) -> None:
        self._link = link
        self._dtype = dtype
        self._now = now
        self._beat = beat
        self._slow_links = slow_links
        self._workers = link.size - servers
        self._traced = traced
        self.busy_s = 0.0
        self.laps: list[tuple[float, float]] = []
        self.served: Served = {worker: numbers() for worker in range(self._workers)}
        self._free = 0.0  # end of the last request
        # by waiting worker: end of the previous request, begin
        self._taken: dict[int, tuple[float, float]] = {}
        self._replying: dict[int, MPI.Request] = {}  # last reply to each worker

    def serve(self) -> int:
        """Answer requests until all workers have closed; return their number.

        Raises:
            RunError: the rule leaves every worker waiting.
        """
        self._await_message(MPI.Status(), 0, _OPEN)
        rule: ServerRule = self._link.recv(source=0, tag=_OPEN)
        open_workers = self._workers
        handled = 0
        began = self._now()
        while open_workers:
            worker, tag, now, payload = self._next(began)
            if tag == _CLOSE:
                open_workers -= 1
            else:
                self._linger(worker, payload)
                # Until its reply is released, which may be upon the request of another
                # worker.
                self._taken[worker] = (self._free, self._woken)
                handled += 1
                for released, reply in rule(worker, payload, now):
                    self._release(released, reply)
            self._free = self._now()
            self.busy_s += self._free - self._woken
            if self._traced:
                self.laps.append((self._woken, self._free))
            if self._taken and len(self._taken) == open_workers:
                # No worker is left whose request could release a reply.
                first = min(self._taken)
                raise RunError(
                    f"the server's rule leaves every worker waiting, first of all worker {first}"
                )
        for reply_sent in self._replying.values():
            self._complete(reply_sent)
        return handled

    def _next(self, began: float) -> tuple[int, int, float, Tensor]:
        """Return worker, tag, time and payload of the next request, chosen by the first server."""
        # In float64, which holds worker and tag exactly.
        order = np.empty(3)
        status = MPI.Status()
        if self._link.rank > self._workers:
            self._await_message(status, self._workers, _ORDER)
            self._link.Recv(order, self._workers, _ORDER)
            worker = int(order[0])
            tag = int(order[1])
            now = float(order[2])
            if tag == _CLOSE:
                return worker, tag, now, torch.empty(0)
            self._await_message(status, worker, tag)
            return worker, tag, now, self._receive(status)
        self._await_message(status, MPI.ANY_SOURCE, MPI.ANY_TAG)
        worker, tag = status.Get_source(), status.Get_tag()
        payload = self._receive(status)
        now = self._now() - began
        for follower in range(self._workers + 1, self._link.size):
            self._link.Send(np.array([worker, tag, now]), follower, _ORDER)
        return worker, tag, now, payload

    def _await_message(self, status: MPI.Status, source: int, tag: int) -> None:
        """Probe with pauses, which leave the core to computing workers."""
        began = self._now()
        self._beat()
        while not self._link.Iprobe(source, tag, status):
            self._beat()
            time.sleep(0 if self._now() - began < _SPIN_S else _NAP_S)
        self._woken = self._now()

    def _linger(self, worker: int, message: Tensor) -> None:
        """Sleep for the delay of slow links to this server, which is on the node of worker 0."""
        if self._slow_links is not None:
            linger(
                self._slow_links.adds(Operation(Kind.SEND, message.nbytes, (worker, 0)))
            )

    def _release(self, worker: int, reply: Any) -> None:
        self._linger(worker, reply)
        self.served[worker].extend((*self._taken.pop(worker), self._woken))
        if worker in self._replying:
            # received before this worker's next request
            self._complete(self._replying[worker])
        self._replying[worker] = self._link.Isend(_bytes_of(reply), worker, _REPLY)

    def _receive(self, status: MPI.Status) -> Tensor:
        raw = _room_for(status)
        self._complete(
            self._link.Irecv(raw.numpy(), status.Get_source(), status.Get_tag())
        )
        return raw.view(self._dtype)

    def _complete(self, transfer: MPI.Request) -> None:
        while not transfer.Test():
            self._beat()
            time.sleep(0)


def _bytes_of(tensor: Tensor) -> Any:
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()


def _receive(link: MPI.Comm, source: int, tag: int, dtype: torch.dtype) -> Tensor:
    status = MPI.Status()
    link.Probe(source, tag, status)
    raw = _room_for(status)
    link.Recv(raw.numpy(), source, tag)
    return raw.view(dtype)


def _room_for(status: MPI.Status) -> Tensor:
    return torch.empty(status.Get_count(MPI.BYTE), dtype=torch.uint8)


class OneSidedState:
    """Implements `comm.base.SharedState`: a window on rank `host` holds a counter and the vector.

    Constructed by all ranks together with the host's `initial` (n,). An access is
    communication from the request of the lock to its release. The counter orders
    accesses, for the computation of waiting times.
    """

    def __init__(self, comm: MpiCommunicator, initial: Tensor, host: int = 0) -> None:
        self._comm, self._host = comm, host
        nbytes = initial.numel() * initial.element_size()
        hosted = comm.rank == host
        self._window = MPI.Win.Allocate(
            _HEADER + nbytes if hosted else 0, 1, comm=MPI.Intracomm(comm.mpi)
        )
        self._fetched = np.zeros(_HEADER + nbytes, dtype=np.uint8)
        self._counter = self._fetched[:8].view(np.int64)
        self._vector = torch.from_numpy(self._fetched[_HEADER:]).view(initial.dtype)
        self._staged = torch.empty_like(initial) if initial.is_cuda else None
        self.merges = 0
        self._accesses = numbers()
        comm.event_log.accesses.append(self._accesses)
        if hosted:
            self._vector.copy_(initial)
            self._window.Lock(self._host, MPI.LOCK_EXCLUSIVE)
            self._window.Put([self._fetched, MPI.BYTE], self._host)
            self._window.Unlock(self._host)
        comm.mpi.Barrier()

    @contextmanager
    def exclusive(self, *, counted: bool = True) -> Iterator[Tensor]:
        """Lock and yield the fetched vector; store it on leaving, unless the block raises."""
        clock = self._comm.clock
        clock.did(Task.OTHER)
        asked = clock.mark
        self._window.Lock(self._host, MPI.LOCK_EXCLUSIVE)
        try:
            self._window.Get([self._fetched, MPI.BYTE], self._host)
            self._window.Flush(self._host)
            entered = time.perf_counter()
            self.merges = int(self._counter[0])
            yield (
                self._vector
                if self._staged is None
                else self._staged.copy_(self._vector)
            )
            if self._staged is not None:
                self._vector.copy_(self._staged)
            self._counter[0] += 1
            self._window.Put([self._fetched, MPI.BYTE], self._host)
            fetched = self._comm.message(
                self._host, self._comm.rank, self._vector.nbytes
            )
            self._comm.linger(fetched, times=2)
        finally:
            self._window.Unlock(self._host)
            clock.did(Task.COMM)
        if clock.running:
            self._accesses.extend((asked, entered, clock.mark, self.merges))
        if counted:
            members = (self._comm.rank, self._host)
            self._comm.count(Operation(Kind.ACCESS, self._vector.nbytes, members))

    def close(self) -> None:
        """Free the window; called by all ranks together."""
        self._window.Free()
