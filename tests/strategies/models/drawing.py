"""A network that draws from torch's, numpy's and Python's generators, of which a part has no gradient at times."""

import random

import numpy as np
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.first, self.block, self.unused = (
            nn.Linear(inputs, 6),
            nn.Linear(6, 6),
            nn.Linear(6, 2),
        )
        self.dropout, self.last = nn.Dropout(0.2), nn.Linear(6, outputs)

    def forward(self, x):
        hidden = torch.tanh(self.first(x))
        if self.training:
            hidden = hidden * (1 + 0.1 * float(np.random.normal()))
        if not self.training or random.random() < 0.5:
            hidden = hidden + torch.tanh(self.block(hidden))
        return self.last(self.dropout(hidden))


def build(input_shape, outputs):
    return Net(input_shape[0], outputs)
