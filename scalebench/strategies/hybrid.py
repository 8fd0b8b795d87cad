"""Replicas of pipeline x tensor workers, agreeing by any strategy that averages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property

from pydantic import Field, model_validator

from scalebench.cluster.mesh import Mesh
from scalebench.comm.base import Capability
from scalebench.errors import StudyError
from scalebench.strategies import parts, registry
from scalebench.strategies.base import Move, Setting, Strategy
from scalebench.strategies.registry import register
from scalebench.strategies.traits import Traits
from scalebench.study.spec import Component

# what the workers that hold the same part of every replica can do
_OF_GROUPS = frozenset(
    {
        Capability.COLLECTIVES,
        Capability.NONBLOCKING,
        Capability.SPLIT,
        Capability.POINT_TO_POINT,
    }
)


@register()
class Hybrid(parts.PartsOfModel):
    """K = d p t workers: d replicas of p stages, whose layers t workers share.

    Within a replica micro-batches move as in `pipeline`, and products are shared as in
    `tensor`. The d workers with the same part of every replica agree by the strategy
    `within`: local SGD, SlowMo or DiLoCo over pipelines too.
    """

    data: int | None = Field(
        None, ge=1, description="d: replicas; default: as many as the workers make"
    )
    pipeline: int = Field(2, ge=1, le=65536, description="p: stages of a replica")
    tensor: int = Field(
        1, ge=1, le=65536, description="t: workers that share the layers of a stage"
    )
    within: Component = Field(
        Component(name="allreduce"),
        description="strategy by which replicas agree, part by part",
    )
    micro_batches: int = Field(
        4,
        ge=1,
        le=65536,
        description="pieces of a replica's batch; they have to divide it",
    )
    schedule: parts.Schedule = Field("1f1b", description=parts.SCHEDULE)
    chunks: int = Field(2, ge=2, le=65536, description=parts.CHUNKS)
    balance: parts.Balance = Field("even", description=parts.BALANCE)

    name = "hybrid"
    summary = "replicas of pipeline x tensor workers that agree by another strategy (option within)"
    source = "Narayanan et al., SC 2021, arXiv 2104.04473 (Megatron-LM); local SGD over it is ours"

    divides_by = (
        ("pipeline", "pipeline"),
        ("tensor", "tensor"),
        ("micro_batches", "micro_batches"),
        ("balance", "balance"),
    )

    @model_validator(mode="after")
    def _fits(self) -> Hybrid:
        parts.require_balance(self.balance, self.pipeline, self.groups())
        # Without stages there are no micro-batches, of which too few would be refused.
        pieces = self.micro_batches if self.pipeline > 1 else self.pipeline
        parts.require_schedule(
            self.schedule, self.pipeline, pieces, self.model_fields_set
        )
        try:
            rule = self.rule
        except StudyError as error:
            raise ValueError(f"within: {error}") from None
        if (
            not rule.needs
            or not rule.needs <= _OF_GROUPS
            # The parts of a replica would merge with those of others in different
            # orders.
            or not rule.deterministic
            # A part is not divided again.
            or isinstance(rule, parts.PartsOfModel)
        ):
            raise ValueError(
                f"within: {self.within} is no strategy of replicas that agree by collectives, as allreduce, local_sgd, "
                "slowmo and diloco are"
            )
        return self

    @cached_property
    def rule(self) -> Strategy:
        return registry.create(self.within.name, self.within.options)

    @property
    def needs(self) -> frozenset[Capability]:
        return self.requires | self.rule.needs

    def replica(self) -> Mesh:
        return Mesh(pipeline=self.pipeline, tensor=self.tensor)

    def pieces(self) -> int:
        return self.micro_batches if self.pipeline > 1 else 1

    def groups(self) -> int:
        return self.pipeline * (self.chunks if self.schedule == "interleaved" else 1)

    def place(self, work: Sequence[float], groups: int) -> Sequence[int]:
        return parts.placed(work, groups, self.balance)

    def order(self, stage: int, stages: int, micro_batches: int) -> Iterator[Move]:
        return parts.scheduled(
            self.schedule, stage, stages, micro_batches, self.groups() // self.pipeline
        )

    def check(self, setting: Setting) -> list[str]:
        found = super().check(setting)
        mesh = self.traits.mesh(setting.workers)
        if self.data is not None and self.data != mesh.data:
            made = self.data * self.pipeline * self.tensor
            raise StudyError(
                f"strategy hybrid: data {self.data} x pipeline {self.pipeline} x tensor {self.tensor} make {made} "
                f"workers, not {setting.workers}; leave data out, or use that many"
            )
        per_node = max(1, setting.workers_per_node // mesh.parts)
        # The rule's workers are replicas, of which a node holds fewer, and whose shapes
        # are those of a part.
        return found + self.rule.check(
            replace(setting, workers=mesh.data, workers_per_node=per_node, shapes=None)
        )

    # Stated again: a class that changes the program loses what its bases state of it.
    @property
    def traits(self) -> Traits:
        return self.repeated()
