"""Models are built from the seed without changing global random state."""

import pytest
import torch
from torch import nn

from scalebench.errors import ModelError
from scalebench.models.architecture import MODELS
from scalebench.models.registry import (
    build_model,
    check_model,
    describe_models,
    model_notes,
)
from scalebench.study.spec import Component
from scalebench.system.random_state import drawn_since, random_state
from tests.facts import naming


def build(
    component,
    input_shape=(64,),
    outputs=10,
    dtype=torch.float32,
    seed=0,
    task="classification",
):
    return build_model(
        Component.model_validate(component), input_shape, outputs, task, dtype, seed
    )


def count(model):
    return sum(parameter.numel() for parameter in model.parameters())


def test_list_describes_user_models():
    assert {"mlp", "cnn"} <= set(MODELS.names())
    assert dict(describe_models())["file.py:factory"].startswith("your own")


@pytest.mark.parametrize(
    ("hidden", "parameters"),
    [
        ([], 64 * 10 + 10),
        ([128], 64 * 128 + 128 + 128 * 10 + 10),
        ([3, 2], 64 * 3 + 3 + 3 * 2 + 2 + 2 * 10 + 10),
    ],
)
def test_mlp_of_any_widths(hidden, parameters):
    assert count(build({"mlp": {"hidden": hidden}})) == parameters
    assert count(build({"mlp": {"hidden": hidden}}, (4, 4, 4))) == parameters


@pytest.mark.parametrize(
    ("name", "function"),
    [("relu", torch.relu), ("tanh", torch.tanh), ("gelu", nn.functional.gelu)],
)
def test_mlp_computes_its_formula(name, function):
    model = build({"mlp": {"hidden": [5], "activation": name}}, (3,), 2)
    first, second = (layer for layer in model.modules() if isinstance(layer, nn.Linear))
    x = torch.randn(7, 3)
    expected = function(x @ first.weight.T + first.bias) @ second.weight.T + second.bias
    # float32 sums in another order
    assert torch.allclose(model(x), expected, atol=1e-6)


@pytest.mark.parametrize(
    "shape",
    [
        (64,),
        (8, 8),
        (1, 8, 8),
        (1, 28, 28),
        (3, 32, 32),
        (3, 64, 64),
        (1, 1),
        (1, 3, 2),
        (2, 4, 1),
        (1,),
    ],
)
def test_cnn_takes_images_of_any_size_and_form(shape):
    model = build("cnn", shape, 4)
    assert model(torch.zeros(3, *shape)).shape == (3, 4)


def test_cnn_reads_a_flat_image_as_a_square():
    flat, square = build("cnn", (64,)), build("cnn", (1, 8, 8))
    x = torch.randn(5, 64)
    assert torch.equal(flat(x), square(x.reshape(5, 1, 8, 8)))


def test_cnn_on_mnist_has_the_layers_of_lenet():
    shapes = [
        tuple(parameter.shape)
        for parameter in build("cnn", (1, 28, 28)).parameters()
        if parameter.ndim > 1
    ]
    assert shapes == [
        (6, 1, 5, 5),
        (16, 6, 5, 5),
        (120, 16 * 7 * 7),
        (84, 120),
        (10, 84),
    ]


def test_weights_depend_on_the_seed_only():
    torch.manual_seed(123)
    expected = torch.randn(3)
    torch.manual_seed(123)
    first, again, other = (
        build("mlp", seed=1),
        build("mlp", seed=1),
        build("mlp", seed=2),
    )
    assert torch.equal(torch.randn(3), expected)
    weights = [
        torch.cat([p.flatten() for p in model.parameters()])
        for model in (first, again, other)
    ]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_precisions_start_from_the_same_numbers():
    single, double = build("mlp"), build("mlp", dtype=torch.float64)
    assert [*single.parameters()]
    for a, b in zip(single.parameters(), double.parameters(), strict=True):
        assert b.dtype == torch.float64
        assert torch.equal(a.double(), b)
    half = build("cnn", dtype=torch.bfloat16)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("component", "message"),
    [
        ("mlpp", "unknown model 'mlpp'; did you mean 'mlp'"),
        (
            {"mlp": {"hiden": [3]}},
            "model mlp: unknown option 'hiden'; did you mean 'hidden'",
        ),
        (
            {"mlp": {"hidden": [0]}},
            r"option 'hidden\.0': expected a number greater than 0, got 0",
        ),
        ({"mlp": {"activation": "sigmoid"}}, "'relu', 'tanh' or 'gelu', got 'sigmoid'"),
        ({"cnn": {"channels": [1]}}, "model cnn: option 'channels"),
        (
            "google/vit-base-patch16-224",
            r"a model of a hub is a function in a file .*from_pretrained\('google/vit-base",
        ),
        ("bert-base-uncased", "a model of a hub is a function in a file of yours"),
    ],
)
def test_unknown_models_and_options(component, message):
    with pytest.raises(ModelError, match=message):
        build(component)
    with pytest.raises(ModelError, match=message):
        check_model(Component.model_validate(component))


