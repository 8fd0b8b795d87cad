"""Construction of models by name: of `scalebench.models.zoo`, entry points, or a user's `file.py:factory`."""

from __future__ import annotations

import re
from contextlib import suppress
from inspect import Parameter, getattr_static, isfunction, signature
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scalebench.errors import ModelError
from scalebench.formatting import counted
from scalebench.models.architecture import MODELS, Architecture
from scalebench.models.metric import logits_of
from scalebench.study.spec import Component
from scalebench.system.late import torch
from scalebench.system.random_state import seeded
from scalebench.system.user_code import load_own, own_file, own_module, raised

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import nn


def describe_models() -> list[tuple[str, str]]:
    """Return (name, one-line summary) of each model."""
    return [
        *MODELS.describe(),
        (
            "file.py:factory",
            "your own: factory(input_shape, outputs, **options) -> nn.Module, or a class of one",
        ),
    ]


def check_model(component: Component, *, trained: bool = True) -> None:
    """Check name and options of a model, and that it can be trained if it is to be, without importing torch.

    Raises:
        ModelError: an unknown name or option, a missing user file, or no arithmetic to train.
    """
    if is_own(component.name):
        check_own(component.name)
    elif not _architecture(component).trainable and trained:
        raise ModelError(
            f"model {component} can be priced but not trained; use execution: modelled, or another model"
        )


def model_notes(component: Component, input_shape: tuple[int, ...]) -> list[str]:
    """Return notes on how a model of the registry reads samples. Raises ModelError for an unsuitable shape."""
    if is_own(component.name):
        return []
    return MODELS.create(component.name, component.options).notes(input_shape)


def _architecture(component: Component) -> Architecture:
    if component.name not in MODELS.names() and _HUB_NAME.fullmatch(component.name):
        raise ModelError(
            f"unknown model {component.name!r}; a model of a hub is a function in a file of yours, my_model.py:build: "
            "def build(input_shape, outputs): return transformers.AutoModelForImageClassification.from_pretrained"
            f"({component.name!r}, num_labels=outputs, ignore_mismatched_sizes=True), downloaded before the study"
        )
    return MODELS.create(component.name, component.options)


def build_model(
    component: Component,
    input_shape: tuple[int, ...],
    outputs: int,
    task: str,
    dtype: torch.dtype,
    seed: int,
) -> nn.Module:
    """Return the model of `component` in `dtype` on the CPU, with initial weights determined by `seed`.

    The random state of torch, numpy and Python is unchanged. Weights are drawn in
    float32, then converted, so that float64 and float32 runs start from the same
    numbers.

    Raises:
        ModelError: an unknown model or option, an unsuitable input, a failing user factory, complex numbers, a model
            with another output shape than `task` requires, or one that does not fit into memory.
    """
    # Alike on all workers, whatever they have drawn before.
    with seeded(seed):
        if is_own(component.name):
            model = build_own(component.name, component.options, input_shape, outputs)
        else:
            architecture = _architecture(component)
            try:
                model = architecture.build(input_shape, outputs)
            except (
                RuntimeError,
                MemoryError,
            ) as error:  # raised by torch when out of memory
                raise ModelError(
                    f"model {component}: cannot be built: {_line(error)}"
                ) from error
        _refuse_complex(component, model)
        model = model.to(dtype)
        _check_output(component, model, input_shape, outputs, task, dtype)
    return model


def _refuse_complex(component: Component, model: nn.Module) -> None:
    """Raise ModelError for complex parameters and buffers: a conversion to the run's dtype drops imaginary parts."""
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if tensor.is_complex():
            raise ModelError(
                f"model {component}: {name} is complex ({str(tensor.dtype).removeprefix('torch.')}), and weights are "
                "real here; keep its real and imaginary parts in one more dimension of size 2, which "
                "torch.view_as_complex joins in forward"
            )


def _check_output(
    component: Component,
    model: nn.Module,
    input_shape: tuple[int, ...],
    outputs: int,
    task: str,
    dtype: torch.dtype,
) -> None:
    """Check the output for two samples, in evaluation mode so that no running statistics change."""
    # In training mode this pass would move running statistics.
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            # Two, so that an output without a row for each sample is told apart.
            made = model(torch.zeros(2, *input_shape, dtype=dtype))
    except (Exception, SystemExit) as error:
        raise ModelError(
            f"model {component}: fails on an input of shape {input_shape}: {_line(error)}{inputs_wanted(model)}"
        ) from error
    finally:
        model.train(was_training)
    require_logits(component, made, 2, outputs, task)


def inputs_wanted(model: nn.Module) -> str:
    """Return what to do about a forward that wants more than the batch; an empty text if it does not."""
    try:
        parameters = signature(model.forward).parameters.values()
    except (TypeError, ValueError):
        return ""
    kinds = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    wanted = [
        one.name for one in parameters if one.kind in kinds and one.default is one.empty
    ]
    if len(wanted) < 2:
        return ""
    return (
        f"; forward is given one tensor, the batch: let a module take {' and '.join(wanted)} from it, as columns "
        "x[:, :n] and x[:, n:]"
    )


def require_logits(
    component: Component,
    made: Any,
    samples: int,
    outputs: int,
    task: str,
    when: str = "",
) -> None:
    """Raise ModelError unless `made` is a tensor (samples, outputs), or has such `logits`; `when` says the mode."""
    logits = logits_of(made)
    if isinstance(logits, torch.Tensor) and logits.shape == (samples, outputs):
        return
    if isinstance(logits, torch.Tensor):
        raise ModelError(
            f"model {component}: gives {tuple(logits.shape)} for {counted(samples, 'sample')}{when}; {task} needs a "
            f"tensor ({samples}, {outputs})"
        )
    raise ModelError(
        f"model {component}: gives {type(made).__name__} for {counted(samples, 'sample')}{when}; {task} needs a tensor "
        f"({samples}, {outputs}), or an object with it as .logits, and a .loss if the model has its own; wrap the "
        "model in a module whose forward returns one of them, such as self.model(x)[0] of a tuple"
    )


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


