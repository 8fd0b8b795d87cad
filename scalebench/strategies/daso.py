"""DASO: gradients averaged inside a node, parameters summed between nodes behind the local steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from scalebench.comm.base import Capability
from scalebench.errors import StudyError
from scalebench.strategies.averaging import Averaging
from scalebench.strategies.base import Batch, Worker
from scalebench.strategies.daso_schedule import FIRST, TALLIED, Plateau, Schedule, Skips, calls_of, tally
from scalebench.strategies.daso_traffic import WIRE, Traffic
from scalebench.strategies.registry import register
from scalebench.strategies.traffic import Setting

if TYPE_CHECKING:
    from scalebench.study.spec import Training


class Daso(Averaging):
    """P nodes of G devices; group i is device i of every node. After a node's gradient mean and optimizer step

        send:   one group after the other starts sum_p w_p, in flight while training goes on
        merge:  w <- (2 s w + sum_p w_p) / (2 s + P),  s: batches it was to be in flight, then a broadcast in the node
        block:  w <- sum_p w_p / P,  during warm-up and cool-down after each batch (bfloat16 on the wire), else
                after an epoch's last batch

    Coquelin et al., J. Big Data 2022; heat.optim.DASO 1.8.0. Between nodes travel parameters, with the buffers (heat
    leaves them where they are) and the optimizer state beside them as the options say. By samples w_p counts
    P n_p / sum_q n_q times in a sum. The gradient mean inside a node is plain, whatever the sizes of its batches.
    """

    warm_up_epochs: int = Field(0, ge=0, description="blocking epochs at the beginning")
    cool_down_epochs: int = Field(0, ge=0, description="blocking epochs at the end")
    devices_per_node: int | None = Field(None, ge=1, description="G; default: the workers that share a node")
    trailing: Literal["synchronise"] = Field("synchronise", description="every epoch's last batch blocks")

    requires: ClassVar[frozenset[Capability]] = frozenset(
        {Capability.COLLECTIVES, Capability.NONBLOCKING, Capability.SPLIT}
    )
    engines: ClassVar[tuple[str, ...]] = ("mpi", "gloo", "nccl")
    counts: ClassVar[dict[str, str]] = TALLIED
    combination: ClassVar[str] = "daso"
    in_rules: ClassVar[bool] = True

    def schedule(self, epochs: int) -> Schedule:
        """The skips of a training of `epochs` epochs, from its beginning."""
        raise NotImplementedError

    def first_interval(self, steps: int) -> tuple[int, int]:
        return 0, min(self.sync_every, steps)  # every epoch's last batch blocks

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
        if devices > workers_per_node:
            raise StudyError(
                f"strategy {self.name} at {workers} workers: devices_per_node {devices} asks for more groups than "
                f"a node has devices; set it to at most {workers_per_node}, the workers that share a node"
            )
        return []

    def advice(self, training: Training) -> list[str]:
        epochs = training.epochs
        blocking = self.warm_up_epochs + self.cool_down_epochs
        if epochs > blocking:
            return []
        return [
            f"never cycles: {epochs} epoch{'s are' if epochs > 1 else ' is'} no more than its {self.warm_up_epochs} of "
            f"warm-up and {self.cool_down_epochs} of cool-down, so that it blocks after every batch"
        ]

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
        """Groups take turns in the sums over the nodes, the first one first; a plateau of the loss changes how many."""
        return f"({self._devices} > 1) * (means + shares) + ceil((sums + halves) / {self._devices}) + judged"

    @property
    def bytes_formula(self) -> str:
        devices, state = self._devices, self.state_bytes
        if state == "n":
            inside, between = f"n * (means + shares / {devices})", "(n * sums + 2 * P * halves)"
        else:
            inside = f"(n * means + {state} * shares / {devices})"
            between = f"{state} * (sums + 2 * P / n * halves)"
        return f"({devices} > 1) * {inside} + {between} / {devices} + n / P * judged"

    @property
    def _devices(self) -> str:
        return "G" if self.devices_per_node is None else "devices_per_node"

    def quantities(self, epoch: int, setting: Setting) -> dict[str, int]:
        return tally(self.schedule(setting.epochs), epoch, setting.steps)


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


@register()
class DasoFixed(Daso):
    """DASO whose skips stay what they are from the first epoch to the last (or between stated blocking epochs).

    A sum is merged at the sending of the next one at the latest, after `global_skip` batches.
    """

    global_skip: int = Field(4, ge=1, description="batches between two sums over the nodes")
    local_skip: int = Field(1, ge=1, description="batches between two gradient means inside a node")
    wait: int = Field(1, ge=0, description="s: batches a sum is in flight; 0: it blocks")

    name: ClassVar[str] = "daso-fixed"
    summary: ClassVar[str] = "gradients averaged inside nodes, parameters between them in flight; constant skips"
    source: ClassVar[str] = "Coquelin et al., J. Big Data 2022, without its schedule"

    @property
    def sync_every(self) -> int:
        return self.global_skip

    def advice(self, training: Training) -> list[str]:
        said = super().advice(training)
        if said or self.wait <= self.global_skip:
            return said
        return [
            f"wait {self.wait} is more than global_skip {self.global_skip}: a sum is merged at the next one, after "
            f"{self.global_skip} batches, but weighs as one that was {self.wait} in flight; use wait: "
            f"{self.global_skip} or less"
        ]

    def schedule(self, epochs: int) -> Schedule:
        return Schedule(
            epochs,
            warm_up=self.warm_up_epochs,
            cool_down=self.cool_down_epochs,
            max_skip=self.global_skip,
            first=Skips(self.global_skip, self.local_skip, self.wait),
            plateau=None,
        )


def _mean_loss(worker: Worker) -> float:
    loss = worker.last_loss.detach().reshape(1).clone()
    worker.comm.allreduce_(loss, "mean")
    return float(loss)
