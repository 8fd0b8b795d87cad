"""Loading of user code named `file.py:NAME`: the factory of a model or the class of a strategy."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from scalebench import errors
from scalebench.system.random_state import seeded

STRATEGY_FORM = "file.py:Class, for example my_strategy.py:LazyAverage"
# libraries with a random generator, in the order in which they are loaded
_DRAWING = (
    "numpy",
    "torch",
)
_IMPORT_SEED = 0

_MOST_BYTES = 10_000_000


def strategy_file(name: str) -> Path | None:
    """Return the file of a user's strategy, None for any other name. Raises StudyError as `own_file` does."""
    is_own = ".py:" in name or name.endswith(".py")
    return (
        own_file("strategy", name, STRATEGY_FORM, errors.StudyError) if is_own else None
    )


def own_file(kind: str, name: str, form: str, error: type[errors.UsageError]) -> Path:
    """Return the file of `name`, which names a `kind` in the `form` file.py:NAME.

    Raises:
        UsageError: (of class `error`) the form is wrong or the file is missing.
    """
    path, _, attribute = name.rpartition(":")
    if not path or not attribute.isidentifier():
        raise error(f"{kind} {name!r}: expected {form}")
    file = Path(path).expanduser()
    if not file.is_file() and Path(path.rpartition(":")[0]).expanduser().is_file():
        raise error(
            f"{kind} {name!r}: {attribute!r} is no option; expected {attribute}=VALUE"
        )
    if not file.is_file():
        raise error(
            f"{kind} {name!r}: no file {file.absolute()}; give the path of a Python file before the colon"
        )
    # it is read, and hashed, before it runs
    if file.stat().st_size > _MOST_BYTES:
        raise error(
            f"{kind} {name!r}: {file} is larger than {_MOST_BYTES:,} bytes; expected a Python file"
        )
    return file


def load_own(
    kind: str, name: str, form: str, what: str, error: type[errors.UsageError]
) -> Any:
    """Return the callable `name` of a file, see `own_module`.

    Raises:
        UsageError: (of class `error`) no such file, a file that cannot be imported, or no such callable (a `what`).
    """
    file, attribute = own_file(kind, name, form, error), name.rpartition(":")[2]
    module = own_module(kind, file, error)
    found = getattr(module, attribute, None)
    if not callable(found):
        known = [
            key
            for key, value in vars(module).items()
            if callable(value) and not key.startswith("_")
        ]
        raise error(
            f"{kind} {name!r}: {file} has no {what} {attribute!r}; {errors.nearest(attribute, known)}"
        )
    return found


def own_module(kind: str, file: Path, error: type[errors.UsageError]) -> ModuleType:
    """Return the module of a user's `file`, which is executed again after a change.

    It is executed with generators of one seed, wherever and whenever that happens:
    numbers that it draws are equal in all processes, and those of a run under way stay
    as they were.

    Raises:
        UsageError: (of class `error`) it cannot be imported.
    """
    state = file.stat()
    try:
        return _module(
            file.absolute(),
            state.st_size,
            state.st_mtime_ns,
            state.st_ctime_ns,
            state.st_ino,
        )
    except (
        Exception,
        SystemExit,
    ) as cause:  # a script without a main guard may call sys.exit
        raise error(
            f"{kind} file {file}: cannot be imported, it raised {raised(cause)}{_found_beside(file, cause)}"
        ) from cause


def _found_beside(file: Path, cause: BaseException) -> str:
    """Return what to do where a file that is loaded by itself imports another one of its folder or package."""
    folder = file.absolute().parent
    if isinstance(cause, ModuleNotFoundError) and cause.name:
        path = folder / cause.name.partition(".")[0]
        if path.is_dir() or path.with_suffix(".py").is_file():
            return f"; it lies beside that file: set PYTHONPATH={folder}"
        return ""
    if not isinstance(cause, ImportError) or "relative import" not in str(cause):
        return ""
    package: list[str] = []
    while (folder / "__init__.py").is_file():
        package.insert(0, folder.name)
        folder = folder.parent
    name = ".".join(package) or "package"
    return (
        f"; a file is loaded by itself: write `from {name}.module import ...` in it, and set PYTHONPATH={folder}, or "
        "install the package"
    )


def raised(error: BaseException) -> str:
    """Return an exception of user code as one line, with its innermost line in that code."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}{errors.place_in_own_code(error)}"


@lru_cache(maxsize=16)
def _module(file: Path, *_: int) -> ModuleType:
    name = f"{errors.OWN_MODULE}{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError("not a Python file; expected a name that ends in .py")
    module = importlib.util.module_from_spec(spec)
    source = file.read_bytes()
    for library in _DRAWING:
        if library.encode() in source:  # loaded first, for its generator to be seeded
            importlib.import_module(library)
    # for dataclasses and pickle, which look up the module of a class
    sys.modules[name] = module
    try:
        with seeded(_IMPORT_SEED):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
