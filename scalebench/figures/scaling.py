"""The strong-scaling figure: time, efficiency and metric against workers, samples per epoch fixed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scalebench.figures.base import FIGURES, Figure

if TYPE_CHECKING:
    from scalebench.analysis import Results
    from scalebench.figures.drawing.canvas import Canvas


@FIGURES.add
class StrongScaling(Figure):
    name = "strong-scaling"
    summary = "training time (log-log, with the ideal line), efficiency and test metric against workers"
    panels = ("time", "efficiency", "metric")

    def absent(self, results: Results) -> str:
        weak = not (results.completed["scaling"] == "strong").any()
        return super().absent(results) or ("the study scales weakly; see weak-scaling" if weak else "")

    def draw(self, results: Results, canvas: Canvas) -> None:
        from scalebench.figures.drawing.scaling import draw_scaling

        draw_scaling(results, canvas, weak=False)


@FIGURES.add
class WeakScaling(Figure):
    name = "weak-scaling"
    summary = "training time, efficiency T(1)/T(N) and test metric against workers, samples per worker fixed"
    panels = ("time", "efficiency", "metric")

    def absent(self, results: Results) -> str:
        strong = not (results.completed["scaling"] == "weak").any()
        return super().absent(results) or ("the study scales strongly; see strong-scaling" if strong else "")

    def draw(self, results: Results, canvas: Canvas) -> None:
        from scalebench.figures.drawing.scaling import draw_scaling

        draw_scaling(results, canvas, weak=True)
