"""Models whose layers are placed on several workers, through which micro-batches move."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import Field, model_validator

from scalebench.strategies.base import Move
from scalebench.strategies.model_parallel import ModelParallel
from scalebench.strategies.parts import (
    CHUNKS,
    SCHEDULE,
    Schedule,
    require_schedule,
    scheduled,
)
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
    schedule: Schedule = Field("1f1b", description=SCHEDULE)
    chunks: int = Field(2, ge=2, le=65536, description=CHUNKS)

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
        require_schedule(
            self.schedule, self.stages, self.micro_batches, self.model_fields_set
        )
        return self

    def pieces(self) -> int:
        # Nothing is to be filled on one stage: it takes whole batches.
        return self.micro_batches if self.stages > 1 else 1

    def groups(self) -> int:
        return self.stages * (self.chunks if self.schedule == "interleaved" else 1)

    def order(self, stage: int, stages: int, micro_batches: int) -> Iterator[Move]:
        return scheduled(
            self.schedule, stage, stages, micro_batches, self.groups() // self.stages
        )

    # Stated again: a class that changes the program loses what its bases state of it.
    @property
    def traits(self) -> Traits:
        return self.repeated()
