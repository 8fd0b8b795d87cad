"""Muon: torch's steps in a bare loop, on one worker, on several, virtually and by real processes."""

from __future__ import annotations

import pytest
import torch

from scalebench.errors import StudyError
from scalebench.strategies import registry
from scalebench.study.spec import Component
from scalebench.training.muon import Muon
from scalebench.training.optimizers import build_optimizer, check_optimizer
from tests.conftest import setting

OPTIONS = {"momentum": 0.9, "nesterov": False, "ns_steps": 3, "beta1": 0.8, "eps": 1e-7, "weight_decay": 0.05}


def model():
    torch.manual_seed(3)
    layers = torch.nn.Conv1d(1, 2, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(12, 5)
    return torch.nn.Sequential(*layers).double()


def trained(optimisers, net, steps=4):
    """The weights after some steps on random samples, with a rate that changes."""
    generator = torch.Generator().manual_seed(7)
    for step in range(steps):
        x = torch.randn(8, 1, 8, generator=generator, dtype=torch.float64)
        y = torch.randint(5, (8,), generator=generator)
        net.zero_grad()
        torch.nn.functional.cross_entropy(net(x), y).backward()
        for optimizer in optimisers:
            for group in optimizer.param_groups:
                group["lr"] = 0.02 / (step + 1)
            optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in net.parameters()])


def test_steps_are_those_of_torchs_muon_and_adamw():
    ours, bare = model(), model()
    found = trained([build_optimizer(Component(name="muon", options=OPTIONS), ours.parameters(), 0.02)], ours)
    matrices = [parameter for parameter in bare.parameters() if parameter.dim() == 2]
    others = [parameter for parameter in bare.parameters() if parameter.dim() != 2]
    muon = torch.optim.Muon(
        matrices, 0.02, 0.05, momentum=0.9, nesterov=False, ns_steps=3, adjust_lr_fn="match_rms_adamw"
    )
    adamw = torch.optim.AdamW(others, 0.02, betas=(0.8, 0.999), eps=1e-7, weight_decay=0.05)
    assert torch.equal(found, trained([muon, adamw], bare))


def test_options_that_are_not_stated_are_torchs():
    matrix, vector = torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.ones(2))
    of_matrices, of_others = build_optimizer(Component(name="muon"), [matrix, vector], 0.1).param_groups
    torchs = torch.optim.Muon([matrix], lr=0.1, adjust_lr_fn="match_rms_adamw").param_groups[0]
    assert {name: of_matrices[name] for name in torchs} == torchs
    torchs = torch.optim.AdamW([vector], lr=0.1).param_groups[0]
    apart = {"weight_decay": 0.1}  # Muon's, for all
    assert {name: of_others[name] for name in torchs} == torchs | apart


def test_a_wrapper_gets_the_same_steps_from_its_groups():
    """Horovod's makes an optimizer of the same class from the groups."""
    ours, wrapped = model(), model()
    found = trained([Muon(ours.parameters(), 0.02)], ours)
    assert torch.equal(found, trained([Muon(Muon(wrapped.parameters(), 0.02).param_groups)], wrapped))


@pytest.mark.parametrize("kept", [lambda each: each.dim() == 2, lambda each: each.dim() != 2])
def test_models_of_one_kind_of_parameters_are_trained(kept):
    parameters = [parameter for parameter in model().parameters() if kept(parameter)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    before = [parameter.detach().clone() for parameter in parameters]
    Muon(parameters, 0.1).step()
    assert all(not torch.equal(old, new) for old, new in zip(before, parameters, strict=True))


def test_unknown_options_are_refused():
    with pytest.raises(StudyError, match=r"optimizer muon: .*'ns_step'.*did you mean 'ns_steps'"):
        check_optimizer(Component(name="muon", options={"ns_step": 3}))


def test_a_torch_without_it_is_named(monkeypatch):
    monkeypatch.setattr("scalebench.training.optimizers.version", lambda package: "2.8.1+cpu")
    with pytest.raises(StudyError, match=r"optimizer muon needs torch 2\.9 or later, and torch is 2\.8\.1\+cpu here"):
        check_optimizer(Component(name="muon"))
    check_optimizer(Component(name="adamw"))


TRAINED = {"optimizer": "muon", "lr": 0.02}


@pytest.mark.parametrize("strategy", ["allreduce", "epoch_average", "local_sgd"])
def test_one_worker_is_serial_bit_for_bit(strategy, play):
    _, serial = play("serial", 1, **TRAINED)
    _, alone = play(strategy, 1, **TRAINED)
    assert torch.equal(alone["final"], serial["final"])
    assert (serial["final"] - serial["initial"]).abs().max() > 1e-4


def test_replicas_that_synchronise_every_step_are_serial(play):
    """A global batch of all samples; Muon rounds to bfloat16, where sums in another order may fall to another side."""
    options = TRAINED | {"batch_global": 96, "shuffle": "none"}
    _, one = play("serial", 1, **options)
    _, two = play("allreduce", 2, **options)
    torch.testing.assert_close(two["final"], one["final"], atol=2e-3, rtol=0)


def test_virtual_workers_keep_their_own_momentum(play):
    outcome, _ = play({"local_sgd": {"steps": 2, "optimizer_state": "average"}}, 4, **TRAINED)
    assert outcome.status == "completed"
    assert outcome.facts.arithmetic != "batched", "its steps have no form by rows"


@pytest.mark.parametrize("strategy", ["fsdp", "torch_fsdp", "tensor", "torch_tensor", "asp", "bsp"])
def test_strategies_that_divide_layers_refuse_it(strategy):
    with pytest.raises(StudyError, match=f"strategy {strategy}: optimizer muon needs whole layers, .*; use sgd, adam"):
        registry.create(strategy, {}).check(setting(2, optimizer="muon"))
