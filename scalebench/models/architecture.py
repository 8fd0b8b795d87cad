"""The one class that a new model writes, and where models are registered."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scalebench.errors import ModelError
from scalebench.registry import Choice, Registry

if TYPE_CHECKING:
    from torch import nn


class Architecture(Choice):
    """A model: its fields are its options, `build` makes it."""

    def build(self, input_shape: tuple[int, ...], outputs: int) -> nn.Module:
        """A module from (n, *input_shape) to (n, outputs). Raises ModelError where the input does not fit it."""
        raise NotImplementedError


MODELS: Registry[Architecture] = Registry("model", ModelError, "scalebench.models.zoo", "scalebench.models")