def test_model_beyond_memory_is_a_one_line_error():
    with pytest.raises(
        ModelError,
        match=r"^model mlp\(hidden=\[1e?\+?[0-9]+\]\): cannot be built: RuntimeError",
    ):
        build({"mlp": {"hidden": [10**14]}})  # 25.6 PB


def test_cnn_refuses_samples_that_are_not_images():
    with pytest.raises(
        ModelError,
        match=r"cannot read samples of shape \(30,\) as images; .* use model: mlp",
    ):
        build("cnn", (30,))


OWN = """
import torch
from torch import nn

class Tiny(nn.Module):
    def __init__(self, inputs, outputs, width):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(inputs, width), nn.BatchNorm1d(width), nn.Linear(width, outputs))

    def forward(self, x):
        return self.layers(x)

def build(input_shape, outputs, width=4):
    return Tiny(input_shape[0], outputs, width)

def broken(input_shape, outputs):
    raise RuntimeError("no such luck\\nsecond line")

def leaving(input_shape, outputs):
    raise SystemExit(2)

def scripted(input_shape, outputs):
    return torch.jit.script(Tiny(input_shape[0], outputs, 4))

def wrong(input_shape, outputs):
    return 3

def narrow(input_shape, outputs):
    return nn.Linear(input_shape[0], outputs - 1)

def other_input(input_shape, outputs):
    return nn.Linear(input_shape[0] + 1, outputs)

value = 3
"""


@pytest.fixture
def own(tmp_path):
    path = tmp_path / "my model.py"
    path.write_text(OWN)
    return path


def test_user_model_is_built(own):
    model = build({"name": f"{own}:build", "width": 9})
    assert count(model) == 64 * 9 + 9 + 9 + 9 + 9 * 10 + 10
    assert model.training
    statistics = next(
        layer for layer in model.modules() if isinstance(layer, nn.BatchNorm1d)
    )
    # looking at the output shape leaves no trace
    assert statistics.num_batches_tracked == 0
    check_model(Component(name=f"{own}:build"))


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("biuld", "has no function 'biuld'; did you mean 'build'"),
        ("value", "has no function 'value'"),
        ("broken", r"raised RuntimeError: no such luck second line"),
        ("leaving", "raised SystemExit: 2"),
        ("wrong", "returned int, expected a torch.nn.Module"),
        (
            "narrow",
            r"gives \(2, 9\) for 2 samples; classification needs a tensor \(2, 10\)",
        ),
        ("other_input", r"fails on an input of shape \(64,\): RuntimeError"),
        ("not a name", "expected file.py:factory"),
    ],
)
def test_failing_user_model_is_a_one_line_error(own, factory, message):
    with pytest.raises(ModelError, match=message) as caught:
        build(f"{own}:{factory}")
    assert "\n" not in str(caught.value)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_compiled_forms_of_a_model_are_built(own):
    torch.manual_seed(0)
    plain, scripted = build(f"{own}:build"), build(f"{own}:scripted")
    assert count(scripted) == count(plain)
    x = torch.rand(3, 64)
    torch.testing.assert_close(scripted.eval()(x), plain.eval()(x))


def test_unknown_factory_options_are_refused(own):
    with pytest.raises(
        ModelError,
        match=r"build\(input_shape=\(64,\), outputs=10, depth=2\) raised TypeError",
    ):
        build({"name": f"{own}:build", "depth": 2})


@pytest.mark.parametrize(
    "text", ["import nothing_like_this", "def f(:", "raise SystemExit(3)"]
)
def test_user_file_with_import_error_is_refused(tmp_path, text):
    (tmp_path / "bad.py").write_text(text)
    with pytest.raises(
        ModelError, match=r"bad\.py: cannot be imported, it raised"
    ) as caught:
        build(f"{tmp_path}/bad.py:build")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere.py:build", "no file .*nowhere.py"),
        ("model.py", "expected file.py:factory"),
        (":f", "expected file"),
    ],
)
def test_missing_user_file_is_refused(name, message):
    for refuse in (
        build,
        lambda component: check_model(Component.model_validate(component)),
    ):
        with pytest.raises(ModelError, match=message):
            refuse(name)


