"""Assembly of a whole model from the parts that the workers of a replica hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import torch
from torch import Tensor, nn

from scalebench.cluster.mesh import Mesh
from scalebench.comm.base import Communicator
from scalebench.models.flat import views
from scalebench.models.parts import layers_of
from scalebench.models.sharding import held_by


class Assembly:
    """The way of all parts to part 0, which has a whole model for them; `build` makes it."""

    def __init__(
        self, build: Callable[[], nn.Module], sizes: Sequence[int], mesh: Mesh, replica: Communicator, name: str
    ) -> None:
        self._build, self._sizes, self._mesh, self._replica, self._name = build, sizes, mesh, replica, name

    @cached_property
    def _whole(self) -> nn.Module:
        return self._build()

    @cached_property
    def _places(self) -> list[list[Tensor]]:
        """Where each part's parameters and floating-point buffers lie in the whole model."""
        layers = layers_of(self._whole, self._name)
        parts = range(self._mesh.parts)
        return [held_by(layers, self._sizes, self._mesh, part, self._name).places() for part in parts]

    def gather(self, vector: Tensor, buffers: Sequence[Tensor]) -> nn.Module | None:
        """Return, on part 0, the model with the parameters in `vector` of each part, and its floating-point `buffers`.

        None on the others. Collective over the replica.
        """
        joined = torch.cat([vector.detach().reshape(-1), *(buffer.reshape(-1).to(vector.dtype) for buffer in buffers)])
        if self._replica.rank:
            self._replica.send(joined, 0)
            return None
        for part, places in enumerate(self._places):
            if part:
                joined = vector.new_empty(sum(place.numel() for place in places))
                self._replica.recv_(joined, part)
            with torch.no_grad():
                for place, value in zip(places, views(places, joined), strict=True):
                    place.copy_(value)
        return self._whole
