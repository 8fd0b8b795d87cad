"""Registry of strategies, data sets, partitions, models and figures by name, with validated options.

A choice is a frozen pydantic model: its fields are its options. It registers itself
when its module is imported. For a choice that is looked up the module of its name is
imported, else the one that names it; all modules of `package` and the entry points of
`group` (third-party packages) where a name is not found so.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from pydantic import ValidationError

from scalebench.errors import UsageError, nearest
from scalebench.study.validation import StrictModel, find_faults


class Choice(StrictModel):
    """Base of everything that a study can name; its fields are its options."""

    name: ClassVar[str]
    summary: ClassVar[str]


C = TypeVar("C", bound=Choice)
D = TypeVar("D", bound=Choice)
ANYWHERE = "*"


class Registry(Generic[C]):
    """Choices of one kind in `package` (or one module); unknown names and options raise `error`.

    A name may have several classes, one for each place with an implementation of its
    own.
    """

    def __init__(
        self, kind: str, error: type[UsageError], package: str, group: str
    ) -> None:
        self.kind = kind
        self._error = error
        self._package = package
        self._group = group
        # by name and place, as a library's strategy has another class on its own engine
        self._classes: dict[str, dict[str, type[C]]] = {}
        self._loaded = False

    def add(self, cls: type[D], place: str = ANYWHERE) -> type[D]:
        """Register a class as the choice `cls.name`, once at each place; usable as a decorator.

        Raises:
            TypeError: the class lacks a class variable of its kind (`name`, `summary`, ...).
            ValueError: the name is taken.
        """
        # now, where the class is written: a page or a list would fail much later
        if missing := self.missing(cls):
            raise TypeError(
                f"class {cls.__name__} does not say its {', '.join(missing)}"
            )
        places: dict[str, Any] = self._classes.setdefault(cls.name, {})
        # two packages may bring the same name, of which one would be taken in silence
        if place in places:
            where = "" if place == ANYWHERE else f" at {place!r}"
            raise ValueError(f"{self.kind} {cls.name!r} is registered twice{where}")
        places[place] = cls
        return cls

    @staticmethod
    def missing(cls: type[Choice]) -> list[str]:
        """Return the class variables of its kind that `cls` lacks."""
        return sorted(fact for fact in cls.__class_vars__ if not hasattr(cls, fact))

    def names(self) -> list[str]:
        """Return all names, sorted."""
        self._load()
        return sorted(self._classes)

    def describe(self) -> list[tuple[str, str]]:
        """Return (name, one-line summary) of each choice."""
        return [(name, self.find(name).summary) for name in self.names()]

    def find(self, name: str, place: str = ANYWHERE) -> type[C]:
        """Return the class of `name` at `place`, else the one for anywhere, else the first registered one."""
        if name not in self._classes:
            self._import(name)
        if name not in self._classes:
            self._load()
        if name not in self._classes:
            raise self._error(
                f"unknown {self.kind} {name!r}; {nearest(name, self.names())}"
            )
        places = self._classes[name]
        return places.get(place) or places.get(ANYWHERE) or next(iter(places.values()))

    def create(self, name: str, options: dict[str, Any], place: str = ANYWHERE) -> C:
        """Return the choice `name` with validated `options`; errors name the option and the expected value."""
        return self.check(self.find(name, place), options, name)

    def check(self, cls: type[D], options: dict[str, Any], name: str) -> D:
        """Return an instance of `cls`, called `name` in messages, with validated `options`."""
        try:
            return cls.model_validate(options)
        except ValidationError as error:
            raise self._error(
                f"{self.kind} {name}: {first_fault(error, cls)}"
            ) from None

    def _import(self, name: str) -> None:
        """Import modules that may hold the choice `name`, until one does."""
        # One module alone: all those of strategies take half a second.
        for module in self._modules_of(name):
            importlib.import_module(f"{self._package}.{module}")
            if name in self._classes:
                break

    def _modules_of(self, name: str) -> Iterator[str]:
        """Yield the modules that may hold the choice `name`: that of its name, then those whose text names it."""
        modules = self._modules()
        if name in modules:
            yield name
        for module in modules:
            # As in `name = "torch_fsdp"`; by the text, as importing takes far longer.
            if f'= "{name}"' in self._text(module):
                yield module

    def _text(self, module: str) -> str:
        """Return the source of a module of the package; empty if it is a folder, or not there as a file."""
        folders = importlib.import_module(self._package).__path__
        files = [Path(folder) / f"{module}.py" for folder in folders]
        return "".join(each.read_text("utf-8") for each in files if each.is_file())

    def _modules(self) -> list[str]:
        """Return the modules of the package; if it is a module itself, none."""
        package = importlib.import_module(self._package)
        return [
            module.name
            for module in pkgutil.iter_modules(getattr(package, "__path__", []))
        ]

    def _load(self) -> None:
        """Import all modules of the package, and all entry points."""
        # once: packages behind entry points can take long to import
        if self._loaded:
            return
        for module in self._modules():
            importlib.import_module(f"{self._package}.{module}")
        # after our own: a third-party package cannot take a name of ours
        for point in entry_points(group=self._group):
            try:
                point.load()
            except Exception as error:
                raise self._error(
                    f"the entry point {point.name!r} ({point.value}) of group {self._group!r} cannot be loaded: "
                    f"{type(error).__name__}: {error}; update or uninstall the package that brings it"
                ) from error
        self._loaded = True


def first_fault(error: ValidationError, cls: type[StrictModel]) -> str:
    """Return the first error in the options of `cls` as half a line that names the option."""
    fault, fields = find_faults(error)[0], cls.model_fields
    if fault.unknown:
        named = [
            name
            for name, field in fields.items()
            if _mentions(field.description, fault.path)
        ]
        # papers call an option H or tau, and so do users
        close = (
            f"did you mean {named[0]!r}?"
            if len(named) == 1
            else nearest(fault.path, fields)
        )
        return f"unknown option {fault.path!r}; " + (
            close if fields else "it takes no options"
        )
    if fault.missing:
        return f"option {fault.path!r} is missing"
    return f"option {fault.path!r}: {fault.message}" if fault.key else fault.message


def _mentions(description: str | None, symbol: str) -> bool:
    """Return True if a description begins with the paper's `symbol` of the option: `H: local steps ...`."""
    return (description or "").startswith(f"{symbol}: ")