def test_a_layer_table_has_the_parameters_of_its_model_and_cannot_be_trained():
    table = {"layers": {"table": "vgg16"}}
    assert count(build(table, (1,), 1000)) == 138_357_544
    component = Component.model_validate(table)
    check_model(component, trained=False)
    with pytest.raises(
        ModelError,
        match=naming("layers(table=vgg16)", "not trained", "execution"),
    ):
        check_model(component)
    with pytest.raises(ModelError, match="unknown layer table 'vgg61'"):
        build({"layers": {"table": "vgg61"}})


@pytest.mark.parametrize("name", ["cnn", "resnet", "nfnet"])
@pytest.mark.parametrize(
    ("shape", "planes"),
    [
        ((8, 6, 3), 3),
        ((8, 8, 1), 1),
        ((8, 8, 4), 4),
        ((4, 4, 3), 3),
        ((3, 8, 6), 3),
        ((3, 4, 4), 3),
        ((1, 4, 3), 1),
    ],
)
def test_channels_are_found_in_the_first_or_the_last_axis(name, shape, planes):
    model = build(name, shape, 2)
    (weight, *_) = (
        parameter for parameter in model.parameters() if parameter.ndim == 4
    )
    assert weight.shape[1] == planes
    notes = model_notes(Component(name=name), shape)
    assert [f"{planes} channel" in note and "come last" in note for note in notes] == [
        True
    ] * (planes == shape[-1])


def test_images_train_the_same_with_channels_first_or_last():
    x = torch.rand(5, 3, 8, 6)
    first, last = build("cnn", (3, 8, 6)), build("cnn", (8, 6, 3))
    assert torch.equal(first(x), last(x.permute(0, 2, 3, 1)))


def test_channels_that_are_not_found_are_refused_until_they_are_stated():
    for call in (
        lambda: build("cnn", (8, 6, 13)),
        lambda: model_notes(Component(name="cnn"), (8, 6, 13)),
    ):
        with pytest.raises(
            ModelError,
            match=r"\(8, 6, 13\) have no first or last axis of 1, 3 or 4 .* layout: hwc",
        ):
            call()
    for layout, planes in (("hwc", 13), ("chw", 8)):
        model = build({"cnn": {"layout": layout}}, (8, 6, 13))
        assert next(model.parameters()).shape[1] == planes
        assert (
            model_notes(Component(name="cnn", options={"layout": layout}), (8, 6, 13))
            == []
        )


DRAWN_AT_IMPORT = """
import random

import numpy as np
import torch
from torch import nn

DRAWN = [float(torch.rand(())), random.random(), float(np.random.rand())]


def build(input_shape, outputs):
    made = nn.Linear(input_shape[0], outputs)
    made.bias.data[:3] = torch.tensor(DRAWN)
    made.bias.data[3:5] = torch.tensor([random.random(), float(np.random.rand())])
    return made


class Net(nn.Module):
    def __init__(self, width):
        super().__init__()


def complex_weights(input_shape, outputs):
    made = build(input_shape, outputs)
    made.spectrum = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    return made


def complex_buffers(input_shape, outputs):
    made = build(input_shape, outputs)
    made.register_buffer("phases", torch.zeros(2, dtype=torch.complex64))
    return made
"""


def test_weights_of_a_file_that_draws_when_it_is_imported_depend_on_the_seed_only(
    tmp_path,
):
    path = tmp_path / "own.py"
    path.write_text(DRAWN_AT_IMPORT)
    first = build(f"{path}:build", seed=1)
    torch.manual_seed(9)
    before = random_state()
    path.write_text(DRAWN_AT_IMPORT + "\n")  # imported once more
    imported, again, other = (
        build(f"{path}:build", seed=1),
        build(f"{path}:build", seed=1),
        build(f"{path}:build", seed=2),
    )
    assert drawn_since(before) == frozenset()
    for model in (imported, again):
        assert torch.equal(first.weight, model.weight)
        assert torch.equal(first.bias, model.bias)
    assert torch.equal(other.bias[:3], first.bias[:3]), (
        "drawn at import: equal in all processes and runs"
    )
    assert not set(other.bias[3:5].tolist()) & set(first.bias[3:5].tolist())


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (
            "complex_weights",
            r"spectrum is complex \(complex64\).*torch.view_as_complex joins in forward",
        ),
        ("complex_buffers", r"phases is complex \(complex64\)"),
        (
            "Net",
            r"raised TypeError: .*; name a function instead: def build\(input_shape, outputs\): return Net\(...\)",
        ),
    ],
)
def test_complex_numbers_and_classes_are_refused(tmp_path, factory, message):
    (tmp_path / "own.py").write_text(DRAWN_AT_IMPORT)
    with pytest.raises(ModelError, match=message):
        build(f"{tmp_path / 'own.py'}:{factory}")


