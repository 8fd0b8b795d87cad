"""Finds things by name, with their options checked: data sets, partitions, models.

A choice is a frozen pydantic model: its fields are its options. It registers itself when its module is imported; the
modules of `package` and the entry points of `group` (other people's packages) are imported at the first question.
"""

from __future__ import annotations

import importlib
import pkgutil
from importlib.metadata import entry_points
from typing import Any, ClassVar, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from scalebench.errors import UsageError, nearest


class Choice(BaseModel):
    """Something a study can name; its fields are the options it takes."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: ClassVar[str]
    summary: ClassVar[str]


C = TypeVar("C", bound=Choice)


class Registry(Generic[C]):
    """The choices of one kind, found in `package` (or one module). `error` is what an unknown name or option raises."""

    def __init__(self, kind: str, error: type[UsageError], package: str, group: str) -> None:
        self.kind = kind
        self._error = error
        self._package = package
        self._group = group
        self._classes: dict[str, type[C]] = {}
        self._loaded = False

    def add(self, cls: type[C]) -> type[C]:
        """Class decorator: `cls` is the choice called `cls.name`. A name can be taken once."""
        if cls.name in self._classes:
            raise ValueError(f"{self.kind} {cls.name!r} is registered twice")
        self._classes[cls.name] = cls
        return cls

    def names(self) -> list[str]:
        """Every known name, sorted."""
        self._load()
        return sorted(self._classes)

    def describe(self) -> list[tuple[str, str]]:
        """(name, one-line summary) of each."""
        return [(name, self._classes[name].summary) for name in self.names()]

    def find(self, name: str) -> type[C]:
        """The class called `name`."""
        if name not in self.names():
            raise self._error(f"unknown {self.kind} {name!r}; {nearest(name, self.names())}")
        return self._classes[name]

    def create(self, name: str, options: dict[str, Any]) -> C:
        """The choice called `name` with `options` checked; the message names the option and what was expected."""
        cls = self.find(name)
        try:
            return cls.model_validate(options)
        except ValidationError as error:
            raise self._error(f"{self.kind} {name}: {_first_fault(error, cls)}") from None

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


def _first_fault(error: ValidationError, cls: type[Choice]) -> str:
    fault = error.errors()[0]
    where = ".".join(str(part) for part in fault["loc"])
    if fault["type"] == "extra_forbidden":
        fields = cls.model_fields
        return f"unknown option {where!r}; " + (nearest(where, fields) if fields else "it takes no options")
    message = fault["msg"].removeprefix("Value error, ")
    return f"option {where!r}: {message}, got {fault['input']!r}" if where else message
