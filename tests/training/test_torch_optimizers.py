"""SGD over one flat tensor is that of torch, bit for bit; Muon steps as torch's Muon and AdamW do."""

from __future__ import annotations

import copy
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scalebench.errors import StudyError
from scalebench.strategies import registry
from scalebench.study.spec import Component
from scalebench.training.optimizers import build_optimizer, check_optimizer
from scalebench.training.torch_optimizers import FlatSgd, Muon, step_onto
from tests.conftest import setting
from tests.facts import naming

MOMENTA = st.sampled_from([0.0, 0.5, 0.9])
DECAYS = st.sampled_from([0.0, 1e-4, 0.1])
OPTIONS = {
    "momentum": 0.9,
    "nesterov": False,
    "ns_steps": 3,
    "beta1": 0.8,
    "eps": 1e-7,
    "weight_decay": 0.05,
}


@given(
    momentum=MOMENTA,
    decay=DECAYS,
    nesterov=st.booleans(),
    double=st.booleans(),
    room=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_flat_sgd_equals_torch_sgd_bit_for_bit(
    momentum: float, decay: float, nesterov: bool, double: bool, room: bool, seed: int
) -> None:
    options = {
        "momentum": momentum,
        "weight_decay": decay,
        "nesterov": nesterov and momentum > 0,
    }
    generator = torch.Generator().manual_seed(seed)
    dtype = torch.float64 if double else torch.float32
    start = torch.randn(257, generator=generator, dtype=dtype)
    ours, theirs = (torch.nn.Parameter(start.clone()) for _ in range(2))
    flat, plain = (
        FlatSgd([ours], 0.1, **options),
        torch.optim.SGD([theirs], lr=0.1, foreach=False, **options),
    )
    if room:
        flat.room = torch.full_like(start, torch.nan)
    for step in range(5):
        gradient = torch.randn(257, generator=generator, dtype=dtype)
        for parameter, optimizer in ((ours, flat), (theirs, plain)):
            parameter.grad = gradient.clone()
            optimizer.param_groups[0]["lr"] = 0.1 / (step + 1)
            optimizer.step()
    assert torch.equal(ours, theirs)
    remembered = [
        dict(optimizer.state).get(p, {})
        for optimizer, p in ((flat, ours), (plain, theirs))
    ]
    assert remembered[0].keys() == remembered[1].keys()
    assert all(
        torch.equal(remembered[0][name], remembered[1][name]) for name in remembered[0]
    )


@given(momentum=MOMENTA, decay=DECAYS, seed=st.integers(0, 1000))
def test_a_step_onto_other_weights_moves_them_as_the_step_would(
    momentum: float, decay: float, seed: int
) -> None:
    options = {"momentum": momentum, "weight_decay": decay}
    generator = torch.Generator().manual_seed(seed)
    start, other = torch.randn(2, 257, generator=generator)
    ours, theirs = (torch.nn.Parameter(start.clone()) for _ in range(2))
    flat = FlatSgd([ours], 0.1, **options)
    plain = torch.optim.SGD([theirs], lr=0.1, foreach=False, **options)
    for _ in range(3):
        gradient = torch.randn(257, generator=generator)
        ours.grad, theirs.grad = gradient.clone(), gradient.clone()
        with torch.no_grad():
            step_onto(flat, ours, other)
            step_onto(plain, theirs, other)
        assert torch.equal(ours, theirs)


def test_velocity_is_stored_in_its_room() -> None:
    parameter = torch.nn.Parameter(torch.zeros(3))
    optimizer = FlatSgd([parameter], 1.0, momentum=0.5)
    optimizer.room = torch.full((3,), torch.nan)
    parameter.grad = torch.ones(3)
    for _ in range(2):
        optimizer.step()
        optimizer.step()
        assert optimizer.state[parameter]["momentum_buffer"] is optimizer.room
        assert optimizer.room.tolist() == [1.5] * 3
        optimizer.state.clear()
    optimizer.begin()
    assert optimizer.room.tolist() == [0] * 3


def test_copy_continues_from_the_state_of_the_original() -> None:
    parameter = torch.nn.Parameter(torch.zeros(3))
    optimizer = build_optimizer(
        Component(name="sgd", options={"momentum": 0.9}), [parameter], 1.0, flat=True
    )
    parameter.grad = torch.ones(3)
    optimizer.step()
    twin = copy.deepcopy(optimizer)
    (other,) = twin.param_groups[0]["params"]
    other.grad = torch.ones(3)
    optimizer.step()
    twin.step()
    assert parameter.tolist() == other.tolist() == pytest.approx([-2.9] * 3)


def test_training_with_sgd_does_not_load_torchs_compiler() -> None:
    program = (
        "import sys; sys.path.insert(0, 'benchmarks')\n"
        "from virtual_overhead import *\n"
        "training = Training(epochs=1, dataset={'name': 'digits'})\n"
        "run, dataset = make_run(training, 'allreduce'), open_dataset(prepare(training, 64))\n"
        "completed(run, dataset, stated_machine())\n"
        "print(sorted({'torch._dynamo', 'sympy'} & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("flat", [True, False])
def test_adam_steps_flat_and_by_tensor(flat: bool) -> None:
    parameter = torch.nn.Parameter(torch.zeros(3))
    optimizer = build_optimizer(Component(name="adam"), [parameter], 0.5, flat=flat)
    parameter.grad = torch.ones(3)
    optimizer.step()
    assert parameter.tolist() == pytest.approx([-0.5] * 3)


def model():
    torch.manual_seed(3)
    layers = (
        torch.nn.Conv1d(1, 2, 3),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(12, 5),
    )
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
    found = trained(
        [
            build_optimizer(
                Component(name="muon", options=OPTIONS), ours.parameters(), 0.02
            )
        ],
        ours,
    )
    matrices = [parameter for parameter in bare.parameters() if parameter.dim() == 2]
    others = [parameter for parameter in bare.parameters() if parameter.dim() != 2]
    muon = torch.optim.Muon(
        matrices,
        0.02,
        0.05,
        momentum=0.9,
        nesterov=False,
        ns_steps=3,
        adjust_lr_fn="match_rms_adamw",
    )
    adamw = torch.optim.AdamW(
        others, 0.02, betas=(0.8, 0.999), eps=1e-7, weight_decay=0.05
    )
    assert torch.equal(found, trained([muon, adamw], bare))


def test_options_that_are_not_stated_are_torchs():
    matrix, vector = (
        torch.nn.Parameter(torch.ones(2, 2)),
        torch.nn.Parameter(torch.ones(2)),
    )
    of_matrices, of_others = build_optimizer(
        Component(name="muon"), [matrix, vector], 0.1
    ).param_groups
    torchs = torch.optim.Muon(
        [matrix], lr=0.1, adjust_lr_fn="match_rms_adamw"
    ).param_groups[0]
    assert {name: of_matrices[name] for name in torchs} == torchs
    torchs = torch.optim.AdamW([vector], lr=0.1).param_groups[0]
    apart = {"weight_decay": 0.1}  # Muon's, for all
    assert {name: of_others[name] for name in torchs} == torchs | apart


def test_a_wrapper_gets_the_same_steps_from_its_groups():
    """Horovod's makes an optimizer of the same class from the groups."""
    ours, wrapped = model(), model()
    found = trained([Muon(ours.parameters(), 0.02)], ours)
    assert torch.equal(
        found, trained([Muon(Muon(wrapped.parameters(), 0.02).param_groups)], wrapped)
    )


@pytest.mark.parametrize(
    "kept", [lambda each: each.dim() == 2, lambda each: each.dim() != 2]
)
def test_models_of_one_kind_of_parameters_are_trained(kept):
    parameters = [parameter for parameter in model().parameters() if kept(parameter)]
    assert parameters
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    before = [parameter.detach().clone() for parameter in parameters]
    Muon(parameters, 0.1).step()
    assert all(
        not torch.equal(old, new) for old, new in zip(before, parameters, strict=True)
    )


def test_unknown_options_are_refused():
    with pytest.raises(
        StudyError, match=r"optimizer muon: .*'ns_step'.*did you mean 'ns_steps'"
    ):
        check_optimizer(Component(name="muon", options={"ns_step": 3}))


def test_a_torch_without_it_is_named(monkeypatch):
    monkeypatch.setattr(
        "scalebench.training.optimizers.version", lambda package: "2.8.1+cpu"
    )
    with pytest.raises(
        StudyError,
        match=naming("muon", "torch 2.9", "torch is 2.8.1+cpu"),
    ):
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
    outcome, _ = play(
        {"local_sgd": {"steps": 2, "optimizer_state": "average"}}, 4, **TRAINED
    )
    assert outcome.status == "completed"
    assert outcome.facts.arithmetic != "batched", "its steps have no form by rows"


@pytest.mark.parametrize(
    "strategy", ["fsdp", "torch_fsdp", "tensor", "torch_tensor", "asp", "bsp"]
)
def test_strategies_that_divide_layers_refuse_it(strategy):
    with pytest.raises(
        StudyError,
        match=f"strategy {strategy}: optimizer muon needs whole layers, .*; use sgd, adam",
    ):
        registry.create(strategy, {}).check(setting(2, optimizer="muon"))
