"""Layer tables: published totals, counts by torch and by transformers, one-line errors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from docs._generate.amoebanet import amoebanet_d
from docs._generate.layer_tables import ARCHITECTURES, counted
from scalebench.errors import ModelError
from scalebench.models.zoo.layers import (
    layer_table_names,
    load_layers,
    read_layers,
    write_layers,
)
from scalebench.pricing.held_parts import TableCut
from tests.conftest import some

# Parameters: torchvision's and transformers' model pages. Multiplications and additions
# (GFLOPS there): torchvision's. Of AmoebaNet-D (18, 256) nothing is published: it is as
# counted, and held by published parameters of other sizes below.
PUBLISHED = {
    "resnet50": (25_557_032, 4.09),
    "resnet101": (44_549_160, 7.80),
    "resnet152": (60_192_808, 11.51),
    "vgg16": (138_357_544, 15.47),
    "alexnet": (61_100_840, 0.71),
    "inception_v3": (27_161_264, None),
    "inception_v3_plain": (23_834_568, 5.71),
    "bert_base": (109_482_240, None),
    "bert_large": (335_141_888, None),
    "vit_b16": (86_567_656, 17.56),
    "gpt2": (124_439_808, None),
    "amoebanet_d": (122_470_120, None),
}


def training_flops(table):
    """Floating-point operations of the forward and backward pass of one sample."""
    return (table.column("flops") * (1 + table.backward_products)).sum()


def meta(name):
    build, shape, _ = ARCHITECTURES[name]
    with torch.device("meta"):
        model = build().train()
    sample = torch.empty(
        2,
        *shape,
        dtype=torch.float32 if len(shape) == 3 else torch.int64,
        device="meta",
    )
    return model, sample


def test_every_table_is_tested():
    assert layer_table_names() == sorted(PUBLISHED) == sorted(ARCHITECTURES)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_totals(name):
    table = load_layers(name)
    parameters, gmacs = PUBLISHED[name]
    assert table.parameters == parameters
    assert table.source
    if gmacs:
        # published with two decimals
        assert table.flops / 2e9 == pytest.approx(gmacs, abs=0.0051)


# Those left out for a change have the layers of another table, more often.
@pytest.mark.parametrize(
    "name",
    some(
        list(PUBLISHED), *(PUBLISHED.keys() - {"resnet101", "resnet152", "bert_large"})
    ),
)
def test_flops_of_training_are_those_of_torchs_counter(name):
    model, sample = meta(name)
    with FlopCounterMode(display=False) as forward:
        out = model(sample)
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    table = load_layers(name)
    assert table.flops == forward.get_total_flops() / 2
    if name != "inception_v3":  # its auxiliary output is not part of `out`
        assert (
            training_flops(table)
            == (forward.get_total_flops() + backward.get_total_flops()) / 2
        )


@pytest.mark.parametrize("name", ["resnet50", "bert_base", "vit_b16", "gpt2"])
def test_flops_are_those_of_transformers(name):
    library = pytest.importorskip("transformers")
    eager = {"attn_implementation": "eager"}
    with torch.device("meta"):
        model = {
            "resnet50": lambda: library.ResNetForImageClassification(
                library.ResNetConfig(num_labels=1000)
            ),
            "bert_base": lambda: library.BertModel(library.BertConfig(**eager)),
            "vit_b16": lambda: library.ViTForImageClassification(
                library.ViTConfig(num_labels=1000, **eager)
            ),
            "gpt2": lambda: library.GPT2LMHeadModel(library.GPT2Config(**eager)),
        }[name]()
    _, sample = meta(name)
    table = load_layers(name)
    with FlopCounterMode(display=False) as counter:
        model(sample)
    assert counter.get_total_flops() == 2 * table.flops
    assert (
        sum(parameter.numel() for parameter in model.parameters()) == table.parameters
    )


@pytest.mark.parametrize("name", ["alexnet", "gpt2"])
def test_tables_are_generated(name):
    assert write_layers(counted(name)) == write_layers(load_layers(name)), (
        "run: python docs/_generate/layer_tables.py"
    )


@pytest.mark.parametrize(
    ("depth", "filters", "millions"),
    [(18, 208, 81.5), (18, 416, 319.0), (18, 544, 542.7), (36, 544, 1060)],
)
def test_amoebanets_parameters_are_those_of_torchgpipe(depth, filters, millions):
    """As many digits as its docs/benchmarks.rst has; in millions, as GPipe's paper has them, 82, 318, 542 and 1,050."""
    with torch.device("meta"):
        model = amoebanet_d(depth, filters)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    digit = 0.05 if millions < 1000 else 5
    assert parameters / 1e6 == pytest.approx(millions, abs=digit)


