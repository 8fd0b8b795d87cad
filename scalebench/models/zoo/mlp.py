"""The multi-layer perceptron."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

from pydantic import Field, PositiveInt

from scalebench.models.architecture import MODELS, Architecture

if TYPE_CHECKING:
    from torch import nn


@MODELS.add
class Mlp(Architecture):
    """Fully connected layers of the widths `hidden`, an activation after each but the last; the input is flattened.

    `hidden: []` is a linear model. Weights start as torch's `nn.Linear` draws them.
    """

    name = "mlp"
    summary = (
        "fully connected layers of any widths (hidden), relu, tanh or gelu between them"
    )

    hidden: list[PositiveInt] = Field([128])
    activation: Literal["relu", "tanh", "gelu"] = "relu"

    def build(self, input_shape: tuple[int, ...], outputs: int) -> nn.Module:
        from torch import nn

        activation = {"relu": nn.ReLU, "tanh": nn.Tanh, "gelu": nn.GELU}[
            self.activation
        ]
        layers: list[nn.Module] = [nn.Flatten()]
        for fan_in, fan_out in pairwise(
            (math.prod(input_shape), *self.hidden, outputs)
        ):
            layers += [nn.Linear(fan_in, fan_out), activation()]
        # Without the last activation: losses take logits.
        return nn.Sequential(*layers[:-1])
