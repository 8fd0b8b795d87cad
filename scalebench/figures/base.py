"""The base class of figures, and their registry, which imports the figures at the first lookup."""

from __future__ import annotations

import ast
import pkgutil
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from scalebench.errors import ResultsError, UsageError
from scalebench.registry import Choice, Registry

if TYPE_CHECKING:
    from scalebench.analysis import Results
    from scalebench.figures.drawing.canvas import Canvas


class EmptyFigureError(ResultsError):
    """No data for a figure in the selected part of a study."""


class Figure(Choice):
    """One figure of a study; a new figure is a new file in this package."""

    by_default: ClassVar[bool] = True  # False: drawn only if named
    # draws other studies and curves beside those of its study
    takes_added: ClassVar[bool] = False
    panels: ClassVar[
        tuple[str, ...]
    ] = ()  # names of panels that can be chosen; empty where each shows one series

    def absent(self, results: Results) -> str:
        """Return the reason why the figure cannot be drawn from `results`, empty if it can."""
        return "" if len(results.completed) else "no run was completed"

    def draw(self, results: Results, canvas: Canvas) -> None:
        """Draw panels, legend and caption on `canvas`, which collects the drawn data.

        Raises:
            EmptyFigureError: the canvas's selection leaves nothing to draw.
        """
        raise NotImplementedError


_GROUP = "scalebench.figures"  # of entry points
FIGURES: Registry[Figure] = Registry("figure", UsageError, "scalebench.figures", _GROUP)


class Declared(NamedTuple):
    """A figure in the list of all figures."""

    name: str
    summary: str
    by_default: bool = Figure.by_default


@cache
def declared_figures() -> list[Declared]:
    """Return all figures by name.

    Those of this package are read from their source: importing them takes matplotlib
    and pandas, and a second.
    """
    # A third party's figure may be anywhere, and has to be imported to be known.
    if entry_points(group=_GROUP):
        kinds = map(FIGURES.find, FIGURES.names())
        return [Declared(kind.name, kind.summary, kind.by_default) for kind in kinds]
    # From the files: a list of figures must not wait for matplotlib.
    folder = Path(__file__).parent
    files = [
        folder / f"{module.name}.py"
        for module in pkgutil.iter_modules([str(folder)])
        if not module.ispkg
    ]
    found = (_declared_in(file.read_text(encoding="utf-8")) for file in files)
    return sorted(figure for own in found for figure in own)


def _declared_in(source: str) -> list[Declared]:
    """Return the figures whose classes a module adds to FIGURES."""
    # Parsing all files takes longer than reading them.
    if "@FIGURES.add" not in source:
        return []
    classes = [
        part for part in ast.parse(source).body if isinstance(part, ast.ClassDef)
    ]
    added = [
        cls for cls in classes if "FIGURES.add" in map(ast.unparse, cls.decorator_list)
    ]
    return [Declared(**_constants(cls)) for cls in added]


def _constants(cls: ast.ClassDef) -> dict[str, Any]:
    """Return the constants in the body of a class that `Declared` has."""
    named = {
        part.targets[0].id: part.value
        for part in cls.body
        if isinstance(part, ast.Assign) and isinstance(part.targets[0], ast.Name)
    }
    return {
        # Constants alone: nothing of a module runs.
        name: ast.literal_eval(named[name])
        for name in Declared._fields
        if name in named
    }


def figure_names() -> list[str]:
    return [figure.name for figure in declared_figures()]


def default_figures() -> list[str]:
    """Return the figures that are drawn if no name is given."""
    return [figure.name for figure in declared_figures() if figure.by_default]


def describe_figures() -> list[tuple[str, str]]:
    """Return (name, summary) of every figure; the summary marks figures that are drawn only if named."""
    return [
        (
            figure.name,
            figure.summary
            if figure.by_default
            else f"{figure.summary} (drawn when named)",
        )
        for figure in declared_figures()
    ]
