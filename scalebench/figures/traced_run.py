"""Figures of one traced run: the activities of each worker, one lane per worker, and the graph of a strategy's tasks.

In the graph stand blocks of training, averages and merges, and which waits for which.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from matplotlib.patches import FancyBboxPatch, Patch
from matplotlib.ticker import MaxNLocator

from scalebench.errors import ResultsError, writing
from scalebench.figures.drawing.canvas import Canvas
from scalebench.figures.drawing.series_style import SERVING, TASKS
from scalebench.figures.plotting import drawing
from scalebench.figures.style import REPORT
from scalebench.system.file_access import open_own

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from scalebench.pricing.schedule import (
        TaskNode,
    )  # imports torch, which no other figure needs
    from scalebench.training.outcome import Lane, Timeline

_NOTES_ON_REAL_RUNS = (
    "Gaps are pauses of the training time. Where communication lies in backward, or hosts differ, waiting is not told "
    "apart. Lanes of Horovod are rank 0's: waiting is negotiation, until every rank has the tensor."
)
_LANE_IN = 0.3
_MOST_LANES = 40
_EDGES_UP_TO = 600  # bars: white edges hide more of them

_COLORS = {
    "train": TASKS["compute"],
    "average": TASKS["communication"],
    "merge": TASKS["other"],
}
_HALF = 0.32  # of a task's width and height, in workers


class Bar(NamedTuple):
    """A drawn stretch of a lane, in seconds."""

    group: str
    begin_s: float
    end_s: float


def draw_timeline(
    timeline: Timeline,
    stem: Path,
    formats: Sequence[str] = REPORT.formats,
    window: tuple[float, float] | None = None,
) -> list[Path]:
    """Write `stem` in `formats`, and the .csv of the drawn bars.

    `window` = (begin, end) in seconds limits what is drawn; default: the whole run.

    Raises:
        ResultsError: no activity lies in the window, or the files cannot be written.
    """
    begin, end = window or (0.0, math.inf)
    lanes = [
        (lane, list(_bars_of(lane, begin, end)))
        for lane in timeline.lanes[:_MOST_LANES]
    ]
    if not any(bars for _, bars in lanes):
        raise ResultsError(
            f"{timeline.title}: nothing happened between {begin:g} and {end:g} s"
        )
    files = [stem.with_suffix(f".{suffix}") for suffix in (*formats, "csv")]
    with writing(stem.parent):
        stem.parent.mkdir(parents=True, exist_ok=True)
        with drawing(files[:-1], stem.name) as canvas:
            _draw(timeline, lanes, canvas, begin, end)
        rows = [
            f"{lane.name},{bar.group},{bar.begin_s!r},{bar.end_s!r}"
            for lane, bars in lanes
            for bar in bars
        ]
        with open_own(files[-1], "w") as file:
            file.write("\n".join(["lane,activity,begin_s,end_s", *rows]) + "\n")
    return files


def _draw(
    timeline: Timeline,
    lanes: list[tuple[Lane, list[Bar]]],
    canvas: Canvas,
    window_begin: float,
    window_end: float,
) -> None:
    colors = TASKS | {"serving": SERVING}
    ((panel,),) = canvas.grids((1, 1, 0.62 + _LANE_IN * len(lanes)))
    panel.title(timeline.title)
    ax = panel.ax
    end = max(bar.end_s for _, bars in lanes for bar in bars)
    scale, unit = (1e3, "ms") if end < 1 else (1.0, "s")
    edged = sum(len(bars) for _, bars in lanes) <= _EDGES_UP_TO
    for place, (lane, bars) in enumerate(lanes):
        for group, color in colors.items():
            own = [bar for bar in bars if bar.group == group]
            spans = [
                (bar.begin_s * scale, (bar.end_s - bar.begin_s) * scale) for bar in own
            ]
            edge = (
                {"edgecolor": "white", "linewidth": 0.35}
                if edged and group == "compute"
                else {"linewidth": 0}
            )
            ax.broken_barh(
                spans, (place - 0.38, 0.76), facecolor=color, zorder=2, **edge
            )
        inside = [at * scale for at in lane.epochs if window_begin <= at <= window_end]
        ax.vlines(
            inside, place - 0.47, place + 0.47, color="#222222", linewidth=0.9, zorder=3
        )
    ax.set_yticks(range(len(lanes)), [_short(lane.name) for lane, _ in lanes])
    # Downwards: worker 0 is on top, as in the trace viewers.
    ax.set_ylim(len(lanes) - 0.4, -0.6)
    ax.set_xlim(window_begin * scale, min(end, window_end) * scale)
    ax.set_xlabel(f"time since training began ({unit})")
    ax.grid(visible=False, axis="y")
    ax.tick_params(axis="y", length=0)
    shown = {bar.group for _, bars in lanes for bar in bars}
    canvas.legend(
        [
            (Patch(facecolor=color), group)
            for group, color in colors.items()
            if group in shown
        ]
    )
    left_out = len(timeline.lanes) - len(lanes)
    canvas.say(
        f"{timeline.about[:1].upper()}{timeline.about[1:]}.",
        "Communication is what compute does not hide, without the waiting for others, which is shown separately. A "
        "black line ends an epoch.",
        "A server's lane shows from when it takes a request up to its last reply to it."
        if "serving" in shown
        else "",
        _NOTES_ON_REAL_RUNS if timeline.execution != "virtual" else "",
        f"{left_out} more lanes are in the trace file." if left_out else "",
    )


def _bars_of(lane: Lane, low: float, high: float) -> Iterator[Bar]:
    """Merge adjacent laps of one group into one bar, but start a new bar at each forward pass."""
    last: Bar | None = None
    for lap in lane.laps:
        begin = max(lap.begin_s, low)
        end = min(lap.end_s, high)
        if end <= begin:
            continue
        if (
            last
            and last.group == lap.group
            # Laps follow one another up to rounding.
            and begin - last.end_s < 1e-9
            and lap.activity != "forward"
        ):
            last = last._replace(end_s=end)
            continue
        if last:
            yield last
        last = Bar(lap.group, begin, end)
    if last:
        yield last


def _short(name: str) -> str:
    return name if len(name) <= 32 else f"{name[:31]}…"


def draw_task_graph(
    nodes: Sequence[TaskNode],
    title: str,
    stem: Path,
    formats: Sequence[str] = REPORT.formats,
) -> list[Path]:
    """Write `stem` in `formats`, and the .csv of the tasks with those that each one waits for.

    Raises:
        ResultsError: the files cannot be written.
    """
    files = [stem.with_suffix(f".{suffix}") for suffix in (*formats, "csv")]
    with writing(stem.parent):
        stem.parent.mkdir(parents=True, exist_ok=True)
        with drawing(files[:-1], stem.name) as canvas:
            workers = 1 + max(max(node.workers) for node in nodes)
            ((panel,),) = canvas.grids((1, 1, 0.62 + _LANE_IN * workers))
            panel.title(title)
            _draw_graph(panel.ax, nodes, workers)
            shown = {node.kind for node in nodes}
            canvas.legend(
                [
                    (Patch(facecolor=color), kind)
                    for kind, color in _COLORS.items()
                    if kind in shown
                ]
            )
            canvas.say(
                "A task begins when all tasks that a line comes from have ended.",
                "Merges of different workers come in any order."
                if "merge" in shown
                else "",
            )
        rows = [
            f"{each.name},{each.kind},{each.epoch},{_listed(each.workers)},{_listed(each.after)}"
            for each in nodes
        ]
        with open_own(files[-1], "w") as file:
            file.write("\n".join(["task,kind,epoch,workers,after", *rows]) + "\n")
    return files


def _draw_graph(ax: Axes, nodes: Sequence[TaskNode], workers: int) -> None:
    """Draw the tasks as boxes, over the lines between them, a row for each worker."""
    places = {node.name: node for node in nodes}
    for node in nodes:
        # Lines first, so that boxes cover their ends.
        for name in node.after:
            _draw_edge(ax, places[name], node)
    for node in nodes:
        low = min(node.workers) - _HALF
        high = max(node.workers) + _HALF
        box = FancyBboxPatch(
            (node.depth - _HALF, low),
            2 * _HALF,
            high - low,
            boxstyle="round,pad=0.02",
            linewidth=0,
        )
        box.set_facecolor(_COLORS[node.kind])
        box.set_zorder(2)
        ax.add_patch(box)
    ax.set_xlim(-0.6, 0.6 + max(node.depth for node in nodes))
    ax.set_ylim(workers - 0.4, -0.6)
    ax.set_yticks(range(workers), [f"worker {rank}" for rank in range(workers)])
    ax.set_xlabel("tasks since training began")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.grid(visible=False)


def _draw_edge(ax: Axes, before: TaskNode, node: TaskNode) -> None:
    """Draw a line between two tasks at the height of the worker that both have."""
    (height, *_) = sorted(set(before.workers) & set(node.workers)) or node.workers
    ax.plot(
        [before.depth, node.depth],
        [height, height],
        color="#666666",
        linewidth=0.8,
        zorder=1,
    )


def _listed(values: Sequence[object]) -> str:
    return " ".join(map(str, values))
