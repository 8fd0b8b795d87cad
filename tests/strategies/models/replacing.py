"""A running mean of activations: one model changes it in place, the other puts a new tensor in its place."""

import torch
from torch import nn


class RunningMean(nn.Module):
    def __init__(self, width, replaces):
        super().__init__()
        self.replaces = replaces
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, x):
        if self.training:
            if self.replaces:
                self.mean = self.mean.lerp(x.detach().mean(0), 0.1)
            else:
                self.mean.lerp_(x.detach().mean(0), 0.1)
        return x - self.mean


def build(input_shape, outputs, replaces):
    return nn.Sequential(
        nn.Linear(input_shape[0], 5),
        RunningMean(5, replaces),
        nn.ReLU(),
        nn.Linear(5, outputs),
    )
