"""A replica that repeats recorded operations trains as one that computes them anew, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from scalebench.data.batch_plan import BatchPlan
from scalebench.pricing.machine import Choice
from scalebench.virtual import engine, recorded
from scalebench.virtual.pool import simulate_alike
from scalebench.virtual.recorded import RecordedReplica
from tests.strategies.test_native_equality import MODEL


@pytest.fixture(autouse=True)
def _always(monkeypatch):
    monkeypatch.setattr(engine, "_WORTH_RECORDING", 0)


def trained(records, run, dataset, machine, monkeypatch):
    made = []
    monkeypatch.setattr(engine, "choose", lambda *_: Choice(records=records))
    original = RecordedReplica.gradient

    def gradient(self, batch, weight=1.0, *, add=False):
        made.append(weight)
        original(self, batch, weight, add=add)

    with monkeypatch.context() as context:
        context.setattr(RecordedReplica, "gradient", gradient)
        ((_, outcome, weights),) = simulate_alike([run], dataset, machine)
    assert outcome.status == "completed", outcome.error
    assert bool(made) is records
    return outcome, weights["final"]


@pytest.mark.parametrize("model", [{"mlp": {"hidden": [6]}}, MODEL])
@pytest.mark.parametrize("optimizer", ["sgd", {"sgd": {"momentum": 0.9}}, "adam"])
@pytest.mark.parametrize(
    ("strategy", "workers"),
    [
        ("serial", 1),
        ("epoch_average", 1),
        ("epoch_async", 3),
        ("allreduce", 3),
        ("local_sgd", 2),
        ("ssp", 3),
    ],
)
def test_recorded_gradients_train_as_computed_ones(
    strategy, workers, optimizer, model, make_run, blobs, machine, monkeypatch
):
    run = make_run(
        strategy,
        workers,
        model=model,
        optimizer=optimizer,
        evaluate_every=1,
        virtual={"jitter": "lognormal"},
    )
    anew, expected = trained(False, run, blobs, machine, monkeypatch)
    again, found = trained(True, run, blobs, machine, monkeypatch)
    assert torch.equal(found, expected)
    assert again.train_s == anew.train_s
    assert again.facts.arithmetic == anew.facts.arithmetic == "per_replica"
    pairs = zip(again.workers, anew.workers, strict=True)
    assert all(one.epochs == other.epochs for one, other in pairs)


@pytest.mark.parametrize("model", [{"mlp": {"hidden": [6]}}, MODEL])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("strategy", ["allreduce", "epoch_average", "demo", "ssp"])
def test_replicas_of_few_steps_repeat_what_one_has_recorded(
    strategy, optimizer, model, make_run, blobs, machine, monkeypatch
):
    """With statistics of their own, where the model has some."""
    values = {"optimizer": optimizer, "model": model, "evaluate_every": 1}
    run = make_run(strategy, 3, virtual={"jitter": "lognormal"}, **values)
    anew, expected = trained(False, run, blobs, machine, monkeypatch)
    steps = BatchPlan.of(run, run.workers, run.seed, blobs).steps(0) * run.epochs
    monkeypatch.setattr(engine, "_WORTH_RECORDING", steps + 1)
    recordings = []
    record = recorded.record

    def counted(compute, inputs):
        recordings.append(inputs)
        return record(compute, inputs)

    monkeypatch.setattr(recorded, "record", counted)
    again, found = trained(True, run, blobs, machine, monkeypatch)
    assert torch.equal(found, expected)
    assert again.train_s == anew.train_s
    metrics = [[each.metric for each in one.evaluations] for one in (again, anew)]
    assert metrics[0] == metrics[1]
    shapes = {tuple(inputs[0].shape) for inputs in recordings}
    assert len(recordings) == len(shapes), "one of each shape"


class PartlyUnused(nn.Linear):
    """A parameter takes no part: its gradient is zero, also behind a step of another strategy."""

    def __init__(self):
        super().__init__(2, 3)
        self.spare = nn.Parameter(torch.ones(2))


def test_parameter_without_gradient_stays(make_run, blobs, machine, monkeypatch):
    def built(*_, **__):
        torch.manual_seed(0)
        return PartlyUnused().double()

    monkeypatch.setattr("scalebench.training.replica.build_model", built)
    run = make_run("serial", 1)
    _, expected = trained(False, run, blobs, machine, monkeypatch)
    _, found = trained(True, run, blobs, machine, monkeypatch)
    assert torch.equal(found, expected)
