"""Residual blocks of `zoo/resnet.py`, in a module of their own because they import torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

# sqrt(2 / (1 - 1/pi)): the ReLU of a standard normal then has variance 1
_RELU_GAIN = 1.7139588594436646


class BatchNormBlock(nn.Module):
    """ReLU(shortcut + BN(conv(ReLU(BN(conv))))); the shortcut takes every `stride`-th pixel, new planes are zero."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.stride, self.new = stride, after - before
        self.branch = nn.Sequential(
            nn.Conv2d(before, after, 3, stride, 1, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(),
            nn.Conv2d(after, after, 3, 1, 1, bias=False),
            nn.BatchNorm2d(after),
        )

    def forward(self, x: Tensor) -> Tensor:
        # Option A of He et al.: no parameters in the shortcut.
        shortcut = x[:, :, :: self.stride, :: self.stride]
        if self.new:
            before = self.new // 2
            shortcut = functional.pad(shortcut, (0, 0, 0, 0, before, self.new - before))
        return torch.relu(shortcut + self.branch(x))


class StandardisedConv(nn.Conv2d):
    """Padded convolution with weights of mean 0 and variance 1 / fan-in per output plane, times a gain."""

    def __init__(self, before: int, after: int, size: int, stride: int = 1) -> None:
        super().__init__(before, after, size, stride, size // 2)
        self.gain = nn.Parameter(torch.ones(after, 1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        fan_in = self.weight[0].numel()
        variance, mean = torch.var_mean(
            self.weight, dim=(1, 2, 3), keepdim=True, correction=0
        )
        # Bounded from below, as a plane of equal weights has no deviation.
        scale = self.gain * torch.rsqrt(torch.clamp(variance * fan_in, min=1e-4))
        return functional.conv2d(
            x, (self.weight - mean) * scale, self.bias, self.stride, self.padding
        )


class ScaledReLU(nn.Module):
    """sqrt(2 / (1 - 1/pi)) max(x, 0), which preserves the variance of a normal input."""

    def forward(self, x: Tensor) -> Tensor:
        return _RELU_GAIN * torch.relu(x)


class NormaliserFreeBlock(nn.Module):
    """h <- shortcut + alpha g f(act(h / beta)) with g a learned scalar that starts at 0.

    The shortcut is h, or a projection of act(h / beta) if the shape changes.
    """

    def __init__(
        self, before: int, after: int, stride: int, alpha: float, beta: float
    ) -> None:
        super().__init__()
        self.alpha, self.beta = alpha, beta
        self.activation = ScaledReLU()
        self.branch = nn.Sequential(
            StandardisedConv(before, after, 3, stride),
            ScaledReLU(),
            StandardisedConv(after, after, 3),
        )
        self.shortcut = (
            StandardisedConv(before, after, 1, stride)
            if stride > 1 or before != after
            else None
        )
        self.skip_gain = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        active = self.activation(x / self.beta)
        kept: Tensor = x if self.shortcut is None else self.shortcut(active)
        moved: Tensor = self.branch(active)
        return kept + self.alpha * self.skip_gain * moved


class LogitsOf(nn.Module):
    """Wrapper of a model of the library transformers that returns only its logits."""

    model: Any

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.model(pixel_values=x).logits
        return logits


class ResNetLogits(LogitsOf):
    """A ResNet of transformers, which can be cut between its residual blocks."""

    def layers(self) -> list[nn.Module]:
        """Return the modules of its forward pass, in order."""
        resnet, classifier = self.model.resnet, self.model.classifier
        blocks = [block for stage in resnet.encoder.stages for block in stage.layers]
        return [resnet.embedder, *blocks, resnet.pooler, *classifier]


class VitLogits(LogitsOf):
    """A vision transformer of transformers, which can be cut between its blocks."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.first = FirstToken()

    def layers(self) -> list[nn.Module]:
        """Return the modules of its forward pass, in order."""
        vit = self.model.vit
        # Renamed in the course of version 5.
        blocks = vit.layers if hasattr(vit, "layers") else vit.encoder.layer
        return [
            vit.embeddings,
            *blocks,
            vit.layernorm,
            self.first,
            self.model.classifier,
        ]


class FirstToken(nn.Module):
    """(n, tokens, width) to the (n, width) of the token that stands for the image."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, 0]


class ChannelsFirst(nn.Module):
    """(n, height, width, planes) to (n, planes, height, width)."""

    def forward(self, x: Tensor) -> Tensor:
        return x.permute(0, 3, 1, 2).contiguous()
