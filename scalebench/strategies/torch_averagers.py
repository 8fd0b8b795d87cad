"""PyTorch's own local SGD, measured as users run it; virtual runs charge our form of the same rule.

Torch rebinds every parameter to a fresh buffer at each average: the flat buffer takes
them back once an epoch. It averages parameters only, counts from its first step, and
leaves the last, partial interval alone: the mean that ends the training is ours.
torchft's LocalSGD and DiLoCo are left out: both take a Manager, which asks a lighthouse
server for a quorum before each average (docs/strategies/torch_local_sgd.md says what
was seen).
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from dataclasses import replace
from typing import cast

from pydantic import Field, PositiveInt

from scalebench.cluster.operation import Kind
from scalebench.comm.base import Capability, LibraryCommunicator
from scalebench.comm.engines import providing
from scalebench.errors import StudyError
from scalebench.strategies import local_sgd
from scalebench.strategies.base import Batch, Setting, Strategy, Synchronisation, Worker
from scalebench.strategies.registry import register
from scalebench.strategies.traits import Traits

Rule = local_sgd.LocalSgd | local_sgd.PostLocalSgd | local_sgd.HierarchicalLocalSgd
_VIRTUAL = frozenset({Capability.COLLECTIVES, Capability.SPLIT})
_NATIVE = frozenset({Capability.PROCESS_GROUP})


class TorchAverager(Strategy):
    """One of torch's averagers: virtual runs take the steps of `rule`, our strategy with the same arithmetic."""

    engines = providing(Capability.PROCESS_GROUP)
    requires = _VIRTUAL

    @property
    def rule(self) -> Rule:
        """Our strategy with the same arithmetic, which leaves a partial interval as it is."""
        raise NotImplementedError

    def setup(self, worker: Worker) -> None:
        self.rule.setup(worker)

    def train_epoch(self, worker: Worker, epoch: int) -> None:
        self.rule.train_epoch(worker, epoch)
        _conclude(self.rule, worker, epoch)

    def in_agreement(self, worker: Worker, epoch: int) -> bool:
        # The mean that ends the training is ours (`_conclude`).
        return worker.is_last(epoch) or self.rule.in_agreement(worker, epoch)

    @property
    def synchronisation(self) -> Synchronisation:
        return Synchronisation(every=self.rule.synchronisation.every)

    def check(self, setting: Setting) -> list[str]:
        return self.rule.check(setting)


class RealAverager:
    """Training by torch's own averager, `worker.state.averager`: the native form, mixed into each of them."""

    def step(self, worker: Worker, batch: Batch) -> None:
        worker.local_step(batch)
        worker.state.taken += 1
        worker.state.averager.average_parameters(worker.model.parameters())
        rule = worker.state.rule
        if rule.due(worker.state.taken):
            group = (
                rule.group_after(worker.state.taken)
                if isinstance(rule, local_sgd.HierarchicalLocalSgd)
                else worker.size
            )
            comm = cast(LibraryCommunicator, worker.comm)
            # torch flattens them too
            averaged = comm.operation_among(
                group, Kind.ALLREDUCE, worker.parameters.nbytes
            )
            comm.carried(averaged, calls=1)

    def train_epoch(self, worker: Worker, epoch: int) -> None:
        for batch in worker.batches(epoch):
            self.step(worker, batch)
        reattach(worker)
        _conclude(worker.state.rule, worker, epoch)


def _begin(strategy: TorchAverager, worker: Worker) -> None:
    worker.state.taken, worker.state.rule = 0, strategy.rule
    # The averagers rebind parameters, and a flat optimizer would go on with the old
    # ones.
    worker.use_optimizer(lambda optimizer: optimizer)


def _conclude(rule: Rule, worker: Worker, epoch: int) -> None:
    if worker.is_last(epoch) and not rule.in_agreement(worker, epoch):
        worker.comm.allreduce_(worker.parameters, "mean")


