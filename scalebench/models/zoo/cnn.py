"""A small convolutional network."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field, PositiveInt

from scalebench.models.architecture import MODELS, ImageArchitecture

if TYPE_CHECKING:
    from torch import nn


@MODELS.add
class Cnn(ImageArchitecture):
    """After LeNet-5 (LeCun et al. 1998): two 5x5 convolutions with max pooling by 2, then fully connected layers.

    Takes C x H x W, H x W x C, H x W, or a flat square image such as 64 values for 8x8.
    Convolutions are padded; a side is halved only while it is larger than 3 pixels, so
    that small images still fit. ReLU where the original has tanh.
    """

    name = "cnn"
    summary = (
        "LeNet-like: two 5x5 convolutions with pooling, then fully connected layers"
    )

    channels: tuple[PositiveInt, PositiveInt] = (6, 16)
    hidden: list[PositiveInt] = Field([120, 84])

    def build(self, input_shape: tuple[int, ...], outputs: int) -> nn.Module:
        from torch import nn

        layers, (planes, height, width) = self.into_images(input_shape)
        for channels in self.channels:
            # Padded by 2, a kernel of 5 keeps the sides.
            layers += [nn.Conv2d(planes, channels, kernel_size=5, padding=2), nn.ReLU()]
            pool = (2 if height > 3 else 1, 2 if width > 3 else 1)
            if pool != (1, 1):
                layers.append(nn.MaxPool2d(pool))
            planes, height, width = channels, height // pool[0], width // pool[1]
        layers.append(nn.Flatten())
        fan_in = planes * height * width
        for width_of_layer in self.hidden:
            layers += [nn.Linear(fan_in, width_of_layer), nn.ReLU()]
            fan_in = width_of_layer
        return nn.Sequential(*layers, nn.Linear(fan_in, outputs))
