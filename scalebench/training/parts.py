"""Assembly of a whole model from the parts that the workers of a replica hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from scalebench.comm.base import Communicator
from scalebench.models.flat import views
from scalebench.models.parts import Layer, bounds_of


class Assembly:
    """Places of the parts' parameters and floating-point buffers in the whole model, and their way to part 0."""

    def __init__(self, whole: nn.Module, layers: Sequence[Layer], sizes: Sequence[int], replica: Communicator) -> None:
        self._replica = replica
        parameters = {id(each): place for place, each in enumerate(_trainable(whole))}
        buffers = {id(each): place for place, each in enumerate(_floating(whole))}
        self._parameters: list[list[int]] = []  # by part, in the order of the part's vector
        self._buffers: list[list[int]] = []
        self._shapes = [each.shape for each in _trainable(whole)]
        self._buffer_shapes = [each.shape for each in _floating(whole)]
        for first, last in bounds_of(sizes):
            modules = [module for layer in layers[first:last] for module in layer.modules]
            held = [parameters[id(each)] for module in modules for each in _trainable(module)]
            self._parameters.append(list(dict.fromkeys(held)))
            statistics = [buffers[id(each)] for module in modules for each in _floating(module)]
            self._buffers.append(list(dict.fromkeys(statistics)))
        self._whole: nn.Module | None = None

    def gather(self, vector: Tensor, buffers: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]] | None:
        """Return all parameters and floating-point buffers of the whole model on part 0, None on the others."""
        joined = torch.cat([vector.detach().reshape(-1), *(buffer.reshape(-1).to(vector.dtype) for buffer in buffers)])
        if self._replica.rank:
            self._replica.send(joined, 0)
            return None
        found = [torch.empty(0)] * len(self._shapes), [torch.empty(0)] * len(self._buffer_shapes)
        for part, (parameters, statistics) in enumerate(zip(self._parameters, self._buffers, strict=True)):
            shaped = [vector.new_empty(self._shapes[place]) for place in parameters]
            shaped += [vector.new_empty(self._buffer_shapes[place]) for place in statistics]
            if part:
                joined = vector.new_empty(sum(each.numel() for each in shaped))
                self._replica.recv_(joined, part)
            pieces = views(shaped, joined)
            for place, piece in zip(parameters, pieces, strict=False):
                found[0][place] = piece
            for place, piece in zip(statistics, pieces[len(parameters) :], strict=True):
                found[1][place] = piece
        return found

    def fill(self, build: Callable[[], nn.Module], parameters: list[Tensor], buffers: list[Tensor]) -> nn.Module:
        """Return the whole model, which `build` makes once, with these parameters and floating-point buffers."""
        if self._whole is None:
            self._whole = build()
        with torch.no_grad():
            for target, value in zip(_trainable(self._whole), parameters, strict=True):
                target.copy_(value)
            for buffer, value in zip(_floating(self._whole), buffers, strict=True):
                buffer.copy_(value)
        return self._whole


def _trainable(module: nn.Module) -> list[nn.Parameter]:
    return [each for each in module.parameters() if each.requires_grad]


def _floating(module: nn.Module) -> list[Tensor]:
    return [each for each in module.buffers() if each.is_floating_point()]
