"""The mesh of workers: how they divide into replicas of a model, and a replica into parts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mesh:
    """`data` replicas of `pipeline` stages, whose layers `tensor` workers share.

    Worker r belongs to replica r // m, m = pipeline * tensor, and holds its part r % m: the workers of a replica are
    neighbours, and so are those of a stage.
    """

    data: int = 1
    pipeline: int = 1
    tensor: int = 1

    @property
    def parts(self) -> int:
        """Number of workers that hold a replica."""
        return self.pipeline * self.tensor

    @property
    def workers(self) -> int:
        return self.data * self.parts

    def stage_of(self, part: int) -> int:
        """Return the stage to which a part of a replica belongs."""
        return part // self.tensor

    def groups_of(self, part: int, groups: int) -> range:
        """Return the groups of layers that a part of a replica holds, of `groups` that are dealt to stages in turn."""
        return range(self.stage_of(part), groups, self.pipeline)
