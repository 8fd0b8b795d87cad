"""The figure of time and epochs to the target, and the target's line in convergence."""

from __future__ import annotations

import math

import pandas as pd
import pytest
from matplotlib.legend import Legend

from scalebench.errors import ResultsError
from scalebench.figures.base import FIGURES, EmptyFigureError
from scalebench.figures.drawing.canvas import Canvas
from scalebench.figures.plotting import house_style, plot
from scalebench.figures.style import choose_style
from tests.analysis.conftest import study  # noqa: F401
from tests.analysis.test_comparing import run
from tests.analysis.test_target import cell
from tests.facts import in_order, naming
from tests.records_factory import epoch_row

ROWS = [
    *cell("serial", 1, (1.0, 1.1, 0.9)),
    *cell("allreduce", 2, (1.0, 1.2, 1.1)),
    *cell("epoch_average", 2, (0.5, 0.55, 0.6)),
    *cell("allreduce", 4, (1.0, 1.2, None)),
    *cell("epoch_average", 4, (None, None, 0.5)),
]


def drawn(results, name="time-to-target", **options):
    with house_style():
        canvas = Canvas(name, **options)
        FIGURES.create(name, {}).draw(results, canvas)
        canvas.finish()
    return canvas


def test_figure_has_time_reduction_epochs_and_what_was_not_reached(study):  # noqa: F811
    canvas = drawn(study(rows=ROWS))
    data = canvas.data().set_index(["quantity", "series", "workers"]).sort_index()
    assert data.loc[("time_to_target_s", "serial", 1), "y"] == pytest.approx(
        (1.0 * 1.1 * 0.9) ** (1 / 3)
    )
    reduction = data.loc[("reduction", "epoch_average", 2)]
    assert 0 < reduction["low"] < reduction["y"] < reduction["high"] < 100
    assert ("reduction", "epoch_average", 4) not in data.index
    assert ("place_of_unreached", "epoch_average", 4) in data.index
    assert ("place_of_unreached", "allreduce", 4) not in data.index, (
        "two of three runs reached it"
    )
    drawn_epochs = canvas.data().query("quantity == 'epochs_to_target'")
    assert set(drawn_epochs["n"]) == {3, 2}, "one of three is too few for a median"
    said = canvas.caption()
    assert in_order(said, "Triangles", "no time", "at most half")
    assert in_order(said, "Stars", "more than half", "not all.")


def test_costs_to_the_target_are_times_at_the_rate_of_the_training(study):  # noqa: F811
    # trainings of 4 s, at 20 W
    rows = cell("serial", 1, (1.0, 1.0, 1.0), cost_core_hours=0.2, energy_j=80.0)
    data = drawn(study(rows=rows)).data().set_index("quantity")
    assert data.loc["core_hours", "y"] == pytest.approx(0.05)
    assert data.loc["energy_j", "y"] == pytest.approx(20.0)


def test_chosen_panel_is_drawn_alone(study):  # noqa: F811
    assert len(drawn(study(rows=ROWS), chosen=["epochs"]).panels) == 1


def test_study_that_never_reaches_its_target_has_no_empty_panels(study):  # noqa: F811
    rows = cell("serial", 1, (None, None)) + cell("epoch_average", 2, (None, None))
    with pytest.raises(
        EmptyFigureError, match="no run of the selection reached accuracy"
    ):
        drawn(study(rows=rows))


def test_group_that_never_reaches_its_target_has_no_panel_but_a_sentence(study):  # noqa: F811
    reached = [
        row
        for name in ("serial", "allreduce", "horovod", "ddp")
        for row in cell(name, 1, (1.0, 1.1))
    ]
    never = [
        row for name in ("asp", "bsp", "ssp") for row in cell(name, 1, (None, None))
    ]
    canvas = drawn(study(rows=reached + never))
    assert not any("asp" in panel.name for panel in canvas.shown)
    assert in_order(canvas.caption(), "Not within 6 epochs", "asp, bsp, ssp.")
    short = {"epochs": 1, "epochs_to_target": 1}
    rows = [row.model_copy(update=short) for row in reached]
    rows += [row.model_copy(update={"epochs": 1}) for row in never]
    assert in_order(drawn(study(rows=rows)).caption(), "Not within 1 epoch at any")


