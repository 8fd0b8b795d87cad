"""Base class and registry of models: a new model implements the class."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from scalebench.errors import ModelError
from scalebench.registry import Choice, Registry

if TYPE_CHECKING:
    from torch import nn


class Architecture(Choice):
    """Builder of a model: its fields are its options."""

    trainable: ClassVar[bool] = True  # False: it has no arithmetic, and can only be priced

    def build(self, input_shape: tuple[int, ...], outputs: int) -> nn.Module:
        """Return a module from (n, *input_shape) to (n, outputs). Raises ModelError for an unsuitable input."""
        raise NotImplementedError


MODELS: Registry[Architecture] = Registry("model", ModelError, "scalebench.models.zoo", "scalebench.models")
