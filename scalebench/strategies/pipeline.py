"""Models whose layers are placed on several workers, through which micro-batches move."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

from pydantic import Field, model_validator

from scalebench.strategies.base import Move
from scalebench.strategies.model_parallel import ModelParallel
from scalebench.strategies.parts import with_forwards_ahead
from scalebench.strategies.registry import register
from scalebench.strategies.traits import Traits


@register()
class Pipeline(ModelParallel):
    """Each replica's batch in u micro-batches, which its stages work on at the same time.

        gpipe:  all u forwards, then all u backwards
        1f1b:   w = min(u, m - k) forwards on stage k of m; then a backward and a forward in turn; the other backwards

    Both give the gradient of the whole batch, sum n_j g_j / sum n_j over micro-batches of n_j samples, and idle for
    (m - 1) / (u + m - 1) of the step where all stages are equal; 1f1b keeps the activations of m - k micro-batches
    instead of u. Batch normalisation sees micro-batches.
    """

    micro_batches: int = Field(4, ge=1, le=65536, description="u: pieces of a replica's batch; they have to divide it")
    schedule: Literal["gpipe", "1f1b"] = Field("1f1b", description="order of the micro-batches on a stage")

    name: ClassVar[str] = "pipeline"
    summary: ClassVar[str] = "layers placed on several workers, through which micro-batches move (option micro_batches)"
    source: ClassVar[str] = "gpipe: Huang et al., NeurIPS 2019; 1f1b: Narayanan et al., SOSP 2019 (PipeDream), flushed"

    @model_validator(mode="after")
    def _enough_micro_batches(self) -> Pipeline:
        if self.schedule == "1f1b" and self.micro_batches < self.stages:
            raise ValueError(
                f"micro_batches: {self.micro_batches} for {self.stages} stages; schedule 1f1b needs at least as many, "
                "gpipe takes any number"
            )
        return self

    def pieces(self) -> int:
        return self.micro_batches

    def order(self, stage: int, stages: int, micro_batches: int) -> Iterator[Move]:
        ahead = micro_batches if self.schedule == "gpipe" else min(micro_batches, stages - stage)
        return with_forwards_ahead(ahead, micro_batches)

    @property
    def traits(self) -> Traits:
        return self.repeated()
