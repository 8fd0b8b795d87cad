"""Residual networks for small images, with and without batch normalisation."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pydantic import Field, PositiveInt, field_validator

from scalebench.errors import ModelError
from scalebench.models.architecture import MODELS, ImageArchitecture

if TYPE_CHECKING:
    from torch import nn


@MODELS.add
class ResNet(ImageArchitecture):
    """He, Zhang, Ren and Sun, CVPR 2016, section 4.2: depth 6n + 2 in three stages of n blocks, for 32 x 32 images.

    Shortcuts have no parameters (option A: every second pixel, new planes zero).
    Weights by He et al., 2015. Batch normalisation keeps running statistics, buffers
    that an averaging strategy has to average too.
    """

    name = "resnet"
    summary = "residual network for CIFAR-sized images: depth 20, 32, 44, 56, 110 (6n + 2), batch normalisation"

    depth: int = Field(20, ge=8)
    width: PositiveInt = 16

    @field_validator("depth")
    @classmethod
    def _three_stages(cls, depth: int) -> int:
        if (depth - 2) % 6:
            raise ValueError("expected 6n + 2: 20, 32, 44, 56, 110")
        return depth

    def build(self, input_shape: tuple[int, ...], outputs: int) -> nn.Module:
        from torch import nn

        from scalebench.models.blocks import BatchNormBlock

        layers, (planes, _, _) = self.into_images(input_shape)
        layers += [
            nn.Conv2d(planes, self.width, 3, padding=1, bias=False),
            nn.BatchNorm2d(self.width),
            nn.ReLU(),
        ]
        here = self.width
        for stage in range(3):
            for place in range((self.depth - 2) // 6):
                # Twice the planes in each stage, which halves the sides.
                there = self.width << stage
                layers.append(
                    BatchNormBlock(here, there, stride=2 if stage and not place else 1)
                )
                here = there
        model = nn.Sequential(
            *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(here, outputs)
        )
        # As He et al., 2015, draw them; other layers begin as torch draws them.
        for module in model.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight)
        return model


@MODELS.add
class NfNet(ImageArchitecture):
    """After Brock, De, Smith and Simonyan, 2021 (arXiv 2102.06171): residual without batch normalisation.

    Convolutions with standardised weights, and blocks h <- h + alpha f(h / beta) with
    beta the deviation that h is expected to have: 1 + k alpha^2 is its variance after k
    blocks of a stage. There are no buffers: what averaging does to a model does not
    depend on a policy for them. Smaller than the paper's networks, and without
    clipping.
    """

    name = "nfnet"
    summary = "NFNet-like residual network without batch normalisation: standardised weights, scaled residuals"

    widths: list[PositiveInt] = Field([32, 64, 128], min_length=1)
    blocks: list[PositiveInt] = Field([1, 2, 2], min_length=1)
    alpha: float = Field(0.2, gt=0, le=1)

    def build(self, input_shape: tuple[int, ...], outputs: int) -> nn.Module:
        from torch import nn

        from scalebench.models.blocks import (
            NormaliserFreeBlock,
            ScaledReLU,
            StandardisedConv,
        )

        if len(self.blocks) != len(self.widths):
            raise ModelError(
                f"model nfnet: {len(self.blocks)} numbers of blocks for {len(self.widths)} widths; give one for each"
            )
        layers, (planes, _, _) = self.into_images(input_shape)
        # Without an activation, with which each block begins.
        layers.append(StandardisedConv(planes, self.widths[0], 3))
        here = self.widths[0]
        for stage, (width, count) in enumerate(
            zip(self.widths, self.blocks, strict=True)
        ):
            variance = 1.0
            for place in range(count):
                stride = 2 if stage and not place else 1
                layers.append(
                    NormaliserFreeBlock(
                        here, width, stride, self.alpha, math.sqrt(variance)
                    )
                )
                # A block that changes the shape normalises its shortcut: the variance
                # starts anew.
                variance = (
                    1.0 if stride > 1 or here != width else variance
                ) + self.alpha**2
                here = width
        return nn.Sequential(
            *layers,
            ScaledReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(here, outputs),
        )
