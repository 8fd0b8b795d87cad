"""Adaptive parallelism: layouts of components train as whole models do, and are chosen by what was measured."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from scalebench.errors import StudyError
from scalebench.models.parts import layers_of
from scalebench.models.registry import build_model
from scalebench.models.sharding import sharing_degrees_of
from scalebench.strategies import registry
from scalebench.strategies.adaptive import Adaptive, Costs, chosen
from scalebench.strategies.base import LayerProfile
from scalebench.study.spec import Component
from scalebench.virtual.engine import compute_and_time, model_time
from scalebench.virtual.lock_step import is_lock_step
from tests.conftest import setting
from tests.strategies.parts_case import images, trained_alone
from tests.strategies.test_parts_of_models import MODELS

DEGREES = st.sampled_from([(1,), (1, 2), (1, 4), (1, 2, 4)])
EXACT = {"atol": 1e-12, "rtol": 0}  # float64, weights of order 1
SGD, ADAM = {"sgd": {"momentum": 0.9}}, {"adam": {}}
MLPS = [("mlp", 2, [1, 2, 2, 1]), ("mlp", 4, [4, 2, 1, 1]), ("mlp", 4, [1, 4, 2, 1])]
OTHERS = [("convolutional", 2, [1, 1, 2, 1, 2]), ("transformer", 2, [1, 2, 2, 1, 1])]
CASES = [(*layout, optimizer) for optimizer in (SGD, ADAM) for layout in MLPS]
# adam would divide by rounding errors of gradients that are zero
CASES += [(*layout, SGD) for layout in OTHERS]
# more parameters than numbers in a batch of two samples
WIDE = {"mlp": {"hidden": [256, 256]}}
# 17, 37, 23 and 19 samples on four workers
UNEVEN = {"partition": {"dirichlet": {"alpha": 1}}}


@pytest.fixture(scope="module")
def patterns():
    return images()


def switching(self, worker, epoch, compute_s, comm_s):
    """Turn the layout by a layer, whatever was measured."""
    turned = [*worker.state.degrees[1:], worker.state.degrees[0]]
    layers = worker.layer_profiles
    degrees = (
        degree if degree in layer.degrees else 1
        for degree, layer in zip(turned, layers, strict=True)
    )
    self._use(worker, tuple(degrees), 0.0)


@pytest.mark.parametrize(("model", "workers", "degrees", "optimizer"), CASES, ids=str)
def test_layouts_train_as_whole_models_do(
    play, make_run, patterns, model, workers, degrees, optimizer
):
    values = {
        "model": MODELS[model],
        "optimizer": optimizer,
        "lr": 0.02,
        "batch_per_worker": 7,
    }
    _, weights = play(
        {"adaptive": {"layout": degrees, "again": False}},
        workers,
        data=patterns,
        **values,
    )
    expected = trained_alone(make_run(**values), patterns, workers)
    torch.testing.assert_close(weights["final"], expected, **EXACT)


@pytest.mark.parametrize("optimizer", [SGD, ADAM], ids=str)
def test_weights_and_states_keep_their_values_when_the_layout_changes(
    monkeypatch, play, make_run, patterns, optimizer
):
    monkeypatch.setattr(Adaptive, "_plan", switching)
    values = {
        "model": MODELS["mlp"],
        "optimizer": optimizer,
        "lr": 0.02,
        "epochs": 4,
        "batch_per_worker": 7,
    }
    _, weights = play(
        {"adaptive": {"layout": [4, 2, 1, 1]}}, 4, data=patterns, **values
    )
    torch.testing.assert_close(
        weights["final"], trained_alone(make_run(**values), patterns, 4), **EXACT
    )


def test_what_was_measured_makes_wide_layers_shared_and_small_ones_not(
    play, make_run, patterns
):
    values = {
        "batch_per_worker": 2,
        "epochs": 3,
        "optimizer": {"sgd": {"momentum": 0.9}},
    }
    narrow, _ = play(
        "adaptive", 4, data=patterns, model={"mlp": {"hidden": [8]}}, **values
    )
    wide, weights = play("adaptive", 4, data=patterns, model=WIDE, **values)
    sent = [
        [epoch.bytes_sent for epoch in outcome.workers[0].epochs]
        for outcome in (narrow, wide)
    ]
    assert sent[0][1] < 1.1 * sent[0][0]
    assert sent[1][2] < 0.5 * sent[1][0]
    assert wide.workers[0].epochs[2].comm_s < wide.workers[0].epochs[0].comm_s
    torch.testing.assert_close(
        weights["final"],
        trained_alone(make_run(model=WIDE, **values), patterns, 4),
        **EXACT,
    )


def test_one_model_for_all_takes_the_layouts_and_times_of_each_workers_own(
    play, make_run, machine, patterns
):
    values = {"batch_per_worker": 2, "epochs": 3, "model": WIDE}
    each, weights = play("adaptive", 4, data=patterns, **values)
    run = make_run("adaptive", 4, **values)
    together, of_one = compute_and_time(run, patterns, machine)
    modelled = model_time(run, patterns, machine)
    assert each.facts.arithmetic == "per_replica"
    assert together.facts.arithmetic == "one_batch"
    torch.testing.assert_close(of_one["final"], weights["final"], **EXACT)
    for worker, *others in zip(
        each.workers, together.workers, modelled.workers, strict=True
    ):
        assert worker.epochs[2].bytes_sent < 0.5 * worker.epochs[0].bytes_sent
        for other in others:
            for mine, same in zip(worker.epochs, other.epochs, strict=True):
                assert same.elapsed_s == mine.elapsed_s
                assert same.bytes_sent == mine.bytes_sent


def test_a_layout_that_takes_longer_than_the_one_before_is_left(
    play, machine, patterns
):
    """Where a collective takes 10 ms however short it is, fewer numbers in more of them cost time."""
    cluster = machine.cluster
    links = {
        name: getattr(cluster.links, name).model_copy(update={"latency_s": 1e-2})
        for name in ("intra", "inter")
    }
    slow = replace(
        machine,
        cluster=cluster.model_copy(
            update={"links": cluster.links.model_copy(update=links)}
        ),
    )
    outcome, _ = play(
        "adaptive",
        4,
        data=patterns,
        model=WIDE,
        machine=slow,
        batch_per_worker=2,
        epochs=4,
    )
    profiled, tried, *then = [epoch.bytes_sent for epoch in outcome.workers[0].epochs]
    assert tried < 0.5 * profiled
    # after the last epoch no times are exchanged
    assert then == pytest.approx([profiled] * 2, abs=16)


class Seconds:
    """A ledger of what epochs took."""

    def __init__(self, compute_s=0.0, comm_s=0.0):
        self.compute_s, self.comm_s = compute_s, comm_s

    def copy(self):
        return Seconds(self.compute_s, self.comm_s)


def layouts_of(epochs, steps):
    """Layouts that one of four workers uses, whose epochs compute and communicate for so many seconds.

    Data parallelism moves 3,000 numbers a step; sharing both layers among all, 600.
    """
    layers = [LayerProfile(name, 1000, 10, 10, (1, 4)) for name in ("one", "two")]
    ledger, used, state = Seconds(), [], SimpleNamespace()

    def batches(epoch):
        ledger.compute_s += epochs[epoch][0]
        ledger.comm_s += epochs[epoch][1]
        return []

    def use_layout(sizes, degrees):
        used.append(degrees)
        return []

    worker = SimpleNamespace(
        size=4,
        state=state,
        layer_profiles=layers,
        parameters=torch.zeros(1),
        gradients=torch.zeros(1, dtype=torch.float64),
        mean_batch=lambda _: 2.0,
        epochs=len(epochs),
        is_last=lambda epoch: epoch == len(epochs) - 1,
        steps_in=lambda _: steps,
        comm=SimpleNamespace(allgather=lambda own: [own] * 4),
        clock=SimpleNamespace(ledger=ledger),
        batches=batches,
        use_layout=use_layout,
        observe=lambda *_: None,
    )
    strategy = registry.create("adaptive", {})
    strategy.setup(worker)
    for epoch in range(len(epochs)):
        strategy.train_epoch(worker, epoch)
    return used


@pytest.mark.parametrize(("comm_s", "switches"), [(0.06, False), (0.07, True)])
def test_a_layout_that_saves_less_than_a_twentieth_is_left_alone(comm_s, switches):
    """Four fifths of the communication would be saved: 4.5 and 5.2 % of an epoch."""
    assert layouts_of([(1.0, comm_s)] * 50, 1000) == [[1]] + [[4]] * switches


@pytest.mark.parametrize(("steps", "switches"), [(1, False), (2, True)])
def test_a_switch_has_to_repay_the_parameters_that_it_moves(steps, switches):
    """One epoch of 1 s is left, of which 0.8 s would be saved; moving 4,000 numbers takes 1.3 s, or half of it."""
    assert layouts_of([(0.0, 1.0)] * 2, steps) == [[1]] + [[4]] * switches


@pytest.mark.parametrize(("third", "switches"), [(1.05, False), (1.20, True)])
def test_a_layout_is_chosen_again_only_if_an_epoch_is_a_tenth_off(third, switches):
    """After 1.06 s, where sharing saved 4.5 %, epochs of 1.10 s would save 7.3 %, and are 4 % off."""
    epochs = [(1.0, 0.06), (1.0, 0.10), (1.0, third - 1.0), (1.0, 0.0), (1.0, 0.0)]
    assert layouts_of(epochs, 10**6)[:2] == [[1]] + [[4]] * switches


@pytest.mark.parametrize("options", [{}, {"parameters_mib": 0.5}], ids=str)
def test_workers_with_other_numbers_of_samples_choose_one_layout(
    play, make_run, patterns, options
):
    """Batches have 8.5 to 18.5 samples in the mean: alone, two workers would share wide layers by 4, and two by 2."""
    values = {"batch_per_worker": 20, "epochs": 3, **UNEVEN}
    _, weights = play({"adaptive": options}, 4, data=patterns, model=WIDE, **values)
    torch.testing.assert_close(
        weights["final"],
        trained_alone(make_run(model=WIDE, **values), patterns, 4),
        **EXACT,
    )


@given(st.data())
def test_the_best_of_all_layouts_is_found_under_the_cap(data):
    number = st.integers(1, 400)
    layers = [
        LayerProfile(
            str(place),
            data.draw(number),
            data.draw(number),
            data.draw(number),
            data.draw(DEGREES),
        )
        for place in range(data.draw(st.integers(1, 4)))
    ]
    costs, cap = Costs(4, data.draw(st.integers(1, 8))), data.draw(st.integers(1, 1600))

    def held(degrees):
        return sum(
            layer.parameters / degree
            for layer, degree in zip(layers, degrees, strict=True)
        )

    layers[1:] = [
        layer._replace(takes=before.gives) for before, layer in pairwise(layers)
    ]
    fitting = [
        each
        for each in product(*(layer.degrees for layer in layers))
        if held(each) <= cap
    ]
    best, greedy = (
        chosen(layers, costs, cap, "viterbi"),
        chosen(layers, costs, cap, "greedy"),
    )
    if not fitting:
        assert best is greedy is None
        return
    least = min(costs.of_layout(layers, each) for each in fitting)
    assert held(best) <= cap
    assert held(greedy) <= cap
    assert costs.of_layout(layers, best) == pytest.approx(least)
    assert costs.of_layout(layers, greedy) >= least * (1 - 1e-12)


def test_repetitions_whose_layouts_depend_on_times_are_computed_again(make_run):
    assert is_lock_step(make_run({"adaptive": {"again": False}}, 4))
    assert not is_lock_step(make_run("adaptive", 4))


def test_costs_are_the_numbers_that_collectives_move():
    layer = LayerProfile("one", 80, 5, 3, (1, 2, 4))
    costs = Costs(4, 10)
    assert costs.of_layer(layer, 1) == 2 * 3 / 4 * 80
    assert costs.of_layer(layer, 2) == 2 * 1 / 2 * 80 / 2 + 2 * (1 / 2) * 2 * 10 * (
        5 + 3
    )
    assert costs.of_layer(layer, 4) == 2 * (3 / 4) * 4 * 10 * (5 + 3)
    assert costs.of_layout([layer, layer._replace(takes=3)], [1, 4]) == (
        120 + 60 * 10 * 6 / 10 + 3 * 10 * 3 + 3 * 10 * 3
    )


def test_layers_that_can_be_shared_alone_but_not_together_have_other_degrees():
    """Eight workers can share the inputs of each, but not the 4 channels between the two."""
    model = nn.Sequential(nn.Conv2d(8, 4, 3), nn.Flatten(), nn.Linear(16, 8))
    assert sharing_degrees_of(layers_of(model, "model"), 8, "model") == [
        (1, 2, 4),
        (1, 2, 4, 8),
    ]


def test_the_least_numbers_are_chosen_from_the_beginning(play, patterns):
    stated, _ = play(
        {"adaptive": {"layout": "least", "again": False}}, 4, data=patterns, model=WIDE
    )
    default, _ = play({"adaptive": {"again": False}}, 4, data=patterns, model=WIDE)
    assert stated.workers[0].bytes_sent < 0.5 * default.workers[0].bytes_sent


def test_a_cap_is_met_from_the_beginning_and_refused_if_no_layout_meets_it(
    play, patterns
):
    outcome, _ = play(
        {"adaptive": {"parameters_mib": 0.4, "again": False}},
        4,
        data=patterns,
        model=WIDE,
    )
    assert outcome.workers[0].bytes_sent
    layers = layers_of(
        build_model(
            Component(name="mlp", options=WIDE["mlp"]),
            (64,),
            3,
            "classification",
            torch.float64,
            0,
        ),
        "mlp",
    )
    with pytest.raises(
        StudyError, match=r"the least is 0\.159 MiB a worker, of which layer"
    ):
        registry.create("adaptive", {"parameters_mib": 0.05}).check(
            replace(setting(4), layers=layers)
        )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"layout": [3, 1]},
            "3 workers cannot share a layer among 4; use divisors of 4",
        ),
        ({"layout": [1, 2]}, "2 degrees for a model of 3 layers"),
        ({"solver": "exact"}, "option 'solver'"),
        ({"parameters_mib": 0}, "option 'parameters_mib'"),
    ],
)
def test_layouts_that_cannot_be_are_refused(options, said):
    with pytest.raises(StudyError, match=said):
        registry.create("adaptive", options).check(
            replace(setting(4), layer_work=[1.0, 1.0, 1.0])
        )
    with pytest.raises(StudyError, match="lamb takes the norms"):
        registry.create("adaptive", {}).check(setting(4, optimizer="lamb"))