def test_legend_of_a_page_without_marks_says_nothing_of_the_unreached(study):  # noqa: F811
    """Triangles and stars are explained on the pages that have them."""
    names = (
        "serial",
        "allreduce",
        "horovod",
        "ddp",
        "bsp",
        "ssp",
        "dssp",
        "gossip",
        "asp",
        "slowmo",
        "epoch_average",
    )
    rows = [row for name in names for row in cell(name, 1, (1.0, 1.1, 1.1))]
    rows += cell("diloco", 1, (None, None, None)) + cell("fedavg", 1, (1.0, 1.0, None))
    with house_style(choose_style("slides")):
        canvas = Canvas("epochs-to-target", choose_style("slides"))
        FIGURES.create("epochs-to-target", {}).draw(study(rows=rows), canvas)
        pages = canvas.finish()
    found = []
    for page, figure in zip(canvas._pages, pages, strict=True):
        said = {
            text.get_text()
            for part in figure.findobj(Legend)
            for text in part.get_texts()
        }
        drawn = set(pd.concat([panel.data() for panel in page.panels])["quantity"])
        assert ("not within 6 epochs" in said) == ("place_of_unreached" in drawn)
        found.append(("not within 6 epochs" in said, "in some runs only" in said))
    assert (False, False) in found, "a page without marks"
    assert {any(marks) for marks in zip(*found, strict=True)} == {True}, (
        "each mark is on some page"
    )


def test_study_without_a_target_has_no_such_figure(study, tmp_path):  # noqa: F811
    results = study(rows=[run("serial", 1, 4.0)])
    assert (
        FIGURES.create("time-to-target", {}).absent(results)
        == "the study states no target_metric"
    )
    with pytest.raises(
        ResultsError,
        match=naming("time-to-target", "target_metric"),
    ):
        plot(results, tmp_path, ["time-to-target"])


def test_convergence_has_the_line_of_the_target(keep_study):
    data = drawn(keep_study, "convergence").data()
    assert set(data.loc[data["series"] == "target metric", "y"]) == {0.9}
    assert not math.isnan(data.loc[data["series"] == "target metric", "x"].min())


@pytest.fixture
def keep_study(tmp_path):
    from scalebench.analysis import load
    from scalebench.records.store import Store

    with Store(tmp_path / "study", fsync=False) as store:
        for one in cell("serial", 1, (1.0, 1.1)):
            store.append(
                one,
                [
                    epoch_row(
                        run_id=one.run_id,
                        epoch=n,
                        elapsed_s=0.5 * (n + 1),
                        test_metric=0.15 * (n + 1),
                    )
                    for n in range(6)
                ],
            )
    return load(tmp_path / "study")


def test_five_panels_stand_side_by_side_in_a_column_of_a_journal(study):  # noqa: F811
    rows = cell("serial", 1, (1.0, 1.0, 1.0), cost_core_hours=0.2, energy_j=80.0)
    rows += cell("allreduce", 2, (1.0, 1.0, 1.0), cost_core_hours=0.2, energy_j=80.0)
    rows += cell(
        "epoch_average", 2, (0.5, 0.6, 0.5), cost_core_hours=0.1, energy_j=40.0
    )
    style = choose_style("ieee")
    with house_style(style):
        canvas = Canvas("time-to-target", style)
        FIGURES.create("time-to-target", {}).draw(study(rows=rows), canvas)
        width, height = canvas.finish()[0].get_size_inches()
    assert len({panel.name for panel in canvas.panels if panel.name}) == 5
    assert width == pytest.approx(3.5)
    assert height < 7


def test_epochs_end_above_the_last_one_that_was_needed(study):  # noqa: F811
    (panel,) = drawn(
        study(rows=cell("serial", 1, (1.0, 1.1, 0.9))), chosen=["epochs"]
    ).panels
    needed = panel.data()["y"].max()
    assert panel.ax.get_ylim()[1] == pytest.approx(1.2 * needed)
