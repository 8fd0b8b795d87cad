"""User-supplied models: `file.py:factory`, where factory(input_shape, outputs, **options) returns an nn.Module."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from scalebench.errors import ModelError
from scalebench.system.user_code import load_own, own_file, raised

if TYPE_CHECKING:
    from torch import nn

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