# owner/model, or bert-base-uncased
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+|[a-z0-9]+(-[\w.]+){2,}")
_FORM = "file.py:factory, for example my_model.py:build"
# attribute of a model: function of the model that lists its modules, of its file
LISTING = "layers_by_file"


def is_own(name: str) -> bool:
    """Return True if `name` is `file.py:factory` and not the name of a model."""
    return ":" in name or name.endswith(".py")


def is_foreign(component: Component) -> bool:
    """Return True for a model that is not of this package: a user's file, or another package's."""
    # By its module: another package registers under any name.
    return is_own(component.name) or not MODELS.find(
        component.name
    ).__module__.startswith("scalebench.")


def check_own(name: str) -> Path:
    """Return the file of `name`. Raises ModelError for a wrong form or a missing file."""
    return own_file("model", name, _FORM, ModelError)


def build_own(
    name: str, options: dict[str, Any], input_shape: tuple[int, ...], outputs: int
) -> nn.Module:
    """Call the factory of `name` with what it takes, see `_arguments`.

    Raises:
        ModelError: no such file or factory, an exception in either, or a result that is not an nn.Module.
    """
    from torch import nn

    factory = load_own("model", name, _FORM, "function", ModelError)
    factory_name = name.rpartition(":")[2]
    positional, named = _arguments(factory, input_shape, outputs)
    named |= options
    try:
        model = factory(*positional, **named)
    except (Exception, SystemExit) as error:
        # A class takes its own arguments: the advice is to wrap it in a function.
        is_class = isinstance(factory, type) and issubclass(factory, nn.Module)
        maker = factory_name if is_class else type(factory).__name__
        is_module = is_class or isinstance(factory, nn.Module)
        wrap = _missing(factory, positional, named)
        if is_module:
            wrap += f"; name a function instead: def build(input_shape, outputs): return {maker}(...)"
        given = dict(zip(("input_shape", "outputs"), positional, strict=False)) | named
        call = ", ".join(f"{key}={value!r}" for key, value in given.items())
        raise ModelError(
            f"model {name!r}: {factory_name}({call}) raised {raised(error)}{wrap}"
        ) from error
    if not isinstance(model, nn.Module):
        raise ModelError(
            f"model {name!r}: {factory_name} returned {type(model).__name__}, expected a torch.nn.Module"
        )
    # looked up without calling it: a ScriptModule has a forward that only its instances
    # can show
    if getattr_static(
        type(model), "forward"
    ) is nn.Module.forward and "forward" not in vars(model):
        inner = next((name for name, _ in model.named_children()), "network")
        raise ModelError(
            f"model {name!r}: {type(model).__name__} has no forward, and no other method is called: give it one, as "
            f"def forward(self, x): return self.{inner}(x), or let the factory return its .{inner}"
        )
    _materialise(model, input_shape)
    # for a class of another library, which has no method layers()
    listing = getattr(own_module("model", check_own(name), ModelError), "layers", None)
    if isfunction(listing) and list(signature(listing).parameters) == ["model"]:
        vars(model)[LISTING] = listing
    return model


def _materialise(model: nn.Module, input_shape: tuple[int, ...]) -> None:
    """Let lazy modules make their parameters, in the default dtype; a forward that fails is tried again later."""
    is_lazy = torch.nn.parameter.is_lazy
    if any(map(is_lazy, chain(model.parameters(), model.buffers()))):
        was_training = model.training
        with suppress(Exception, SystemExit), torch.no_grad():
            model.eval()(torch.zeros(2, *input_shape))
        model.train(was_training)


def _missing(
    function: Callable[..., Any], positional: Sequence[Any], named: Mapping[str, Any]
) -> str:
    """Return how to give the arguments that a factory wants beside these, an empty text if it wants none."""
    try:
        parameters = list(signature(function).parameters.values())
    except ValueError:
        return ""
    wanted = [
        one.name
        for one in parameters[len(positional) :]
        if one.default is one.empty
        and one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)
        and one.name not in named
    ]
    if not wanted:
        return ""
    flags = " ".join(f"--set model.{name}=..." for name in wanted)
    return f"; give {' and '.join(wanted)} a default, or a value with {flags}"


def _arguments(
    factory: Callable[..., Any], input_shape: tuple[int, ...], outputs: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and the named arguments of a call of `factory`.

    By name where parameters have the names of both, `num_classes` as torchvision and
    transformers call the outputs; by position where a parameter without a default, or
    `*args`, takes the first; otherwise those that have a parameter of their name. A
    class like `Net()` gets neither.
    """
    try:
        parameters = signature(factory).parameters
    except ValueError:
        # some callables of C have no signature
        return (input_shape, outputs), {}
    by_position = [
        one
        for one in parameters.values()
        if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)
    ]
    required = sum(one.default is one.empty for one in by_position)
    has_any = any(one.kind is one.VAR_POSITIONAL for one in parameters.values())
    known = {"input_shape": input_shape, "outputs": outputs, "num_classes": outputs}
    by_name = {
        one.name: known[one.name]
        for one in parameters.values()
        if one.name in known and one.kind is not one.POSITIONAL_ONLY
    }
    has_both = "input_shape" in by_name and len(by_name) > 1
    if not has_both and ((required and len(by_position) >= 2) or has_any):
        return (input_shape, outputs), {}
    return (), by_name
