"""A model that kills one rank in the training pass after the first `at`: once, or whenever it gets there."""

import os
import signal
from pathlib import Path

import torch

RANK = int(os.environ.get("HOROVOD_RANK") or os.environ.get("RANK", "0"))


class Mortal(torch.nn.Module):
    def __init__(self, inputs, outputs, rank, at, once):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(inputs, 8),
            torch.nn.BatchNorm1d(8),
            torch.nn.Dropout(0.2),
            torch.nn.Linear(8, outputs),
        )
        self.rank, self.at, self.once = rank, at, once
        self.calls = 0

    def forward(self, x):
        self.calls += self.training
        if self.training and self.rank == RANK and self.calls > self.at:
            if self.once is None:
                os.kill(os.getpid(), signal.SIGKILL)
            elif not Path(self.once).exists():
                Path(self.once).touch()
                os.kill(os.getpid(), signal.SIGKILL)
        return self.layers(x)


def build(input_shape, outputs, rank=1, at=10**9, once=None):
    """`once`: the file that tells whether the rank has died before."""
    return Mortal(input_shape[0], outputs, rank, at, once)
