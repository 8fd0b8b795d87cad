"""Base class and registry of models, and the conversion of samples to images."""

from __future__ import annotations

import math
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


def image_shape(model: str, input_shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Return (planes, height, width) of a sample C x H x W, H x W, or a flat square such as 64 values for 8 x 8.

    Raises:
        ModelError: the sample has another shape.
    """
    if len(input_shape) == 3:
        return input_shape[0], input_shape[1], input_shape[2]
    if len(input_shape) == 2:
        return 1, input_shape[0], input_shape[1]
    side = math.isqrt(math.prod(input_shape))
    if len(input_shape) == 1 and side * side == input_shape[0]:
        return 1, side, side
    raise ModelError(
        f"model {model}: cannot read samples of shape {input_shape} as images; expected C x H x W, H x W or a square "
        "number of values; use model: mlp for features"
    )


def into_images(model: str, input_shape: tuple[int, ...]) -> list[nn.Module]:
    """Return layers from (n, *input_shape) to (n, planes, height, width); empty if samples have that shape."""
    from torch import nn

    shape = image_shape(model, input_shape)
    if len(input_shape) == 3:
        return []
    return [nn.Flatten(), nn.Unflatten(1, shape)]
