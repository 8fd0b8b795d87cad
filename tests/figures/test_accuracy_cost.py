"""The figure of the metric against time and core-hours."""

from __future__ import annotations

import json

import numpy as np
import pytest
from matplotlib.path import Path
from matplotlib.text import Text

from scalebench.errors import ResultsError
from scalebench.figures import default_figures, plot
from scalebench.figures.base import FIGURES
from scalebench.figures.drawing.canvas import WIDE
from scalebench.figures.selection import Selection
from scalebench.figures.style import choose_style
from tests.analysis.conftest import study  # noqa: F401
from tests.analysis.test_comparing import run
from tests.analysis.test_pareto import timed
from tests.facts import in_order, together
from tests.figures.test_time_to_target import drawn

ROWS = [
    timed(
        strategy, workers, seconds * noise, metric + 0.01 * at, repetition=at, seed=at
    )
    for strategy, workers, seconds, metric in [
        ("serial", 1, 8.0, 0.95),
        ("allreduce", 4, 4.0, 0.93),
        ("epoch_average", 4, 3.0, 0.90),
        ("epoch_average", 2, 5.0, 0.88),
    ]
    for at, noise in enumerate((1.0, 1.1, 0.95))
]


def test_points_have_both_intervals_and_the_front_is_recorded(study):  # noqa: F811
    canvas = drawn(study(rows=ROWS), "accuracy-cost")
    data = canvas.data()
    time = data[data["panel"] == "time, virtual"]
    front = time[time["quantity"] == "front"].sort_values("x")
    assert front["workers"].tolist() == [4, 4, 1]
    assert front["y"].tolist() == pytest.approx([0.91, 0.94, 0.96])
    assert set(data["panel"]) == {"time, virtual", "core-hours, virtual"}
    for quantity in ("metric", "train_s"):
        own = time[time["quantity"] == quantity]
        assert len(own) == 4
        assert (own["low"] < own["y"]).all()
        assert (own["y"] < own["high"]).all()
    assert "Modelled" not in canvas.caption()


def test_front_of_the_whole_study_stays_with_a_selection(study):  # noqa: F811
    data = drawn(
        study(rows=ROWS),
        "accuracy-cost",
        selection=Selection(strategies=("serial",)),
        chosen=["time"],
    ).data()
    assert len(data[data["quantity"] == "front"]) == 3
    assert set(data.loc[data["quantity"] == "metric", "series"]) == {"serial"}


@pytest.mark.parametrize(("counts", "panels"), [((4,), 1), ((2, 4, 8), 4)])
def test_many_strategies_share_a_panel_where_each_has_few_points(study, counts, panels):  # noqa: F811
    names = ("serial", "ddp", "adaptive", "hybrid", "model_parallel", "tensor")
    options = [(name, {}) for name in names]
    options += [("fsdp", {"shard": shard}) for shard in (1, 2, 3)]
    options += [("pipeline", {"schedule": name}) for name in ("gpipe", "interleaved")]
    rows = [
        timed(name, workers, 4.0 + place, 0.9, strategy_options=json.dumps(own))
        for place, (name, own) in enumerate(options)
        for workers in counts
    ]
    canvas = drawn(study(rows=rows), "accuracy-cost", chosen=["time"])
    assert len([panel for panel in canvas.panels if panel.ax.get_visible()]) == panels


def test_executions_have_panels_of_their_own_and_modelled_runs_a_word(study):  # noqa: F811
    native = [timed("allreduce", 2, 6.0, 0.8, execution="native")]
    modelled = [
        run(
            "allreduce",
            8,
            1.0,
            "modelled",
            "virtual",
            final_metric=None,
            metric_name=None,
        )
    ]
    canvas = drawn(study(rows=ROWS + native + modelled), "accuracy-cost")
    assert [panel.name for panel in canvas.panels] == [
        *("time, native", "core-hours, native", "time, virtual", "core-hours, virtual")
    ]
    assert in_order(canvas.caption(), "Modelled runs", "no metric", "left out.")


