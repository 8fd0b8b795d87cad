"""The convergence figure: the metric against epochs and against time."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from scalebench.figures.base import FIGURES, Figure

if TYPE_CHECKING:
    import pandas as pd

    from scalebench.analysis import Results
    from scalebench.figures.drawing.canvas import Canvas

_COLUMNS = 4
_KEY = ["execution", "engine", "label", "strategy", "workers"]


@FIGURES.add
class Convergence(Figure):
    name = "convergence"
    summary = "test metric of the consensus model against epochs and against training time"

    def absent(self, results: Results) -> str:
        measured = results.epochs["test_metric"].notna().any()
        return super().absent(results) or ("" if measured else "no epoch was evaluated")

    def draw(self, results: Results, canvas: Canvas) -> None:
        from matplotlib.ticker import MaxNLocator

        from scalebench.figures.drawing.caption import (
            describe_executions,
            describe_oversubscription,
            describe_study,
            with_interval,
        )
        from scalebench.figures.drawing.panel import share_y
        from scalebench.figures.drawing.scaling import METRIC_WORDS
        from scalebench.figures.drawing.styles import looks, name_series
        from scalebench.formatting import counted

        table = name_series(_by_epoch(results))
        look = looks(list(table["series"]))
        counts = _spread([int(count) for count in sorted(table["workers"].unique())])
        panels = canvas.rows((len(counts), 2.1), (len(counts), 2.1))
        word = METRIC_WORDS.get(str(results.completed["metric_name"].iloc[0]), "test metric")
        for column, count in enumerate(counts):
            own = table[(table["workers"] == count) | (table["strategy"] == "serial")]
            for row, x in enumerate(("epochs", "elapsed_s")):
                panel = panels[row * len(counts) + column]
                panel.title("", counted(count, "worker"))
                panel.curve(own, "metric", look, x=x, low="low", high="high", shift=False, sparse=True)
                if column == 0:
                    panel.ax.set_ylabel(word)
                else:
                    panel.ax.tick_params(labelleft=False)
                if x == "epochs":
                    panel.ax.set_xlabel("epochs")
                    panel.ax.xaxis.set_major_locator(MaxNLocator(5, integer=True))
                else:
                    panel.seconds_axis("x")
        share_y(panels)
        canvas.legend_of_series(table["series"], look)
        canvas.legend_of_executions(table[table["workers"].isin(counts)])
        interval = with_interval(table["interval"]).replace("seeds", "seeds (drawn at the last epoch)")
        canvas.say(
            describe_study(results),
            describe_executions(results, bars=False),
            "Each point is the mean over repetitions of the consensus model's metric on held-out data after an "
            f"epoch{interval}; time is training time without evaluation, its arithmetic mean (tables: geometric).",
            "Serial (one worker) is drawn in every panel." if (table["strategy"] == "serial").any() else "",
            describe_oversubscription(table[table["workers"].isin(counts)]),
        )


def _by_epoch(results: Results) -> pd.DataFrame:
    import pandas as pd

    from scalebench.analysis.intervals import CONFIDENCE, metric_interval
    from scalebench.formatting import is_interval

    runs = results.completed[["run_id", "attempt", "oversubscribed", *_KEY]]
    table = results.epochs.merge(runs, on=["run_id", "attempt"])
    table = table[table["test_metric"].notna()]
    rows: list[dict[str, object]] = []
    for key, group in table.groupby([*_KEY, "epoch"]):
        metric = metric_interval(group["test_metric"].tolist())
        known = is_interval(metric.low, metric.high)
        values = dict(zip([*_KEY, "epoch"], key, strict=True))
        rows.append(
            values
            | {
                "epochs": int(str(values["epoch"])) + 1,
                "elapsed_s": float(group["elapsed_s"].mean()),
                "metric": metric.centre,
                "low": metric.low if known else math.nan,
                "high": metric.high if known else math.nan,
                "n": metric.n,
                "interval": CONFIDENCE if known else "",
                "oversubscribed": bool(group["oversubscribed"].any()),
            }
        )
    return pd.DataFrame(rows)


def _spread(counts: list[int]) -> list[int]:
    """Select at most four of the counts above one, the largest included."""
    counts = [count for count in counts if count > 1] or counts
    if len(counts) <= _COLUMNS:
        return counts
    return [counts[round(step * (len(counts) - 1) / (_COLUMNS - 1))] for step in range(_COLUMNS)]