@register("virtual")
class VirtualTorchLocalSgd(TorchAverager):
    """PeriodicModelAverager: w <- (1/K) sum_j w_j after step t = `warmup` + 1, then after every `period` steps."""

    period: int = Field(8, ge=2, description="steps between two averages")
    warmup: int = Field(0, ge=0, description="steps before the averager begins")

    name = "torch_local_sgd"
    summary = "the real PeriodicModelAverager: weights averaged every H local steps (option period)"
    source = (
        "torch.distributed.algorithms.model_averaging.averagers.PeriodicModelAverager"
    )

    @property
    def rule(self) -> Rule:
        # torch counts from 0, and averages before it counts.
        return local_sgd.LocalSgd(
            steps=self.period, first=self.warmup + 1, buffers="keep", trailing="leave"
        )

    @property
    def traits(self) -> Traits:
        return replace(self.rule.traits, options={"interval": "period"})


@register()
class TorchLocalSgd(RealAverager, VirtualTorchLocalSgd):
    """The real PeriodicModelAverager."""

    requires = _NATIVE

    def setup(self, worker: Worker) -> None:
        from torch.distributed.algorithms.model_averaging import averagers

        _begin(self, worker)
        group = cast(LibraryCommunicator, worker.comm).process_group
        worker.state.averager = averagers.PeriodicModelAverager(
            self.period, self.warmup, group
        )


@register("virtual")
class VirtualTorchHierarchical(TorchAverager):
    """HierarchicalModelAverager: w <- (1/s) sum_j w_j over each group of s neighbouring ranks after step t.

    s is the largest group whose period divides t - 1.
    """

    groups: dict[PositiveInt, PositiveInt] = Field(
        {4: 4, 1024: 16},
        min_length=1,
        description="group size: steps between its averages; both grow together",
    )

    name = "torch_hierarchical_local_sgd"
    summary = "the real HierarchicalModelAverager: averaged often in small groups, seldom in large ones"
    source = "torch.distributed.algorithms.model_averaging.hierarchical_model_averager"

    @property
    def rule(self) -> local_sgd.HierarchicalLocalSgd:
        return local_sgd.HierarchicalLocalSgd(
            groups=self.groups, first=1, buffers="keep", trailing="leave"
        )

    @property
    def traits(self) -> Traits:
        return self.rule.traits

    def check(self, setting: Setting) -> list[str]:
        if max(self.groups) < setting.workers:
            raise StudyError(
                f"strategy {self.name}: option 'groups': the largest group, {max(self.groups)}, has to hold all "
                f"{setting.workers} workers; add a size of {setting.workers} or more"
            )
        local_sgd.require_divisors(self.name, "groups", self.groups, setting.workers)
        return super().check(setting)


@register()
class TorchHierarchical(RealAverager, VirtualTorchHierarchical):
    """The real HierarchicalModelAverager."""

    requires = _NATIVE

    def setup(self, worker: Worker) -> None:
        from torch.distributed.algorithms.model_averaging.hierarchical_model_averager import (
            HierarchicalModelAverager,
        )

        _begin(self, worker)
        # torch refuses a largest group other than all ranks.
        sizes = OrderedDict(
            (period, min(size, worker.size))
            for size, period in sorted(self.groups.items())
        )
        group = cast(LibraryCommunicator, worker.comm).process_group
        worker.state.averager = HierarchicalModelAverager(sizes, process_group=group)


