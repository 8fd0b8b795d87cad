"""The breakdown figure: shares of compute, communication, waiting, data and other in the training time."""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

from scalebench.figures.base import FIGURES, Figure

if TYPE_CHECKING:
    from scalebench.analysis import Results
    from scalebench.figures.drawing.canvas import Canvas
    from scalebench.figures.drawing.panel import Panel, Segment

_COLUMNS = 3
_ALONE = "engine, at one worker"


@FIGURES.add
class Breakdown(Figure):
    name = "breakdown"
    summary = "share of compute, exposed communication, waiting, data and other in the training time"

    def draw(self, results: Results, canvas: Canvas) -> None:
        from matplotlib.patches import Patch

        from scalebench.analysis import cells
        from scalebench.figures.drawing.bars import counts_by_execution, draw_bars
        from scalebench.figures.drawing.caption import (
            describe_executions,
            describe_machines,
            describe_oversubscription,
            describe_study,
        )
        from scalebench.figures.drawing.panel import lettered
        from scalebench.figures.drawing.styles import ENGINE_ALONE, TASKS, looks, name_series

        table = name_series(cells(results))
        names = list(looks(list(table["series"])))
        counts = counts_by_execution(table)
        rows = -(-len(names) // _COLUMNS)
        panels = canvas.rows(*[(min(_COLUMNS, len(names)), 2.15)] * rows)
        for place, (panel, name) in enumerate(zip(panels, names, strict=False)):
            panel.title(lettered(place), name)
            own = table[table["series"] == name]
            single = own["workers"].nunique() == 1  # serial: one bar, without room for other counts
            shown = counts_by_execution(own) if single else counts
            places = draw_bars(panel, own, shown, _segments, "share of training time", like=counts)
            for at, cell in places:
                _label(panel, at, cell)
            panel.ax.set_ylim(0, 139)
            panel.ax.set_yticks([0, 25, 50, 75, 100])
            panel.ax.set_ylabel("share of time (%)")
        for panel in panels[len(names) :]:
            panel.blank(panels[0])
        tasks = [(Patch(facecolor=color, edgecolor=color), task) for task, color in TASKS.items()]
        if any(_engine_alone(cell) for cell in table.to_dict("records")):
            tasks.append((Patch(facecolor=ENGINE_ALONE, edgecolor=ENGINE_ALONE), _ALONE))
        unmeasured = (Patch(facecolor="white", edgecolor="#999999", hatch="////"), "split not measured")
        canvas.legend([*tasks, *([unmeasured] if table["compute_s"].isna().any() else [])])
        canvas.say(
            describe_study(results),
            describe_executions(results, bars=False),
            describe_machines(results),
            "Means over workers and repetitions; communication is what compute does not hide, without the waiting for "
            "the last worker, which is shown separately; one worker communicates with nobody, what its engine takes is "
            "shown as that. Above each bar the training time; pale bars are virtual.",
            "DDP communicates inside backward, so a real run of it has no split.",
            describe_oversubscription(table),
        )


def _segments(cell: dict[Hashable, Any]) -> list[Segment]:
    from scalebench.figures.drawing.panel import Segment
    from scalebench.figures.drawing.styles import ENGINE_ALONE, TASKS

    colors = TASKS | {_ALONE: ENGINE_ALONE}
    wait = cell["wait_s"] if math.isfinite(cell["wait_s"]) else 0.0
    seconds = {
        "compute": cell["compute_s"],
        _ALONE if _engine_alone(cell) else "communication": cell["comm_s"] - wait,
        "waiting": cell["wait_s"],
        "data": cell["data_s"],
        "other": cell["other_s"],
    }
    if not math.isfinite(cell["compute_s"] + cell["comm_s"]):
        return [Segment("not measured", 100.0, "#999999", "////")]
    total = sum(value for value in seconds.values() if math.isfinite(value))
    return [Segment(task, 100 * value / total, colors[task]) for task, value in seconds.items()]


def _engine_alone(cell: dict[Hashable, Any]) -> bool:
    """Return True if the communication time of a cell is the engine's cost at a single worker."""
    return bool(cell["workers"] == 1 and cell["comm_s"] > 0)


def _label(panel: Panel, at: float, cell: dict[Hashable, Any]) -> None:
    from scalebench.formatting import seconds

    cross = " ×" if cell["oversubscribed"] else ""
    text = seconds(cell["train_s"]) + cross
    label = panel.ax.text(at, 103, text, rotation=90, ha="center", va="bottom", fontsize=6.3)
    label.set_in_layout(False)
