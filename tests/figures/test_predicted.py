"""The figure of a prediction."""

from __future__ import annotations

from dataclasses import replace

import pandas as pd
from matplotlib.legend import Legend

from scalebench.figures.drawing.canvas import Canvas
from scalebench.figures.drawing.panel import Curve
from scalebench.figures.drawing.series_style import looks
from scalebench.figures.plotting import house_style
from scalebench.figures.predicted import OUTSIDE, fill_prediction
from scalebench.pricing.advice import batch_for, held_at, interval_for
from scalebench.pricing.grid import predict
from scalebench.pricing.prediction import Predictor
from scalebench.study.spec import Component
from tests.pricing.test_prediction import predictor

STRATEGIES = [
    Component(name="allreduce"),
    Component(name="local_sgd", options={"steps": 4}),
]


def test_points_have_the_batch_and_the_interval_that_hold_an_efficiency():
    own = predictor()
    grid = predict(own, STRATEGIES, [2, 64])
    with house_style():
        canvas = Canvas("prediction")
        fill_prediction(
            canvas,
            grid,
            [held_at(own, point) for point in grid.points],
            "resnet50",
            of_all=False,
        )
        canvas.finish()
    data = canvas.data()
    assert set(data["execution"].dropna()) == {"modelled"}
    drawn = data.set_index(["quantity", "series", "workers"])["y"]
    for quantity, found in (
        ("batch", {_place(point): batch_for(own, point) for point in grid.points}),
        (
            "interval",
            {
                _place(point): (interval_for(own, point) or (None, None))[1]
                for point in grid.points
            },
        ),
    ):
        held = {place: value for place, value in found.items() if value is not None}
        assert held
        assert drawn[quantity].to_dict() == held


def test_points_outside_the_inputs_range_are_crossed():
    whole = predictor()
    cluster = whole.platform.cluster.model_copy(update={"nodes": 1})
    own = Predictor(whole.workload, replace(whole.platform, cluster=cluster))
    grid = predict(own, STRATEGIES[:1], [2, 16])
    with house_style():
        canvas = Canvas("prediction")
        fill_prediction(
            canvas,
            grid,
            [held_at(own, point) for point in grid.points],
            "resnet50",
            of_all=False,
        )
        canvas.finish()
    crossed = (
        canvas.data()
        .dropna(subset=["workers"])
        .groupby("workers")["oversubscribed"]
        .all()
    )
    assert crossed.to_dict() == {2: False, 16: True}
    assert OUTSIDE in {
        text.get_text()
        for legend in canvas._pages[0].figure.findobj(Legend)
        for text in legend.get_texts()
    }


def _place(point):
    return str(point.strategy), point.workers


def test_equal_lines_are_drawn_apart_with_their_crosses():
    frame = pd.DataFrame(
        [
            {
                "execution": "modelled",
                "engine": "virtual",
                "series": name,
                "workers": workers,
                "interval": 8.0,
            }
            for name in ("allreduce", "ddp")
            for workers in (2, 4)
        ]
    ).assign(oversubscribed=True)
    with house_style():
        [[panel]] = Canvas("prediction").grids((1, 1, 2.0))
        panel.title("interval")
        interval = Curve("interval", shift=False, apart_pt=1.6)
        panel.curve(frame, interval, looks(["allreduce", "ddp"]))
    heights = [line.get_transform().transform((2, 8.0))[1] for line in panel.ax.lines]
    assert len(heights) == 4
    assert heights[0] == heights[1] < heights[2] == heights[3]
    assert set(panel.data()["y"]) == {8.0}
