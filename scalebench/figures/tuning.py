"""The tuning figure: best trial so far against the number of trials, and the values that were chosen."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pandas as pd
from matplotlib.ticker import MaxNLocator

from scalebench.analysis import Results, tuning_trials
from scalebench.figures.base import FIGURES, EmptyFigureError, Figure
from scalebench.figures.drawing import series_style
from scalebench.figures.drawing.canvas import Canvas
from scalebench.figures.drawing.caption import describe_label, describe_study
from scalebench.figures.drawing.panel import Curve, Panel, share_y
from scalebench.figures.drawing.series_style import Look
from scalebench.formatting import counted, metric_word

_PANELS = ("trials", "values")
_COLUMNS, _HEIGHT_IN = 3, 2.1
# Set aside by trials, so that marks of equal lines are seen side by side.
_BEST = Curve("best", over="trial", shift=False, aside=1.5)


@FIGURES.add
class Tuning(Figure):
    name = "tuning"
    panels = _PANELS
    by_default = False
    summary = "best trial so far against the number of trials, and the tuned values against workers"

    def absent(self, results: Results) -> str:
        return super().absent(results) or (
            "" if len(results.trials) else "the study was not tuned"
        )

    def draw(self, results: Results, canvas: Canvas) -> None:
        course, best = (
            canvas.selection.of(
                series_style.name_series(table).assign(oversubscribed=False)
            )
            for table in (
                tuning_trials.best_so_far(results),
                tuning_trials.tuned_cells(results),
            )
        )
        if course.empty:
            raise EmptyFigureError("no trial is selected")
        # Of all runs: colours are those of the study's other figures.
        look = series_style.looks(series_style.name_series(results.completed)["series"])
        canvas.names = series_style.short_names(look)
        by_time = tuning_trials.metric_of(results) == "time_to_target"
        name = _chosen_by(results.trials, by_time=by_time)
        wanted = canvas.wanted(_PANELS)
        counts = (
            sorted(int(count) for count in course["workers"].unique())
            if "trials" in wanted
            else []
        )
        keys = _numeric(best["tuned"]) if "values" in wanted else []
        grids = [
            (number, canvas.fits(min(_COLUMNS, number), narrow=True), _HEIGHT_IN)
            for number in (len(counts), len(keys))
            if number
        ]
        if not grids:
            raise EmptyFigureError("no value of the study that was tuned is a number")
        panels = [panel for grid in canvas.grids(*grids) for panel in grid]
        of_counts, of_keys = panels[: len(counts)], panels[len(counts) :]
        _draw_courses(of_counts, counts, course, look, by_time=by_time)
        for panel in of_counts:
            if by_time:
                panel.seconds_axis("y", "")
            panel.ax.set_ylabel(name if panel.leftmost else "")
        for panel, key in zip(of_keys, keys, strict=True):
            _draw_chosen(panel, key, best, look)

        canvas.legends(look, course.assign(execution=""))
        words = tuning_trials.tuning_in_words(results)
        canvas.say(
            describe_label(results),
            f"{words[:1].upper()}{words[1:]}.",
            "A line begins at the first trial that reached the target."
            if by_time
            else "",
        )
        canvas.method(
            describe_study(results),
            "Trials are virtual runs with one seed; the runs of the study have others.",
            "Points at one number of trials are set apart sideways to be seen.",
        )


def _chosen_by(trials: pd.DataFrame, *, by_time: bool) -> str:
    """Return the quantity by which trials were chosen: `time to accuracy 0.9 (s)`, `validation accuracy`."""
    metric = metric_word(str(trials["metric_name"].dropna().iloc[0]))
    if not by_time:
        return f"validation {metric}"
    target = trials["target_metric"].dropna()
    return f"time to {metric} {target.iloc[0]:g} (s)"


def _draw_courses(
    panels: Sequence[Panel],
    counts: Sequence[int],
    course: pd.DataFrame,
    look: dict[str, Look],
    *,
    by_time: bool,
) -> None:
    """Draw the best trial so far in one panel for each worker count, over the same axes."""
    trials = int(course["trial"].max())
    for panel, workers in zip(panels, counts, strict=True):
        panel.title(counted(workers, "worker"))
        panel.curve(course[course["workers"] == workers], _BEST, look)
        panel.ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        panel.ax.set_xlabel("trials")
        # All trials, also where the first ones did not reach the target.
        panel.ax.set_xlim(0.5, trials + 0.5)
        panel.ax.set_yscale("log" if by_time else "linear")
        low, high = panel.ax.get_ylim()
        # Room for the marks at the ends, in panels that share the axis.
        panel.ax.set_ylim(*((low / 1.25, high * 1.25) if by_time else (low, high)))
    share_y(panels)


def _draw_chosen(
    panel: Panel, key: str, best: pd.DataFrame, look: dict[str, Look]
) -> None:
    """Draw the values of one tuned key that were chosen, against workers."""
    panel.title(f"chosen {key}")
    values = pd.to_numeric(best["tuned"].map(lambda tuned: tuned.get(key)))
    panel.curve(best.assign(**{key: values}), Curve(key), look)
    panel.workers_axis(best["workers"])
    panel.seconds_axis("y", key)


def _numeric(tuned: Iterable[dict[str, object]]) -> list[str]:
    """Return the tuned keys whose values are positive numbers."""
    values: dict[str, list[object]] = {}
    for chosen in tuned:
        for key, value in chosen.items():
            values.setdefault(key, []).append(value)
    return [
        key
        for key, own in values.items()
        if all(isinstance(v, int | float) and v > 0 for v in own)
    ]
