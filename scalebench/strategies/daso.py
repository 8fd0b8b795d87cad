"""DASO: gradients averaged inside a node, parameters summed between nodes behind the local steps.

Coquelin et al., J. Big Data 2022, as heat 1.8.0 does it. The schedule says when: the
skips of each epoch, and the calls that follow each batch, without communication; all
its divisions are integer divisions. The exchange does what they say.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal, NamedTuple

from pydantic import Field

from scalebench.comm.base import Capability, Request
from scalebench.comm.engines import providing
from scalebench.errors import StudyError
from scalebench.strategies.averaging import Averaging
from scalebench.strategies.base import Batch, Setting, Synchronisation, Worker
from scalebench.strategies.registry import register
from scalebench.strategies.replica_state import packed, unpack_
from scalebench.strategies.traits import Stretch, Traits

if TYPE_CHECKING:
    from torch import Tensor

WIRE = "bfloat16"  # while every batch blocks


@register()
class DasoFixed(Averaging):
    """P nodes of G devices; group i is device i of every node. After a node's gradient mean and optimizer step

        send:   one group after the other starts sum_p w_p, in flight while training goes on
        merge:  w <- (2 s w + sum_p w_p) / (2 s + P),  s: planned batches in flight, fixed when it is sent;
                the result is then broadcast inside each node
        block:  w <- sum_p w_p / P,  during warm-up and cool-down after each batch (bfloat16 on the wire), else
                after an epoch's last batch

    Coquelin et al., J. Big Data 2022; heat.optim.DASO 1.8.0. Between nodes travel
    parameters, with the buffers (heat leaves them where they are) and the optimizer
    state beside them as the options say. By samples w_p counts P n_p / sum_q n_q times
    in a sum. The gradient mean inside a node is plain, whatever the sizes of its
    batches. Skips are constant, but for stated blocking epochs. A sum is merged at the
    sending of the next one at the latest.
    """

    global_skip: int = Field(
        4, ge=1, description="batches between two sums over the nodes"
    )
    local_skip: int = Field(
        1, ge=1, description="batches between two gradient means inside a node"
    )
    wait: int = Field(
        1, ge=0, description="s: batches a sum is in flight; 0: it blocks"
    )
    warm_up_epochs: int = Field(0, ge=0, description="blocking epochs at the beginning")
    cool_down_epochs: int = Field(0, ge=0, description="blocking epochs at the end")
    devices_per_node: int | None = Field(
        None, ge=1, description="G; default: the workers that share a node"
    )
    trailing: Literal["synchronise"] = Field(
        "synchronise", description="every epoch's last batch blocks"
    )

    name = "daso-fixed"
    summary = "gradients averaged inside nodes, parameters between them in flight; constant skips"
    source = "Coquelin et al., J. Big Data 2022, without its schedule"
    requires = frozenset(
        {Capability.COLLECTIVES, Capability.NONBLOCKING, Capability.SPLIT}
    )
    engines = providing(Capability.SPLIT)

    def schedule(self, epochs: int) -> SkipSchedule:
        first = Skips(self.global_skip, self.local_skip, self.wait)
        return SkipSchedule(epochs, self.warm_up_epochs, self.cool_down_epochs, first)

    def setup(self, worker: Worker) -> None:
        worker.state.schedule = self.schedule(worker.epochs)
        worker.state.skips = []  # of every epoch
        worker.state.exchange = Exchange(
            worker, self, self.devices_per_node or worker.workers_per_node
        )

    def warm_up(self, worker: Worker, batch: Batch) -> None:
        worker.state.exchange.step(batch)
        worker.comm.allreduce_(worker.parameters, "mean", wire=WIRE)

    def train_epoch(self, worker: Worker, epoch: int) -> None:
        schedule: SkipSchedule = worker.state.schedule
        exchange: Exchange = worker.state.exchange
        skips = schedule.skips
        worker.state.skips.append(skips)
        last = worker.steps_in(epoch) - 1
        for batch in worker.batches(epoch):
            exchange.step(batch)
            calls = calls_of(batch.step, last, skips)
            if calls.send and skips.wait == 0:
                exchange.block(WIRE if skips == _BLOCKING else None, batch.step == last)
            elif calls.send:
                exchange.send(calls, batch.step == last)
            elif calls.merge:
                exchange.merge()
            if calls.local_sync is not None:
                exchange.local_sync = calls.local_sync
        schedule.epoch_over(_mean_loss(worker) if schedule.judges else None)

    def in_agreement(self, worker: Worker, epoch: int) -> bool:
        return True

    @property
    def traits(self) -> Traits:
        warm_up, cool_down = (
            Stretch(epochs=self.warm_up_epochs),
            Stretch(epochs=self.cool_down_epochs),
        )
        cycle = Stretch(
            period=math.lcm(self.global_skip, self.local_skip), restarts=True
        )
        return self.repeated(warm_up, cycle, cool_down, interval="global_skip")

    @property
    def synchronisation(self) -> Synchronisation:
        return self.averaged_every(self.global_skip, merge="daso")

    def check(self, setting: Setting) -> list[str]:
        workers, workers_per_node = setting.workers, setting.workers_per_node
        devices = self.devices_per_node or workers_per_node
        if devices >= workers or workers % devices:
            raise StudyError(
                f"strategy {self.name} at {workers} workers: they do not fill 2 or more whole nodes of {devices} "
                f"devices; use a multiple of {devices}, from {2 * devices} workers on, or another devices_per_node"
            )
        if devices > workers_per_node:
            raise StudyError(
                f"strategy {self.name} at {workers} workers: devices_per_node {devices} asks for more groups than "
                f"a node has devices; set it to at most {workers_per_node}, the workers that share a node"
            )
        epochs = setting.training.epochs
        if epochs <= self.warm_up_epochs + self.cool_down_epochs:
            return [
                f"never cycles: the epochs, {epochs}, are no more than its {self.warm_up_epochs} of warm-up and "
                f"{self.cool_down_epochs} of cool-down, so that it blocks after every batch"
            ]
        if self.wait > self.global_skip:
            return [
                f"wait {self.wait} is more than global_skip {self.global_skip}: a sum is merged at the next one, after "
                f"{self.global_skip} batches, but weighs as one that was {self.wait} in flight"
            ]
        return []


@register()
class DasoHeat(DasoFixed):
    """DASO with the schedule of heat 1.8.0: from (4, 1, 1) the skips halve at each plateau of the loss, then restart.

    The loss is the mean over workers of that of the epoch's last batch, before its
    update.
    """

    global_skip: Literal[4] = Field(4, description="batches between two sums at first")
    local_skip: Literal[1] = Field(
        1, description="batches between two gradient means inside a node at first"
    )
    wait: Literal[1] = Field(1, description="s: batches a sum is in flight at first")
    warm_up_epochs: int = Field(4, ge=0, description="blocking epochs at the beginning")
    cool_down_epochs: int = Field(4, ge=0, description="blocking epochs at the end")
    max_global_skips: int = Field(
        8, ge=1, description="batches between sums when the cycle restarts"
    )
    stability: float = Field(
        0.05, ge=0, lt=1, description="relative improvement of the loss that is none"
    )
    patience: int = Field(
        2,
        ge=0,
        description="epochs without improvement before the one that changes the skips",
    )

    @property
    def traits(self) -> Traits:
        return super().traits  # while the loss falls

    name = "daso-heat"
    summary = "gradients averaged inside nodes, parameters between them in flight; heat's schedule"
    source = "Coquelin et al., J. Big Data 2022; heat.optim.DASO 1.8.0"

    def schedule(self, epochs: int) -> SkipSchedule:
        first, plateau = (
            Skips(self.global_skip, self.local_skip, self.wait),
            _Plateau(self.stability, self.patience),
        )
        return SkipSchedule(
            epochs,
            self.warm_up_epochs,
            self.cool_down_epochs,
            first,
            self.max_global_skips,
            plateau,
        )


class Exchange:
    """One worker's part in the exchanges: its node, its group, the group whose turn it is and the sum in flight."""

    def __init__(self, worker: Worker, policies: Averaging, devices: int) -> None:
        self._device = worker.rank % devices
        self._worker, self._policies, self._devices = worker, policies, devices
        self._node = worker.comm.split(lambda rank: rank // devices)
        self._group = worker.comm.split(lambda rank: rank % devices)
        self.local_sync = True
        self._turn = 0  # the group that sends next
        # group of the last sum left in flight; a blocking sum clears it
        self._sender: int | None = None
        # on that group's devices, until merged
        self._in_flight: tuple[Request, Tensor, int] | None = None

    def step(self, batch: Batch) -> None:
        """Take one step; the gradient is the node's mean while `local_sync` is on."""
        self._worker.gradient(batch)
        if self.local_sync and self._devices > 1:
            self._node.allreduce_(self._worker.gradients, "mean")
        self._worker.update()

    def block(self, wire: str | None, last: bool) -> None:
        """w <- sum_p w_p / P, waited for."""
        state = self._policies.averaged(self._worker)
        vector = packed(state)
        if self._device == self._turn:
            self._mean_(vector, wire)
        self._settle(state, vector, last)

    def send(self, calls: Calls, last: bool) -> None:
        """Start sum_p w_p of the state as it is before an older sum is merged."""
        sent: tuple[Request, Tensor, int] | None = None
        if self._device == self._turn:
            vector = packed(self._policies.averaged(self._worker)).clone()
            weight = self._policies.weight(self._worker)
            request = self._group.iallreduce_(
                vector, "sum" if weight is None else "mean", weight=weight
            )
            sent = (request, vector, calls.wait)
        self.merge()
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
        """Mean over the nodes; the plain one is divided after the sum, as heat does it."""
        weight = self._policies.weight(self._worker)
        if weight is None:
            self._group.allreduce_(vector, "sum", wire=wire)
            vector.div_(self._group.size)
        else:
            self._group.allreduce_(vector, "mean", weight=weight, wire=wire)

    def _landed(self, sent: tuple[Request, Tensor, int]) -> Tensor:
        """Wait for the sum in flight; weighted by samples it is P times the mean."""
        request, vector, _ = sent
        request.wait()
        return (
            vector
            if self._policies.weighting == "uniform"
            else vector.mul_(self._group.size)
        )

    def merge(self) -> None:
        """w <- (2 s w + sum_p w_p) / (2 s + P) on the last sender, then a broadcast in its node."""
        if self._sender is None:
            return
        state = self._policies.averaged(self._worker)
        vector = packed(state)
        if self._in_flight is not None:
            own = 2 * self._in_flight[2] or 1
            vector.mul_(own).add_(self._landed(self._in_flight)).div_(
                own + self._group.size
            )
            self._in_flight = None
        self._share(state, vector, self._sender)

    def _settle(self, state: list[Tensor], vector: Tensor, last: bool) -> None:
        self._share(state, vector, self._turn)
        self._sender = None
        self._turn = 0 if last else (self._turn + 1) % self._devices

    def _share(self, state: list[Tensor], vector: Tensor, source: int) -> None:
        """Replace the node's state by `source`'s `vector`."""
        if self._devices > 1:
            self._node.broadcast_(vector, source)
        unpack_(vector, state)
        self._policies.after_average(self._worker)


def _mean_loss(worker: Worker) -> float:
    loss = worker.last_loss.detach().reshape(1).clone()
    worker.comm.allreduce_(loss, "mean")
    return float(loss)


class Skips(NamedTuple):
    """Intervals of one epoch, in batches."""

    global_skip: int  # between two sums over the nodes; 0: after every batch, blocking
    # between two gradient means inside a node; up to 1: after every batch
    local_skip: int
    wait: int  # from the sending of a sum to its merge


_BLOCKING = Skips(0, 0, 0)


class _Plateau:
    """Fires at the (`patience` + 1)-th loss in a row that is not `stability` (relative) better than the best.

    Firing resets the count; the best stays.
    """

    def __init__(self, stability: float, patience: int) -> None:
        self._stability, self._patience = stability, patience
        self._best = math.inf
        self._poor = 0

    def saw(self, loss: float) -> bool:
        """Add one epoch's loss; return True if the plateau fires."""
        if loss < self._best * (1.0 - self._stability):
            self._best, self._poor = loss, 0
        else:
            self._poor += 1
        if self._poor <= self._patience:
            return False
        self._poor = 0
        return True


class SkipSchedule:
    """The skips of `epochs` epochs. With e = epochs completed, cool-down before all else:

        e >= epochs - cool_down: blocking;  e < warm_up: blocking;  e = warm_up: `first`;
        later, at a plateau of the loss:  gs > 1: gs/2, ls/2, wait - 1, not below 1;  gs = 1: max, max/4, max/4.

    `plateau` None keeps `first` until the cool-down. `skips` are those of the epoch to
    come.
    """

    def __init__(
        self,
        epochs: int,
        warm_up: int,
        cool_down: int,
        first: Skips,
        max_skip: int = 0,
        plateau: _Plateau | None = None,
    ) -> None:
        self._warm_up, self._cooling = warm_up, epochs - cool_down
        self._max_skip, self.first, self._plateau = max_skip, first, plateau
        self._completed = 0
        self.skips = first if warm_up == 0 and self._cooling > 0 else _BLOCKING

    @property
    def judges(self) -> bool:
        """True if the loss of the current epoch will be used."""
        return (
            self._plateau is not None
            and self._warm_up <= self._completed + 1 < self._cooling
        )

    def epoch_over(self, loss: float | None = None) -> None:
        """Complete an epoch, with its `loss` if the schedule `judges` it."""
        fired = (
            self.judges
            and self._plateau is not None
            and loss is not None
            and self._plateau.saw(loss)
        )
        self._completed += 1
        if self._completed >= self._cooling or self._completed < self._warm_up:
            self.skips = _BLOCKING
        elif self._completed == self._warm_up:
            self.skips = self.first
        elif fired:
            self.skips = self._next(self.skips)

    def _next(self, skips: Skips) -> Skips:
        if skips.global_skip > 1:
            return Skips(
                max(1, skips.global_skip // 2),
                max(1, skips.local_skip // 2),
                max(1, skips.wait - 1),
            )
        return Skips(self._max_skip, self._max_skip // 4, self._max_skip // 4)


class Calls(NamedTuple):
    """Calls that follow the optimizer step of one batch."""

    send: bool = False  # the current group sums its parameters
    wait: int = 0  # S of the sum that is sent here: batches until it is merged
    blocking: bool = False  # the sum is waited for at once, and replaces the parameters
    merge: bool = False  # the sum in flight is due
    # gradients are averaged inside the node from now on; None: as before
    local_sync: bool | None = None


def calls_of(batch: int, last: int, skips: Skips) -> Calls:
    """Calls of batch `batch` of 0..`last`. `local_sync` applies to the batches after it."""
    gs, ls, wait = skips
    # As heat does it: a merge weighs by the wait of its sending, but is due by that of
    # the batch at hand, which shrinks towards an epoch's end. So a sum may find no
    # batch that is its own: it is lost in the last, blocking one.
    due = min(wait, last - batch)
    if batch == last or gs == 0 or batch % gs == 0:
        return Calls(
            send=True, wait=due, blocking=batch == last or wait == 0, merge=wait > 0
        )
    ends = batch + 1 == last
    if (batch + 1) % gs == 0:
        return Calls(local_sync=True)
    if batch % gs < due:
        return Calls(local_sync=True if ends else None)
    merge = batch % gs == due
    if ls <= 1:
        return Calls(merge=merge, local_sync=True if ls == 1 else None)
    return Calls(merge=merge, local_sync=(batch + 1) % ls == 0 or ends)
