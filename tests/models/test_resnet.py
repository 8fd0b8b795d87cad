"""Residual networks: published sizes, shapes, and signals that neither vanish nor explode without normalisation."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from scalebench.errors import ModelError
from scalebench.models.registry import build_model
from scalebench.study.spec import Component


def build(component, input_shape=(3, 32, 32), outputs=10, dtype=torch.float32):
    return build_model(
        Component.model_validate(component),
        input_shape,
        outputs,
        "classification",
        dtype,
        0,
    )


def count(model):
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(("depth", "layers"), [(20, 20), (56, 56)])
def test_resnets_have_the_depth_and_the_size_of_the_paper(depth, layers):
    """n blocks of two convolutions of w x w x 9 and two pairs of gain and shift, in stages of w = 16, 32, 64."""
    model = build({"resnet": {"depth": depth}})
    weighted = [
        module
        for module in model.modules()
        if isinstance(module, nn.Conv2d | nn.Linear)
    ]
    assert len(weighted) == layers
    n = (depth - 2) // 6
    expected, here = 3 * 16 * 9 + 2 * 16 + 64 * 10 + 10, 16
    for width in (16, 32, 64):
        for _ in range(n):
            expected += 9 * width * (here + width) + 4 * width
            here = width
    assert count(model) == expected
    assert {20: 0.27, 56: 0.85}[depth] == round(expected / 1e6, 2)  # He et al., table 6


def test_stage_halves_the_image_and_pads_the_shortcut():
    model = build({"resnet": {"depth": 8}}).eval()
    block = model[4]
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.zero_()
        x = torch.rand(2, 16, 8, 8)
        made = block(x)
    assert made.shape == (2, 32, 4, 4)
    assert torch.equal(made[:, 8:24], x[:, :, ::2, ::2])
    assert made[:, :8].abs().sum() == made[:, 24:].abs().sum() == 0


@pytest.mark.parametrize("name", ["resnet", "nfnet"])
@pytest.mark.parametrize("shape", [(64,), (8, 8), (1, 28, 28), (3, 5, 9)])
def test_images_of_any_size_and_spelling(name, shape):
    model = build(name, shape, 4, torch.float64)
    assert model(torch.zeros(3, *shape, dtype=torch.float64)).shape == (3, 4)


def test_nfnet_has_no_buffers_and_keeps_the_variance():
    model = build("nfnet")
    assert list(model.buffers()) == []
    torch.manual_seed(0)
    x = torch.randn(64, 3, 32, 32)
    with torch.no_grad():
        for parameter in (
            p for name, p in model.named_parameters() if name.endswith("skip_gain")
        ):
            parameter.fill_(1.0)
        for layer in list(model)[:6]:
            x = layer(x)
            assert 0.3 < x.var().item() < 3.0


def test_initial_nfnet_block_is_the_identity():
    block = build({"nfnet": {"widths": [8], "blocks": [2]}}, (1, 8, 8))[2]
    x = torch.randn(2, 8, 8, 8)
    assert torch.equal(block(x), x)


@pytest.mark.parametrize("name", ["resnet", "nfnet"])
def test_residual_networks_learn(name):
    options = {
        "resnet": {"depth": 8, "width": 4},
        "nfnet": {"widths": [8], "blocks": [1]},
    }[name]
    torch.manual_seed(0)
    model = build({name: options}, (1, 6, 6), 2, torch.float64)
    y = torch.arange(32) % 2
    x = torch.randn(32, 1, 6, 6, dtype=torch.float64) + y[:, None, None, None]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]


@pytest.mark.parametrize(
    ("component", "shape", "message"),
    [
        (
            {"resnet": {"depth": 21}},
            (3, 32, 32),
            r"option 'depth': expected 6n \+ 2: 20, 32",
        ),
        (
            {"nfnet": {"widths": [8], "blocks": [1, 2]}},
            (3, 32, 32),
            "2 numbers of blocks for 1 widths",
        ),
        (
            "resnet",
            (10,),
            r"model resnet: cannot read samples of shape \(10,\) as images",
        ),
    ],
)
def test_invalid_options_and_inputs_are_refused(component, shape, message):
    with pytest.raises(ModelError, match=message):
        build(component, shape)