@register("virtual")
class VirtualTorchPostLocalSgd(TorchAverager):
    """DDP with post_localSGD_hook and PostLocalSGDOptimizer.

        t <= start:  w <- w - eta (1/K) sum_j g_j
        then:        w <- w - eta g,  and w <- (1/K) sum_j w_j after step `start` + 1 and every `period` steps

    In a `subgroup` g stays a mean over its members.
    """

    start: int = Field(
        100, ge=0, description="steps with averaged gradients before local SGD begins"
    )
    period: int = Field(
        8, ge=2, description="steps between two averages of the weights"
    )
    subgroup: int = Field(
        1,
        ge=0,
        description="workers that go on averaging gradients; 0: those of a node, 1: none",
    )

    name = "torch_post_local_sgd"
    summary = "the real PostLocalSGDOptimizer under DDP: gradients at first, then weights every H steps (option period)"
    source = "torch.distributed.optim.PostLocalSGDOptimizer, ddp_comm_hooks.post_localSGD_hook"

    @property
    def rule(self) -> Rule:
        policies = {"subgroup": self.subgroup, "buffers": "keep", "trailing": "leave"}
        return local_sgd.PostLocalSgd(
            start=self.start, steps=self.period, first=1, **policies
        )

    @property
    def traits(self) -> Traits:
        return replace(self.rule.traits, options={"interval": "period"})

    def check(self, setting: Setting) -> list[str]:
        local_sgd.require_divisors(
            self.name,
            "subgroup",
            [self.subgroup or setting.workers_per_node],
            setting.workers,
        )
        return super().check(setting)


@register()
class TorchPostLocalSgd(RealAverager, VirtualTorchPostLocalSgd):
    """The real PostLocalSGDOptimizer. Gradients travel inside backward: compute and communication are not separate."""

    requires = _NATIVE

    @property
    def traits(self) -> Traits:
        return replace(super().traits, split_is_measured=False)

    def setup(self, worker: Worker) -> None:
        import torch.distributed as dist
        from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook
        from torch.distributed.algorithms.model_averaging import averagers
        from torch.nn.parallel import DistributedDataParallel

        with warnings.catch_warnings():
            # its package scripts other optimizers when loaded
            warnings.simplefilter("ignore", DeprecationWarning)
            from torch.distributed.optim import PostLocalSGDOptimizer

        _begin(self, worker)
        group = cast(LibraryCommunicator, worker.comm).process_group
        members = min(self.subgroup or worker.workers_per_node, worker.size)
        subgroup = dist.new_subgroups(members)[0] if members > 1 else None
        worker.state.averager = averagers.PeriodicModelAverager(
            self.period, self.start, group
        )
        worker.use_optimizer(
            lambda optimizer: PostLocalSGDOptimizer(optimizer, worker.state.averager)
        )
        # Buffers stay those of each worker, as with the other averagers.
        model = DistributedDataParallel(
            worker.model, process_group=group, forward_sync_buffers=False
        )
        worker.state.hook = post_localSGD_hook.PostLocalSGDState(
            group, subgroup, self.start, members > 1
        )
        model.register_comm_hook(
            worker.state.hook, post_localSGD_hook.post_localSGD_hook
        )
        worker.forward = model

    def warm_up(self, worker: Worker, batch: Batch) -> None:
        worker.local_step(batch)
        # Both count steps, of which those of the warm-up are none.
        worker.state.averager.step = worker.state.hook.iter = 0
        reattach(worker)

    def step(self, worker: Worker, batch: Batch) -> None:
        # Numbers of samples weight means of gradients; a local step has none.
        weighted = worker.state.taken < self.start
        worker.gradient(batch, batch.weight if weighted else 1.0)
        worker.update()
        worker.state.taken += 1
        comm = cast(LibraryCommunicator, worker.comm)
        if weighted or worker.state.hook.post_local_gradient_allreduce:
            # DDP communicates inside the backward pass: counted, as its time is
            # unknown.
            comm.overlapped(comm.operation(Kind.ALLREDUCE, worker.gradients.nbytes))
        if not weighted and worker.state.rule.due(worker.state.taken):
            comm.overlapped(comm.operation(Kind.ALLREDUCE, worker.parameters.nbytes))


def reattach(worker: Worker) -> None:
    """Take parameters that torch has bound to buffers of its own back into the flat one."""
    from scalebench.models.flat import views

    trainable = [
        parameter for parameter in worker.model.parameters() if parameter.requires_grad
    ]
    for parameter, view in zip(
        trainable, views(trainable, worker.parameters), strict=True
    ):
        # After an epoch without an average they still lie in the flat buffer.
        if parameter.data_ptr() != view.data_ptr():
            view.copy_(parameter.detach())
            parameter.data = view
