"""The breakdown figure: shares of compute, communication, waiting, data and other in the training time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import pandas as pd
from matplotlib import rcParams
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.path import Path
from matplotlib.textpath import TextPath
from matplotlib.transforms import Affine2D

from scalebench.analysis import Results, cells
from scalebench.figures.base import FIGURES, Figure
from scalebench.figures.drawing import series_style
from scalebench.figures.drawing.canvas import Canvas, Entry
from scalebench.figures.drawing.marks import (
    Row,
    counts_by_execution,
    draw_bars,
    executions_of_bars,
)
from scalebench.figures.drawing.panel import Panel, Segment, hatch_of
from scalebench.figures.style import Style
from scalebench.formatting import DISTURBED, OVERSUBSCRIBED, marks, seconds

_COLUMNS = 3
_HEIGHTS_IN = (
    2.6,
    2.15,
    3.0,
)  # in print, on screen, on slides, whose times above the bars are large
_SIGNS = {"oversubscribed": OVERSUBSCRIBED, "disturbed": DISTURBED}  # behind times
_NAMES_IN = 0.2  # of executions, below the counts
_ALONE = "engine, at one worker"
_UNMEASURED = "split not measured"
_PARTS = ("compute", "communication", "waiting", "data", "other", _ALONE)


@FIGURES.add
class Breakdown(Figure):
    name = "breakdown"
    summary = "share of compute, exposed communication, waiting, data and other in the training time"

    def draw(self, results: Results, canvas: Canvas) -> None:
        table, look, _ = canvas.series_of(cells(results), of=results)
        names = [name for name in look if name in set(table["series"])]
        counts = counts_by_execution(table)
        height = _HEIGHTS_IN[
            int(canvas.style.height >= 1) + int(canvas.style.height > 1)
        ]
        named = _NAMES_IN * (len(counts) > 1)
        top = _top(table, canvas.style, height)
        (panels,) = canvas.grids(
            (
                len(names),
                canvas.fits(min(_COLUMNS, len(names)), narrow=True),
                height + named,
            )
        )
        for panel, name in zip(panels, names, strict=True):
            panel.title(canvas.names[name], name)
            own = table[table["series"] == name]
            # serial: one bar, without room for other counts
            single = own["workers"].nunique() == 1
            shown = counts_by_execution(own) if single else counts
            bars = draw_bars(
                panel, own, shown, _segments, "share of training time", like=counts
            )
            _write_times(panel, bars)
            panel.ax.set_ylim(0, top)
            panel.ax.set_yticks([0, 50, 100])
            if panel.leftmost:
                panel.ax.set_ylabel("share of time (%)")
        drawn = {
            segment.part: segment
            for cell in table.to_dict("records")
            for segment in _segments(cell)
        }
        canvas.legend(_parts(drawn, canvas.style))
        canvas.legend([*executions_of_bars(table), *_signs(table)])
        canvas.describe(
            results,
            table,
            "Shares of the training time, which stands above each bar; communication is what compute does not hide, "
            "without the waiting for the last worker. Pale bars are virtual.",
            "DDP communicates inside backward, so a real run of it has no split."
            if _UNMEASURED in drawn
            else "",
            method=(
                "Shares are means over workers and repetitions; one worker communicates with nobody: the cost of its "
                "engine is shown as that.",
            ),
            bars=False,
            signs=(OVERSUBSCRIBED, DISTURBED),
        )


def _write_times(panel: Panel, bars: Sequence[tuple[float, Row]]) -> None:
    """Write the training time above each bar."""
    for at, cell in bars:
        time = panel.ax.text(
            at,
            103,
            _time_of(cell),
            rotation=90,
            ha="center",
            va="bottom",
            fontsize=panel.style.small,
        )
        # Its room is in the limit of the axis: the layout would shrink the panel for it
        # once more.
        time.set_in_layout(False)
        panel.explained |= {
            series_style.MARK_WORDS[mark] for mark in _SIGNS if cell[mark]
        }


def _parts(drawn: Mapping[str, Segment], style: Style) -> list[Entry]:
    """Return the entries of the drawn parts of bars, in one order in all figures."""
    entries: list[Entry] = []
    for part in [name for name in (*_PARTS, _UNMEASURED) if name in drawn]:
        segment = drawn[part]
        patch = Patch(
            facecolor=segment.color if segment.measured else "white",
            edgecolor="white" if segment.measured and style.patterns else segment.color,
            hatch=hatch_of(segment, style),
        )
        entries.append((patch, part))
    return entries


def _signs(table: pd.DataFrame) -> list[Entry]:
    """Return the entries of the signs behind times."""
    look = {
        "linestyle": "",
        "color": series_style.NEUTRAL,
        "markersize": 1.5 * rcParams["lines.markersize"],
        "markeredgewidth": 0,
    }
    return [
        (Line2D([], [], marker=_as_marker(sign), **look), series_style.MARK_WORDS[mark])
        for mark, sign in _SIGNS.items()
        if table[mark].any()
    ]


def _as_marker(sign: str) -> Path:
    """Return the outline of a sign around the origin."""
    outline = TextPath((0, 0), sign)
    (left, bottom), (right, top) = outline.get_extents().get_points()
    return outline.transformed(
        Affine2D().translate(-(left + right) / 2, -(bottom + top) / 2)
    )


def _segments(cell: Row) -> list[Segment]:
    """Return the parts of one bar, in per cent; parts without time are left out."""
    if not math.isfinite(cell["compute_s"] + cell["comm_s"]):
        return [Segment(_UNMEASURED, 100.0, "#999999", measured=False)]
    # Engines that do not measure it have it inside communication.
    wait = cell["wait_s"] if math.isfinite(cell["wait_s"]) else 0.0
    # the engine's cost at a single worker
    alone = cell["workers"] == 1 and cell["comm_s"] > 0
    seconds = {
        "compute": cell["compute_s"],
        _ALONE if alone else "communication": cell["comm_s"] - wait,
        "waiting": wait,
        "data": cell["data_s"],
        "other": cell["other_s"],
    }
    # The sum of the parts: one that was not measured must leave no gap.
    total = sum(value for value in seconds.values() if math.isfinite(value))
    colors = series_style.TASKS | {_ALONE: series_style.ENGINE_ALONE}
    patterns = series_style.TASK_PATTERNS | {_ALONE: series_style.ENGINE_ALONE_PATTERN}
    return [
        Segment(part, 100 * value / total, colors[part], patterns.get(part, ""))
        for part, value in seconds.items()
        if value > 0
    ]


def _top(table: pd.DataFrame, style: Style, height: float) -> float:
    """Return the end of the y axis that leaves room for the longest time above the bars."""
    longest = max(len(_time_of(cell)) for cell in table.to_dict("records"))
    room = 0.6 * style.small * longest + 0.6 * style.size
    # What the bars lose in height, the times above them get.
    return 100 / (1 - room / (72 * height * style.height - 6.2 * style.size))


def _time_of(cell: Row) -> str:
    return seconds(cell["train_s"]) + marks(cell)
