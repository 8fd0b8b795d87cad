"""A server rank: a party with a state of its own that answers requests now or later.

The last rank of the communicator runs a `ServerLoop`; the others are its workers. The rule travels to it when the
workers open it, requests are handled one by one in the order of their arrival, and a reply leaves when the rule
releases it: a parameter server that lets a fast worker wait is a few lines.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor

from scalebench.clock import Task
from scalebench.comm.base import ServerRule
from scalebench.comm.mpi import MpiCommunicator
from scalebench.errors import EngineError, RunError

_OPEN, _CLOSE, _EMPTY, _PAYLOAD, _REPLY = range(1, 6)  # message tags
_SPIN_S, _NAP_S = 1e-3, 5e-5  # how long the server looks without pause for the next request, then the pause


class RankServer:
    """Implements `comm.base.Server` for a worker.

    `link` is an MPI communicator of all workers and, as its last rank, the server. All workers make it together, with
    the same `rule`; worker 0's is sent, so it has to be picklable: an object of a module's class, not a closure.
    """

    def __init__(
        self, comm: MpiCommunicator, link: MPI.Comm, rule: ServerRule, dtype: torch.dtype = torch.float32
    ) -> None:
        self._comm, self._link, self._dtype = comm, link, dtype
        self._host = link.size - 1
        if getattr(rule, "shards", 1) > 1:
            raise EngineError("real runs have one server rank; use shards: 1, or --execution virtual")
        if comm.rank == 0:
            try:
                link.send(rule, self._host, _OPEN)
            except (TypeError, AttributeError, pickle.PicklingError) as error:
                raise EngineError(f"the server's rule cannot be sent to its rank: {error}") from None

    def request(self, payload: Tensor | None) -> Tensor:
        """Send `payload` (flat or not) and wait for the reply: flat, in the server's dtype."""
        clock, link = self._comm.clock, self._link
        clock.did(Task.OTHER)
        if payload is None:
            link.Send(np.empty(0, dtype=np.uint8), self._host, _EMPTY)
        else:
            self._comm.count(payload.numel() * payload.element_size())
            link.Send(_bytes_of(payload), self._host, _PAYLOAD)
        reply = _receive(link, self._host, _REPLY, self._dtype)
        clock.did(Task.COMM)
        return reply if payload is None else reply.to(payload.device)

    def close(self) -> None:
        """This worker asks no more; when all have said so the server's loop ends."""
        self._link.Send(np.empty(0, dtype=np.uint8), self._host, _CLOSE)


class ServerLoop:
    """What the server rank runs: `serve` returns when every worker has closed."""

    def __init__(self, link: MPI.Comm, dtype: torch.dtype, now: Callable[[], float] = time.perf_counter) -> None:
        self._link, self._dtype, self._now = link, dtype, now

    def serve(self) -> int:
        """Answer until all workers have closed; return how many requests were handled.

        Raises:
            RunError: the rule leaves every worker waiting, or answers one that has not asked.
        """
        rule: ServerRule | None = None
        open_workers = self._link.size - 1
        waiting: set[int] = set()
        handled = 0
        began = self._now()
        while open_workers:
            status = MPI.Status()
            if rule is None:
                rule = self._link.recv(source=0, tag=_OPEN)
            self._await_message(status)
            worker, tag = status.Get_source(), status.Get_tag()
            payload = _receive(self._link, worker, tag, self._dtype)
            if tag == _CLOSE:
                open_workers -= 1
            else:
                waiting.add(worker)
                handled += 1
                for released, reply in rule(worker, payload if tag == _PAYLOAD else None, self._now() - began):
                    self._release(released, reply, waiting)
            if waiting and len(waiting) == open_workers:
                raise RunError(f"the server's rule leaves every worker waiting, first of all worker {min(waiting)}")
        return handled

    def _await_message(self, status: MPI.Status) -> None:
        """As a probe, but the core is left to the workers between looks: they compute, the server mostly waits."""
        began = self._now()
        while not self._link.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG, status):
            time.sleep(0 if self._now() - began < _SPIN_S else _NAP_S)

    def _release(self, worker: int, reply: Any, waiting: set[int]) -> None:
        if worker not in waiting:
            raise RunError(f"the server's rule answers worker {worker}, which has not asked")
        waiting.discard(worker)
        self._link.Send(_bytes_of(reply), worker, _REPLY)


def _bytes_of(tensor: Tensor) -> Any:
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()


def _receive(link: MPI.Comm, source: int, tag: int, dtype: torch.dtype) -> Tensor:
    status = MPI.Status()
    link.Probe(source, tag, status)
    raw = torch.empty(status.Get_count(MPI.BYTE), dtype=torch.uint8)
    link.Recv(raw.numpy(), source, tag)
    return raw.view(dtype)
