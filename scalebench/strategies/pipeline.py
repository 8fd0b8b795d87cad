"""Models whose layers are placed on several workers, through which micro-batches move; and torch's pipelines."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, repeat
from typing import Literal

from pydantic import Field, model_validator

from scalebench.cluster.mesh import Mesh
from scalebench.comm.base import Capability
from scalebench.comm.engines import providing
from scalebench.strategies import parts
from scalebench.strategies.base import Move, Worker
from scalebench.strategies.model_parallel import ModelParallel
from scalebench.strategies.registry import register
from scalebench.strategies.traits import Traits


@register()
class Pipeline(ModelParallel):
    """Each replica's batch in u micro-batches, which its stages work on at the same time.

        gpipe:  all u forwards, then all u backwards
        1f1b:   w = min(u, m - k) forwards on stage k of m; then a backward and a forward in turn; the other backwards
        interleaved:  1f1b over v chunks of layers on each stage, chunk c of stage k being group c m + k of all layers

    All give the gradient of the whole batch, sum n_j g_j / sum n_j over micro-batches
    of n_j samples. Where all stages are equal they idle for (m - 1) / (u + m - 1) of
    the step, interleaved for (m - 1) / (v u + m - 1); 1f1b keeps the activations of m -
    k micro-batches instead of u. Batch normalisation sees micro-batches.
    """

    micro_batches: int = Field(
        4,
        ge=1,
        le=65536,
        description="u: pieces of a replica's batch; they have to divide it",
    )
    schedule: parts.Schedule = Field("1f1b", description=parts.SCHEDULE)
    chunks: int = Field(2, ge=2, le=65536, description=parts.CHUNKS)

    name = "pipeline"
    summary = "layers placed on several workers, through which micro-batches move (option micro_batches)"
    source = (
        "gpipe: Huang et al., NeurIPS 2019; 1f1b: Narayanan et al., SOSP 2019 (PipeDream), flushed; interleaved: "
        "Narayanan et al., SC 2021, arXiv 2104.04473 (Megatron-LM)"
    )

    divides_by = (*ModelParallel.divides_by, ("micro_batches", "micro_batches"))

    @model_validator(mode="after")
    def _enough_micro_batches(self) -> Pipeline:
        # By what is stated: the default of another schedule's option is no mistake.
        parts.require_schedule(
            self.schedule, self.stages, self.micro_batches, self.model_fields_set
        )
        return self

    def pieces(self) -> int:
        # Nothing is to be filled on one stage: it takes whole batches.
        return self.micro_batches if self.stages > 1 else 1

    def groups(self) -> int:
        return self.stages * (self.chunks if self.schedule == "interleaved" else 1)

    def order(self, stage: int, stages: int, micro_batches: int) -> Iterator[Move]:
        return parts.scheduled(
            self.schedule, stage, stages, micro_batches, self.groups() // self.stages
        )

    # Stated again: a class that changes the program loses what its bases state of it.
    @property
    def traits(self) -> Traits:
        return self.repeated()


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

    schedule: parts.Schedule | Literal["zbv"] = Field(
        "1f1b", description=parts.SCHEDULE
    )  # type: ignore[assignment]
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
