"""The mesh of workers: how they divide into replicas of a model, and a replica into parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Mesh:
    """`data` replicas of `pipeline` stages, whose layers `tensor` workers share.

    Worker r belongs to replica r // m, m = pipeline * tensor, and holds its part r % m:
    the workers of a replica are neighbours, and so are those of a stage. Groups of
    consecutive layers are dealt to the p stages in turn, or, `folded`, forth and back
    in the shape of a V: group g < p to stage g, the others to stage 2 p - 1 - g.
    """

    data: int = 1
    pipeline: int = 1
    tensor: int = 1
    folded: bool = False

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

    def groups_of(self, part: int, groups: int) -> Sequence[int]:
        """Return the groups of layers that a part of a replica holds, of `groups` in all."""
        return [
            group
            for group in range(groups)
            if self.stage_with(group) == self.stage_of(part)
        ]

    def stage_with(self, group: int) -> int:
        """Return the stage that holds a group of layers."""
        if self.folded and group >= self.pipeline:
            return 2 * self.pipeline - 1 - group
        return group % self.pipeline

    @property
    def last_part(self) -> int:
        """Part of a replica that holds the last layers."""
        # Folded, the last groups come back to the first stage.
        return (1 if self.folded else self.pipeline) * self.tensor - 1
