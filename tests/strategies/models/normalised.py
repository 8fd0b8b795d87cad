"""A small network with BatchNorm, whose running statistics are buffers."""

from torch import nn


def build(input_shape, outputs, width=5):
    layers = (
        nn.Linear(input_shape[0], width),
        nn.BatchNorm1d(width),
        nn.ReLU(),
        nn.Linear(width, outputs),
    )
    return nn.Sequential(*layers)
