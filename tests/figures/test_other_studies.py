"""Figures of studies that are tuned or scale weakly, with eight strategies; words, panels and ticks of others."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from matplotlib.text import Text
from matplotlib.ticker import MaxNLocator

from scalebench.analysis import Results, load
from scalebench.figures.style import choose_style
from scalebench.records.store import Store
from tests.facts import together
from tests.figures.test_many_series import EIGHT, draw
from tests.figures.test_plotting import _texts, overlapping
from tests.records_factory import keep_study, run_row, study_rows

TRIALS = 4
COUNTS = (1, 2, 4, 8)


@pytest.fixture(scope="module")
def weak(tmp_path_factory) -> Results:
    folder = tmp_path_factory.mktemp("results") / "weak"
    counts = {
        "workers": COUNTS,
        "native_workers": (),
        "repetitions": 2,
        "scaling": "weak",
    }
    with Store(folder, fsync=False) as store:
        for run, epochs in study_rows(strategies=("serial", "allreduce"), **counts):
            store.append(run, epochs)
        for place, (strategy, options) in enumerate(EIGHT):
            for run, epochs in study_rows(
                strategies=("epoch_average",), seed=place, **counts
            ):
                run_id = f"{run.run_id}-{place}"
                own = {
                    "run_id": run_id,
                    "strategy": strategy,
                    "strategy_options": json.dumps(options),
                }
                store.append(
                    run.model_copy(update=own),
                    [epoch.model_copy(update={"run_id": run_id}) for epoch in epochs],
                )
    return load(folder)


@pytest.fixture(scope="module")
def tuned(tmp_path_factory) -> Results:
    folder = tmp_path_factory.mktemp("results") / "tuned"
    with Store(folder, fsync=False) as store:
        for place, (strategy, options) in enumerate(EIGHT):
            for workers in COUNTS:
                own = {
                    "strategy": strategy,
                    "strategy_options": json.dumps(options),
                    "workers": workers,
                }
                for trial in range(TRIALS):
                    reached = None if trial == 0 else 1 / (1 + trial + place)
                    store.append(
                        run_row(
                            **own,
                            run_id=f"{place}-{workers}-{trial}",
                            trial=trial,
                            tuned=json.dumps({"lr": 0.01 * 2**trial}),
                            target_metric=0.9,
                            time_to_target_s=reached,
                            epochs_to_target=reached and 3,
                        ),
                        [],
                    )
                store.append(
                    run_row(
                        **own,
                        run_id=f"{place}-{workers}",
                        tuned=json.dumps({"lr": 0.04}),
                    ),
                    [],
                )
    keep_study(
        folder,
        {
            "tune": {
                "over": {"lr": [0.01, 0.08]},
                "trials": TRIALS,
                "metric": "time_to_target",
                "validation": 0.2,
            }
        },
    )
    return load(folder)


@pytest.mark.parametrize("name", ["weak-scaling", "tuning"])
def test_figures_of_other_studies_fit_their_pages(request, name):
    results = request.getfixturevalue("tuned" if name == "tuning" else "weak")
    chosen = choose_style("ieee")
    canvas, pages = draw(results, name, chosen)
    named = {
        "".join(text.get_text().split())
        for figure in pages
        for text in figure.findobj(Text)
    }
    assert {"".join(short.split()) for short in canvas.names.values()} <= named
    for figure in pages:
        assert figure.get_size_inches()[1] <= chosen.page_in + 1e-6
        assert overlapping(figure) == []
        for text in filter(lambda text: text.get_text(), _texts(figure)):
            box = text.get_window_extent()
            assert figure.bbox.x0 <= box.x0 < box.x1 <= figure.bbox.x1, text.get_text()


def test_trials_that_reached_nothing_are_on_the_axis(tuned):
    canvas, _ = draw(tuned, "tuning", choose_style("report"))
    panel = canvas.shown[0]
    assert panel.ax.get_xlim() == (0.5, TRIALS + 0.5)
    assert together(canvas.caption(), "first trial", "target")


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Results:
    folder = tmp_path_factory.mktemp("results") / "plain"
    with Store(folder, fsync=False) as store:
        for run, epochs in study_rows(
            workers=(1, 2, 4), native_workers=(1, 2), repetitions=2
        ):
            store.append(run, epochs)
    return load(folder)


def test_time_reduction_has_a_panel_for_each_per_batch_baseline(plain):
    canvas, _ = draw(plain, "time-reduction", choose_style("report"))
    assert [panel.name for panel in canvas.shown] == [
        "against allreduce",
        "against horovod",
        "against ddp",
    ]


def test_reduction_parts_say_what_engine_and_frequency_save(plain):
    _, pages = draw(plain, "reduction-parts", choose_style("report"))
    words = " ".join(
        " ".join(text.get_text().split()) for text in pages[0].findobj(Text)
    )
    assert together(words, "allreduce", "baseline", "engine")
    assert "saved by synchronising less often" in words


def test_ticks_of_epochs_are_whole_and_evenly_apart(plain):
    canvas, _ = draw(plain, "convergence", choose_style("ieee"))
    panels = [panel for panel in canvas.shown if panel.ax.get_xlabel() == "epochs"]
    assert panels
    for panel in panels:
        assert isinstance(panel.ax.xaxis.get_major_locator(), MaxNLocator)
        ticks = panel.ax.get_xticks()
        apart = {round(after - before, 9) for before, after in pairwise(ticks)}
        assert len(apart) == 1
        assert all(tick == int(tick) for tick in ticks)
