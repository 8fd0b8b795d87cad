"""What a figure is, and how figures are found by name.

No module of this package imports pandas or matplotlib when it is loaded, so that figures can be listed in a tenth of a
second; what draws is in `scalebench.figures.drawing`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from scalebench.errors import UsageError
from scalebench.registry import Choice, Registry

if TYPE_CHECKING:
    from scalebench.analysis import Results
    from scalebench.figures.drawing.canvas import Canvas


class Figure(Choice):
    """One figure of a study: a new one is one new file in this package."""

    by_default: ClassVar[bool] = True  # False: drawn only where it is named

    def absent(self, results: Results) -> str:
        """Why these results cannot carry the figure; empty if they can."""
        return "" if len(results.completed) else "no run was completed"

    def draw(self, results: Results, canvas: Canvas) -> None:
        """Draw panels and caption on `canvas`, which keeps the drawn data."""
        raise NotImplementedError


FIGURES: Registry[Figure] = Registry("figure", UsageError, "scalebench.figures", "scalebench.figures")


def figure_names() -> list[str]:
    """Every known figure."""
    return FIGURES.names()


def default_figures() -> list[str]:
    """Those that are drawn where none is named."""
    return [name for name in figure_names() if FIGURES.find(name).by_default]


def describe_figures() -> list[tuple[str, str]]:
    """(name, one-line summary) of every figure, and whether it is drawn only when it is named."""
    named = set(figure_names()) - set(default_figures())
    return [
        (name, f"{summary} (drawn when named)" if name in named else summary) for name, summary in FIGURES.describe()
    ]
