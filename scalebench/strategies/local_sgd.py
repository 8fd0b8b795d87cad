"""Local SGD: train alone for some steps, then average; from the start, after a while, or over growing groups."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from pydantic import Field, PositiveInt, model_validator

from scalebench.comm.base import Capability, Communicator
from scalebench.errors import StudyError
from scalebench.strategies.averaging import Averaging, Periodic, last_step
from scalebench.strategies.base import Batch, Worker
from scalebench.strategies.registry import register
from scalebench.strategies.replica_state import floating_buffers
from scalebench.strategies.traffic import Setting


@register()
class LocalSgd(Periodic):
    """w <- mean_i w_i after every `steps` = H local steps, and after the last one.

    Stich, ICLR 2019, arXiv 1805.09767. H = 1 with SGD, momentum included, is `allreduce` only where all batches are of
    equal size: `allreduce` weighs gradients by samples, a mean of weights all workers alike. With Adam it never is.
    Torch's PeriodicModelAverager counts from its first step: `first = 1`.
    """

    name: ClassVar[str] = "local_sgd"
    summary: ClassVar[str] = "weights averaged every H local steps (option steps)"
    source: ClassVar[str] = "Stich, ICLR 2019, arXiv 1805.09767"


@register()
class PostLocalSgd(Periodic):
    """Gradients averaged after each of the first `start` batches, then local SGD.

    Lin et al., ICLR 2020, arXiv 1808.07217. Afterwards the members of a subgroup may go on averaging their gradients
    at each step (a plain mean, as torch's post_localSGD_hook takes it). `first` and H count from `start` on.
    """

    start: int = Field(100, ge=0, description="steps with averaged gradients before local SGD begins")
    subgroup: int = Field(1, ge=0, description="workers that go on averaging gradients; 0: those of a node, 1: none")

    name: ClassVar[str] = "post_local_sgd"
    summary: ClassVar[str] = "gradients averaged every batch at first, then weights every H local steps (option steps)"
    source: ClassVar[str] = "Lin et al., ICLR 2020, arXiv 1808.07217"
    requires: ClassVar[frozenset[Capability]] = frozenset({Capability.COLLECTIVES, Capability.SPLIT})
    engines: ClassVar[tuple[str, ...]] = ("mpi", "gloo", "nccl")
    counts: ClassVar[dict[str, str]] = {
        "averages": "means of the weights: each `steps` steps after `start`, and where a partial interval ends training"
    }

    def first_interval(self, steps: int) -> tuple[int, int]:
        return self.start, self.start + super().first_interval(steps)[1]

    def due(self, taken: int) -> bool:
        return super().due(taken - self.start)

    def check(self, workers: int, workers_per_node: int) -> list[str]:
        check_subgroup(self.name, self.subgroup, workers, workers_per_node)
        return []

    def setup(self, worker: Worker) -> None:
        super().setup(worker)
        members = min(self.subgroup or worker.workers_per_node, worker.size)
        worker.state.subgroup = worker.comm.split(worker.rank // members) if members > 1 else None

    def step(self, worker: Worker, batch: Batch) -> None:
        comm: Communicator | None = worker.state.subgroup
        if worker.state.taken < self.start:
            worker.gradient(batch, batch.weight)
            comm = worker.comm
        else:
            worker.gradient(batch)
        if comm is not None:
            comm.allreduce_(worker.gradients, "mean")
        worker.update()

    def after_step(self, worker: Worker, taken: int, ends: bool) -> None:
        if taken > self.start:  # up to there replicas are equal
            super().after_step(worker, taken, ends)

    def in_agreement(self, worker: Worker, epoch: int) -> bool:
        """Averaged gradients keep weights equal; statistics that are to be averaged, each worker's own till then."""
        if worker.state.taken > self.start:
            return super().in_agreement(worker, epoch)
        return worker.size == 1 or self.buffers == "keep" or not floating_buffers(worker)

    @property
    def syncs_formula(self) -> str:
        return f"{self._means_of_gradients} + averages"

    @property
    def bytes_formula(self) -> str:
        return f"n * {self._means_of_gradients} + {self.state_bytes} * averages"

    @property
    def _means_of_gradients(self) -> str:
        """Over all workers up to `start`, then inside subgroups of more than one."""
        first = "min(max(start - e * S, 0), S)"
        return {0: f"(S if G > 1 else {first})", 1: first}.get(self.subgroup, "S")

    def quantities(self, epoch: int, setting: Setting) -> dict[str, int]:
        epochs, steps = setting.epochs, setting.steps
        taken = range(max(epoch * steps, self.start) + 1, (epoch + 1) * steps + 1)
        cut = self.start < epochs * steps and not self.due(epochs * steps)
        ends = epoch == epochs - 1 and cut and self.trailing == "synchronise"
        return {"averages": sum(self.due(step) for step in taken) + ends}


@register()
class HierarchicalLocalSgd(Averaging):
    """Every p_s steps the mean over the workers of each group of s; the largest dividing period runs, and no other.

    Lin et al., ICLR 2020, arXiv 1808.07217, as torch's HierarchicalModelAverager groups them: neighbouring ranks. A
    group at least as large as the number of workers is all of them. The end of training averages over all, unless
    told to leave it.
    Torch counts from its first step: `first = 1`.
    """

    groups: dict[PositiveInt, PositiveInt] = Field(
        {4: 4, 1024: 16}, min_length=1, description="group size: steps between its averages; both grow together"
    )
    first: int | None = Field(None, ge=1, description="steps before the first averages; default: each group's period")

    name: ClassVar[str] = "hierarchical_local_sgd"
    summary: ClassVar[str] = "weights averaged often in small groups, seldom in large ones"
    source: ClassVar[str] = "Lin et al., ICLR 2020, arXiv 1808.07217; torch HierarchicalModelAverager"
    requires: ClassVar[frozenset[Capability]] = frozenset({Capability.COLLECTIVES, Capability.SPLIT})
    engines: ClassVar[tuple[str, ...]] = ("mpi", "gloo", "nccl")
    counts: ClassVar[dict[str, str]] = {
        "averages": "steps after which the period of some group ends, and the last step of training"
    }

    @model_validator(mode="after")
    def _grow_together(self) -> HierarchicalLocalSgd:
        sizes = sorted(self.groups)
        periods = [self.groups[size] for size in sizes]
        if sorted(set(periods)) != periods:
            raise ValueError(f"groups: a larger group needs a longer period, got {self.groups}")
        return self

    @property
    def sync_every(self) -> int:
        return min(self.groups.values())

    def first_interval(self, steps: int) -> tuple[int, int]:
        return 0, self.first or self.sync_every

    def check(self, workers: int, workers_per_node: int) -> list[str]:
        check_groups(self.name, self.groups, workers)
        if max(self.groups) < workers:
            when = "at the end of training only" if self.trailing == "synchronise" else "never"
            return [f"no group holds all {workers} workers: they all agree {when}"]
        return []

    def setup(self, worker: Worker) -> None:
        worker.state.taken = 0
        sizes = [size for size in sorted(self.groups, reverse=True) if size < worker.size]
        worker.state.comms = {size: worker.comm.split(worker.rank // size) for size in sizes}

    def train_epoch(self, worker: Worker, epoch: int) -> None:
        last = last_step(self, worker, epoch)
        for batch in worker.batches(epoch):
            worker.local_step(batch)
            worker.state.taken += 1
            size = worker.size if batch.step == last else self.group_after(worker.state.taken)
            if size > 1:
                self.average(worker, worker.state.comms.get(size, worker.comm))

    def group_after(self, taken: int) -> int:
        """The size of the groups that average after `taken` steps; 1 if none does."""
        for size, period in sorted(self.groups.items(), reverse=True):
            first = self.first or period
            if taken >= first and (taken - first) % period == 0:
                return size
        return 1

    def in_agreement(self, worker: Worker, epoch: int) -> bool:
        ended = worker.is_last(epoch) and self.trailing == "synchronise"
        return ended or self.group_after(worker.state.taken) >= worker.size

    @property
    def syncs_formula(self) -> str:
        return "averages"

    def quantities(self, epoch: int, setting: Setting) -> dict[str, int]:
        epochs, steps = setting.epochs, setting.steps
        counted = sum(self.group_after(taken) > 1 for taken in range(epoch * steps + 1, (epoch + 1) * steps + 1))
        cut = epoch == epochs - 1 and self.group_after(epochs * steps) == 1
        return {"averages": counted + (cut and self.trailing == "synchronise")}


def check_subgroup(name: str, subgroup: int, workers: int, workers_per_node: int) -> None:
    """Refuse a `subgroup` of strategy `name` that leaves workers over; 0 stands for the workers of a node."""
    size = subgroup or workers_per_node
    if size >= workers or workers % size == 0:
        return
    if subgroup:
        raise StudyError(
            f"strategy {name}: option 'subgroup' {size} does not divide {workers} workers; use a divisor of {workers}"
        )
    raise StudyError(
        f"strategy {name}: option 'subgroup' 0 is the {size} workers of a node, which do not divide {workers} workers; "
        f"use a multiple of {size} workers, or a subgroup that is a divisor of {workers}"
    )


def check_groups(name: str, sizes: Iterable[int], workers: int) -> None:
    """Refuse group `sizes` of strategy `name` that leave workers over."""
    for size in sizes:
        if size < workers and workers % size:
            raise StudyError(
                f"strategy {name}: option 'groups': size {size} does not divide {workers} workers; "
                f"use a divisor of {workers}"
            )
