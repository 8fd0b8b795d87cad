"""DASO: gradients averaged inside a node, parameters summed between nodes behind the local steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from scalebench.comm.base import Capability, Request
from scalebench.errors import StudyError
from scalebench.strategies.averaging import Averaging
from scalebench.strategies.base import Batch, Worker
from scalebench.strategies.daso_schedule import (
    BLOCKING,
    FIRST,
    TALLIED,
    Calls,
    Plateau,
    Schedule,
    Skips,
    calls_of,
    tally,
)
from scalebench.strategies.registry import register
from scalebench.strategies.replica_state import packed, unpack_

if TYPE_CHECKING:
    from torch import Tensor

WIRE = "bfloat16"  # while every batch blocks


class Daso(Averaging):
    """P nodes of G devices; group i is device i of every node. After a node's gradient mean and optimizer step

        send:   one group after the other starts sum_p w_p, in flight while training goes on
        merge:  w <- (2 S w + sum_p w_p) / (2 S + P),  S: batches it was to be in flight, then a broadcast in the node
        block:  w <- sum_p w_p / P,  during warm-up and cool-down after each batch (bfloat16 on the wire), else
                after an epoch's last batch

    Coquelin et al., J. Big Data 2022; heat.optim.DASO 1.8.0. Between nodes travel parameters, with the buffers (heat
    leaves them where they are) and the optimizer state beside them as the options say. By samples w_p counts
    P n_p / sum_q n_q times in a sum. The gradient mean inside a node is plain, whatever the sizes of its batches.
    """

    devices_per_node: int | None = Field(None, ge=1, description="G; default: the workers that share a node")
    trailing: Literal["synchronise"] = Field("synchronise", description="every epoch's last batch blocks")

    requires: ClassVar[frozenset[Capability]] = frozenset(
        {Capability.COLLECTIVES, Capability.NONBLOCKING, Capability.SPLIT}
    )
    engines: ClassVar[tuple[str, ...]] = ("mpi", "gloo", "nccl")
    counts: ClassVar[dict[str, str]] = TALLIED
    combination: ClassVar[str] = "daso"

    def schedule(self, epochs: int) -> Schedule:
        """The skips of a training of `epochs` epochs, from its beginning."""
        raise NotImplementedError

    def check(self, workers: int, workers_per_node: int) -> list[str]:
        devices = self.devices_per_node or workers_per_node
        if devices >= workers:
            smaller = f", or set devices_per_node to at most {workers // 2}" if workers > 1 else ""
            raise StudyError(
                f"strategy {self.name} at {workers} workers: one node of {devices} devices holds them all; it needs 2 "
                f"nodes, so start at {2 * devices} workers{smaller}"
            )
        if workers % devices:
            raise StudyError(
                f"strategy {self.name} at {workers} workers: they do not fill whole nodes of {devices} devices; use a "
                f"multiple of {devices} workers or a devices_per_node that divides {workers}"
            )
        return []

    def setup(self, worker: Worker) -> None:
        worker.state.schedule = self.schedule(worker.epochs)
        worker.state.skips = []  # of every epoch, for whoever asks afterwards
        worker.state.traffic = Traffic(worker, self, self.devices_per_node or worker.workers_per_node)

    def warm_up(self, worker: Worker, batch: Batch) -> None:
        worker.state.traffic.step(batch)
        worker.comm.allreduce_(worker.parameters, "mean", wire=WIRE)

    def train_epoch(self, worker: Worker, epoch: int) -> None:
        schedule: Schedule = worker.state.schedule
        traffic: Traffic = worker.state.traffic
        skips = schedule.skips
        worker.state.skips.append(skips)
        last = worker.steps_in(epoch) - 1
        for batch in worker.batches(epoch):
            traffic.step(batch)
            traffic.answer(calls_of(batch.step, last, skips), skips, batch.step == last)
        schedule.epoch_over(_mean_loss(worker) if schedule.judges else None)

    def in_agreement(self, worker: Worker, epoch: int) -> bool:
        return True

    @property
    def syncs_formula(self) -> str:
        """Sums over the nodes; a plateau of the loss changes how many."""
        return "sums + halves"

    @property
    def bytes_formula(self) -> str:
        devices = "G" if self.devices_per_node is None else "devices_per_node"
        state = self.state_bytes
        if state == "n":
            inside, between = f"n * (means + shares / {devices})", "n * sums + 2 * P * halves"
        else:
            inside = f"(n * means + {state} * shares / {devices})"
            between = f"{state} * (sums + 2 * P / n * halves)"
        return f"({devices} > 1) * {inside} + ({between}) / {devices} + n / P * judged"

    def quantities(self, epoch: int, epochs: int, steps: int) -> dict[str, int]:
        return tally(self.schedule(epochs), epoch, steps)


@register()
class DasoHeat(Daso):
    """DASO with the schedule of heat 1.8.0: from (4, 1, 1) the skips halve at each plateau of the loss, then restart.

    The loss is the mean over workers of that of the epoch's last batch, before its update.
    """

    warm_up_epochs: int = Field(4, ge=0, description="blocking epochs at the beginning")
    cool_down_epochs: int = Field(4, ge=0, description="blocking epochs at the end")
    max_global_skips: int = Field(8, ge=1, description="batches between sums when the cycle restarts")
    stability: float = Field(0.05, ge=0, lt=1, description="relative improvement of the loss that is none")
    patience: int = Field(2, ge=0, description="epochs without improvement before the one that changes the skips")

    name: ClassVar[str] = "daso-heat"
    summary: ClassVar[str] = "gradients averaged inside nodes, parameters between them in flight; heat's schedule"
    source: ClassVar[str] = "Coquelin et al., J. Big Data 2022; heat.optim.DASO 1.8.0"

    @property
    def sync_every(self) -> int:
        return FIRST.global_skip

    def schedule(self, epochs: int) -> Schedule:
        return Schedule(
            epochs,
            warm_up=self.warm_up_epochs,
            cool_down=self.cool_down_epochs,
            max_skip=self.max_global_skips,
            first=FIRST,
            plateau=Plateau(self.stability, self.patience),
        )

    def advice(self, epochs: int) -> list[str]:
        blocking = self.warm_up_epochs + self.cool_down_epochs
        if epochs > blocking:
            return []
        return [
            f"never cycles: {epochs} epochs are no more than its {self.warm_up_epochs} of warm-up and "
            f"{self.cool_down_epochs} of cool-down, so that it blocks after every batch"
        ]


@register()
class DasoFixed(Daso):
    """DASO whose skips stay what they are from the first epoch to the last (or between stated blocking epochs)."""

    global_skip: int = Field(4, ge=1, description="batches between two sums over the nodes")
    local_skip: int = Field(1, ge=1, description="batches between two gradient means inside a node")
    wait: int = Field(1, ge=0, description="batches a sum is in flight; 0: it blocks")
    warm_up_epochs: int = Field(0, ge=0, description="blocking epochs at the beginning")
    cool_down_epochs: int = Field(0, ge=0, description="blocking epochs at the end")

    name: ClassVar[str] = "daso-fixed"
    summary: ClassVar[str] = "gradients averaged inside nodes, parameters between them in flight; constant skips"
    source: ClassVar[str] = "Coquelin et al., J. Big Data 2022, without its schedule"

    @property
    def sync_every(self) -> int:
        return self.global_skip

    def schedule(self, epochs: int) -> Schedule:
        return Schedule(
            epochs,
            warm_up=self.warm_up_epochs,
            cool_down=self.cool_down_epochs,
            max_skip=self.global_skip,
            first=Skips(self.global_skip, self.local_skip, self.wait),
            plateau=None,
        )


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


def _mean_loss(worker: Worker) -> float:
    loss = worker.last_loss.detach().reshape(1).clone()
    worker.comm.allreduce_(loss, "mean")
    return float(loss)