def test_amoebanet_is_cut_between_its_cells():
    """The published balances are of 24 layers; what crosses a cut in the table is the output of the cell before it."""
    with torch.device("meta"):
        model = amoebanet_d(18, 256)
    states = torch.empty(2, 3, 224, 224, device="meta")
    outputs = []
    for layer in model:
        states = layer(states)
        outputs.append(states[0] if isinstance(states, tuple) else states)
    assert outputs[0].shape == (2, 64, 112, 112)
    assert outputs[8].shape == (2, 1024, 28, 28)
    assert outputs[15].shape == (2, 2048, 14, 14)
    assert outputs[22].shape == (2, 4096, 7, 7)
    assert outputs[23].shape == (2, 1000)
    table = load_layers("amoebanet_d")
    cut = TableCut(table, *[np.ones(len(table.layers))] * 2)
    assert [layer.name for layer in cut.layers] == list(dict(model.named_children()))
    assert [layer.shape for layer in cut.facts] == [
        (output[0].numel(),) for output in outputs
    ]


def test_products_have_shapes():
    for name in PUBLISHED:
        table = load_layers(name)
        assert sum(layer.flops for layer in table.layers) == table.flops > 0
        for layer in table.layers:
            assert layer.flops == 2 * layer.count * layer.m * layer.n * layer.k


def test_activations_are_what_autograd_saves():
    """VGG's first layers in numbers: a convolution without normalisation, ReLU in place, so one tensor is kept."""
    first, relu, second = load_layers("vgg16").layers[:3]
    assert (first.kind, first.inputs, first.activations, first.kept) == (
        "conv",
        3 * 224**2,
        64 * 224**2,
        64 * 224**2,
    )
    assert (relu.kind, relu.flops, relu.kept) == ("relu", 0, 0)
    assert (second.m, second.n, second.k, second.weights) == (
        224**2,
        64,
        9 * 64,
        9 * 64 * 64,
    )


def test_memory_is_parameters_gradients_states_and_activations():
    table = load_layers("resnet50")
    kept = table.column("kept").sum()
    assert (
        table.memory_bytes(32, optimizer_states=2)
        == 4 * 4 * table.parameters + 32 * 4 * kept
    )
    assert table.activation_bytes(8, "bfloat16") * 2 == table.activation_bytes(8)


OWN = """
import torch
from torch import nn

def build(input_shape, outputs):
    return nn.Sequential(nn.Flatten(), nn.Linear(input_shape[0], 7), nn.Tanh(), nn.Linear(7, outputs))

class Words(nn.Module):
    def __init__(self, outputs):
        super().__init__()
        self.words, self.spare, self.head = nn.Embedding(11, 4), nn.Linear(2, 2), nn.Linear(4, outputs)

    def forward(self, x):
        return self.head(self.words(x).sum(1) * 2)

def words(input_shape, outputs):
    return Words(outputs)

def looks(input_shape, outputs):
    class Looks(nn.Linear):
        def forward(self, x):
            return super().forward(x) if x.sum().item() > 0 else x
    return Looks(input_shape[0], outputs)
def scripted(input_shape, outputs):
    return torch.jit.script(nn.Sequential(nn.Linear(input_shape[0], outputs)))
def lazy(input_shape, outputs):
    return nn.Sequential(nn.LazyLinear(outputs))
def narrow(input_shape, outputs):
    return nn.Linear(5, outputs)
def two(input_shape, outputs):
    class Two(nn.Linear):
        def forward(self, x, y):
            return super().forward(x) + y
    return Two(input_shape[0], outputs)
"""


