"""The base class of figures, and their registry, which imports the figures at the first lookup."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

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
    takes_added: ClassVar[bool] = False  # draws other studies and curves beside those of its study
    panels: ClassVar[tuple[str, ...]] = ()  # names of panels that can be chosen; empty where each shows one series

    def absent(self, results: Results) -> str:
        """Return the reason why the figure cannot be drawn from `results`, empty if it can."""
        return "" if len(results.completed) else "no run was completed"

    def draw(self, results: Results, canvas: Canvas) -> None:
        """Draw panels, legend and caption on `canvas`, which collects the drawn data.

        Raises:
            EmptyFigureError: the canvas's selection leaves nothing to draw.
        """
        raise NotImplementedError


FIGURES: Registry[Figure] = Registry("figure", UsageError, "scalebench.figures", "scalebench.figures")


def figure_names() -> list[str]:
    return FIGURES.names()


def default_figures() -> list[str]:
    """Return the figures that are drawn if no name is given."""
    return [name for name in figure_names() if FIGURES.find(name).by_default]


def describe_figures() -> list[tuple[str, str]]:
    """Return (name, summary) of every figure; the summary marks figures that are drawn only if named."""
    named = set(figure_names()) - set(default_figures())
    return [
        (name, f"{summary} (drawn when named)" if name in named else summary) for name, summary in FIGURES.describe()
    ]
