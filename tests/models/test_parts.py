"""Models are cut into layers where these, one after the other, compute what the model does."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional

from scalebench.cluster.mesh import Mesh
from scalebench.errors import ModelError
from scalebench.models.parts import facts_of, layers_of, require_cut, through
from scalebench.models.registry import build_model
from scalebench.models.sharding import held_by
from scalebench.study.spec import Component


class Blocks(nn.Module):
    """Two blocks and a head, listed in this order, or as `listed` says."""

    def __init__(self, listed=(0, 1, 2)):
        super().__init__()
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 4)]
        )
        self.head = nn.Linear(4, 3)
        self.listed = listed

    def layers(self):
        every = [*self.blocks, self.head]
        return [every[place] for place in self.listed]

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def test_a_layer_has_parameters_and_what_follows_it():
    inner = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    model = nn.Sequential(nn.Flatten(), inner, nn.Dropout(), nn.Linear(4, 3))
    layers = layers_of(model, "mine")
    assert [layer.name for layer in layers] == ["1.0", "3"]
    assert [len(layer.modules) for layer in layers] == [4, 1]
    relu = nn.ReLU()
    again = nn.Sequential(nn.Linear(4, 4), relu, nn.Linear(4, 4), relu)
    assert [len(layer.modules) for layer in layers_of(again, "mine")] == [2, 2], (
        "of a module that is there twice too"
    )
    assert len(require_cut(model, "mine", (2, 2))) == 2


def test_a_model_may_list_its_layers_itself():
    model = Blocks()
    assert len(require_cut(model, "mine", (4,))) == 3
    assert model.training
    assert len(require_cut(nn.Sequential(nn.Flatten(), model), "mine", (2, 2))) == 3, (
        "as a child too"
    )


OTHERS = """
import torch
from torch import nn


class Other(nn.Module):
    def __init__(self, outputs):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.head = nn.Linear(4, outputs)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x) if x.sum() > -1e9 else x
        return self.head(x)


def build(input_shape, outputs):
    return Other(outputs)
"""
LISTING = "\n\ndef layers(model):\n    return [*model.layers, model.head]\n"


def built(folder, source):
    (folder / "other.py").write_text(source)
    component = Component(name=f"{folder / 'other.py'}:build")
    return build_model(component, (4,), 3, "classification", torch.float32, 0)


def test_the_file_of_the_factory_may_list_the_layers_of_a_model(tmp_path):
    model = built(tmp_path, OTHERS + LISTING)
    layers = require_cut(copy.deepcopy(model), "mine", (4,))
    assert [layer.name for layer in layers] == [
        f"layers(model)[{place}]" for place in range(3)
    ]
    with pytest.raises(ModelError, match=r"or its file a function layers\(model\)"):
        require_cut(built(tmp_path, OTHERS), "mine", (4,))
    # a function for something else
    other = OTHERS + LISTING.replace("layers(model)", "layers(model, depth)")
    with pytest.raises(ModelError, match="cannot be cut into layers"):
        require_cut(built(tmp_path, other), "mine", (4,))


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        ("[*model.layers, 'head']", r"layers\(model\)\[2\] is str, expected"),
        ("model.bodies", r"layers\(model\) raised AttributeError.*other.py:"),
        ("[*model.layers]", "do not compute what its forward does"),
    ],
)
def test_what_lists_no_layers_is_refused(tmp_path, returned, said):
    listing = LISTING.replace("[*model.layers, model.head]", returned)
    with pytest.raises(ModelError, match=said):
        require_cut(built(tmp_path, OTHERS + listing), "mine", (4,))


class Plain(Blocks):
    layers = None


class Convolutions(nn.Module):
    """A network as in PyTorch's examples: calls between modules, dropout by the mode, arguments with a default."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(2, 3, 3)
        self.second = nn.Linear(12, 8)
        self.third = nn.Linear(8, 3)

    def forward(self, x, features=False, scale=1.0, mask=None):
        x = functional.max_pool2d(functional.relu(self.first(x)), 2)
        x = functional.dropout(x, training=self.training)
        x = torch.relu(self.second(torch.flatten(x, 1)))
        return x if features else self.third(x) * scale


class ByMode(Plain):
    """Its activation is another one in evaluation."""

    def forward(self, x):
        x = self.blocks[0](x)
        x = functional.relu(x) if self.training else x.exp()
        return self.head(self.blocks[1](x))


class Residual(nn.Module):
    """Parameters of its own, a connection around two products, blocks in a list."""

    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.ones(4))
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.TransformerEncoderLayer(4, 2)])
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        x = x.view(x.size(0), -1) + self.shift
        x = x + self.two(torch.tanh(self.one(x)))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Wrapped(nn.Module):
    """A network inside another, which has most of the parameters."""

    def __init__(self):
        super().__init__()
        self.body, self.head = Convolutions(), nn.Linear(3, 3)

    def forward(self, x):
        return self.head(self.body(x))


class Labelled(nn.Module):
    """Reads parts of what its modules give, as networks of transformers are wrapped."""

    def __init__(self):
        super().__init__()
        self.read, self.body, self.head = nn.LSTM(4, 4), Named(), nn.Linear(3, 3)

    def forward(self, x):
        made, _ = self.read(x)
        return self.head(self.body(samples=made).logits)


class Named(nn.Linear):
    def __init__(self):
        super().__init__(4, 3)

    def forward(self, samples):
        return SimpleNamespace(logits=super().forward(samples))


class Deciding(Plain):
    """Its forward depends on numbers."""

    def forward(self, x):
        return super().forward(-x if x.sum() > 0 else x)