MODULES = """
from torch import nn

class Net(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.first = nn.Linear(64, 10)

    def forward(self, x):
        return self.first(x)

net = Net(8)

class Trained(nn.Module):  # as a LightningModule whose steps call self.net
    def __init__(self):
        super().__init__()
        self.net = Net(8)

    def training_step(self, batch, number):
        return self.net(batch[0]).sum()

def build(input_shape, outputs):
    return Trained()
"""


WANTING = """
from torch import nn

def wide(input_shape, outputs, width, *, depth):
    return nn.Linear(width * depth, outputs)

def turned(outputs, input_shape):
    return nn.Linear(input_shape[0], outputs)

class Pair(nn.Linear):
    def __init__(self, input_shape, outputs):
        super().__init__(input_shape[0], outputs)

    def forward(self, x, mask):
        return super().forward(x * mask)
"""


def test_what_a_factory_or_a_forward_wants_beside_is_named(tmp_path):
    own = tmp_path / "own.py"
    own.write_text(WANTING)
    with pytest.raises(
        ModelError,
        match=r"give width and depth a default, or .*--set model\.width=\.\.\. --set model\.depth",
    ):
        build(f"{own}:wide")
    assert build({"name": f"{own}:wide", "width": 32, "depth": 2}).in_features == 64
    with pytest.raises(
        ModelError, match=r"one tensor, the batch: .* x and mask from it"
    ):
        build(f"{own}:Pair")
    assert build(f"{own}:turned").out_features == 10, "by their names"


def test_file_that_imports_another_of_its_folder_or_package_says_how(tmp_path):
    package = tmp_path / "nets" / "deep"
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").touch()
    (package / "own.py").write_text("from ..blocks import Block")
    said = rf"`from nets\.deep\.module import .*PYTHONPATH={tmp_path}, or install"
    with pytest.raises(ModelError, match=said):
        build(f"{package}/own.py:build")
    (tmp_path / "own.py").write_text("from beside_it import Block")
    with pytest.raises(ModelError) as caught:
        build(f"{tmp_path}/own.py:build")
    assert "PYTHONPATH" not in str(caught.value), "that is nowhere"
    (tmp_path / "beside_it.py").write_text("Block = None")
    with pytest.raises(
        ModelError, match=f"beside that file: set PYTHONPATH={tmp_path}"
    ):
        build(f"{tmp_path}/own.py:build")


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (
            "Net",
            r"name a function instead: def build\(input_shape, outputs\): return Net\(...\)",
        ),
        (
            "net",
            r"name a function instead: def build\(input_shape, outputs\): return Net\(...\)",
        ),
        (
            "build",
            r"Trained has no forward.*return self\.net\(x\), or let the factory return its \.net",
        ),
    ],
)
def test_refusal_of_a_module_says_how_to_wrap_it(tmp_path, factory, message):
    (tmp_path / "own.py").write_text(MODULES)
    with pytest.raises(ModelError, match=message):
        build(f"{tmp_path / 'own.py'}:{factory}")


FACTORIES = """
from torch import nn

class Net(nn.Linear):
    def __init__(self):
        super().__init__(64, 10)

class Classes(nn.Linear):
    def __init__(self, num_classes=3, hidden=8):
        super().__init__(64, num_classes)

def keywords(*, outputs, input_shape):
    return nn.Linear(input_shape[0], outputs)

def shape_alone(input_shape):
    return nn.Linear(input_shape[0], 10)

def without_defaults(shape, classes=3):
    return nn.Linear(shape[0], classes)

def anything(*arguments):
    return nn.Linear(arguments[0][0], arguments[1])
"""


@pytest.mark.parametrize(
    "factory",
    ["Net", "Classes", "keywords", "shape_alone", "without_defaults", "anything"],
)
def test_a_factory_gets_what_it_takes(tmp_path, factory):
    (tmp_path / "own.py").write_text(FACTORIES)
    built = build(f"{tmp_path / 'own.py'}:{factory}")
    assert built(torch.zeros(3, 64)).shape == (3, 10)


def test_options_reach_a_class_that_takes_no_shape(tmp_path):
    (tmp_path / "own.py").write_text(FACTORIES)
    name = f"{tmp_path / 'own.py'}:Classes"
    built = build({"name": name, "num_classes": 4, "hidden": 3}, outputs=4)
    assert built(torch.zeros(3, 64)).shape == (3, 4)
