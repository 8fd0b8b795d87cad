"""torch, for modules with which studies are read: imported at its first use, of a second, and not with them."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any


class _Late:
    """The module `name` as it is written in code, `torch.stack`."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        found = getattr(importlib.import_module(self._name), attribute)
        setattr(self, attribute, found)  # and not looked up here again
        return found


if TYPE_CHECKING:
    import torch as torch
else:
    torch = _Late("torch")
