"""Lines are drawn where their numbers are, but for equal ones, of which both are to be seen."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from scalebench.figures.drawing.panel import Curve, Panel
from scalebench.figures.drawing.series_style import looks


def test_only_lines_that_cover_each_other_are_set_apart():
    rows = [
        ("allreduce", [0.5, 0.6]),
        ("ddp", [0.5002, 0.5998]),
        ("epoch_average", [0.4, 0.55]),
    ]
    table = pd.DataFrame(
        {
            "execution": "virtual",
            "engine": "virtual",
            "series": name,
            "workers": 2,
            "epochs": epoch,
            "metric": value,
        }
        for name, values in rows
        for epoch, value in enumerate(values, start=1)
    ).assign(oversubscribed=False)
    ax = Figure().add_subplot()
    panel = Panel(ax, 3.0)
    panel.curve(
        table,
        Curve("metric", over="epochs", shift=False, apart_pt=0.8),
        looks(name for name, _ in rows),
    )
    lines = [line for line in ax.lines if len(line.get_xdata())]
    assert len(lines) == len(rows)
    at = [line.get_transform().transform((1, 0.5))[1] for line in lines]
    assert at[0] < at[2] < at[1], "equal lines stand on both sides of what is true"
    assert at[2] == ax.transData.transform((1, 0.5))[1]
