"""Builds models by name: those of `scalebench.models.zoo`, of entry points, or a user's own `file.py:factory`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scalebench.errors import ModelError
from scalebench.models.architecture import MODELS
from scalebench.models.metric import evaluate, loss_for, metric
from scalebench.models.own import build_own, check_own, is_own
from scalebench.study.spec import Component

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["build_model", "check_model", "describe_models", "evaluate", "loss_for", "metric", "model_names"]


def model_names() -> list[str]:
    """Every known model."""
    return MODELS.names()


def describe_models() -> list[tuple[str, str]]:
    """(name, one-line summary) of each model."""
    return [*MODELS.describe(), ("file.py:factory", "your own: factory(input_shape, outputs, **options) -> nn.Module")]


def check_model(component: Component) -> None:
    """Refuse a model that cannot be: unknown name or option, or a user's file that is missing. Imports no torch."""
    if is_own(component.name):
        check_own(component.name)
    else:
        MODELS.create(component.name, component.options)


def build_model(
    component: Component, input_shape: tuple[int, ...], outputs: int, task: str, dtype: torch.dtype, seed: int
) -> nn.Module:
    """The model of `component` in `dtype` on the CPU, its initial weights a function of `seed`.

    The global random state is left as it was. Weights are drawn in float32, then converted, so that a float64 run
    starts from the same numbers as a float32 one.

    Raises:
        ModelError: an unknown model or option, an input that does not fit, a user's factory that fails, or a model
            whose output has not the shape that `task` needs, or that does not fit into memory.
    """
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # the CPU's alone, which spares asking after devices
        if is_own(component.name):
            model = build_own(component.name, component.options, input_shape, outputs)
        else:
            architecture = MODELS.create(component.name, component.options)
            try:
                model = architecture.build(input_shape, outputs)
            except (RuntimeError, MemoryError) as error:  # torch's when it gets no memory
                raise ModelError(f"model {component}: cannot be built: {_line(error)}") from error
        model = model.to(dtype)
        _check_output(component, model, input_shape, outputs, task, dtype)
    return model


def _check_output(
    component: Component, model: nn.Module, input_shape: tuple[int, ...], outputs: int, task: str, dtype: torch.dtype
) -> None:
    """Run two samples through the model, in evaluation mode so that no running statistics change."""
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
