"""Losses and metrics agree with references, and evaluation has no side effects."""

import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score, r2_score
from torch import nn

from scalebench.models.metric import evaluate, loss_for, metric


def test_losses():
    outputs, labels = (
        torch.randn(6, 4, dtype=torch.float64),
        torch.tensor([0, 1, 2, 3, 0, 1]),
    )
    expected = -torch.log_softmax(outputs, dim=1)[torch.arange(6), labels].mean()
    assert loss_for("classification")(outputs, labels) == pytest.approx(
        expected.item(), rel=1e-12
    )
    targets = torch.randn(6, 4, dtype=torch.float64)
    assert loss_for("regression")(outputs, targets) == pytest.approx(
        ((outputs - targets) ** 2).mean().item(), rel=1e-12
    )


def test_metrics_agree_with_scikit_learn():
    generator = np.random.default_rng(0)
    outputs, labels = generator.standard_normal((50, 3)), generator.integers(0, 3, 50)
    assert metric(
        "classification", torch.tensor(outputs), torch.tensor(labels)
    ) == accuracy_score(labels, outputs.argmax(axis=1))
    targets = outputs * [1, 2, 3] + generator.standard_normal((50, 3))
    assert metric(
        "regression", torch.tensor(outputs), torch.tensor(targets)
    ) == pytest.approx(r2_score(targets, outputs), rel=1e-12)


def test_constant_target_has_r2_of_one_or_zero():
    targets = torch.tensor([[2.0, 1.0], [2.0, 3.0]])
    assert metric("regression", targets, targets) == 1
    assert metric("regression", targets + torch.tensor([1.0, 0.0]), targets) == 0.5


class Watched(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout(0.5))
        self.layers[1].eval()  # frozen statistics, as users do
        self.seen = []

    def forward(self, x):
        self.seen.append((len(x), torch.is_grad_enabled(), self.training))
        return self.layers(x)


def test_evaluation_is_batched_without_side_effects():
    model = Watched()
    x, y = torch.randn(10, 4), torch.randint(0, 3, (10,))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random_state = torch.get_rng_state()
    whole = evaluate(model, x, y, "classification")
    assert evaluate(model, x, y, "classification", batch=4) == whole
    assert model.seen == [
        (10, False, False),
        (4, False, False),
        (4, False, False),
        (2, False, False),
    ]
    assert model.training
    assert not model.layers[1].training
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(
        torch.equal(value, before[name]) for name, value in model.state_dict().items()
    )
    assert all(parameter.grad is None for parameter in model.parameters())


def test_mode_is_restored_after_a_failure():
    model = Watched()
    with pytest.raises(RuntimeError):
        evaluate(model, torch.randn(10, 5), torch.zeros(10), "classification")
    assert model.training
