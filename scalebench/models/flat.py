"""The state of a module: flat buffers of parameters and of gradients, and the attributes beside them.

Parameters and gradients of a model are views of flat buffers: with one buffer an
average is one collective, an optimizer step one kernel and a snapshot one copy. What
modules hold beside parameters, buffers and submodules is put back after a rehearsal.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

# registries of parameters, buffers, modules and hooks
_OF_EVERY_MODULE = vars(nn.Module()).keys() - {"training"}
Attributes = list[tuple[nn.Module, dict[str, Any]]]


class Memory(NamedTuple):
    """Tensors for the one storage of a model, as long as `side_by_side` makes it, for its gradients and its buffers.

    Of the buffers, in the order of the model, statistics lie in `whole`.
    """

    whole: Tensor
    gradients: Tensor
    buffers: Sequence[Tensor] = ()


def to_meta(model: nn.Module) -> nn.Module:
    """Move a model to torch's meta device; parameters that modules share stay shared, unlike with `Module.to`."""
    owners: dict[nn.Parameter, tuple[nn.Module, str]] = {}
    shared: list[tuple[nn.Module, str, tuple[nn.Module, str]]] = []
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                owner = owners.setdefault(parameter, (module, name))
                if owner != (module, name):
                    shared.append((module, name, owner))
    model.to("meta")
    for module, name, (owning, own_name) in shared:
        module._parameters[name] = owning._parameters[own_name]
    return model


def side_by_side(
    model: nn.Module, room: int = 0, memory: Memory | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return flat parameters, flat gradients, and uninitialised room for `room` times the number of parameters.

    One storage holds parameters, statistics (floating-point buffers of the parameters'
    dtype) and the room, in this order, so that consecutive parts are averaged as one
    piece. It lies in `memory`, if given.
    """
    trainable = [
        parameter for parameter in model.parameters() if parameter.requires_grad
    ]
    statistics = _statistics(model, trainable[0])
    moved = [*trainable, *statistics]
    n, held = (
        sum(tensor.numel() for tensor in tensors) for tensors in (trainable, moved)
    )
    whole = (
        trainable[0].detach().new_empty(held + room * n)
        if memory is None
        else memory.whole
    )
    torch.cat([tensor.detach().reshape(-1) for tensor in moved], out=whole[:held])
    gradients = (
        torch.zeros_like(whole[:n]) if memory is None else memory.gradients.zero_()
    )
    _lay(moved, whole)
    _lay_gradients(trainable, gradients)
    if memory is not None:
        for buffer, place in zip(model.buffers(), memory.buffers, strict=True):
            buffer.data = place.copy_(buffer)
    return whole[:n], gradients, whole[held:]


def lie_in(memory: Memory, model: nn.Module) -> None:
    """Give a model the parameters, gradients and buffers that are in `memory`."""
    trainable = [
        parameter for parameter in model.parameters() if parameter.requires_grad
    ]
    _lay(trainable, memory.whole)
    _lay_gradients(trainable, memory.gradients)
    for buffer, value in zip(model.buffers(), memory.buffers, strict=True):
        buffer.data = value


def _lay(tensors: Sequence[Tensor], whole: Tensor) -> None:
    for tensor, value in zip(tensors, views(tensors, whole), strict=True):
        # Not the parameter itself is replaced, which modules and optimizers hold.
        tensor.data = value


def _lay_gradients(trainable: Sequence[nn.Parameter], gradients: Tensor) -> None:
    for parameter, gradient in zip(trainable, views(trainable, gradients), strict=True):
        parameter.grad = gradient


def buffers_have_room(model: nn.Module, parameters: Tensor) -> bool:
    """Return True if each buffer lies by itself: statistics beside the flat `parameters`, others in their storages."""
    buffers = list(model.buffers())
    places = [buffer.untyped_storage().data_ptr() for buffer in buffers]
    flat = parameters.untyped_storage().data_ptr()
    return all(
        place == flat
        if buffer.is_floating_point()
        else buffer.is_contiguous() and places.count(place) == 1
        for buffer, place in zip(buffers, places, strict=True)
    )


def _statistics(model: nn.Module, like: Tensor) -> list[Tensor]:
    """Return the buffers that can be moved: contiguous ones that share no memory."""
    # A buffer that shares memory, with a parameter or another buffer, would lose it by
    # moving.
    places = Counter(
        tensor.untyped_storage().data_ptr()
        for tensor in (*model.parameters(), *model.buffers())
    )
    fitting = (
        buffer
        for buffer in model.buffers()
        if buffer.dtype == like.dtype and buffer.is_contiguous()
    )
    storages = ((buffer, buffer.untyped_storage()) for buffer in fitting)
    return [
        buffer
        for buffer, own in storages
        if places[own.data_ptr()] == 1 and own.nbytes() == buffer.nbytes > 0
    ]


def views(parameters: Sequence[Tensor], flat: Tensor) -> list[Tensor]:
    """Return consecutive views of `flat` with the shapes of `parameters`."""
    ends = [0]
    for parameter in parameters:
        ends.append(ends[-1] + parameter.numel())
    return [
        flat[start:end].view_as(parameter)
        for parameter, (start, end) in zip(parameters, pairwise(ends), strict=True)
    ]


def is_finite(vector: Tensor) -> bool:
    """Return True if all elements are finite, in one pass without allocation."""
    low, high = torch.aminmax(vector)
    return math.isfinite(low.item()) and math.isfinite(high.item())


def module_attributes(model: nn.Module) -> Attributes:
    """Return copies of the attributes of all modules: counters, tensors that are no buffers, generators.

    Parameters, buffers and modules that they refer to stay the same objects. What
    cannot be copied is left out.
    """
    kept = (*model.parameters(), *model.buffers(), *model.modules())
    # As if they had been copied already: deepcopy then refers to them.
    memo: dict[int, Any] = {id(each): each for each in kept}
    found: Attributes = []
    for module in model.modules():
        own = {
            name: value
            for name, value in vars(module).items()
            if name not in _OF_EVERY_MODULE
        }
        found.append(
            (module, {name: _copied(value, memo) for name, value in own.items()})
        )
    return found


def put_back_attributes(attributes: Attributes) -> None:
    """Restore what `module_attributes` returned, and delete attributes that came since."""
    for module, before in attributes:
        now = vars(module)
        for name in now.keys() - before.keys() - _OF_EVERY_MODULE:
            del now[name]
        now.update(before)


def equal_attributes(one: Attributes, other: Attributes) -> bool:
    """Return True if the copies of two moments are equal; what cannot be compared counts as changed."""
    return all(
        before.keys() == after.keys()
        and all(_equal(before[name], after[name]) for name in before)
        for (_, before), (_, after) in zip(one, other, strict=True)
    )


def _equal(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if isinstance(one, Tensor):
        return (
            isinstance(other, Tensor)
            and one.shape == other.shape
            and torch.equal(one, other)
        )
    try:
        return bool(one == other)
    except Exception:  # arrays, and containers of tensors
        return False


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    try:
        return copy.deepcopy(value, memo)
    except Exception:  # a lock, an open file, a tensor within a graph
        return value
