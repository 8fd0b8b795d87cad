"""The learning rate of each moment, and what optimizers accept."""

from __future__ import annotations

import math

import pytest
from pydantic import ValidationError

from scalebench.errors import StudyError
from scalebench.optimizers import check_optimizer, learning_rate
from scalebench.study.spec import Component, Training


def rates(moments, workers=4, **values):
    training = Training(epochs=10, lr=0.4, **values)
    return [learning_rate(training, workers, epochs, steps) for epochs, steps in moments]


EPOCHS = [(0, 0), (2.5, 25), (5, 50), (9.99, 100)]


def test_constant_and_linear():
    assert rates(EPOCHS) == [0.4] * 4
    assert rates(EPOCHS, lr_policy="linear", lr_warmup_epochs=5) == pytest.approx([0.4, 1.0, 1.6, 1.6])
    assert rates(EPOCHS, lr_policy="linear") == [1.6] * 4


def test_cosine_goes_from_lr_to_nothing():
    found = rates([*EPOCHS, (10, 0), (12, 0)], lr_policy="cosine")
    assert found[:3] == pytest.approx([0.4, 0.4 * (1 + math.sqrt(0.5)) / 2, 0.2])
    assert 0 < found[3] < 1e-5
    assert found[4:] == [0, 0]


def test_step_decays_in_epochs_and_optimizer_steps_in_updates():
    assert rates(EPOCHS, lr_policy="step", lr_decay_every=5, lr_decay=0.5) == pytest.approx([0.4, 0.4, 0.2, 0.2])
    found = rates(EPOCHS, lr_policy="optimizer_steps", lr_decay_every=25, lr_decay=0.5)
    assert found == pytest.approx([0.4, 0.2, 0.1, 0.025])
    assert rates([(5, 24)], lr_policy="optimizer_steps", lr_decay_every=25) == [0.4]


@pytest.mark.parametrize(("policy", "unit"), [("step", "epochs"), ("optimizer_steps", "optimizer steps")])
def test_a_decay_needs_its_interval(policy, unit):
    with pytest.raises(ValidationError, match=f"lr_policy {policy} needs lr_decay_every, in {unit}"):
        Training(lr_policy=policy)
    with pytest.raises(ValidationError, match="less than or equal to 1"):
        Training(lr_policy=policy, lr_decay_every=3, lr_decay=2)


def test_optimizer_steps_are_those_that_a_worker_took(play):
    """96 samples in batches of 8: 12 steps an epoch for one worker, 3 for four; a decay to nothing stops both."""

    def moved_after(workers, epochs):
        options = {"lr_policy": "optimizer_steps", "lr_decay_every": 6, "lr_decay": 1e-12, "optimizer": "sgd"}
        _, longer = play("allreduce", workers, epochs=epochs, **options)
        _, shorter = play("allreduce", workers, epochs=epochs - 1, **options)
        return (longer["final"] - shorter["final"]).abs().max() > 1e-9

    assert [moved_after(1, epochs) for epochs in (2, 3)] == [False, False]
    assert [moved_after(4, epochs) for epochs in (2, 3, 4)] == [True, False, False]


@pytest.mark.parametrize(
    ("component", "message"),
    [
        (Component(name="sgdd"), "unknown optimizer 'sgdd'; did you mean 'sgd'"),
        (Component(name="sgd", options={"nesterov": True}), "nesterov needs a momentum above 0"),
        (Component(name="adam", options={"beta3": 0.1}), "option 'beta3'.*did you mean 'beta"),
        (Component(name="sgd", options={"momentum": 1.0}), "option 'momentum'.*less than 1"),
    ],
)
def test_what_no_optimizer_takes_is_refused(component, message):
    with pytest.raises(StudyError, match=message):
        check_optimizer(component)