def test_time_whose_interval_is_wider_than_the_panel_has_a_mark_along_its_axis(study):  # noqa: F811
    """Two repetitions a factor of 1.4 apart: their t interval is a factor of 9 to either side."""
    rows = [
        timed(
            strategy,
            4,
            seconds * noise,
            metric,
            repetition=at,
            seed=at,
            execution="native",
        )
        for strategy, seconds, metric in (
            ("allreduce", 4.0, 0.93),
            ("epoch_average", 3.0, 0.90),
        )
        for at, noise in enumerate((1.0, 1.4))
    ]
    canvas = drawn(study(rows=rows), "accuracy-cost", chosen=["time"])
    (panel,) = canvas.panels
    assert panel.marks_wide
    marks = [
        line.get_marker().vertices
        for line in panel.ax.lines
        if isinstance(line.get_marker(), Path)
    ]
    assert len(marks) == 2
    assert all(np.ptp(along[:, 0]) > np.ptp(along[:, 1]) for along in marks), "along x"
    assert any(text.get_text() == WIDE for text in panel.ax.figure.figure.findobj(Text))


def test_counts_of_crowded_points_stand_beside_them(study):  # noqa: F811
    """Labels cover no mark and no other label, and each is near its point or led to it by a line."""
    crowd = [
        timed(
            strategy,
            workers,
            seconds / workers,
            0.90 + 0.004 * place,
            repetition=at,
            seed=at,
        )
        for place, workers in enumerate((8, 6, 5, 4, 3, 2, 1))
        for strategy, seconds in (
            ("allreduce", 8.0),
            ("epoch_average", 7.9),
            ("local_sgd", 7.95),
        )
        for at in range(2)
    ]
    canvas = drawn(study(rows=crowd), "accuracy-cost", style=choose_style("ieee"))
    assert [panel.name for panel in canvas.shown] == [
        "time, virtual",
        "core-hours, virtual",
    ]
    for panel in canvas.shown:
        figure = panel.ax.get_figure(root=True)
        figure.draw_without_rendering()
        labels = [(text, Text.get_window_extent(text)) for text in panel.ax.texts]
        numbers = {
            int(count) for text, _ in labels for count in text.get_text().split(", ")
        }
        front = canvas.data().query(f"quantity == 'front' and panel == {panel.name!r}")
        assert numbers == set(front["workers"]) >= {1}
        marks = [
            line
            for line in panel.ax.get_lines()
            if line.get_marker() not in ("", "None")
        ]
        points = [
            panel.ax.transData.transform(point)
            for line in marks
            for point in line.get_xydata()
        ]
        for text, box in labels:
            assert not any(box.contains(*point) for point in points), text.get_text()
            assert not any(
                box.padded(-0.5).overlaps(other.padded(-0.5))
                for one, other in labels
                if one is not text
            )
            away = min(
                np.hypot(*(np.clip(point, box.min, box.max) - point))
                for point in points
            )
            assert text.arrow_patch or away < 8 * figure.dpi / 72, text.get_text()


def test_figure_is_drawn_when_named(study, tmp_path):  # noqa: F811
    assert "accuracy-cost" not in default_figures()
    modelled = study(
        rows=[
            run(
                "allreduce",
                8,
                1.0,
                "modelled",
                "virtual",
                final_metric=None,
                metric_name=None,
            )
        ]
    )
    why = "no run has a metric; modelled runs train nothing"
    assert FIGURES.create("accuracy-cost", {}).absent(modelled) == why
    with pytest.raises(ResultsError, match=f"accuracy-cost cannot be drawn: {why}"):
        plot(modelled, tmp_path, ["accuracy-cost"])


def test_memory_is_drawn_where_workers_have_processes(study):  # noqa: F811
    """The least and the largest of the repetitions bound it; a device's memory counts in place of a process's."""
    memory = [
        {"peak_rss_mib": 400.0},
        {"peak_rss_mib": 420.0},
        {"peak_rss_mib": 900.0, "peak_device_mib": 410.0},
    ]
    rows = [
        timed(
            "ddp", 4, 6.0 + at, 0.8, execution="native", repetition=at, seed=at, **own
        )
        for at, own in enumerate(memory)
    ]
    canvas = drawn(study(rows=rows), "accuracy-cost")
    assert [panel.name for panel in canvas.panels] == [
        "time, native",
        "core-hours, native",
        "memory, native",
    ]
    data = canvas.data()
    (drawn_memory,) = data[data["quantity"] == "peak_mib"].to_dict("records")
    assert (drawn_memory["y"], drawn_memory["low"], drawn_memory["high"]) == (
        410.0,
        400.0,
        420.0,
    )
    assert together(canvas.caption(), "largest", "process", "device")
