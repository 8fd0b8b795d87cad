"""The other baseline that users run: PyTorch's own DistributedDataParallel, and its model for virtual runs."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, cast

from pydantic import Field, model_validator

from scalebench.cluster.operation import Kind
from scalebench.comm.base import (
    Capability,
    LibraryCommunicator,
    Overlap,
    OverlapCommunicator,
)
from scalebench.comm.engines import providing
from scalebench.errors import StudyError
from scalebench.strategies.allreduce import GradientAveraging, mean_of_gradients
from scalebench.strategies.base import Batch, Setting, Synchronisation, Worker
from scalebench.strategies.compression import (
    WIRES,
    PowerSgd,
    compressed,
    options_have_an_effect,
    powersgd_elements,
    require_matrices,
)
from scalebench.strategies.registry import register
from scalebench.strategies.replica_state import broadcast_bytes_, model_buffers
from scalebench.strategies.traits import Traits
from scalebench.system.late import torch

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel

_MIB = 1 << 20
_TORCHS_CAP = 25.0  # MiB
_BUCKETS = (
    "bucket_sizes",
    "rebuilt_bucket_sizes",
)  # of the first backward pass, of all others


@register("virtual")
class VirtualDdp(GradientAveraging):
    """Gradients are averaged in buckets, in backward order, as soon as each bucket is complete.

    Li et al., VLDB 2020, arXiv 2006.15704. Defaults are those of PyTorch, but for
    `start` (torch: 1000). Compression is by torch's own hooks, `accumulate` by its
    no_sync. Each step begins with worker 0's buffers (BatchNorm's statistics and
    counters), broadcast to all: torch's default. PowerSGD has one bucket whatever the
    cap, for of several its hook sums on gloo in an order that ranks do not share. A
    lone worker compresses nothing.

    With find_unused_parameters each step also adds up, over the workers, which
    parameters have a gradient.

    A virtual run charges the same buckets, each when it is complete; of PowerSGD two
    collectives, after the backward pass.
    """

    bucket_cap_mb: float = Field(
        25.0,
        gt=0,
        description="size of a gradient bucket in MiB; at 25 the first holds 1",
    )
    compression: Literal["none", "fp16", "bf16", "powersgd"] = Field(
        "none", description="what travels"
    )
    rank: int = Field(1, ge=1, le=4096, description="powersgd: rank of the factors")
    start: int = Field(
        2,
        ge=2,
        description="powersgd: first steps that are not compressed; torch wants at least 2",
    )
    find_unused_parameters: bool = Field(
        False, description="for models of which some parameters get no gradient"
    )

    name = "ddp"
    summary = "the real DistributedDataParallel: gradients averaged every batch in overlapped buckets"
    source = "Li et al., VLDB 2020, arXiv 2006.15704; torch.nn.parallel.DistributedDataParallel"
    engines = providing(Capability.PROCESS_GROUP)
    requires = frozenset({Capability.COLLECTIVES, Capability.OVERLAP})

    _stated = model_validator(mode="after")(options_have_an_effect)

    def setup(self, worker: Worker) -> None:
        worker.state.buffers = model_buffers(worker) if worker.size > 1 else []
        if self.compression == "powersgd" and worker.size > 1:
            worker.state.factors = PowerSgd(worker, self.rank, self.start)
        if self.find_unused_parameters:
            used = torch.ones(_trainable(worker), dtype=torch.int32)
            worker.state.used = used.to(worker.parameters.device)

    def gather(
        self, worker: Worker, batch: Batch, weight: float, *, add: bool, ends: bool
    ) -> None:
        """The first forward pass of a step begins with worker 0's buffers."""
        if worker.state.buffers and not add:
            broadcast_bytes_(worker.comm, worker.state.buffers)
        super().gather(worker, batch, weight, add=add, ends=ends)

    def exchange(self, worker: Worker, scale: float = 1.0) -> None:
        if self.compression == "powersgd" and worker.size > 1:
            worker.state.factors.mean_(worker.gradients)
        else:
            cast(OverlapCommunicator, worker.comm).overlapped_mean_(
                worker.gradients, self.overlap
            )
        if self.find_unused_parameters and worker.size > 1:
            worker.comm.allreduce_(worker.state.used)
        if scale != 1.0:
            worker.gradients.mul_(scale)
        worker.update()

    @property
    def overlap(self) -> Overlap:
        cap = int(self.bucket_cap_mb * _MIB)
        first = _MIB if self.bucket_cap_mb == _TORCHS_CAP else cap
        return Overlap(self.engines[0], cap, first, wire=WIRES.get(self.compression))

    def warm_up(self, worker: Worker, batch: Batch) -> None:
        super().warm_up(worker, batch)
        if hasattr(worker.state, "factors"):
            worker.state.factors.forget()  # these steps are not among PowerSGD's first

    @property
    def synchronisation(self) -> Synchronisation:
        return Synchronisation(
            every=self.accumulate, averaged="parameters, worker 0's buffers"
        )

    def check(self, setting: Setting) -> list[str]:
        if setting.without_gradient and not self.find_unused_parameters:
            some = ", ".join(setting.without_gradient[:3])
            more = f" and {len(setting.without_gradient) - 3} more" * (
                len(setting.without_gradient) > 3
            )
            raise StudyError(
                f"strategy ddp: {some}{more} of model {setting.training.model} get no gradient in some steps, for "
                "which DDP waits; use ddp: {find_unused_parameters: true}, or leave them out of the model"
            )
        if (
            self.compression == "powersgd"
            and setting.workers > 1
            and setting.shapes is not None
        ):
            require_matrices(setting.shapes, self.rank)
        return []

    @property
    def traits(self) -> Traits:
        return replace(
            compressed(super().traits, self.compression, self.start), sends_buffers=True
        )

    def arithmetic(self, workers: int) -> str | None:
        plain = self.accumulate == 1 and (self.compression == "none" or workers == 1)
        return mean_of_gradients(workers) if plain else None


