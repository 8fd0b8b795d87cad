"""The figure of communication and waiting against workers."""

from __future__ import annotations

import pytest

from scalebench.errors import ResultsError
from scalebench.figures import plot
from scalebench.figures.style import choose_style
from tests.analysis.conftest import study  # noqa: F401
from tests.analysis.test_comparing import run
from tests.facts import in_order, together
from tests.figures.test_time_to_target import drawn

ROWS = [
    run(
        "allreduce",
        workers,
        4.0,
        execution,
        repetition=at,
        seed=at,
        comm_s=0.1 * workers + 0.01 * at,
        wait_s=0.04,
    )
    for execution in ("native", "virtual")
    for workers in (2, 4)
    for at in (0, 1)
]


def test_shares_are_in_per_cent_with_intervals_of_measured_ones(study):  # noqa: F811
    canvas = drawn(study(rows=ROWS), "communication")
    data = canvas.data().set_index(["quantity", "execution", "workers"]).sort_index()
    assert data.loc[("exposed", "virtual", 4), "y"] == pytest.approx(100 * 0.405 / 4)
    assert data.loc[("waiting", "virtual", 4), "y"] == pytest.approx(1)
    assert data.loc[("transfer", "virtual", 4), "y"] == pytest.approx(100 * 0.365 / 4)
    native = data.loc[("exposed", "native", 4)]
    assert native["low"] < native["y"] < native["high"]
    assert together(canvas.caption(), "Error bars", "95 % confidence", "shares")
    assert "Error bars" not in drawn(study(rows=ROWS[4:]), "communication").caption()


def test_unmeasured_waiting_and_splits_are_left_out(study):  # noqa: F811
    canvas = drawn(
        study(rows=[run("allreduce", 4, 4.0, comm_s=1.0), run("ddp", 4, 4.0)]),
        "communication",
    )
    assert [panel.name for panel in canvas.panels] == ["exposed communication"]
    assert in_order(canvas.caption(), "split was not measured", "left out.")
    assert "left out" not in drawn(study(rows=ROWS), "communication").caption()


def test_hidden_communication_has_a_panel_where_it_is_known(study):  # noqa: F811
    rows = [
        run("ddp", workers, 4.0, "virtual", comm_s=0.1, wait_s=0.0, hidden_comm_s=1.0)
        for workers in (2, 4)
    ]
    canvas = drawn(study(rows=rows), "communication")
    assert canvas.panels[-1].name == "hidden behind compute"
    assert set(canvas.data().query("quantity == 'hidden'")["y"]) == {25}


def test_four_panels_stand_two_by_two_and_an_empty_one_is_left_out(study):  # noqa: F811
    def panels(hidden):
        rows = [
            run(
                "ddp",
                workers,
                4.0,
                "virtual",
                comm_s=0.1,
                wait_s=0.04,
                hidden_comm_s=hidden,
            )
            for workers in (2, 4)
        ]
        canvas = drawn(
            study(rows=rows), "communication", style=choose_style(width_in=7.0)
        )
        return [
            panel.leftmost for panel in canvas.panels
        ], "No communication was hidden" in canvas.caption()

    assert panels(1.0) == ([True, False, True, False], False)
    assert panels(0.0) == ([True, False, False], True)


def test_chosen_panel_is_drawn_alone(study):  # noqa: F811
    assert [
        panel.name
        for panel in drawn(study(rows=ROWS), "communication", chosen=["waiting"]).panels
    ] == ["waiting"]


def test_study_without_measured_communication_has_no_such_figure(study, tmp_path):  # noqa: F811
    with pytest.raises(
        ResultsError, match="no run on several workers has measured communication"
    ):
        plot(study(rows=[run("ddp", 4, 4.0, "native")]), tmp_path, ["communication"])
