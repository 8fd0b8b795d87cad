"""Averaged state that lies side by side is sent in place; other state is gathered first."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scalebench.pricing.machine import Choice
from scalebench.strategies import registry
from scalebench.strategies.replica_state import (
    joined,
    packed,
    parameter_shapes,
    unpack_,
)
from scalebench.training.replica import Replica
from scalebench.virtual import engine
from scalebench.virtual.communicator import VirtualCommunicator

MODELS = Path(__file__).parent / "models"
NORMALISED = f"{MODELS / 'normalised.py'}:build"


@st.composite
def pieces(draw):
    """Tensors over one storage of 40 numbers or another, which may follow one another, in any order, or overlap."""
    storages = [torch.arange(40.0), 100 + torch.arange(40.0)]
    found = []
    for _ in range(draw(st.integers(1, 6))):
        begin = draw(st.integers(0, 39))
        end = draw(st.integers(begin + 1, 40))
        found.append(storages[draw(st.integers(0, 1))][begin:end])
        if draw(st.booleans()) and end < 40:
            found.append(
                storages[0 if found[-1][0] < 100 else 1][
                    end : draw(st.integers(end + 1, 40))
                ]
            )
    return found


@given(tensors=pieces())
def test_joined_tensors_are_the_same_memory_in_the_same_order(tensors):
    found = joined(tensors)
    assert torch.equal(
        torch.cat([each.reshape(-1) for each in found]), torch.cat(tensors)
    )
    ends = [each.data_ptr() + each.nbytes for each in found[:-1]]
    # as few as can be
    assert all(
        end != each.data_ptr() for end, each in zip(ends, found[1:], strict=True)
    )
    # none is a copy
    assert all(
        any(each.data_ptr() == tensor.data_ptr() for tensor in tensors)
        for each in found
    )


def test_adjacent_tensors_of_other_storage_are_not_joined():
    memory = bytearray(32)
    first, second = (
        torch.frombuffer(memory, dtype=torch.float32, count=4, offset=begin)
        for begin in (0, 16)
    )
    assert first.data_ptr() + first.nbytes == second.data_ptr()
    assert [each.data_ptr() for each in joined([first, second])] == [
        first.data_ptr(),
        second.data_ptr(),
    ]


@pytest.mark.parametrize(
    "tensors",
    [
        (torch.zeros(8)[:4], torch.zeros(8)[4:].double()),
        (torch.zeros(6, 2)[:3].t(), torch.zeros(4)),
        (torch.zeros(0), torch.zeros(3)),
    ],
    ids=["dtypes", "transposed", "empty"],
)
def test_tensors_of_other_layout_are_not_joined(tensors):
    found = joined(tensors)
    assert [each is one for each, one in zip(found, tensors, strict=True)] == [True] * 2


def test_a_transposed_piece_is_not_taken_for_the_memory_that_it_covers():
    whole = torch.arange(8.0)
    tensors = [whole[:2], whole[2:].view(2, 3).t(), whole[:1]]
    vector = packed(tensors).clone()
    assert vector.tolist() == [0, 1, 2, 5, 3, 6, 4, 7, 0]
    unpack_(2 * vector, tensors)
    assert whole.tolist() == [0, 2, 4, 6, 8, 10, 12, 14]


@given(tensors=pieces())
def test_packed_state_is_unpacked_unchanged(tensors):
    """Apart from what overlaps, which would be written twice."""
    covered = [
        place
        for each in tensors
        for place in range(each.data_ptr(), each.data_ptr() + each.nbytes)
    ]
    vector = packed(tensors).clone()
    unpack_(vector, tensors)
    assert torch.equal(torch.cat(tensors), vector)
    if len(set(covered)) == len(covered):
        unpack_(vector + 1, tensors)
        assert torch.equal(torch.cat(tensors), vector + 1)


@pytest.fixture
def observed(monkeypatch, play):
    """`observed(strategy, model, ...)`: what each call averaged over three workers, and the replicas afterwards."""

    def of(options, model, **values):
        made, sent = [], []
        mean_ = VirtualCommunicator.mean_

        class Kept(Replica):
            def __init__(self, *arguments, **options):
                super().__init__(*arguments, **options)
                made.append(self)

        def noted(comm, tensors, weight=None):
            sent.append([(each.data_ptr(), each.numel()) for each in tensors])
            mean_(comm, tensors, weight)

        # gradients replica by replica
        monkeypatch.setattr(engine, "choose", lambda *_: Choice())
        monkeypatch.setattr(engine, "Replica", Kept)
        monkeypatch.setattr(
            engine, "evaluate", lambda *arguments: engine.EvaluationResult([], None)
        )
        monkeypatch.setattr(VirtualCommunicator, "mean_", noted)
        play(
            options,
            3,
            **{"model": model, "optimizer": {"sgd": {"momentum": 0.9}}, **values},
        )
        monkeypatch.undo()
        return sent, made

    return of


@pytest.mark.parametrize("policy", ["keep", "average", "reset"])
@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_parameters_statistics_and_momentum_are_averaged_as_one_where_they_lie(
    observed, policy, weighting
):
    options = {"steps": 3, "optimizer_state": policy, "weighting": weighting}
    sent, made = observed({"local_sgd": options}, NORMALISED)
    strategy = registry.create("local_sgd", options, "virtual")
    numbers = sum(tensor.numel() for tensor in strategy.averaged(made[0]))
    begins = {replica.parameters.data_ptr() for replica in made}
    assert len(sent) >= 3 * 3
    assert all(len(call) == 1 for call in sent)
    assert {call[0] for call in sent} == {(begin, numbers) for begin in begins}


def test_momentum_of_a_worker_without_steps_is_averaged_as_zeros(observed):
    """Of three clients one is chosen in each round; the others' momentum is that of before the first step."""
    sent, made = observed(
        {"fedavg": {"fraction": 0.4, "optimizer_state": "average"}},
        NORMALISED,
        epochs=1,
    )
    assert {len(call) for call in sent} == {1}
    momenta = [
        next(iter(replica.optimizer.state.values()))["momentum_buffer"]
        for replica in made
    ]
    assert all(torch.equal(momentum, momenta[0]) for momentum in momenta)
    assert momenta[0].any()


def test_a_buffer_that_a_forward_pass_replaces_is_averaged_all_the_same(observed):
    """Bit for bit what the model does that changes the buffer in place."""
    options, found = {"local_sgd": {"steps": 3, "optimizer_state": "average"}}, {}
    for replaces in (True, False):
        sent, made = observed(
            options, {f"{MODELS / 'replacing.py'}:build": {"replaces": replaces}}
        )
        begins = {replica.parameters.data_ptr() for replica in made}
        # gathered, or where they lie
        assert all((call[0][0] in begins) is not replaces for call in sent)
        momenta = [
            next(iter(replica.optimizer.state.values()))["momentum_buffer"]
            for replica in made
        ]
        found[replaces] = [
            torch.cat([replica.parameters, *replica.model.buffers(), momentum])
            for replica, momentum in zip(made, momenta, strict=True)
        ]
        assert all(
            torch.equal(found[replaces][0], other) for other in found[replaces][1:]
        )
        assert made[0].model[1].mean.any()
    assert torch.equal(found[True][0], found[False][0])


def test_shapes_are_those_of_trained_parameters():
    """As they lie in the vectors of weights and gradients, which frozen ones are not in."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 4))
    model[0].weight.requires_grad_(False)
    worker = SimpleNamespace(model=model, state=SimpleNamespace())
    assert parameter_shapes(worker) == [(2,), (4, 2), (4,)]
