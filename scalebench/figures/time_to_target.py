"""The time-to-target figure: time, reduction, epochs and costs until the target, with the runs that never reach it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from scalebench.analysis import Results
from scalebench.analysis.grouping import PER_BATCH, costs_to_target
from scalebench.analysis.target_ratios import target_ratios
from scalebench.figures.base import FIGURES, EmptyFigureError, Figure
from scalebench.figures.drawing.canvas import Canvas
from scalebench.figures.drawing.panel import Panel, share_y
from scalebench.figures.drawing.styles import Look, name_series
from scalebench.figures.drawing.unreached import legend_of_unreached, mark_unreached, torn
from scalebench.formatting import metric_word

_PANELS = ("time", "reduction", "epochs", "core-hours", "energy")
_COSTS = {"core-hours": ("core_hours", "core-hours"), "energy": ("energy_j", "energy (J)")}


@dataclass(frozen=True)
class _Goal:
    """The target in words and as a number, the study's epochs, and the baseline of reductions, empty without one."""

    words: str
    metric: float
    epochs: int
    baseline: str


@FIGURES.add
class TimeToTarget(Figure):
    name = "time-to-target"
    panels = _PANELS
    summary = "time, epochs and costs until the target metric is reached, the time saved, and what never reaches it"

    def absent(self, results: Results) -> str:
        aimed = results.completed["target_metric"].notna().any()
        return super().absent(results) or ("" if aimed else "the study states no target_metric")

    def draw(self, results: Results, canvas: Canvas) -> None:
        table, look, groups = canvas.series_of(costs_to_target(results))
        if not look:
            raise EmptyFigureError("no run with a target took any time")
        table = table.assign(n=table["n_reached"], interval=table["target_interval"])
        baseline, compared = _against(canvas.selection.of(name_series(target_ratios(results))))
        words = f"{metric_word(str(table['metric_name'].iloc[0]) or 'metric')} {table['target_metric'].iloc[0]:g}"
        goal = _Goal(words, float(table["target_metric"].iloc[0]), int(results.completed["epochs"].max()), baseline)
        counted = {name for name, (cost, _) in _COSTS.items() if table[cost].notna().any()}
        shown = {"time", "epochs", *counted, *(["reduction"] if baseline else [])}
        names = [name for name in canvas.wanted(_PANELS) if name in shown]
        if not names:
            raise EmptyFigureError("no run of the selection has what these panels show")
        across = canvas.fits(len(names)) if len(names) <= 3 else canvas.fits(-(-len(names) // 2), narrow=True)
        (panels,) = canvas.grids((len(groups) * len(names), across, 2.75 if len(groups) == 1 else 2.1))
        counts = sorted(int(count) for count in table["workers"].unique())
        for place, panel in enumerate(panels):
            group, name = groups[place // len(names)], names[place % len(names)]
            _draw(panel, name, compared if name == "reduction" else table, group, look, goal, counts)
        for place in range(len(names)):
            share_y(panels[place :: len(names)])

        canvas.legend_of_series(look)
        never, some = table["time_to_target_s"] == math.inf, torn(table)
        canvas.legend_of_executions(table, *legend_of_unreached(bool(never.any()), bool(some.any()), goal.epochs))
        canvas.describe(
            results,
            table,
            f"The target, {goal.words} of the consensus model, is met at the first evaluation at or above it.",
            "Times are geometric means where every run reached the target, else medians of the Kaplan-Meier curve, in "
            "which runs that did not count as longer; epochs are such medians.",
            "Triangles, which have no time: at most half of the runs reached it." if never.any() else "",
            "Stars: more than half of the runs reached it, but not all." if some.any() else "",
            f"Reduction = 1 - T(strategy, N) / T({baseline}, N), times to the target." if "reduction" in names else "",
            "Pale grey: the series of the other panels." if len(groups) > 1 else "",
            "Energy is the time to the target at the mean power of the training." if "energy" in names else "",
        )


def _against(compared: pd.DataFrame) -> tuple[str, pd.DataFrame]:
    """The first baseline that reached the target, and the reductions against it of the strategies that are none."""
    known = compared[compared["reduction"].notna() & ~compared["strategy"].isin(PER_BATCH)]
    for baseline in ("allreduce", "horovod", "ddp", "serial"):
        if len(own := known[known["baseline"] == baseline]):
            return baseline, own
    return "", known.iloc[:0]


def _draw(
    panel: Panel,
    name: str,
    table: pd.DataFrame,
    group: Sequence[str],
    look: dict[str, Look],
    goal: _Goal,
    counts: Sequence[int],
) -> None:
    """Draw the series of `group` over all others of `table` in grey."""
    in_group = table["series"].isin(group)
    own, others = table[in_group], table[~in_group]
    if name == "reduction":
        panel.title("reduction")
        panel.context(others, "reduction", scale=100)
        panel.curve(own, "reduction", look, low="reduction_low", high="reduction_high", scale=100)
        panel.reference([counts[0], counts[-1]], [0, 0], "no reduction")
        panel.ax.set_ylabel(f"time saved (% of {goal.baseline})")
    elif name == "time" or name in _COSTS:
        of_time = "time_to_target_s", "target_low_s", "target_high_s"
        cost, label = _COSTS.get(name, ("", "training time (s)"))
        quantity, low, high = (cost, f"{cost}_low", f"{cost}_high") if cost else of_time
        panel.title(f"{name} to {goal.metric:g}")
        own = own[own[quantity].notna()]  # a cost that is not known is no cost that was not reached
        reached = own[quantity].where(own[quantity] < math.inf)
        shown = own.assign(**{quantity: reached})
        panel.context(others[others[quantity] < math.inf], quantity)
        panel.curve(shown, quantity, look, low=low, high=high)
        mark_unreached(panel, shown, quantity, look, above=2 * reached.max() if reached.notna().any() else 1.0)
        panel.seconds_axis(label=label)
    else:
        panel.title(f"epochs to {goal.metric:g}")
        shown = own.assign(epochs_to_target=own["epochs_to_target"].where(own["epochs_to_target"] < math.inf))
        panel.context(others[others["epochs_to_target"] < math.inf], "epochs_to_target")
        panel.curve(shown, "epochs_to_target", look)
        mark_unreached(panel, shown, "epochs_to_target", look, above=1.1 * goal.epochs)
        most = table["epochs_to_target"].max()
        panel.ax.set_ylim(0, 1.2 * (most if most < math.inf else goal.epochs))
        panel.ax.set_ylabel(f"epochs (of {goal.epochs})")
    panel.workers_axis(counts)
