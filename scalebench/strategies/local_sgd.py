"""Local SGD: train alone for some steps, then average; from the start, after a while, or over growing groups."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Annotated

from pydantic import Field, PositiveInt, model_validator

from scalebench.comm.base import Capability, Communicator
from scalebench.comm.engines import providing
from scalebench.errors import StudyError
from scalebench.strategies.averaging import Averaging, local_intervals, too_few_steps
from scalebench.strategies.base import Setting, Synchronisation, Worker
from scalebench.strategies.registry import register
from scalebench.strategies.replica_state import floating_buffers
from scalebench.strategies.traits import Stretch, Traits

Steps = Annotated[
    int,
    Field(
        ge=1,
        description="H: local steps between two synchronisations, counted through all epochs",
    ),
]
First = Annotated[
    int | None,
    Field(
        ge=1,
        description="local steps before the first synchronisation; default: H",
    ),
]


@register()
class LocalSgd(Averaging):
    """w <- mean_i w_i after every `steps` = H local steps, and after the last one.

    Steps are counted through the whole training: an interval may reach over the end of
    an epoch. Stich, ICLR 2019, arXiv 1805.09767. H = 1 with SGD, momentum included, is
    `allreduce` only where all batches are of equal size: `allreduce` weighs gradients
    by samples, a mean of weights all workers alike. With Adam it never is. Torch's
    PeriodicModelAverager counts from its first step: `first = 1`.
    """

    steps: Steps = 8
    first: First = None

    name = "local_sgd"
    summary = "weights averaged every H local steps (option steps)"
    source = "Stich, ICLR 2019, arXiv 1805.09767"

    def setup(self, worker: Worker) -> None:
        worker.state.taken = 0

    def train_epoch(self, worker: Worker, epoch: int) -> None:
        for epoch_ends in local_intervals(worker, epoch, self.due):
            if self.due(worker.state.taken) or (
                epoch_ends and self.ends_training(worker, epoch)
            ):
                self.synchronise(worker)

    def due(self, taken: int) -> bool:
        """Return True if replicas synchronise after `taken` steps."""
        return ends_interval(taken, self.steps, self.first)

    # SlowMo, BMUF, DiLoCo and their kin differ from local SGD in this alone.
    def synchronise(self, worker: Worker) -> None:
        self.average(worker)

    def in_agreement(self, worker: Worker, epoch: int) -> bool:
        return (
            worker.size == 1
            or self.ends_training(worker, epoch)
            or self.due(worker.state.taken)
        )

    @property
    def traits(self) -> Traits:
        return self.repeated(
            *until(self.first), Stretch(period=self.steps), interval="steps"
        )

    @property
    def synchronisation(self) -> Synchronisation:
        return self.averaged_every(self.steps)

    def check(self, setting: Setting) -> list[str]:
        return too_few_steps(setting, self.first or self.steps)


@register()
class PostLocalSgd(Averaging):
    """Gradients averaged after each of the first `start` batches, then local SGD.

    Lin et al., ICLR 2020, arXiv 1808.07217. Afterwards the members of a subgroup may
    average their gradients at each step (a plain mean, as torch's post_localSGD_hook
    takes it). `first` and H count from `start` on.
    """

    start: int = Field(
        100, ge=0, description="steps with averaged gradients before local SGD begins"
    )
    steps: Steps = 8
    first: First = None
    # torch's hook takes the devices of a node by default.
    subgroup: int = Field(
        1,
        ge=0,
        description="workers that go on averaging gradients; 0: those of a node, 1: none",
    )

    name = "post_local_sgd"
    summary = "gradients averaged every batch at first, then weights every H local steps (option steps)"
    source = "Lin et al., ICLR 2020, arXiv 1808.07217"
    requires = frozenset({Capability.COLLECTIVES, Capability.SPLIT})
    engines = providing(Capability.SPLIT)

    def setup(self, worker: Worker) -> None:
        worker.state.taken = 0
        members = min(self.subgroup or worker.workers_per_node, worker.size)
        worker.state.subgroup = (
            worker.comm.split(_consecutive(members)) if members > 1 else None
        )

    def train_epoch(self, worker: Worker, epoch: int) -> None:
        state, last = worker.state, self.last_step(worker, epoch)
        for batch in worker.batches(epoch):
            together = state.taken < self.start
            # In the mean of gradients all samples are to weigh the same; a local step
            # has no mean.
            worker.gradient(batch, batch.weight if together else 1.0)
            comm: Communicator | None = worker.comm if together else state.subgroup
            if comm is not None:
                comm.allreduce_(worker.gradients, "mean")
            worker.update()
            state.taken += 1
            # Up to `start` steps the mean gradient keeps weights equal.
            if state.taken > self.start and (
                self.due(state.taken) or batch.step == last
            ):
                self.average(worker)

    def due(self, taken: int) -> bool:
        """Return True if weights are averaged after `taken` steps."""
        return ends_interval(taken - self.start, self.steps, self.first)

    def in_agreement(self, worker: Worker, epoch: int) -> bool:
        """Averaged gradients keep the weights equal; averaged statistics are local until the first mean."""
        if worker.state.taken > self.start:
            return (
                worker.size == 1
                or self.ends_training(worker, epoch)
                or self.due(worker.state.taken)
            )
        return (
            worker.size == 1 or self.buffers == "keep" or not floating_buffers(worker)
        )

    @property
    def traits(self) -> Traits:
        alone = self.start + (self.first or 0)
        return self.repeated(
            *until(alone), Stretch(period=self.steps), interval="steps"
        )

    @property
    def synchronisation(self) -> Synchronisation:
        return self.averaged_every(self.steps)

    def check(self, setting: Setting) -> list[str]:
        require_divisors(
            self.name,
            "subgroup",
            [self.subgroup or setting.workers_per_node],
            setting.workers,
        )
        return too_few_steps(setting, self.first or self.steps, self.start)


@register()
class HierarchicalLocalSgd(Averaging):
    """Every p_s steps the mean over the workers of each group of s (`groups`: s: p_s).

    Where several periods divide the number of steps, only the largest group averages.

    Lin et al., ICLR 2020, arXiv 1808.07217, as torch's HierarchicalModelAverager groups
    them: neighbouring ranks. A group at least as large as the number of workers is all
    of them. The end of training averages over all, unless told to leave it. Torch
    counts from its first step: `first = 1`.
    """

    groups: dict[PositiveInt, PositiveInt] = Field(
        {4: 4, 1024: 16},
        min_length=1,
        description="group size: steps between its averages; both grow together",
    )
    first: int | None = Field(
        None,
        ge=1,
        description="steps before the first averages; default: each group's period",
    )

    name = "hierarchical_local_sgd"
    summary = "weights averaged often in small groups, seldom in large ones"
    source = "Lin et al., ICLR 2020, arXiv 1808.07217; torch HierarchicalModelAverager"
    requires = frozenset({Capability.COLLECTIVES, Capability.SPLIT})
    engines = providing(Capability.SPLIT)

    @model_validator(mode="after")
    def _grow_together(self) -> HierarchicalLocalSgd:
        sizes = sorted(self.groups)
        periods = [self.groups[size] for size in sizes]
        # A larger group acts in place of smaller ones: with the same period these never
        # would.
        if sorted(set(periods)) != periods:
            raise ValueError(
                f"groups: a larger group needs a longer period, got {self.groups}"
            )
        return self

    def setup(self, worker: Worker) -> None:
        worker.state.taken = 0
        sizes = [
            size
            for size in sorted(self.groups, reverse=True)
            # All workers have a communicator already.
            if size < worker.size
        ]
        worker.state.comms = {
            size: worker.comm.split(_consecutive(size)) for size in sizes
        }

    def train_epoch(self, worker: Worker, epoch: int) -> None:
        for epoch_ends in local_intervals(worker, epoch, self.due):
            ends = epoch_ends and self.ends_training(worker, epoch)
            size = worker.size if ends else self.group_after(worker.state.taken)
            if size > 1:
                self.average(worker, worker.state.comms.get(size, worker.comm))

    def group_after(self, taken: int) -> int:
        """Size of the groups that average after `taken` steps; 1: none."""
        # The mean over a group is that of all smaller groups in it.
        for size, period in sorted(self.groups.items(), reverse=True):
            if ends_interval(taken, period, self.first):
                return size
        return 1

    def due(self, taken: int) -> bool:
        """Return True if weights are averaged after `taken` steps."""
        return self.group_after(taken) > 1

    def in_agreement(self, worker: Worker, epoch: int) -> bool:
        return (
            self.ends_training(worker, epoch)
            or self.group_after(worker.state.taken) >= worker.size
        )

    @property
    def traits(self) -> Traits:
        return self.repeated(
            *until(self.first), Stretch(period=math.lcm(*self.groups.values()))
        )

    @property
    def synchronisation(self) -> Synchronisation:
        return self.averaged_every(min(self.groups.values()))

    def check(self, setting: Setting) -> list[str]:
        workers = setting.workers
        require_divisors(self.name, "groups", self.groups, workers)
        found = too_few_steps(setting, self.first or min(self.groups.values()))
        if max(self.groups) < workers:
            when = (
                "at the end of training only"
                if self.trailing == "synchronise"
                else "never"
            )
            found.append(f"no group holds all {workers} workers: they all agree {when}")
        return found


def ends_interval(taken: int, steps: int, first: int | None) -> bool:
    """Return True after `first` (default: `steps`) steps, and after every `steps` further ones."""
    # Torch counts from 0 and averages before it counts: after the first step, then
    # every period.
    first = first or steps
    return taken >= first and (taken - first) % steps == 0


def until(steps: int | None) -> tuple[Stretch, ...]:
    """Return the stretch of the first `steps` of a training, if there are any."""
    # Of another length than those behind it, it cannot stand for them.
    return (Stretch(steps=steps),) if steps else ()


def require_divisors(
    name: str, option: str, sizes: Iterable[int], workers: int
) -> None:
    """Refuse group `sizes`, of an `option` of strategy `name`, that leave workers over."""
    # The members of a smaller last group would weigh more in a mean of groups.
    for size in sizes:
        if size < workers and workers % size:
            raise StudyError(
                f"strategy {name}: option {option!r}: groups of {size} do not divide {workers} workers; use a divisor "
                f"of {workers}, or a multiple of {size} workers"
            )


def _consecutive(size: int) -> Callable[[int], int]:
    """Return the color of groups of `size` consecutive ranks."""
    # Neighbouring ranks share a node, whose links are the fastest.
    return lambda rank: rank // size
