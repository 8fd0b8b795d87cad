"""Learning-rate schedules and optimizer options."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from scalebench.errors import StudyError
from scalebench.launch.sweep import config_hash
from scalebench.strategies import registry
from scalebench.study.spec import Component, Training
from scalebench.training.optimizers import (
    build_optimizer,
    check_optimizer,
    learning_rate,
)
from tests.conftest import setting


def rates(moments, workers=4, **values):
    training = Training(epochs=10, lr=0.4, **values)
    return [
        learning_rate(training, workers, epochs, steps) for epochs, steps in moments
    ]


EPOCHS = [(0, 0), (2.5, 25), (5, 50), (9.99, 100)]


def test_constant_and_linear():
    assert rates(EPOCHS) == [0.4] * 4
    assert rates(EPOCHS, lr_policy="linear", lr_warmup_epochs=5) == pytest.approx(
        [0.4, 1.0, 1.6, 1.6]
    )
    assert rates(EPOCHS, lr_policy="linear") == [1.6] * 4


def test_cosine_decays_from_lr_to_zero():
    found = rates([*EPOCHS, (10, 0), (12, 0)], lr_policy="cosine")
    assert found[:3] == pytest.approx([0.4, 0.4 * (1 + math.sqrt(0.5)) / 2, 0.2])
    assert 0 < found[3] < 1e-5
    assert found[4:] == [0, 0]


def test_step_counts_epochs_and_optimizer_steps_counts_updates():
    assert rates(
        EPOCHS, lr_policy="step", lr_decay_every=5, lr_decay=0.5
    ) == pytest.approx([0.4, 0.4, 0.2, 0.2])
    found = rates(EPOCHS, lr_policy="optimizer_steps", lr_decay_every=25, lr_decay=0.5)
    assert found == pytest.approx([0.4, 0.2, 0.1, 0.025])
    assert rates([(5, 24)], lr_policy="optimizer_steps", lr_decay_every=25) == [0.4]


@pytest.mark.parametrize(
    ("policy", "unit"), [("step", "epochs"), ("optimizer_steps", "optimizer steps")]
)
def test_a_decay_needs_its_interval(policy, unit):
    with pytest.raises(
        ValidationError, match=f"lr_policy {policy} needs lr_decay_every, in {unit}"
    ):
        Training(lr_policy=policy)
    with pytest.raises(ValidationError, match="less than or equal to 1"):
        Training(lr_policy=policy, lr_decay_every=3, lr_decay=2)


def test_optimizer_steps_are_counted_per_worker(play):
    """96 samples in batches of 8: 12 steps an epoch for one worker, 3 for four; a decay to nothing stops both."""

    def moved_after(workers, epochs):
        options = {
            "lr_policy": "optimizer_steps",
            "lr_decay_every": 6,
            "lr_decay": 1e-12,
            "optimizer": "sgd",
        }
        _, longer = play("allreduce", workers, epochs=epochs, **options)
        _, shorter = play("allreduce", workers, epochs=epochs - 1, **options)
        return (longer["final"] - shorter["final"]).abs().max() > 1e-9

    assert [moved_after(1, epochs) for epochs in (2, 3)] == [False, False]
    assert [moved_after(4, epochs) for epochs in (2, 3, 4)] == [True, False, False]


@pytest.mark.parametrize(
    ("component", "message"),
    [
        (Component(name="sgdd"), "unknown optimizer 'sgdd'; did you mean 'sgd'"),
        (
            Component(name="sgd", options={"nesterov": True}),
            "nesterov needs a momentum above 0",
        ),
        (
            Component(name="adam", options={"beta3": 0.1}),
            "option 'beta3'.*did you mean 'beta",
        ),
        (
            Component(name="sgd", options={"momentum": 1.0}),
            "option 'momentum'.*less than 1",
        ),
    ],
)
def test_invalid_optimizer_options_are_refused(component, message):
    with pytest.raises(StudyError, match=message):
        check_optimizer(component)


@pytest.mark.parametrize("name", ["sgd", "lars"])
def test_nesterov_needs_a_momentum(name):
    pytest.importorskip("pytorch_optimizer")
    with pytest.raises(
        StudyError, match=f"optimizer {name}: nesterov needs a momentum above 0"
    ):
        check_optimizer(Component(name=name, options={"nesterov": True, "momentum": 0}))
    check_optimizer(Component(name=name, options={"nesterov": True, "momentum": 0.5}))


LAYERS = [np.array([[0.6, -0.8], [0.3, 0.1]]), np.array([0.5, -0.2])]
SLOPES = [np.array([[0.2, 0.1], [-0.4, 0.3]]), np.array([-0.3, 0.7])]


def stepped(name, options, steps=3):
    """The layers after some steps with constant gradients."""
    pytest.importorskip("pytorch_optimizer")
    layers = [torch.nn.Parameter(torch.tensor(layer)) for layer in LAYERS]
    optimizer = build_optimizer(Component(name=name, options=options), layers, 0.1)
    for _ in range(steps):
        for layer, slope in zip(layers, SLOPES, strict=True):
            layer.grad = torch.tensor(slope)
        optimizer.step()
    return [layer.detach().numpy() for layer in layers]


def test_lars_follows_its_formula():
    """You et al., 2017, arXiv 1708.03888: v <- m v + c |w| / (|g| + d |w|) (g + d w); w <- w - lr v. Biases: plain."""
    decay, trust, momentum = 0.01, 0.02, 0.9
    found = stepped(
        "lars",
        {"weight_decay": decay, "trust_coefficient": trust, "momentum": momentum},
    )
    for layer, slope, result in zip(LAYERS, SLOPES, found, strict=True):
        w, v = layer.copy(), np.zeros_like(layer)
        for _ in range(3):
            g = slope.copy()
            if w.ndim > 1:
                norm = np.linalg.norm(w)
                g = trust * norm / (np.linalg.norm(g) + decay * norm) * (g + decay * w)
            v = momentum * v + g
            w = w - 0.1 * v
        np.testing.assert_allclose(result, w, atol=1e-12)


def test_lamb_follows_its_formula():
    """You et al., ICLR 2020, arXiv 1904.00962, plain moments: r = m / (sqrt(v) + eps); w <- w - lr |w| / |r| r."""
    found = stepped("lamb", {"beta1": 0.8, "beta2": 0.9, "eps": 1e-6})
    for layer, slope, result in zip(LAYERS, SLOPES, found, strict=True):
        w, m, v = layer.copy(), np.zeros_like(layer), np.zeros_like(layer)
        for _ in range(3):
            m, v = 0.8 * m + 0.2 * slope, 0.9 * v + 0.1 * slope**2
            r = m / (np.sqrt(v) + 1e-6)
            w = w - 0.1 * np.linalg.norm(w) / (np.linalg.norm(r) + 1e-6) * r
        np.testing.assert_allclose(result, w, atol=1e-12)


@pytest.mark.parametrize("name", ["lars", "lamb"])
def test_layerwise_optimizers_step_replicas_like_serial(name, play):
    """A global batch of all samples: the mean of two workers' gradients is serial's, and so is each layer's step."""
    pytest.importorskip("pytorch_optimizer")
    options = {"optimizer": name, "lr": 0.05, "batch_global": 96, "shuffle": "none"}
    _, one = play("serial", 1, **options)
    _, two = play("allreduce", 2, **options)
    torch.testing.assert_close(two["final"], one["final"], atol=1e-12, rtol=0)
    assert (one["final"] - one["initial"]).abs().max() > 1e-5
    play({"local_sgd": {"steps": 2, "optimizer_state": "average"}}, 2, **options)


