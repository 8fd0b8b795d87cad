"""Finds things by name, with their options checked: strategies, data sets, partitions, models, figures.

A choice is a frozen pydantic model: its fields are its options. It registers itself when its module is imported; the
modules of `package` and the entry points of `group` (other people's packages) are imported at the first question.
"""

from __future__ import annotations

import importlib
import pkgutil
from importlib.metadata import entry_points
from typing import Any, ClassVar, Generic, TypeVar

from pydantic import ValidationError

from scalebench.errors import UsageError, nearest
from scalebench.study.strict import StrictModel
from scalebench.study.validation_errors import faults_of


class Choice(StrictModel):
    """Something a study can name; its fields are the options it takes."""

    name: ClassVar[str]
    summary: ClassVar[str]


C = TypeVar("C", bound=Choice)
D = TypeVar("D", bound=Choice)
ANYWHERE = "*"


class Registry(Generic[C]):
    """The choices of one kind, found in `package` (or one module). `error` is what an unknown name or option raises.

    A name may stand for several classes, one for each place where it is carried out differently.
    """

    def __init__(self, kind: str, error: type[UsageError], package: str, group: str) -> None:
        self.kind = kind
        self._error = error
        self._package = package
        self._group = group
        self._classes: dict[str, dict[str, type[C]]] = {}
        self._loaded = False

    def add(self, cls: type[D], place: str = ANYWHERE) -> type[D]:
        """Class decorator: `cls` is the choice called `cls.name`. A name can be taken once (at each place).

        Raises:
            TypeError: the class does not say what each of its kind has to (`name`, `summary`, ...).
            ValueError: the name is taken.
        """
        if unsaid := self.unsaid(cls):
            raise TypeError(f"class {cls.__name__} does not say its {', '.join(unsaid)}")
        places: dict[str, Any] = self._classes.setdefault(cls.name, {})
        if place in places:
            where = "" if place == ANYWHERE else f" at {place!r}"
            raise ValueError(f"{self.kind} {cls.name!r} is registered twice{where}")
        places[place] = cls
        return cls

    @staticmethod
    def unsaid(cls: type[Choice]) -> list[str]:
        """The facts that each of its kind has to state and `cls` does not."""
        return sorted(fact for fact in cls.__class_vars__ if not hasattr(cls, fact))

    def names(self) -> list[str]:
        """Every known name, sorted."""
        self._load()
        return sorted(self._classes)

    def describe(self) -> list[tuple[str, str]]:
        """(name, one-line summary) of each."""
        return [(name, self.find(name).summary) for name in self.names()]

    def find(self, name: str, place: str = ANYWHERE) -> type[C]:
        """The class that is `name` at `place`; else the one for anywhere, else the first that was registered."""
        self._load()
        if name not in self._classes:
            raise self._error(f"unknown {self.kind} {name!r}; {nearest(name, self.names())}")
        places = self._classes[name]
        return places.get(place) or places.get(ANYWHERE) or next(iter(places.values()))

    def create(self, name: str, options: dict[str, Any], place: str = ANYWHERE) -> C:
        """The choice called `name` with `options` checked; the message names the option and what was expected."""
        return self.check(self.find(name, place), options, name)

    def check(self, cls: type[D], options: dict[str, Any], name: str) -> D:
        """The choice of class `cls`, called `name` in messages, with `options` checked."""
        try:
            return cls.model_validate(options)
        except ValidationError as error:
            raise self._error(f"{self.kind} {name}: {first_fault(error, cls)}") from None

    def _load(self) -> None:
        if self._loaded:
            return
        package = importlib.import_module(self._package)
        for module in pkgutil.iter_modules(getattr(package, "__path__", [])):
            importlib.import_module(f"{self._package}.{module.name}")
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
    """What does not fit the options of `cls`, in half a line that names the option."""
    fault, fields = faults_of(error, cls)[0], cls.model_fields
    if fault.unknown:
        meant = [name for name, field in fields.items() if _mentions(field.description, fault.path)]
        close = f"did you mean {meant[0]!r}?" if len(meant) == 1 else nearest(fault.path, fields)
        return f"unknown option {fault.path!r}; " + (close if fields else "it takes no options")
    if fault.missing:
        return f"option {fault.path!r} is missing"
    return f"option {fault.path!r}: {fault.message}" if fault.key else fault.message


def _mentions(description: str | None, symbol: str) -> bool:
    """Whether an option's description begins with the `symbol` that papers write for it: `H: local steps ...`."""
    return (description or "").startswith(f"{symbol}: ")