@pytest.mark.parametrize(
    ("model", "shape", "names"),
    [
        (Plain(), (4,), ["blocks.0.0", "blocks.1", "head"]),
        (Convolutions(), (2, 6, 6), ["first", "second", "third"]),
        (Residual(), (2, 2), ["shift", "one", "blocks.0", "blocks.1", "head"]),
        (
            Wrapped(),
            (2, 6, 6),
            ["body.first", "body.second", "body.third", "head"],
        ),
        (Labelled(), (4,), ["read", "body", "head"]),
    ],
    ids=["Plain", "Convolutions", "Residual", "Wrapped", "Labelled"],
)
def test_an_ordinary_forward_is_cut_between_its_calls(model, shape, names):
    """`require_cut` compares the layers, one after the other, with the model."""
    layers = require_cut(model, "mine", shape)
    assert [layer.name for layer in layers] == names
    made = torch.zeros(2, *shape)
    for module in (module for layer in layers for module in layer.modules):
        made = module(made)
        assert isinstance(made, torch.Tensor), "what a next worker can take"


def test_layers_of_a_forward_have_gradients_of_the_whole_model():
    model = Residual().eval()
    x = torch.randn(5, 4)
    model(x).square().sum().backward()
    whole = [parameter.grad.clone() for parameter in model.parameters()]
    assert whole
    model.zero_grad()
    for layer in layers_of(model, "mine"):
        x = through(layer, x)
    x.square().sum().backward()
    for parameter, gradient in zip(model.parameters(), whole, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=0, atol=0)


@pytest.mark.parametrize("training", [True, False])
def test_a_call_that_depends_on_the_mode_follows_that_of_its_layer(training):
    model = ByMode().train(training)
    made = x = torch.randn(5, 4)
    layers = layers_of(model, "mine")
    for layer in layers:
        for module in layer.modules:
            module.train(training)
        made = through(layer, made)
    assert len(layers) == 3
    torch.testing.assert_close(made, model(x), rtol=0, atol=0)


def test_functional_dropout_follows_the_mode_of_its_layer():
    first = layers_of(Convolutions(), "mine")[0]
    x = torch.ones(2, 2, 6, 6)
    torch.manual_seed(0)
    assert (through(first, x) == 0).any()
    for module in first.modules:
        module.eval()
    torch.testing.assert_close(through(first, x), through(first, x), rtol=0, atol=0)
    with pytest.raises(ModelError, match="mine: dropout: workers that hold shares"):
        held_by(layers_of(Convolutions(), "mine"), [3], Mesh(tensor=2), 0, "mine")


def test_a_product_whose_inputs_do_not_divide_is_held_whole():
    """The first convolution of an image, in front of a residual block; the widths of pairs still have to divide."""
    stem = nn.Conv2d(1, 4, 3)
    pair = nn.Conv2d(4, 6, 3), nn.Conv2d(6, 4, 3)
    model = nn.Sequential(stem, nn.Softmax(1), *pair)
    (segments,) = held_by(
        layers_of(model, "mine"), [3], Mesh(tensor=2), 1, "mine"
    ).chunks
    first, second = segments[:2]
    assert (first.divided, second.divided) == (False, True)
    assert first.module[0] is stem
    for chain, degree, width in (([stem], 2, 1), ([stem, nn.Softmax(1), *pair], 4, 6)):
        layers = layers_of(nn.Sequential(*chain), "mine")
        with pytest.raises(
            ModelError, match=f"{degree} does not divide its width {width}"
        ):
            held_by(layers, [len(layers)], Mesh(tensor=degree), 0, "mine")


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (
            Deciding(),
            r"Deciding cannot be cut into layers \(TraceError: .*control flow\); make it an nn.Sequential",
        ),
        (Blocks((0, 2)), "do not compute what its forward does"),
        (Blocks((0, 1)), "do not compute what its forward does"),
        (
            Blocks((2, 0, 1)),
            r"layer layers\(\)\[1\] fails on the output of the one before",
        ),
        (nn.Sequential(*[nn.Linear(4, 4)] * 2), "layers 0 and 1 share a parameter"),
        (
            nn.Sequential(nn.Linear(4, 4), nn.LSTM(4, 4)),
            "layer 1 gives tuple for 2 samples",
        ),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_a_model_that_cannot_be_cut_is_refused_with_where_it_fails(model, said):
    with pytest.raises(ModelError, match=f"model mine: .*{said}"):
        require_cut(model, "mine", (4,))


def test_sizes_of_layers_count_their_products():
    model = nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 16, 5)
    )
    first, last = facts_of(layers_of(model, "mine"), torch.zeros(2, 1, 4, 4))
    assert (first.parameters, first.shape, last.parameters, last.shape) == (
        60,
        (96,),
        485,
        (5,),
    )
    assert first.forward == pytest.approx(2 * 9 * 96, rel=0.2)
    assert last.forward == 2 * 96 * 5
    assert (first.backward, last.backward) == (first.forward, 2 * last.forward)


@pytest.mark.parametrize("norm_first", [True, False])
def test_counted_work_is_the_same_with_and_without_memory(norm_first):
    """Attention is one fused operation of the CPU in evaluation mode; cuts by times have to agree with recordings."""
    block = nn.TransformerEncoderLayer(
        8, 2, 16, 0.0, batch_first=True, norm_first=norm_first
    )
    model = nn.Sequential(nn.Linear(8, 8), block, nn.Linear(8, 3))
    real = facts_of(layers_of(model, "mine"), torch.zeros(2, 4, 8))
    without = facts_of(
        layers_of(model.to("meta"), "mine"), torch.empty(2, 4, 8, device="meta")
    )
    assert real == without
    assert real[1].forward > 2 * 4 * (4 * 8 * 8 + 2 * 8 * 16), (
        "products of attention and of the feed-forward part"
    )
    assert torch.backends.mha.get_fastpath_enabled()
    assert torch.backends.cuda.flash_sdp_enabled()
