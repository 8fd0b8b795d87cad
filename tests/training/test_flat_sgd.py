"""FlatSgd is bit-identical to torch's SGD and does not load torch's compiler."""

from __future__ import annotations

import copy
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scalebench.study.spec import Component
from scalebench.training.flat_sgd import FlatSgd
from scalebench.training.optimizers import build_optimizer

MOMENTA = st.sampled_from([0.0, 0.5, 0.9])
DECAYS = st.sampled_from([0.0, 1e-4, 0.1])


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
    options = {"momentum": momentum, "weight_decay": decay, "nesterov": nesterov and momentum > 0}
    generator = torch.Generator().manual_seed(seed)
    dtype = torch.float64 if double else torch.float32
    start = torch.randn(257, generator=generator, dtype=dtype)
    ours, theirs = (torch.nn.Parameter(start.clone()) for _ in range(2))
    flat, plain = FlatSgd([ours], 0.1, **options), torch.optim.SGD([theirs], lr=0.1, foreach=False, **options)
    if room:
        flat.room = torch.full_like(start, torch.nan)
    for step in range(5):
        gradient = torch.randn(257, generator=generator, dtype=dtype)
        for parameter, optimizer in ((ours, flat), (theirs, plain)):
            parameter.grad = gradient.clone()
            optimizer.param_groups[0]["lr"] = 0.1 / (step + 1)
            optimizer.step()
    assert torch.equal(ours, theirs)
    remembered = [dict(optimizer.state).get(p, {}) for optimizer, p in ((flat, ours), (plain, theirs))]
    assert remembered[0].keys() == remembered[1].keys()
    assert all(torch.equal(remembered[0][name], remembered[1][name]) for name in remembered[0])


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
    optimizer = build_optimizer(Component(name="sgd", options={"momentum": 0.9}), [parameter], 1.0, flat=True)
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
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("flat", [True, False])
def test_adam_steps_flat_and_by_tensor(flat: bool) -> None:
    parameter = torch.nn.Parameter(torch.zeros(3))
    optimizer = build_optimizer(Component(name="adam"), [parameter], 0.5, flat=flat)
    parameter.grad = torch.ones(3)
    optimizer.step()
    assert parameter.tolist() == pytest.approx([-0.5] * 3)
