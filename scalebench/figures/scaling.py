"""Strong and weak scaling: time, efficiency and metric against workers."""

from __future__ import annotations

from typing import ClassVar

from scalebench.analysis import Results
from scalebench.figures.base import FIGURES, Figure
from scalebench.figures.drawing.canvas import Canvas
from scalebench.figures.drawing.scaling import draw_scaling


@FIGURES.add
class StrongScaling(Figure):
    """Samples per epoch are fixed."""

    name = "strong-scaling"
    summary = "training time (log-log, with the ideal line), efficiency and test metric against workers"
    panels = ("time", "efficiency", "metric")
    weak: ClassVar[bool] = False

    def absent(self, results: Results) -> str:
        own, other = ("weak", "strong") if self.weak else ("strong", "weak")
        scales_so = (results.completed["scaling"] == own).any()
        return super().absent(results) or ("" if scales_so else f"the study scales {other}ly; see {other}-scaling")

    def draw(self, results: Results, canvas: Canvas) -> None:
        draw_scaling(results, canvas, weak=self.weak)


@FIGURES.add
class WeakScaling(StrongScaling):
    """Samples per worker are fixed."""

    name = "weak-scaling"
    summary = "training time, efficiency T(1)/T(N) and test metric against workers, samples per worker fixed"
    weak = True