@pytest.fixture
def own(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    return str(tmp_path / "own.py")


def test_own_factory(own):
    table = load_layers(f"{own}:build", (5,), 3)
    assert [
        (layer.name, layer.kind, layer.parameters, layer.flops)
        for layer in table.layers
    ] == [
        ("1", "gemm", 5 * 7 + 7, 2 * 5 * 7),
        ("2", "tanh", 0, 0),
        ("3", "gemm", 7 * 3 + 3, 2 * 7 * 3),
    ]
    assert (
        table.column("flops") * (1 + table.backward_products)
    ).sum() == 2 * 2 * 5 * 7 + 3 * 2 * 7 * 3  # the input needs no gradient


def test_own_factory_of_words_and_parameters_without_use(own):
    table = load_layers(f"{own}:words", (6,), 3)
    assert [(layer.name, layer.parameters) for layer in table.layers] == [
        ("words", 44),
        ("sum", 0),
        ("mul", 0),
        ("head", 15),
        ("unused", 6),
    ]


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("factory", ["looks", "scripted", "lazy"])
def test_own_factory_that_torch_cannot_count_without_values(own, factory):
    """It reads values, takes no hooks, or has no parameters before it sees a sample."""
    table = load_layers(f"{own}:{factory}", (5,), 3)
    assert table.parameters == 5 * 3 + 3
    assert table.flops == 2 * 5 * 3


def test_own_factory_that_cannot_be_counted(own):
    with pytest.raises(
        ModelError,
        match=r"fails on a sample of shape 4: .*cannot be multiplied.*FILE\.csv",
    ):
        load_layers(f"{own}:narrow", (4,), 3)
    with pytest.raises(ModelError, match=r"take x and y from it"):
        load_layers(f"{own}:two", (5,), 3)
    with pytest.raises(
        ModelError, match=r"counted on a sample, .* give it: --input 3x224x224"
    ):
        load_layers(f"{own}:build")


def test_own_file(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text(
        "# parameters: 1,010\n# source: me\nname,parameters,flops,activations\na,1000,2000,10\nb,10,20,1\n"
    )
    table = load_layers(str(path))
    assert (table.name, table.source, table.parameters, table.flops) == (
        "mine",
        "me",
        1010,
        2020,
    )
    assert [layer.inputs for layer in table.layers] == [10, 10]
    assert read_layers(write_layers(table), "mine", "copy").layers == table.layers


HEADER = "name,parameters,flops,activations"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            f"# parameters: 7\n{HEADER}\na,5,1,1\n",
            "t.csv: parameters of the layers add up to 5, stated are 7; correct",
        ),
        (
            f"# flops: 7\n{HEADER}\na,5,1,1\n",
            "t.csv: flops of the layers add up to 1, stated are 7",
        ),
        (
            f"{HEADER}\na,5,1,1\nb,-5,1,1\n",
            "t.csv, line 3: parameters is -5; expected a whole number, 0 or more",
        ),
        (
            f"{HEADER}\na,5,,1\n",
            "t.csv, line 2: flops is missing; expected a whole number",
        ),
        (f"{HEADER}\na,5,nan,1\n", "t.csv, line 2: flops is nan; expected"),
        (f"{HEADER}\na,5,2 G,1\n", "t.csv, line 2: flops is 2 G; expected"),
        (f"{HEADER}\na,5,1\n", "t.csv, line 2: expected 4 values, got 3"),
        (f"{HEADER}\n", "t.csv: no layers"),
        (f"{HEADER}\na,0,1,1\n", "t.csv: no layer has parameters"),
        ("name,parameters,flops\na,1,1\n", "t.csv: column 'activations' is missing"),
        (
            f"{HEADER},parms\na,1,1,1,1\n",
            "t.csv: unknown column 'parms'; did you mean 'parameters'",
        ),
        (f"{HEADER},flops\na,1,1,1,1\n", "t.csv: column 'flops' stands twice"),
        (
            f"{HEADER},count,m,n,k\na,1,5,1,1,1,1,2\n",
            "t.csv, line 2: flops are 5, 2 m n k count is 4",
        ),
        ("", "t.csv: column 'name' is missing"),
    ],
)
def test_tables_that_are_wrong(text, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(ModelError) as raised:
        load_layers("t.csv")
    assert str(raised.value).startswith(message)
    assert "\n" not in str(raised.value)
    assert raised.value.exit_code == 2


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("resnet5", "unknown layer table 'resnet5'; did you mean 'resnet50'"),
        ("no.csv", "cannot read it: No such file"),
    ],
)
def test_unknown_tables(name, message):
    with pytest.raises(ModelError, match=message):
        load_layers(name)


def test_tables_are_found_by_other_spellings_of_their_names():
    assert load_layers("vit_b_16") is load_layers("ViT-B/16") is load_layers("vit_b16")


def test_shipped_tables_have_spellings_of_their_own():
    names = layer_table_names()
    assert {load_layers(name).name for name in names} == set(names)


def test_backward_products_of_the_first_layers():
    text = f"{HEADER}\nflip,0,0,4\na,3,8,4\nb,3,8,4\n"
    assert np.array_equal(read_layers(text, "t", "t").backward_products, [0, 1, 2])
