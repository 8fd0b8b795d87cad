"""Models whose layers are placed on several workers, one of which works at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

from pydantic import Field, model_validator

from scalebench.cluster.mesh import Mesh
from scalebench.strategies import parts
from scalebench.strategies.base import Move
from scalebench.strategies.registry import register
from scalebench.strategies.traits import Traits, Varied


@register()
class ModelParallel(parts.PartsOfModel):
    """The whole batch forward through stages 0 .. m - 1, then backward through m - 1 .. 0.

    One stage works at a time: m workers hold one model, and are no faster than one.
    With K workers K / m replicas average the gradients of each stage after every batch.
    A layer has parameters; what follows it without is a part of it. A replica of one
    stage is a whole model, and trained as by `allreduce`.
    """

    stages: int = Field(
        2,
        ge=1,
        le=65536,
        description="workers that hold a replica, each with consecutive layers",
    )
    balance: parts.Balance = Field("even", description=parts.BALANCE)

    name = "model_parallel"
    summary = "layers placed on several workers, one of which works at a time"
    source = "placement of layers, as in Dean et al., NeurIPS 2012"

    divides_by: ClassVar[tuple[tuple[Varied, str], ...]] = (
        ("pipeline", "stages"),
        ("balance", "balance"),
    )

    @model_validator(mode="after")
    def _one_number_a_stage(self) -> ModelParallel:
        parts.require_balance(self.balance, self.stages, self.groups())
        return self

    def replica(self) -> Mesh:
        return Mesh(pipeline=self.stages)

    def place(self, work: Sequence[float], groups: int) -> Sequence[int]:
        return parts.placed(work, groups, self.balance)

    def order(self, stage: int, stages: int, micro_batches: int) -> Iterator[Move]:
        # One micro-batch: stages wait for each other, and memory is what is won.
        return parts.whole_batch()

    # Stated again: a class that changes the program loses what its bases state of it.
    @property
    def traits(self) -> Traits:
        return self.repeated()
