"""The graph of a strategy's tasks: blocks of training, averages and merges, and which waits for which."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.patches import FancyBboxPatch, Patch

from scalebench.errors import writing
from scalebench.figures.drawing.series_style import TASKS
from scalebench.figures.plotting import drawing
from scalebench.figures.style import REPORT
from scalebench.system.atomic_write import open_own

if TYPE_CHECKING:
    from scalebench.pricing.task_graph import TaskNode  # imports torch, which no other figure needs

_COLORS = {"train": TASKS["compute"], "average": TASKS["communication"], "merge": TASKS["other"]}
_LANE_IN = 0.3
_HALF = 0.32  # of a task's width and height, in workers


def draw_task_graph(
    nodes: Sequence[TaskNode], title: str, stem: Path, formats: Sequence[str] = REPORT.formats
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
            ax = panel.ax
            places = {node.name: node for node in nodes}
            for node in nodes:
                for name in node.after:
                    _draw_edge(ax, places[name], node)
            for node in nodes:
                low, high = min(node.workers) - _HALF, max(node.workers) + _HALF
                box = FancyBboxPatch(
                    (node.depth - _HALF, low), 2 * _HALF, high - low, boxstyle="round,pad=0.02", linewidth=0
                )
                box.set_facecolor(_COLORS[node.kind])
                box.set_zorder(2)
                ax.add_patch(box)
            ax.set_xlim(-0.6, 0.6 + max(node.depth for node in nodes))
            ax.set_ylim(workers - 0.4, -0.6)
            ax.set_yticks(range(workers), [f"worker {rank}" for rank in range(workers)])
            ax.set_xlabel("tasks since training began")
            ax.grid(visible=False)
            shown = {node.kind for node in nodes}
            canvas.legend([(Patch(facecolor=color), kind) for kind, color in _COLORS.items() if kind in shown])
            canvas.say(
                "A task begins when all tasks that a line comes from have ended.",
                "Merges of different workers come in any order." if "merge" in shown else "",
            )
        rows = [f"{each.name},{each.kind},{each.epoch},{_listed(each.workers)},{_listed(each.after)}" for each in nodes]
        with open_own(files[-1], "w") as file:
            file.write("\n".join(["task,kind,epoch,workers,after", *rows]) + "\n")
    return files


def _draw_edge(ax: object, before: TaskNode, node: TaskNode) -> None:
    """Draw a line between two tasks at the height of the worker that both have."""
    (height, *_) = sorted(set(before.workers) & set(node.workers)) or node.workers
    ax.plot([before.depth, node.depth], [height, height], color="#666666", linewidth=0.8, zorder=1)  # type: ignore[attr-defined]


def _listed(values: Sequence[object]) -> str:
    return " ".join(map(str, values))
