"""Warm-up steps change nothing that is recorded but time."""

from __future__ import annotations

import numpy as np
import pytest

from scalebench.comm.simulated import lone_communicator
from scalebench.data.batch_plan import BatchPlan
from scalebench.strategies import registry
from scalebench.system.clock import WallClock
from scalebench.system.random_state import seed_generators
from scalebench.training.loop import train
from scalebench.training.replica import Replica

SOURCE = """
import random

import numpy as np
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(inputs, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, outputs))
        self.calls, self.mean, self.generator = 0, torch.zeros(inputs), np.random.default_rng(3)

    def forward(self, x):
        if self.training:
            self.calls += 1
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(dim=0)
            self.last = x
            x = x * (1 + 0.1 * random.random() + 0.1 * float(np.random.normal()) + 0.1 * self.generator.random())
        return self.net(x - self.mean) / (1 + 0.01 * self.calls)


def build(input_shape, outputs):
    return Net(input_shape[0], outputs)
"""


@pytest.fixture
def trained(tmp_path, make_run, blobs):
    (tmp_path / "own.py").write_text(SOURCE)

    def training(warmup_steps):
        run = make_run(model=f"{tmp_path / 'own.py'}:build", warmup_steps=warmup_steps)
        seed_generators(11)
        plan = BatchPlan.of(run, 1, run.seed, blobs)
        replica = Replica(run, blobs, plan, lone_communicator(), WallClock())
        report = train(replica, registry.create("serial", {}), warm=warmup_steps > 0)
        return replica, report

    return training


def test_losses_and_weights_do_not_depend_on_warm_up_steps(trained):
    plain, report = trained(0)
    warm, warm_report = trained(7)
    assert [epoch.train_loss for epoch in warm_report.epochs] == [
        epoch.train_loss for epoch in report.epochs
    ]
    np.testing.assert_array_equal(warm.parameters.numpy(), plain.parameters.numpy())
    assert warm.model.calls == plain.model.calls
    for one, other in zip(warm.model.buffers(), plain.model.buffers(), strict=True):
        np.testing.assert_array_equal(one.numpy(), other.numpy())


def test_attributes_that_came_in_a_rehearsal_are_gone(trained):
    replica, _ = trained(0)
    del replica.model.last
    with replica.rehearsal():
        replica.local_step(next(iter(replica.batches(0))))
        assert hasattr(replica.model, "last")
    assert not hasattr(replica.model, "last")
