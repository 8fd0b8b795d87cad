"""A user's own model: `file.py:factory`, where factory(input_shape, outputs, **options) returns an nn.Module."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scalebench.errors import ModelError, nearest

if TYPE_CHECKING:
    from torch import nn


def is_own(name: str) -> bool:
    """Whether `name` is a file and a factory rather than the name of a model."""
    return ":" in name or name.endswith(".py")


def check_own(name: str) -> Path:
    """The file in `name`. Raises ModelError when the form is wrong or the file is not there."""
    path, _, factory = name.rpartition(":")
    if not path or not factory.isidentifier():
        raise ModelError(f"model {name!r}: expected file.py:factory, for example my_model.py:build")
    file = Path(path).expanduser()
    if not file.is_file():
        raise ModelError(f"model {name!r}: no file {file.absolute()}; give the path of a Python file before the colon")
    return file


def build_own(name: str, options: dict[str, Any], input_shape: tuple[int, ...], outputs: int) -> nn.Module:
    """Call the factory of `name`.

    Raises:
        ModelError: no such file or factory, an exception in either, or something returned that is not an nn.Module.
    """
    from torch import nn

    file = check_own(name)
    factory_name = name.rpartition(":")[2]
    module = _load(file)
    factory = getattr(module, factory_name, None)
    if not callable(factory):
        known = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise ModelError(f"model {name!r}: {file} has no function {factory_name!r}; {nearest(factory_name, known)}")
    try:
        model = factory(input_shape, outputs, **options)
    except Exception as error:
        raise ModelError(
            f"model {name!r}: {factory_name}(input_shape={input_shape}, outputs={outputs}"
            f"{''.join(f', {key}={value!r}' for key, value in options.items())}) raised {_line(error)}"
        ) from error
    if not isinstance(model, nn.Module):
        raise ModelError(f"model {name!r}: {factory_name} returned {type(model).__name__}, expected a torch.nn.Module")
    return model


def _load(file: Path) -> Any:
    name = f"scalebench_own_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ModelError(f"model file {file}: not a Python file; expected a name that ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses and pickle look a class's module up
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # a script without a main guard may call sys.exit
        del sys.modules[name]
        raise ModelError(f"model file {file}: cannot be imported, it raised {_line(error)}") from error
    return module


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
