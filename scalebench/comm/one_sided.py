"""Shared model over MPI one-sided communication, stored on a training rank.

Asynchronous merging needs no server rank: a worker locks the window, fetches, changes, stores and unlocks.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor

from scalebench.comm.counters import numbers
from scalebench.comm.mpi import MpiCommunicator
from scalebench.system.clock import Task

_HEADER = 64  # bytes before the vector: the number of accesses, padded for alignment


class OneSidedState:
    """Implements `comm.base.SharedState`: a window on rank `host` holds a counter and the vector.

    Constructed by all ranks together with the host's `initial` (n,). An access is communication from the request of the
    lock to its release. The counter orders accesses, for the computation of waiting times.
    """

    def __init__(self, comm: MpiCommunicator, initial: Tensor, host: int = 0) -> None:
        self._comm, self._host = comm, host
        nbytes = initial.numel() * initial.element_size()
        hosted = comm.rank == host
        self._window = MPI.Win.Allocate(_HEADER + nbytes if hosted else 0, 1, comm=MPI.Intracomm(comm.mpi))
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
            yield self._vector if self._staged is None else self._staged.copy_(self._vector)
            if self._staged is not None:
                self._vector.copy_(self._staged)
            self._counter[0] += 1
            self._window.Put([self._fetched, MPI.BYTE], self._host)
            self._comm.linger(self._comm.message_from(self._host, self._vector.nbytes), times=2)
        finally:
            self._window.Unlock(self._host)
            clock.did(Task.COMM)
        if clock.running:
            self._accesses.extend((asked, entered, clock.mark, self.merges))
        if counted:
            self._comm.tally(self._vector.numel() * self._vector.element_size())

    def close(self) -> None:
        """Free the window; called by all ranks together."""
        self._window.Free()
