"""What modules hold beside parameters, buffers and submodules, to be put back after a rehearsal."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

_OF_EVERY_MODULE = vars(nn.Module()).keys() - {"training"}  # registries of parameters, buffers, modules and hooks
Attributes = list[tuple[nn.Module, dict[str, Any]]]


def module_attributes(model: nn.Module) -> Attributes:
    """Return copies of the attributes of all modules: counters, tensors that are no buffers, generators.

    Parameters, buffers and modules that they refer to stay the same objects. What cannot be copied is left out.
    """
    kept = (*model.parameters(), *model.buffers(), *model.modules())
    memo: dict[int, Any] = {id(each): each for each in kept}
    found: Attributes = []
    for module in model.modules():
        own = {name: value for name, value in vars(module).items() if name not in _OF_EVERY_MODULE}
        found.append((module, {name: _copied(value, memo) for name, value in own.items()}))
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
        before.keys() == after.keys() and all(_equal(before[name], after[name]) for name in before)
        for (_, before), (_, after) in zip(one, other, strict=True)
    )


def _equal(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and one.shape == other.shape and torch.equal(one, other)
    try:
        return bool(one == other)
    except Exception:  # arrays, and containers of tensors
        return False


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    try:
        return copy.deepcopy(value, memo)
    except Exception:  # a lock, an open file, a tensor within a graph
        return value
