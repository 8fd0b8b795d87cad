"""The figure of predictions against measurements, with linear scaling beside them."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter

from scalebench.errors import ResultsError, writing
from scalebench.figures.drawing.canvas import Canvas, Entry
from scalebench.figures.plotting import FORMATS, drawing
from scalebench.system.atomic_write import open_own

_NAME = "prediction-error"
_GREY = "#B4B4B4"
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#332288", "#882255", "#999933")
_MARKERS = "osD^v<>h"
# Ticks of times as multiples of linear scaling: the first of these with few enough of them in the panel.
_LADDERS = (
    (0.5, 0.7, 0.8, 0.9, 1, 1.05, 1.1, 1.15, 1.2, 1.3, 1.4, 1.5, 2, 3, 5, 10, 20),
    (0.5, 0.7, 1, 1.2, 1.5, 2, 3, 5, 10, 20),
    (0.5, 1, 2, 5, 10, 20, 50),
)
_MOST_TICKS = 8
_OF_RUNS = re.compile(r"(?P<study>.+): (?P<execution>\w+), (?P<engine>\w+)")


def write_prediction_error(errors: pd.DataFrame, output: Path) -> list[Path]:
    """Write the figure and each prediction to `output`; `errors` are those of `validation.prediction_errors`.

    Raises:
        ResultsError: a file cannot be written, or no measurement is at more workers than its base.
    """
    if errors["linear_s"].isna().all():
        raise ResultsError("nothing to draw: each measurement is at the fewest workers of its strategy")
    files = [output / f"{_NAME}.{suffix}" for suffix in (*FORMATS, "csv")]
    with writing(output):
        output.mkdir(parents=True, exist_ok=True)
        with drawing(files[:-1], _NAME) as canvas:
            _draw(errors, canvas)
        with open_own(files[-1], "w") as file:
            errors.to_csv(file, index=False, lineterminator="\n")
    return files


def _draw(errors: pd.DataFrame, canvas: Canvas) -> None:
    """Draw seconds of each prediction as multiples of linear scaling from its base row, and errors by distance."""
    [[against, apart]] = canvas.grids((2, 2, 3.6))
    errors = errors[errors["linear_s"].notna()]
    slower = errors["seconds"] / errors["linear_s"]
    predicted = errors["predicted_s"] / errors["linear_s"]
    ends = [0.9 * float(min(slower.min(), predicted.min())), 1.1 * float(max(slower.max(), predicted.max()))]
    against.title("time, as a multiple of linear scaling")
    against.ax.plot(slower, np.ones(len(slower)), linestyle="", marker="_", color=_GREY, zorder=1)
    against.reference(ends, ends, "equal")
    sources = sorted(errors["source"].unique())
    names = _names(sources)
    handles: list[Entry] = []
    for number, source in enumerate(sources):
        style: dict[str, Any] = {
            "color": _COLORS[number % len(_COLORS)],
            "marker": _MARKERS[number % len(_MARKERS)],
            "markersize": 3.6,
        }
        own = errors["source"] == source
        against.ax.plot(slower[own], predicted[own], linestyle="", alpha=0.75, **style)
        spread = errors.loc[own, "doublings"] + 0.08 * (number - (len(sources) - 1) / 2)
        apart.ax.plot(spread, errors.loc[own, "error"], linestyle="", alpha=0.75, **style)
        handles.append((Line2D([], [], linestyle="", **style), names[source]))
    plain = FuncFormatter(lambda value, _: f"{value:g}")
    for axis, which in ((against.ax.xaxis, "measured"), (against.ax.yaxis, "predicted")):
        axis.set_label_text(f"{which} / linear scaling")
    against.ax.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
    inside = [[tick for tick in ladder if ends[0] <= tick <= ends[1]] for ladder in _LADDERS]
    ticks = next((own for own in inside if len(own) <= _MOST_TICKS), inside[-1])
    for axis in (against.ax.xaxis, against.ax.yaxis):
        axis.set_ticks(ticks, minor=False)
        axis.set_major_formatter(plain)
        axis.set_minor_formatter(FuncFormatter(lambda value, _: ""))
    apart.title("error by distance from the calibration")
    shift = errors["doublings"] - 0.3
    apart.ax.plot(shift, errors["linear_error"], linestyle="", marker="_", color=_GREY, zorder=1)
    apart.ax.axhline(0, color="#444444", linewidth=0.8)
    apart.ax.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    apart.ax.set_xlim(float(errors["doublings"].min()) - 0.6, float(errors["doublings"].max()) + 0.6)
    apart.ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    apart.ax.set(xlabel="doublings from the calibration", ylabel="predicted / measured - 1")
    handles.append((Line2D([], [], linestyle="", marker="_", color=_GREY), "linear scaling"))
    handles.append((Line2D([], [], linestyle=":", color="#888888"), "equal"))
    canvas.legend(handles)
    mape, linear = errors["error"].abs().mean(), errors["linear_error"].abs().mean()
    held = errors["held"].mean()
    coverage = f"; {held:.0%} lie in the 95 % interval of their prediction" if not math.isnan(held) else ""
    canvas.say(
        f"{len(errors)} {' and '.join(sorted(set(errors['execution'])))} measurements, and predictions (modelled) by a "
        f"calibration that has not seen them: mean error {mape:.1%}, of linear scaling from the same base row "
        f"{linear:.1%}{coverage}.",
        "Errors in (b) are those of the measured quantity, a throughput or a time.",
    )


def _names(sources: Sequence[str]) -> dict[str, str]:
    """Return the names of sources in the legend: `paced on gloo` for runs, with their study where there are several."""
    runs = {source: match for source in sources if (match := _OF_RUNS.fullmatch(source))}
    several = len({match["study"] for match in runs.values()}) > 1
    names = dict(zip(sources, sources, strict=True))
    for source, match in runs.items():
        of_study = f"{match['study']}, " if several else ""
        names[source] = f"{of_study}{match['execution']} on {match['engine']}"
    return names
