"""Construction of models by name: of `scalebench.models.zoo`, entry points, or a user's `file.py:factory`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from scalebench.errors import ModelError
from scalebench.models.architecture import MODELS
from scalebench.models.metric import evaluate, loss_for, metric
from scalebench.study.spec import Component
from scalebench.system.user_code import load_own, own_file, raised

if TYPE_CHECKING:
    import torch
    from torch import nn


__all__ = ["build_model", "check_model", "describe_models", "evaluate", "loss_for", "metric"]


def describe_models() -> list[tuple[str, str]]:
    """Return (name, one-line summary) of each model."""
    return [*MODELS.describe(), ("file.py:factory", "your own: factory(input_shape, outputs, **options) -> nn.Module")]


def check_model(component: Component, *, trained: bool = True) -> None:
    """Check name and options of a model, and that it can be trained if it is to be, without importing torch.

    Raises:
        ModelError: an unknown name or option, a missing user file, or no arithmetic to train.
    """
    if is_own(component.name):
        check_own(component.name)
    elif not MODELS.create(component.name, component.options).trainable and trained:
        raise ModelError(f"model {component} can be priced but not trained; use execution: modelled, or another model")


def model_notes(component: Component, input_shape: tuple[int, ...]) -> list[str]:
    """Return notes on how a model of the registry reads samples. Raises ModelError for an unsuitable shape."""
    if is_own(component.name):
        return []
    return MODELS.create(component.name, component.options).notes(input_shape)


def build_model(
    component: Component, input_shape: tuple[int, ...], outputs: int, task: str, dtype: torch.dtype, seed: int
) -> nn.Module:
    """Return the model of `component` in `dtype` on the CPU, with initial weights determined by `seed`.

    The global random state is unchanged. Weights are drawn in float32, then converted, so that float64 and float32 runs
    start from the same numbers.

    Raises:
        ModelError: an unknown model or option, an unsuitable input, a failing user factory, a model with another output
            shape than `task` requires, or one that does not fit into memory.
    """
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # only the CPU's, without a query for devices
        if is_own(component.name):
            model = build_own(component.name, component.options, input_shape, outputs)
        else:
            architecture = MODELS.create(component.name, component.options)
            try:
                model = architecture.build(input_shape, outputs)
            except (RuntimeError, MemoryError) as error:  # raised by torch when out of memory
                raise ModelError(f"model {component}: cannot be built: {_line(error)}") from error
        model = model.to(dtype)
        _check_output(component, model, input_shape, outputs, task, dtype)
    return model


def _check_output(
    component: Component, model: nn.Module, input_shape: tuple[int, ...], outputs: int, task: str, dtype: torch.dtype
) -> None:
    """Check the output shape for two samples, in evaluation mode so that no running statistics change."""
    import torch

    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            made = model(torch.zeros(2, *input_shape, dtype=dtype))
    except Exception as error:
        raise ModelError(f"model {component}: fails on an input of shape {input_shape}: {_line(error)}") from error
    finally:
        model.train(was_training)
    if not isinstance(made, torch.Tensor) or made.shape != (2, outputs):
        what = tuple(made.shape) if isinstance(made, torch.Tensor) else type(made).__name__
        raise ModelError(f"model {component}: gives {what} for 2 samples; {task} needs a tensor (2, {outputs})")


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


_FORM = "file.py:factory, for example my_model.py:build"


def is_own(name: str) -> bool:
    """Return True if `name` is `file.py:factory` and not the name of a model."""
    return ":" in name or name.endswith(".py")


def check_own(name: str) -> Path:
    """Return the file of `name`. Raises ModelError for a wrong form or a missing file."""
    return own_file("model", name, _FORM, ModelError)


def build_own(name: str, options: dict[str, Any], input_shape: tuple[int, ...], outputs: int) -> nn.Module:
    """Call the factory of `name`.

    Raises:
        ModelError: no such file or factory, an exception in either, or a result that is not an nn.Module.
    """
    from torch import nn

    factory, factory_name = load_own("model", name, _FORM, "function", ModelError), name.rpartition(":")[2]
    try:
        model = factory(input_shape, outputs, **options)
    except Exception as error:
        raise ModelError(
            f"model {name!r}: {factory_name}(input_shape={input_shape}, outputs={outputs}"
            f"{''.join(f', {key}={value!r}' for key, value in options.items())}) raised {raised(error)}"
        ) from error
    if not isinstance(model, nn.Module):
        raise ModelError(f"model {name!r}: {factory_name} returned {type(model).__name__}, expected a torch.nn.Module")
    return model
