"""Models are cut into layers where these, one after the other, compute what the model does."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from scalebench.errors import ModelError
from scalebench.models.parts import facts_of, layers_of, require_cut


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


class Plain(Blocks):
    layers = None


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (Plain(), "Plain cannot be cut into layers; make it an nn.Sequential"),
        (Blocks((0, 2)), "do not compute what its forward does"),
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
