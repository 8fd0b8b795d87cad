"""Operations that are taken down once give, on other contents, what computing anew gives."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from scalebench.virtual.tape import record, write


def gradient_of(model, x, y):
    parameters = list(model.parameters())

    def compute():
        with torch.enable_grad():
            loss = nn.functional.cross_entropy(model(x), y)
        return [loss.detach(), *torch.autograd.grad(loss, parameters)]

    return compute, [x, y, *parameters]


NETS = {
    "mlp": lambda: nn.Sequential(
        nn.Flatten(), nn.Linear(64, 8), nn.ReLU(inplace=True), nn.Linear(8, 3)
    ),
    "norm": lambda: nn.Sequential(
        nn.Flatten(), nn.Linear(64, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 3)
    ),
    "cnn": lambda: nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 3)
    ),
    "shared": lambda: nn.Sequential(nn.Flatten(), *[nn.Linear(64, 64)] * 3),
}


@pytest.mark.parametrize("net", NETS)
def test_repeated_operations_are_those_of_the_computation(net):
    torch.manual_seed(0)
    x, y, model = torch.randn(5, 1, 8, 8), torch.tensor([0, 1, 2, 0, 1]), NETS[net]()
    compute, inputs = gradient_of(model, x, y)
    taken, repeat = record(compute, inputs)
    assert all(
        torch.equal(one, other) for one, other in zip(taken, compute(), strict=True)
    )
    with torch.no_grad():
        x.normal_()
        y.copy_(torch.tensor([2, 2, 1, 0, 1]))
        for parameter in model.parameters():
            parameter.mul_(1.5)
        expected = compute()
        assert not torch.equal(expected[0], taken[0])
        for _ in range(2):
            assert all(
                torch.equal(one, other)
                for one, other in zip(repeat(), expected, strict=True)
            )


def test_vmap_is_left_out_of_the_repetition():
    weights, x = torch.randn(3, 4, 2), torch.randn(3, 5, 2)
    model = nn.Linear(2, 4, bias=False)

    def each(weight, rows):
        return torch.func.functional_call(model, {"weight": weight}, (rows,))

    taken, repeat = record(lambda: [torch.func.vmap(each)(weights, x)], [weights, x])
    assert torch.allclose(taken[0], torch.einsum("kbi,koi->kbo", x, weights))
    weights.mul_(2)
    assert torch.allclose(repeat()[0], 2 * taken[0])


def test_what_would_change_two_tensors_at_once_is_refused():
    x = torch.ones(3)

    def compute():
        same = torch.ops.aten.mul.Scalar(x, 1)
        return [same.add_(1), x + 1]

    with pytest.raises(RuntimeError, match="changes in place"):
        record(compute, [x])


def test_change_of_a_view_of_what_stands_for_two_tensors_is_refused():
    """Repeated, it would change the input."""
    x = torch.ones(3)

    def compute():
        same = torch.ops.aten.mul.Scalar(x, 1)
        return [same.view(1, 3).add_(1)]

    with pytest.raises(RuntimeError, match="changes in place"):
        record(compute, [x])


def test_views_of_what_stays_follow_its_values():
    x = torch.ones(2, 3)

    def compute():
        same = torch.ops.aten.mul.Scalar(x, 1)
        return [same.view(3, 2).t() + 1]

    _, repeat = record(compute, [x])
    x.copy_(torch.arange(6.0).view(2, 3))
    assert torch.equal(repeat()[0], x.view(3, 2).t() + 1)


def test_a_result_that_is_no_tensor_stays_none():
    x = torch.ones(3)
    taken, repeat = record(lambda: [None, x + 1], [x])
    x.zero_()
    assert taken[0] is repeat()[0] is None
    assert repeat()[1].tolist() == [1, 1, 1]


def test_computation_that_depends_on_values_is_refused():
    x = torch.randn(3)

    def compute():
        return [x * 2 if bool(x.sum() > 0) else x]

    with pytest.raises(RuntimeError, match="reads a value"):
        record(compute, [x])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("add", [False, True])
def test_transposed_gradients_are_written_of_any_dtype(dtype, add):
    """numpy, which copies those of matrices, has no bfloat16."""
    gradients = [
        torch.arange(6, dtype=dtype).view(1, 2, 3).mT,
        torch.arange(2, dtype=dtype).view(1, 2),
    ]
    targets = [torch.ones(1, 3, 2, dtype=dtype), torch.ones(1, 2, dtype=dtype)]
    write(gradients, targets, add=add)
    assert targets[0].tolist() == [
        [[0 + add, 3 + add], [1 + add, 4 + add], [2 + add, 5 + add]]
    ]
    assert targets[1].tolist() == [[0 + add, 1 + add]]
