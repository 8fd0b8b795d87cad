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


def into_images(model: str, input_shape: tuple[int, ...]) -> tuple[list[nn.Module], tuple[int, int, int]]:
    """Return layers from (n, *input_shape) to (n, planes, height, width), and these three.

    A sample is C x H x W, which needs no layer, H x W, or a flat square such as 64 values for 8 x 8.

    Raises:
        ModelError: the sample has another shape.
    """
    from torch import nn

    if len(input_shape) == 3:
        return [], (input_shape[0], input_shape[1], input_shape[2])
    sides = input_shape if len(input_shape) == 2 else (math.isqrt(math.prod(input_shape)),) * 2
    if len(input_shape) not in (1, 2) or math.prod(sides) != math.prod(input_shape):
        raise ModelError(
            f"model {model}: cannot read samples of shape {input_shape} as images; expected C x H x W, H x W or a "
            "square number of values; use model: mlp for features"
        )
    shape = (1, sides[0], sides[1])
    return [nn.Flatten(), nn.Unflatten(1, shape)], shape