@register()
class Ddp(VirtualDdp):
    """The real DistributedDataParallel. It communicates inside backward: compute and communication are not separate.

    How many buckets it sends is read from torch's own log: a synchronisation takes an
    allreduce for each of them.
    """

    requires = frozenset({Capability.PROCESS_GROUP})

    @property
    def traits(self) -> Traits:
        return replace(super().traits, split_is_measured=False)

    def setup(self, worker: Worker) -> None:
        from torch.nn.parallel import DistributedDataParallel

        group = cast(LibraryCommunicator, worker.comm).process_group
        worker.use_optimizer(lambda optimizer: optimizer)
        state, gradients = worker.state, worker.gradients
        cap: Any = self.torchs_cap(gradients.nbytes)  # torch takes floats, and says int
        worker.forward = DistributedDataParallel(
            worker.model,
            process_group=group,
            bucket_cap_mb=cap,
            find_unused_parameters=self.find_unused_parameters,
        )
        state.steps, state.warmed = 0, False
        buffers = list(worker.model.buffers())
        state.buffer_bytes, state.buffer_calls = (
            sum(each.nbytes for each in buffers),
            len({b.dtype for b in buffers}),
        )
        state.used_bytes = 4 * _trainable(worker) if self.find_unused_parameters else 0
        state.sent = (
            2 * gradients.numel() if self.compression in WIRES else gradients.nbytes
        )
        state.factors_sent = (
            powersgd_elements(worker.model, self.rank) * gradients.element_size()
        )
        if self.compression != "none" and worker.size > 1:
            self._compress(worker, group)

    def torchs_cap(self, size: int) -> float | None:
        """DDP's `bucket_cap_mb` for gradients of `size` bytes: torch makes the first bucket small only without one."""
        if self.compression == "powersgd":
            return size / _MIB + 1
        return None if self.bucket_cap_mb == _TORCHS_CAP else self.bucket_cap_mb

    def _compress(self, worker: Worker, group: Any) -> None:
        from torch.distributed.algorithms import ddp_comm_hooks as hooks

        # By its own name DDP refuses the bf16 hook on gloo, which can do it by now.
        shorten: Any = getattr(
            hooks.default_hooks, f"{self.compression}_compress_hook", None
        )
        hook: Any = lambda group, bucket: shorten(group, bucket)  # noqa: E731
        if self.compression == "powersgd":
            group = worker.state.factors = hooks.powerSGD_hook.PowerSGDState(
                group,
                matrix_approximation_rank=self.rank,
                start_powerSGD_iter=self.start,
            )
            hook = hooks.powerSGD_hook.powerSGD_hook
        _wrapped(worker).register_comm_hook(group, hook)

    def warm_up(self, worker: Worker, batch: Batch) -> None:
        GradientAveraging.warm_up(self, worker, batch)
        worker.state.warmed, worker.state.steps = True, 0
        if hasattr(worker.state, "factors"):
            import numpy as np

            factors = worker.state.factors
            factors.iter, factors.rng = 0, np.random.RandomState(0)
            for memory in (
                factors.error_dict,
                factors.p_memory_dict,
                factors.q_memory_dict,
            ):
                memory.clear()

    def gather(
        self, worker: Worker, batch: Batch, weight: float, *, add: bool, ends: bool
    ) -> None:
        """Gradients are exchanged within the last of the backward passes."""
        alone: Any = nullcontext() if ends else _wrapped(worker).no_sync()
        with alone:
            worker.gradient(batch, weight, add=add)

    def exchange(self, worker: Worker, scale: float = 1.0) -> None:
        state, comm = worker.state, cast(LibraryCommunicator, worker.comm)
        if scale != 1.0:
            worker.gradients.mul_(scale)
        if worker.size > 1:
            # DDP has sent them before the first forward pass, dtype by dtype
            if state.buffer_bytes:
                broadcast = comm.operation(Kind.BROADCAST, state.buffer_bytes)
                comm.count(broadcast, state.buffer_calls)
                comm.linger(broadcast)
            compressed = self.compression == "powersgd" and state.steps >= self.start
            sent = state.factors_sent if compressed else state.sent
            comm.overlapped(
                comm.operation(Kind.ALLREDUCE, sent), calls=3 if compressed else 0
            )
            if state.used_bytes:
                comm.count(comm.operation(Kind.ALLREDUCE, state.used_bytes), calls=1)
            if compressed:
                # The second factor waits for the first one's mean.
                comm.count(comm.operation(Kind.ALLREDUCE, 0))
        state.steps += 1
        worker.update()

    def finish(self, worker: Worker) -> None:
        """Count an allreduce for each bucket of a step; PowerSGD's three for its only bucket are counted already.

        Buckets are made anew after the first backward pass, in the order of its
        gradients; torch logs them some passes later, and the number is unknown until
        then.
        """
        state = worker.state
        plain = (
            min(state.steps, self.start)
            if self.compression == "powersgd"
            else state.steps
        )
        if worker.size > 1:
            log = _wrapped(worker)._get_ddp_logging_data()
            first, then = (
                len(sizes.split(",")) if sizes else None
                for sizes in map(log.get, _BUCKETS)
            )
            early = 0 if state.warmed else min(plain, 1)  # steps with the first buckets
            if self.find_unused_parameters:  # torch then makes no new buckets
                then = first
            known = plain == early or then is not None
            calls = (
                early * (first or 0) + (plain - early) * (then or 0) if known else None
            )
            cast(LibraryCommunicator, worker.comm).called(calls)


def _wrapped(worker: Worker) -> DistributedDataParallel:
    return cast("DistributedDataParallel", worker.forward)


def _trainable(worker: Worker) -> int:
    """Return the number of parameter tensors that are trained."""
    return sum(parameter.requires_grad for parameter in worker.model.parameters())
