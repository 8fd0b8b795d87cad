"""Models of users are tried before any run: what does not suit is one line."""

from __future__ import annotations

import re

import pytest
import torch

from scalebench.errors import ModelError
from scalebench.launch.model_check import refuse_small_batches, try_model
from scalebench.models.registry import build_model, is_foreign
from scalebench.study.spec import Component
from tests.facts import together

SOURCE = """
import random
from types import SimpleNamespace

import numpy as np
import torch
from torch import distributed, nn

BODY = nn.Linear(4, 6)
CACHED = {}
UNSEEDED = np.random.default_rng()


class Net(nn.Module):
    def __init__(self, outputs, kind):
        super().__init__()
        self.kind, self.body, self.head = kind, nn.Linear(4, 6), nn.Linear(6, outputs)
        self.other_head, self.aside = nn.Linear(6, 2), nn.Linear(6, 6)

    def forward(self, x):
        if self.kind == "in place" or (self.kind == "in place while evaluating" and not self.training):
            x -= 1.0
        if self.kind == "through numpy":
            x.numpy()[:] *= 0.5
        hidden = torch.tanh(self.body(x))
        if self.kind == "at times" and random.random() < 0.5:
            hidden = hidden + self.aside(hidden)
        if self.kind == "own generator":
            hidden = hidden * float(UNSEEDED.random())
        if self.kind == "communicates" and distributed.is_initialized() and distributed.get_world_size() > 1:
            distributed.all_reduce(hidden)
        logits = self.head(hidden)
        if self.kind == "auxiliary" and self.training:
            return logits, self.other_head(hidden)
        if self.kind == "softmax":
            return torch.softmax(logits, dim=1)
        if self.kind == "leaves":
            raise SystemExit("enough")
        if self.kind == "logits":
            return SimpleNamespace(logits=logits)
        if self.kind == "nothing":
            return SimpleNamespace(last_hidden_state=hidden)
        return logits


class LightningModule(nn.Module):
    pass


class Lit(LightningModule):
    def __init__(self, outputs):
        super().__init__()
        self.net = nn.Linear(4, outputs)

    def forward(self, x):
        return self.net(x)


def net(input_shape, outputs, kind="plain"):
    return Net(outputs, kind)


def lit(input_shape, outputs):
    return Lit(outputs)


def shared(input_shape, outputs):
    return nn.Sequential(BODY, nn.Linear(6, outputs))


def cached(input_shape, outputs):
    return CACHED.setdefault("net", nn.Linear(4, outputs))


def unseeded(input_shape, outputs):
    made = nn.Linear(4, outputs)
    made.weight.data += float(UNSEEDED.random())
    return made


def synchronised(input_shape, outputs):
    return nn.Sequential(nn.Linear(4, 6), nn.SyncBatchNorm(6), nn.Linear(6, outputs))


def normalised(input_shape, outputs):
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, outputs))


class Words(nn.Module):
    def __init__(self, outputs):
        super().__init__()
        self.table, self.head = nn.Embedding(10, 6, sparse=True), nn.Linear(6, outputs)

    def forward(self, x):
        return self.head(self.table(x.long()).mean(dim=1))


def words(input_shape, outputs):
    return Words(outputs)
"""
TRUNK = ["aside.bias", "aside.weight", "other_head.bias", "other_head.weight"]


@pytest.fixture
def tried(tmp_path):
    """Try a factory of the file above: `tried("net", kind="in place", samples=2)`."""
    (tmp_path / "own.py").write_text(SOURCE)

    def attempt(factory, samples=2, **options):
        component = Component(name=f"{tmp_path / 'own.py'}:{factory}", options=options)
        torch.manual_seed(0)
        x, y = torch.rand(samples, 4) * 5, torch.arange(samples) % 3

        def build():
            return build_model(component, (4,), 3, "classification", torch.float32, 0)

        return try_model(component, build, x, y, 3, "classification")

    return attempt


@pytest.mark.parametrize(
    ("factory", "kind", "message"),
    [
        ("shared", None, "0.weight is the same tensor at two calls of the factory"),
        ("cached", None, "weight is the same tensor at two calls of the factory"),
        (
            "unseeded",
            None,
            "two calls of the factory with the same seed give another weight",
        ),
        ("synchronised", None, "1 is a SyncBatchNorm, which communicates by itself"),
        ("words", None, "table.weight has sparse gradients"),
        ("net", "in place", "its forward changes the batch in place"),
        ("net", "in place while evaluating", "its forward changes the batch in place"),
        ("net", "through numpy", "its forward changes the batch in place"),
        ("net", "communicates", "communicates by itself (c10d::allreduce_)"),
        (
            "net",
            "auxiliary",
            "gives tuple for 2 samples while training; classification needs a tensor (2, 3)",
        ),
        ("net", "leaves", "fails on an input of shape (4,): SystemExit: enough"),
        (
            "net",
            "nothing",
            "gives SimpleNamespace for 2 samples; classification needs a tensor (2, 3), or an object",
        ),
    ],
)
def test_unsuitable_models_are_refused_in_one_line(tried, factory, kind, message):
    options = {} if kind is None else {"kind": kind}
    with pytest.raises(ModelError, match=re.escape(message)) as caught:
        tried(factory, **options)
    assert "\n" not in str(caught.value)
    assert not torch.distributed.is_initialized(), (
        "the group that the trial pretends is gone"
    )


def test_batchnorm_on_one_sample_fails_before_any_run(tried):
    tried("normalised", samples=2)
    with pytest.raises(
        ModelError,
        match=r"fails while training on a batch of 1 sample: .*; use a larger batch",
    ):
        tried("normalised", samples=1)


def test_own_batchnorm_of_this_package_is_looked_at_too():
    component = Component(name="resnet", options={"depth": 20})
    assert not is_foreign(component)
    model = build_model(component, (1, 4, 4), 3, "classification", torch.float32, 0)
    x, y = torch.rand(1, 1, 4, 4), torch.tensor([0])
    with pytest.raises(ModelError, match="on a batch of 1 sample"):
        refuse_small_batches(component, model, x, y, 3, "classification")


def test_parameters_without_gradient_are_named(tried):
    trial = tried("net")
    assert sorted(trial.without_gradient) == TRUNK
    (note,) = trial.notes
    assert together(note, "other_head.weight, other_head.bias, aside.weight", "1 more")
    assert "get no gradient" in note


def test_parameters_of_some_steps_are_named_for_ddp_alone(tried):
    trial = tried("net", kind="at times")
    assert sorted(trial.without_gradient) == TRUNK
    (note,) = trial.notes
    assert "aside" not in note, "half of the steps train it"


def test_generators_that_no_run_seeds_are_noted(tried):
    notes = tried("net", kind="own generator").notes
    assert any(together(note, "draws", "generator") for note in notes)


def test_logits_of_an_object_are_taken(tried):
    assert sorted(tried("net", kind="logits").without_gradient) == TRUNK


def test_what_a_lightning_module_does_not_bring_is_noted(tried):
    (note,) = tried("lit").notes
    assert together(
        note, "training_step", "configure_optimizers", "LightningModule", "not called"
    )


def test_softmax_before_the_loss_is_noted(tried):
    assert any(
        "ends in a softmax" in note for note in tried("net", kind="softmax").notes
    )
    assert not any("ends in a softmax" in note for note in tried("net").notes)
