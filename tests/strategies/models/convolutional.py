"""A small convolutional network with BatchNorm, nested as networks are."""

from torch import nn


def build(input_shape, outputs, width=4):
    block = nn.Sequential(
        nn.Conv2d(input_shape[0], width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()
    )
    further = nn.Sequential(
        nn.Conv2d(width, 2 * width, 3, padding=1), nn.BatchNorm2d(2 * width), nn.ReLU()
    )
    pooled = nn.AdaptiveAvgPool2d(2), nn.Flatten()
    return nn.Sequential(
        block, nn.MaxPool2d(2), further, *pooled, nn.Linear(8 * width, outputs)
    )
