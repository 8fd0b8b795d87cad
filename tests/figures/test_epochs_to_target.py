"""The figure of epochs to the target against the global batch."""

from __future__ import annotations

import pytest

from scalebench.errors import ResultsError
from scalebench.figures import plot
from tests.analysis.conftest import study  # noqa: F401
from tests.analysis.test_comparing import run
from tests.analysis.test_critical_batch import COUNTS, aimed, law
from tests.facts import in_order, naming
from tests.figures.test_time_to_target import drawn


@pytest.fixture(autouse=True)
def few_draws(monkeypatch):
    # each takes milliseconds
    monkeypatch.setattr("scalebench.analysis.target.DRAWS", 3)


def test_points_law_and_unreached_batches_are_drawn(study):  # noqa: F811
    rows = [aimed("allreduce", workers, law(workers)) for workers in COUNTS]
    canvas = drawn(
        study(rows=[aimed("serial", 1, 20), *rows, aimed("allreduce", 32, None)]),
        "epochs-to-target",
    )
    assert [panel.name for panel in canvas.panels] == ["serial", "allreduce"]
    data = canvas.data()
    points = data[
        (data["quantity"] == "epochs_to_target") & (data["series"] == "allreduce")
    ].sort_values("x")
    assert points["x"].tolist() == [8, 16, 32, 64, 128]
    assert points["y"].tolist() == [law(workers) for workers in COUNTS]
    assert data.loc[data["quantity"] == "place_of_unreached", "x"].tolist() == [256]
    critical = data[data["quantity"] == "critical batch"]
    assert critical["series"].tolist() == ["allreduce"]
    assert critical["y"].item() == pytest.approx(64, rel=0.05)
    said = canvas.caption()
    assert "Critical batch, in samples: allreduce (virtual) 6" in said
    assert "Triangles at the top" in said


def test_stars_are_explained_where_some_runs_reach_the_target(study):  # noqa: F811
    rows = [
        aimed("allreduce", workers, reached, seed=seed)
        for workers in (1, 2)
        for seed, reached in enumerate((20, 20, 20 if workers == 1 else None))
    ]
    caption = drawn(study(rows=rows), "epochs-to-target").caption()
    assert in_order(caption, "Stars", "more than half", "not all.")
    assert "Triangles" not in caption


def test_two_batches_are_points_without_a_law(study):  # noqa: F811
    canvas = drawn(
        study(rows=[aimed("allreduce", workers, 20) for workers in (1, 2)]),
        "epochs-to-target",
    )
    assert in_order(canvas.caption(), "No law", "3 global batches")


def test_epochs_that_do_not_grow_have_no_critical_batch(study):  # noqa: F811
    canvas = drawn(
        study(rows=[aimed("allreduce", workers, 20) for workers in COUNTS]),
        "epochs-to-target",
    )
    assert in_order(canvas.caption(), "allreduce (virtual) none", "10 times")


def test_study_without_a_target_has_no_such_figure(study, tmp_path):  # noqa: F811
    with pytest.raises(
        ResultsError,
        match=naming("epochs-to-target", "target_metric"),
    ):
        plot(study(rows=[run("serial", 1, 4.0)]), tmp_path, ["epochs-to-target"])
