"""ResNet-50 and ViT-B/16 of transformers: published sizes, plain outputs, one-line errors."""

from __future__ import annotations

import sys

import pytest
import torch

from scalebench.errors import ModelError
from scalebench.models.parts import layers_of
from scalebench.models.registry import build_model, check_model
from scalebench.study.spec import Component
from tests.facts import naming


def build(name, input_shape, outputs=100):
    return build_model(
        Component(name=name), input_shape, outputs, "classification", torch.float32, 0
    )


@pytest.mark.parametrize(
    ("name", "side", "parameters"),
    # The position of each 16 x 16 patch is 768 numbers: 4 of them here, 196 in images
    # of 224 x 224.
    [("resnet50", 64, 23_712_932), ("vit_b16", 32, 85_875_556 - (196 - 4) * 768)],
)
def test_sizes_are_the_published_ones(name, side, parameters):
    model = build(name, (3, side, side))
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    made = model.eval()(torch.zeros(2, 3, side, side))
    assert made.shape == (2, 100)
    made.sum().backward()
    assert any(buffer.is_floating_point() for buffer in model.buffers()) == (
        name == "resnet50"
    )


@pytest.mark.parametrize(
    ("name", "side", "layers"),
    # Embedding and classifier beside 16 residual blocks; beside 12 blocks and a norm.
    [("resnet50", 64, 18), ("vit_b16", 32, 15)],
)
def test_models_are_their_layers_one_after_the_other(name, side, layers):
    model = build(name, (3, side, side)).eval()
    found = layers_of(model, name)
    assert len(found) == layers
    x = torch.randn(2, 3, side, side, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model(x)
        for layer in found:
            for module in layer.modules:
                x = module(x)
    assert torch.equal(x, expected)
    ours = [parameter for layer in found for parameter in layer.parameters]
    assert all(
        one is other for one, other in zip(ours, model.parameters(), strict=True)
    )


def test_side_not_divisible_by_the_patch_is_refused():
    with pytest.raises(
        ModelError,
        match=naming("vit_b16", "28 x 28", "16, 32"),
    ):
        build("vit_b16", (1, 28, 28))


@pytest.mark.parametrize("name", ["resnet50", "vit_b16"])
def test_missing_extra_is_named(name, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    check_model(Component(name=name))
    with pytest.raises(
        ModelError, match=rf"model {name} needs transformers; .* 'scalebench\[models\]'"
    ):
        build(name, (3, 32, 32))
