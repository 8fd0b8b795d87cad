"""The loss that a model gives, as those of transformers do, is the one that is trained."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from scalebench.comm.simulated import lone_communicator
from scalebench.data.batch_plan import BatchPlan
from scalebench.data.dataset import Dataset
from scalebench.system.clock import WallClock
from scalebench.training.replica import Replica

SOURCE = """
from types import SimpleNamespace

from torch import nn
from torch.nn import functional


class Net(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.net = nn.Linear(inputs, outputs)

    def forward(self, x):
        return SimpleNamespace(logits=self.net(x))


class Labelled(Net):
    def forward(self, x, labels=None):
        logits = self.net(x)
        loss = None if labels is None else 3 * functional.cross_entropy(logits, labels)
        return SimpleNamespace(logits=logits, loss=loss)


class Plain(Net):
    def forward(self, x):
        return self.net(x)


def plain(input_shape, outputs):
    return Plain(input_shape[0], outputs)


def logits(input_shape, outputs):
    return Net(input_shape[0], outputs)


def labelled(input_shape, outputs):
    return Labelled(input_shape[0], outputs)
"""


@pytest.mark.parametrize(("factory", "times"), [("logits", 1.0), ("labelled", 3.0)])
def test_a_model_s_own_loss_is_trained(tmp_path, make_run, blobs, factory, times):
    (tmp_path / "own.py").write_text(SOURCE)

    def gradient(name):
        run = make_run(model=f"{tmp_path / 'own.py'}:{name}")
        plan = BatchPlan.of(run, 1, run.seed, blobs)
        replica = Replica(run, blobs, plan, lone_communicator(), WallClock())
        replica.gradient(next(iter(replica.batches(0))))
        return replica.gradients.clone(), float(replica.last_loss)

    (plain, plain_loss), (own, own_loss) = gradient("plain"), gradient(factory)
    torch.testing.assert_close(own, times * plain)
    assert own_loss == pytest.approx(times * plain_loss)


@pytest.mark.parametrize("factory", ["logits", "labelled"])
def test_such_models_are_evaluated_by_their_logits(play, tmp_path, factory):
    (tmp_path / "own.py").write_text(SOURCE)
    outcome, _ = play("epoch_average", 2, model=f"{tmp_path / 'own.py'}:{factory}")
    assert outcome.evaluations[-1].metric > 0.5


def test_an_image_model_of_transformers_is_trained_as_it_is(play, tmp_path):
    pytest.importorskip("transformers")
    (tmp_path / "own.py").write_text(
        "import transformers\n"
        "def build(input_shape, outputs):\n"
        "    config = transformers.ViTConfig(image_size=4, patch_size=2, num_channels=1, num_labels=outputs,\n"
        "        hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)\n"
        "    return transformers.ViTForImageClassification(config)\n"
    )
    random = np.random.default_rng(0)
    y = np.arange(40) % 2
    x = (random.standard_normal((40, 1, 4, 4)) + 2 * y[:, None, None, None]).astype(
        np.float32
    )
    images = Dataset("images", "classification", 2, x[:32], y[:32], x[32:], y[32:])
    outcome, _ = play(
        "allreduce",
        2,
        model=f"{tmp_path / 'own.py'}:build",
        data=images,
        dtype="float32",
        epochs=20,
        lr=0.02,
        optimizer="adam",
    )
    assert outcome.evaluations[-1].metric > 0.5
