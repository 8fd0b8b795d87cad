"""A small convolutional network with BatchNorm, whose forward is ordinary Python."""

import torch
from torch import nn
from torch.nn import functional


class Convolutional(nn.Module):
    """Two convolutions and a product."""

    def __init__(self, planes, outputs, width):
        super().__init__()
        self.first = nn.Conv2d(planes, width, 3, padding=1)
        self.first_norm = nn.BatchNorm2d(width)
        self.second = nn.Conv2d(width, 2 * width, 3, padding=1)
        self.second_norm = nn.BatchNorm2d(2 * width)
        self.head = nn.Linear(8 * width, outputs)

    def forward(self, x):
        x = functional.relu(self.first_norm(self.first(x)))
        x = functional.max_pool2d(x, 2)
        x = torch.relu(self.second_norm(self.second(x)))
        x = functional.adaptive_avg_pool2d(x, 2)
        return self.head(x.flatten(1))


def build(input_shape, outputs, width=4):
    return Convolutional(input_shape[0], outputs, width)
