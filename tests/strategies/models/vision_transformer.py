"""A small vision transformer: patches, two blocks with residuals, and a head."""

import torch
from torch import nn


class Patches(nn.Module):
    """Cut images into patches of 4 x 4, and add their positions."""

    def __init__(self, planes, side, width):
        super().__init__()
        self.project = nn.Conv2d(planes, width, 4, stride=4)
        self.positions = nn.Parameter(0.02 * torch.randn(1, (side // 4) ** 2, width))

    def forward(self, x):
        return self.project(x).flatten(2).transpose(1, 2) + self.positions


class Mean(nn.Module):
    """Mean over the patches."""

    def forward(self, x):
        return x.mean(dim=1)


def build(input_shape, outputs, width=8, heads=4):
    planes, side, _ = input_shape
    blocks = [
        nn.TransformerEncoderLayer(
            width, heads, 2 * width, 0.0, "gelu", batch_first=True, norm_first=first
        )
        for first in (True, False)
    ]
    return nn.Sequential(
        Patches(planes, side, width),
        *blocks,
        nn.LayerNorm(width),
        Mean(),
        nn.Linear(width, outputs),
    )
