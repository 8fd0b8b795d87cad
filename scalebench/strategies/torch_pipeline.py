"""PyTorch's own pipelines, torch.distributed.pipelining, and their model for virtual runs."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, repeat
from typing import Literal

from pydantic import Field

from scalebench.cluster.mesh import Mesh
from scalebench.comm.base import Capability
from scalebench.comm.engines import providing
from scalebench.strategies.base import Move, Worker
from scalebench.strategies.parts import SCHEDULE, Schedule
from scalebench.strategies.pipeline import Pipeline
from scalebench.strategies.registry import register
from scalebench.strategies.traits import Traits

_FIRST, _SECOND = 0, 1  # chunk of a stage: on the way forth, and on the way back


@register("virtual")
class VirtualTorchPipeline(Pipeline):
    """ScheduleGPipe, Schedule1F1B, ScheduleInterleaved1F1B and ScheduleZBVZeroBubble over the stages of `pipeline`.

    zbv:  stage k of m holds chunks k and 2 m - 1 - k of the layers; backward passes come in halves, gradients of the
          inputs first, and those of the weights fill the bubble

    A virtual run takes the steps of `pipeline`, in the order of micro-batches of torch;
    halves of a backward pass take equally long there, but for the first layers, which
    have no gradient of inputs.
    """

    schedule: Schedule | Literal["zbv"] = Field("1f1b", description=SCHEDULE)  # type: ignore[assignment]
    recompute: Literal["none"] = Field(
        "none", description="torch keeps all activations"
    )

    name = "torch_pipeline"
    summary = "the real torch.distributed.pipelining: GPipe, 1F1B, Interleaved1F1B, ZBV (schedule)"
    source = "torch.distributed.pipelining; zbv: Qi et al., ICLR 2024, arXiv 2401.10241"
    engines = providing(Capability.PROCESS_GROUP)

    def replica(self) -> Mesh:
        return Mesh(pipeline=self.stages, folded=self.schedule == "zbv")

    def groups(self) -> int:
        return 2 * self.stages if self.schedule == "zbv" else super().groups()

    def order(self, stage: int, stages: int, micro_batches: int) -> Iterator[Move]:
        if self.schedule == "zbv":
            return zero_bubble(stage, stages, micro_batches)
        return super().order(stage, stages, micro_batches)

    # Stated again: a class that changes the program loses what its bases state of it.
    @property
    def traits(self) -> Traits:
        return self.repeated()


@register()
class TorchPipeline(VirtualTorchPipeline):
    """Torch's own schedules; gradients of replicas are averaged as by `allreduce`, after the step.

    Torch does not say when its messages came: the waiting of a stage is communication,
    and the bubble is unknown.
    """

    requires = frozenset({Capability.PROCESS_GROUP, Capability.SPLIT})

    def setup(self, worker: Worker) -> None:
        super().setup(worker)
        if worker.mesh.parts > 1:
            worker.use_schedule(self.schedule, self.micro_batches)
            # Over torch's own parameters, as its users have it, in place of the flat
            # one.
            worker.use_optimizer(lambda optimizer: optimizer)

    @property
    def traits(self) -> Traits:
        return self.repeated()


def zero_bubble(stage: int, stages: int, micro_batches: int) -> Iterator[Move]:
    """Yield the moves of stage k of m, which holds chunks k and 2 m - 1 - k of the layers: ZB-V.

    Gradients of the weights fill the bubble of the pipeline. Source: Qi et al., "Zero
    Bubble Pipeline Parallelism", ICLR 2024, arXiv 2401.10241, section 6.

    F, I, W: forward pass, gradients of the inputs, gradients of the weights, of the
    next micro-batch of chunk a or b.

        warm-up     Fa 2 (m - k) - 1 times;  Fb Fa k times;  Fb Ib Wb m - k times
        steady      Fa Ia Wa Fb Ib Wb until all micro-batches have begun and have been through chunk b
        cool-down   Ia Ib k times;  Ia Wa m - k times;  the Wb and Wa that are left

    The bubble vanishes where F, I and W take equally long. The order is that of 2 m - 1
    micro-batches at least, without the moves of those that there are not.
    """
    count = max(micro_batches, 2 * stages - 1)
    done = dict.fromkeys(["Fa", "Fb", "Ia", "Ib", "Wa", "Wb"], 0)

    def next_of(*kinds: str) -> Iterator[Move]:
        for kind in kinds:
            place = done[kind]
            done[kind] += 1
            if place < micro_batches:
                yield _move(kind, place)

    ahead = stages - stage
    warm_up = chain(
        repeat(("Fa",), 2 * ahead - 1),
        repeat(("Fb", "Fa"), stage),
        repeat(("Fb", "Ib", "Wb"), ahead),
    )
    for kinds in warm_up:
        yield from next_of(*kinds)
    while done["Fb"] < done["Fa"] or done["Fa"] < count:
        if done["Fa"] < count:
            yield from next_of("Fa")
        yield from next_of("Ia", "Wa", "Fb", "Ib", "Wb")
    for kinds in chain(repeat(("Ia", "Ib"), stage), repeat(("Ia", "Wa"), ahead)):
        yield from next_of(*kinds)
    for kind in ("b", "a"):
        while done[f"W{kind}"] < done[f"I{kind}"]:
            yield from next_of(f"W{kind}")


def _move(kind: str, place: int) -> Move:
    chunk = _FIRST if kind[1] == "a" else _SECOND
    if kind[0] == "F":
        return Move(True, place, chunk)
    return Move(False, place, chunk, "inputs" if kind[0] == "I" else "weights")