def test_unsupported_layerwise_optimizer_is_refused(monkeypatch):
    pytest.importorskip("pytorch_optimizer")
    with pytest.raises(
        StudyError, match=r"strategy asp: optimizer lars .*use sgd, adam or adamw"
    ):
        registry.create("asp", {}).check(setting(2, optimizer="lars"))
    monkeypatch.setattr("scalebench.training.optimizers.find_spec", lambda name: None)
    with pytest.raises(
        StudyError,
        match=r'optimizer lamb needs .*pip install "scalebench\[optimizers\]"',
    ):
        check_optimizer(Component(name="lamb"))


def test_adamw_decays_by_default_as_torchs(make_run):
    parameter = torch.nn.Parameter(torch.ones(3))
    default = torch.optim.AdamW([parameter]).defaults["weight_decay"]
    assert (
        build_optimizer(Component(name="adamw"), [parameter], 0.1).defaults[
            "weight_decay"
        ]
        == default
        == 0.01
    )
    assert (
        build_optimizer(Component(name="adam"), [parameter], 0.1).defaults[
            "weight_decay"
        ]
        == 0
    )
    plain, stated, none = (
        config_hash(make_run("serial", 1, optimizer={"adamw": options}))
        for options in ({}, {"weight_decay": 0.01}, {"weight_decay": 0.0})
    )
    assert plain == stated != none
