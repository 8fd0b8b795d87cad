"""Flat vector of parameters, statistics and room, and its finiteness."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from scalebench.models.flat import is_finite, side_by_side, to_meta

FLOATS = st.floats(width=32)


@given(
    values=st.lists(FLOATS, min_size=1, max_size=20),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_a_vector_is_finite_if_every_element_is(values, dtype):
    vector = torch.tensor(values, dtype=dtype)
    assert is_finite(vector) is all(map(torch.isfinite, vector))


def floating(model):
    return [buffer for buffer in model.buffers() if buffer.is_floating_point()]


@pytest.mark.parametrize("room", [0, 1])
def test_parameters_statistics_and_room_are_contiguous(room):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2, bias=False)
    )
    held = [*model.parameters(), *floating(model)]
    before = torch.cat([tensor.detach().reshape(-1).clone() for tensor in held])
    parameters, gradients, behind = side_by_side(model, room=room)
    assert (
        parameters.numel()
        == gradients.numel()
        == sum(tensor.numel() for tensor in model.parameters())
    )
    assert behind.numel() == room * parameters.numel()
    whole = parameters.as_strided((len(before),), (1,))
    assert torch.equal(whole, before)
    assert whole.data_ptr() + whole.nbytes == behind.data_ptr() or room == 0
    now = [*model.parameters(), *floating(model)]
    assert all(one is other for one, other in zip(now, held, strict=True))
    # BatchNorm changes its statistics where they lie
    model(torch.randn(8, 3)).sum().backward()
    after = torch.cat([tensor.detach().reshape(-1) for tensor in held])
    assert torch.equal(whole, after)
    assert not torch.equal(after, before)
    assert torch.equal(
        gradients,
        torch.cat([parameter.grad.reshape(-1) for parameter in model.parameters()]),
    )


class Sharing(nn.Module):
    """Two buffers that are halves of a third, one that is counted in integers, and one that fills its own storage."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("both", torch.arange(4.0))
        self.register_buffer("upper", self.both[2:])
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("alone", torch.full((3,), 7.0))
        self.same = self.alone


def test_buffers_that_share_memory_are_not_moved():
    model = Sharing()
    places = [model.both.data_ptr(), model.upper.data_ptr(), model.count.data_ptr()]
    parameters, _, _ = side_by_side(model)
    assert [
        model.both.data_ptr(),
        model.upper.data_ptr(),
        model.count.data_ptr(),
    ] == places
    assert model.alone.data_ptr() == parameters.data_ptr() + parameters.nbytes
    model.upper.fill_(-1)
    assert model.both.tolist() == [0, 1, -1, -1]
    model.alone.fill_(5)
    assert model.same.tolist() == [5, 5, 5]


def test_parameters_that_modules_share_stay_shared_without_memory():
    """Of a language model the embedding and the last product: `Module.to` makes two of them."""
    model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 7, bias=False))
    model[1].weight = model[0].weight
    assert to_meta(model)[1].weight is model[0].weight
    assert model[0].weight.is_meta
    assert sum(each.numel() for each in model.parameters()) == 28
