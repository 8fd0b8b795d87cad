"""What DASO's workers exchange: gradients inside a node, sums between the nodes, some of them in flight."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scalebench.comm.base import Request
from scalebench.strategies.averaging import Averaging
from scalebench.strategies.base import Batch, Worker
from scalebench.strategies.daso_schedule import BLOCKING, Calls, Skips
from scalebench.strategies.replica_state import packed, unpack_

if TYPE_CHECKING:
    from torch import Tensor

WIRE = "bfloat16"  # while every batch blocks


class Traffic:
    """One worker's part in the exchanges: its node, its group, whose turn it is and what is in flight."""

    def __init__(self, worker: Worker, policies: Averaging, devices: int) -> None:
        node, self._device = divmod(worker.rank, devices)
        self._worker, self._policies, self._devices = worker, policies, devices
        self._node = worker.comm.split(node, self._device)
        self._group = worker.comm.split(self._device, node)
        self._local_sync = True
        self._turn = 0  # the group that sends next
        self._sender: int | None = None  # the group whose sum was last left in flight; a blocking sum clears it
        self._in_flight: tuple[Request, Tensor, int] | None = None  # on that group's devices, until merged

    def step(self, batch: Batch) -> None:
        """Forward, backward, the node's gradient mean if it is on, and the optimizer step."""
        self._worker.gradient(batch)
        if self._local_sync and self._devices > 1:
            self._node.allreduce_(self._worker.gradients, "mean")
        self._worker.update()

    def answer(self, calls: Calls, skips: Skips, last: bool) -> None:
        """Do what the batch just made calls for."""
        if calls.send and skips.wait == 0:
            self._sum_now(WIRE if skips == BLOCKING else None, last)
        elif calls.send:
            self._send(calls, last)
        elif calls.merge:
            self._merge()
        if calls.local_sync is not None:
            self._local_sync = calls.local_sync

    def _sum_now(self, wire: str | None, last: bool) -> None:
        state = self._policies.averaged(self._worker)
        vector = packed(state)
        if self._device == self._turn:
            self._mean_(vector, wire)
        self._settle(state, vector, last)

    def _send(self, calls: Calls, last: bool) -> None:
        """What is sent is the state as it stands before the older sum is merged."""
        sent: tuple[Request, Tensor, int] | None = None
        if self._device == self._turn:
            vector = packed(self._policies.averaged(self._worker)).clone()
            weight = self._policies.weight(self._worker)
            request = self._group.iallreduce_(vector, "sum" if weight is None else "mean", weight=weight)
            sent = (request, vector, calls.wait)
        self._merge()
        if not calls.blocking:
            self._in_flight, self._sender = sent, self._turn
            self._turn = (self._turn + 1) % self._devices
            return
        state = self._policies.averaged(self._worker)
        settled = packed(state)
        if sent is not None:
            settled.copy_(self._landed(sent).div_(self._group.size))
        self._settle(state, settled, last)

    def _mean_(self, vector: Tensor, wire: str | None) -> None:
        """Over the nodes; the plain one is divided after the sum, as heat does it."""
        weight = self._policies.weight(self._worker)
        if weight is None:
            self._group.allreduce_(vector, "sum", wire=wire)
            vector.div_(self._group.size)
        else:
            self._group.allreduce_(vector, "mean", weight=weight, wire=wire)

    def _landed(self, sent: tuple[Request, Tensor, int]) -> Tensor:
        """The sum that was in flight; by samples P times the weighted mean."""
        request, vector, _ = sent
        request.wait()
        return vector if self._policies.weighting == "uniform" else vector.mul_(self._group.size)

    def _merge(self) -> None:
        """The node takes the last sender's state, even where its sum was merged before."""
        if self._sender is None:
            return
        state = self._policies.averaged(self._worker)
        vector = packed(state)
        if self._in_flight is not None:
            own = 2 * self._in_flight[2] or 1
            vector.mul_(own).add_(self._landed(self._in_flight)).div_(own + self._group.size)
            self._in_flight = None
        self._share(state, vector, self._sender)

    def _settle(self, state: list[Tensor], vector: Tensor, last: bool) -> None:
        self._share(state, vector, self._turn)
        self._sender = None
        self._turn = 0 if last else (self._turn + 1) % self._devices

    def _share(self, state: list[Tensor], vector: Tensor, source: int) -> None:
        """The node takes `source`'s `vector` for its state."""
        if self._devices > 1:
            self._node.broadcast_(vector, source)
        unpack_(vector, state)
        self._policies.after_average(self._worker)
