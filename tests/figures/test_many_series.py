"""Figures of eight strategies with long options: pages, names, colours, and marks of wide intervals."""

from __future__ import annotations

import json
import random
import re
from functools import cache
from itertools import combinations

import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import to_rgb
from matplotlib.legend import Legend
from matplotlib.text import Text

from scalebench.analysis import Results, load
from scalebench.figures import PlotRequest, figure_names, plot_folder
from scalebench.figures.base import FIGURES
from scalebench.figures.drawing.canvas import WIDE, Canvas
from scalebench.figures.drawing.panel import Curve
from scalebench.figures.drawing.series_style import (
    EXECUTION_WORDS,
    NEUTRAL,
    family,
    grouped,
    looks,
    short_names,
    wrapped,
)
from scalebench.figures.plotting import house_style
from scalebench.figures.style import choose_style
from scalebench.records.store import Store
from tests.conftest import some
from tests.facts import together
from tests.figures.test_plotting import _texts, overlapping
from tests.records_factory import run_row, study_rows

EIGHT = [
    ("epoch_average", {}),
    ("epoch_average", {"every": 2}),
    ("local_sgd", {"first": 4, "steps": 16}),
    ("local_sgd", {"first": 4, "steps": 32}),
    ("hierarchical_local_sgd", {"groups": [4, 16], "periods": [8, 32]}),
    ("hierarchical_local_sgd", {"groups": [4, 16], "periods": [8, 64]}),
    ("torch_post_local_sgd", {"start": 100, "steps": 8, "subgroup": 4}),
    ("torch_post_local_sgd", {"start": 100, "steps": 16, "subgroup": 4}),
]
NOT_HERE = ("weak-scaling", "tuning")  # of other studies


@pytest.fixture(scope="module")
def eight(tmp_path_factory) -> Results:
    folder = tmp_path_factory.mktemp("results") / "eight"
    counts = {"workers": (1, 2, 4, 8, 16), "native_workers": (1, 2), "repetitions": 2}
    rows = study_rows(strategies=("serial", "allreduce", "horovod", "ddp"), **counts)
    for place, (strategy, options) in enumerate(EIGHT):
        rows += [
            (
                run.model_copy(
                    update={
                        "run_id": f"{run.run_id}-{place}",
                        "strategy": strategy,
                        "strategy_options": json.dumps(options),
                        "train_s": run.train_s * (1 + 0.02 * place),
                    }
                ),
                [
                    epoch.model_copy(update={"run_id": f"{run.run_id}-{place}"})
                    for epoch in epochs
                ],
            )
            for run, epochs in study_rows(
                strategies=("epoch_average",), seed=place, **counts
            )
        ]
    with Store(folder, fsync=False) as store:
        for run, epochs in rows:
            at = next((epoch for epoch in epochs if epoch.test_metric >= 0.9), None)
            reached = {
                "time_to_target_s": at and at.elapsed_s,
                "epochs_to_target": at and at.epoch + 1,
            }
            store.append(
                run.model_copy(update={"target_metric": 0.9, **reached}), epochs
            )
    return load(folder)


def draw(results, name, style):
    with house_style(style):
        canvas = Canvas(name, style)
        FIGURES.create(name, {}).draw(results, canvas)
        return canvas, canvas.finish()


@pytest.fixture(scope="module")
def drawn(eight):
    """A figure of the study in a style: drawn once, as tests only look at it."""
    with pytest.MonkeyPatch.context() as patch:
        # an interval as wide as any in print
        patch.setattr("scalebench.analysis.target.DRAWS", 20)
        yield cache(lambda name, style: draw(eight, name, choose_style(style)))


@pytest.mark.parametrize("style", some(["ieee", "slides", "report"], "ieee"))
@pytest.mark.parametrize(
    "name", [name for name in figure_names() if name not in NOT_HERE]
)
def test_each_page_fits_and_names_its_series(drawn, name, style):
    canvas, pages = drawn(name, style)
    for page, figure in zip(canvas._pages, pages, strict=True):
        assert figure.get_size_inches()[1] <= choose_style(style).page_in + 1e-6
        assert overlapping(figure) == []
        for text in filter(Text.get_text, _texts(figure)):
            box = text.get_window_extent()
            assert figure.bbox.x0 <= box.x0 < box.x1 <= figure.bbox.x1, text.get_text()
            assert figure.bbox.y0 <= box.y0 < box.y1 <= figure.bbox.y1, text.get_text()
        shown = [text.get_text() for text in figure.findobj(Text)]
        named = {re.sub(r"[\s\n]+", "", text) for text in shown}
        for series in page.series:
            assert re.sub(r"\s+", "", canvas.names[series]) in named, (
                "each curve is in the legend of its page"
            )
    titles = [panel.ax.get_title(loc="left") for panel in canvas.shown]
    assert len(set(titles)) == len(titles)
    assert not any("..." in title for title in titles)
    assert all(title.endswith(re.sub(r"^\([a-z]+\) ", "", title)) for title in titles)


@pytest.mark.parametrize(
    "name", some(["breakdown", "reduction-parts", "communication"], "breakdown")
)
def test_slides_keep_texts_apart_below_long_titles(drawn, name):
    _, pages = drawn(name, "slides")
    assert len(pages) > 1
    for figure in pages:
        assert overlapping(figure) == []
        assert any(ax.get_ylabel() for ax in figure.axes)
        for ax in figure.axes:
            label = ax.yaxis.label.get_window_extent()
            assert (
                not ax.get_ylabel()
                or label.height <= 1.1 * ax.get_window_extent().height
            ), ax.get_ylabel()


@pytest.mark.parametrize("name", ["strong-scaling", "convergence"])
def test_panels_of_a_group_are_on_one_page(drawn, name):
    canvas, _ = drawn(name, "ieee")
    groups = [
        [panel.ax.get_title(loc="left").partition(": ")[2] for panel in page.panels]
        for page in canvas._pages
    ]
    assert len(groups) > 1
    assert all(not set(one) & set(other) for one, other in combinations(groups, 2))


@pytest.mark.parametrize("name", ["breakdown", "reduction-parts"])
def test_axes_of_bars_are_labelled_workers_and_the_legend_names_executions(drawn, name):
    canvas, (figure, *_) = drawn(name, "ieee")
    assert {panel.ax.get_xlabel() for panel in canvas.shown} == {"workers"}
    legend = {
        text.get_text() for part in figure.findobj(Legend) for text in part.get_texts()
    }
    assert {"virtual (computed time)", "native (measured)"} <= legend
    below = {text.get_text() for text in canvas.shown[-1].ax.texts}
    assert {"native", "virtual"} <= below, (
        "two executions have a name each below their counts"
    )


def test_marks_at_the_end_of_an_axis_are_whole(tmp_path):
    rows = [run_row(run_id=str(n), workers=n, final_metric=1.0) for n in (1, 2)]
    with Store(tmp_path / "whole", fsync=False) as store:
        for row in rows:
            store.append(row, [])
    canvas, _ = draw(load(tmp_path / "whole"), "strong-scaling", choose_style("ieee"))
    (metric,) = [panel for panel in canvas.shown if panel.name == "test accuracy"]
    (line,) = [
        line for line in metric.ax.get_lines() if line.get_marker() not in ("", "None")
    ]
    assert not line.get_clip_on()


def test_equal_curves_of_convergence_are_seen_side_by_side(drawn):
    canvas, _ = drawn("convergence", "ieee")
    lines = [
        line
        for line in canvas.shown[0].ax.get_lines()
        if line.get_marker() not in ("", "None")
    ]
    heights = [line.get_transform().transform((1, 0.9))[1] for line in lines]
    assert canvas.shown[0].series == {"serial", "allreduce", "horovod", "ddp"}
    assert len(set(np.round(heights, 3))) == 3, (
        "serial is alone, and stands where its numbers are, as the second of three"
    )


def test_equal_trials_are_seen_side_by_side():
    names = [f"local_sgd(steps={steps})" for steps in (2, 4, 8)]
    trials = pd.DataFrame(
        {"series": np.repeat(names, 2), "trial": [1, 2] * 3, "best": 0.5}
    )
    trials = trials.assign(
        execution="virtual", engine="virtual", workers=8, oversubscribed=False
    )
    with house_style():
        ((panel,),) = Canvas("tuning").grids((1, 1, 2.0))
        best = Curve("best", over="trial", shift=False, aside=1.5)
        panel.curve(trials, best, looks(names))
    lines = [
        line
        for line in panel.ax.get_lines()
        if len(line.get_xdata()) == 2 and line.get_linestyle() != "None"
    ]
    first = [line.get_xdata()[0] for line in lines]
    assert np.diff(first).min() > 0.05
    assert abs(np.array(first) - 1).max() < 0.5
    assert set(panel.data()["x"]) == {1, 2}, "the data have the trials"


def test_panels_with_one_series_are_told_apart_without_their_letter(drawn):
    for name in ("breakdown", "reduction-parts", "epochs-to-target"):
        canvas, _ = drawn(name, "ieee")
        titles = [
            re.sub(r"^\([a-z]+\) |\n| ", "", panel.ax.get_title(loc="left"))
            for panel in canvas.shown
        ]
        assert len(set(titles)) == len(titles)


def test_groups_keep_a_family_together():
    shown = [
        "epoch_average",
        "epoch_average(every=2)",
        "local_sgd(steps=4)",
        "local_sgd(steps=16)",
    ]
    names = [
        "allreduce",
        "ddp",
        "diloco(outer_lr=0.5)",
        "diloco(outer_lr=0.7)",
        "epoch_async",
        *shown,
        "ssp",
    ]
    assert grouped(names) == [names[:2], names[2:5], names[5:]]
    alone = [f"local_sgd(steps={n})" for n in range(9)]
    assert [len(part) for part in grouped(["allreduce", "ddp", *alone])] == [
        2,
        3,
        3,
        3,
    ], "one family is split evenly"


def test_further_pages_are_written_beside_the_first(eight, tmp_path):
    request = PlotRequest(("strong-scaling",), ("svg",), choose_style("ieee"))
    (figure,) = plot_folder(eight.folder, tmp_path, request, place=tmp_path)
    names = [file.name for file in figure.files]
    assert names[:2] == ["strong-scaling.svg", "strong-scaling-2.svg"]
    assert names[-1] == "strong-scaling.csv", "one file has the numbers of all pages"
    assert figure.pages == sum(name.endswith(".svg") for name in names) > 1
    assert (tmp_path / "strong-scaling-2.txt").read_text().startswith("(")
    assert "Method: Strong scaling" in (tmp_path / "strong-scaling.txt").read_text()


def test_every_figure_that_is_left_out_exists():
    assert set(NOT_HERE) < set(figure_names())


@pytest.mark.parametrize(
    "name",
    some(
        [name for name in figure_names() if name not in NOT_HERE],
        "strong-scaling",
        "scaling-laws",
    ),
)
def test_caption_in_the_picture_has_at_most_four_lines(drawn, name):
    _, (first, *_) = drawn(name, "report")
    (text,) = [
        text.get_text()
        for text in first.findobj(Text)
        if text.get_text().startswith("mlp(hidden")
    ]
    assert text.count("\n") < 4
    assert "steps per epoch" not in text


def test_panels_of_groups_name_their_strategies(drawn):
    canvas, _ = drawn("strong-scaling", "report")
    titles = [panel.name for panel in canvas.shown]
    assert titles[0] == "training time: serial, allreduce, horovod, ddp"
    assert titles[3] == "training time: epoch_average, hierarchical_local_sgd"


def test_short_names_keep_the_difference():
    names = [f"local_sgd(first=4, groups=[1, 2], steps={steps})" for steps in (16, 32)]
    assert short_names(names) == {
        names[0]: "local_sgd(…, steps=16)",
        names[1]: "local_sgd(…, steps=32)",
    }
    assert (
        short_names(["epoch_average(every=2)", "epoch_average"])[
            "epoch_average(every=2)"
        ]
        == "epoch_average(every=2)"
    )
    beside = [
        "epoch_average",
        "epoch_average(every=2)",
        "epoch_average in another",
        "epoch_average(every=2) in another",
    ]
    assert list(short_names(beside).values()) == beside, (
        "every=2 is what tells two of them apart"
    )
    alone = "hierarchical_local_sgd(groups=[4, 16], periods=[8, 32])"
    assert short_names([alone, "ddp"])[alone] == alone
    assert family("mine.py:Mine(first=3) on gloo") == "mine.py:Mine"


@pytest.mark.parametrize("seed", range(30))
def test_short_names_are_distinct(seed):
    draw = random.Random(seed)
    options = [f"{key}={draw.randint(1, 3)}" for key in ("alpha", "beta", "gamma_ray")]
    heads = ["local_sgd", "a_very_long_name_of_a_strategy"]
    names = {
        f"{draw.choice(heads)}({', '.join(sorted(draw.sample(options, draw.randint(1, 3))))})"
        for _ in range(12)
    }
    names |= {f"{name} on gloo" for name in list(names)[:3]}
    assert len(set(short_names(names).values())) == len(names)


def test_letter_of_a_panel_has_no_line_of_its_own():
    with house_style():
        assert (
            wrapped("(d) epoch_average(every=2)", 95, 8)
            == "(d) epoch_average(\nevery=2)"
        )


def test_numbers_are_not_broken():
    with house_style(choose_style("ieee")):
        lines = wrapped("(h) slowmo(slow_lr=0.9, steps=4)", 62, 8).split("\n")
    assert any("0.9" in line for line in lines)


def test_wrapped_lines_lose_no_letter():
    text = (
        "(a) hierarchical_local_sgd(groups=[4, 16], periods=[8, 32]) against allreduce"
    )
    with house_style():
        lines = wrapped(text, 80, 10)
    assert re.sub(r"\s", "", lines) == re.sub(r"\s", "", text)
    assert lines.count("\n") >= 4


# How cones that lack red or green see linear RGB: Machado, Oliveira and Fernandes, IEEE
# Trans. Vis. 15 (2009), 1291.
SEEN = {
    "normal": np.eye(3),
    "protan": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deutan": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
}


def lab(color, eyes="normal"):
    """CIELAB of a colour under D65."""
    rgb = np.array(to_rgb(color))
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    linear = np.clip(np.array(SEEN[eyes]) @ linear, 0, 1)
    to_xyz = [
        [0.4124564, 0.3575761, 0.1804375],
        [0.2126729, 0.7151522, 0.0721750],
        [0.0193339, 0.1191920, 0.9503041],
    ]
    xyz = np.array(to_xyz) @ linear / [0.95047, 1.0, 1.08883]
    f = np.where(xyz > 216 / 24389, np.cbrt(xyz), (24389 / 27 * xyz + 16) / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def apart(one, other, eyes="normal"):
    return float(np.linalg.norm(lab(one.color, eyes) - lab(other.color, eyes)))


FAMILIES = [
    *("serial", "allreduce", "horovod", "ddp", "epoch_average", "epoch_async"),
    *(
        "local_sgd",
        "post_local_sgd",
        "slowmo",
        "diloco",
        "asp",
        "fedavg",
        "daso-heat",
        "mine.py:Mine",
    ),
]


@pytest.mark.parametrize("seed", range(20))
def test_twelve_series_are_distinguishable(seed):
    """Colours of a family are apart for all eyes, all others for normal ones; families differ in marks too."""
    draw = random.Random(seed)
    families = draw.sample(FAMILIES, draw.randint(3, 12))
    series = [
        f"{name}(steps={n})" if n else name
        for name in families
        for n in range(4)
        if name != "serial" or not n
    ]
    chosen = draw.sample(series, 12) if len(series) >= 12 else series
    given = looks(chosen)
    assert set(given) == set(chosen)
    for (name, one), (other_name, other) in combinations(given.items(), 2):
        assert apart(one, other) >= 14, (name, other_name)
        if family(name) == family(other_name):
            assert min(apart(one, other, eyes) for eyes in SEEN) >= 14, (
                name,
                other_name,
            )
            assert one.marker == other.marker
            assert one.inside != other.inside
        else:
            assert one.marker != other.marker, (name, other_name)


@pytest.mark.parametrize("seed", range(20))
def test_twelve_families_are_distinguishable_by_colour_alone(seed):
    given = looks(random.Random(seed).sample(FAMILIES, 12))
    assert len(given) == 12
    for eyes in SEEN:
        for (name, one), (other_name, other) in combinations(given.items(), 2):
            assert apart(one, other, eyes) >= 14, (name, other_name, eyes)


def test_twelve_options_of_one_family_are_told_apart():
    """By shade for all eyes, or, where shades begin again, by what is inside of the mark and by the dash."""
    given = list(looks([f"local_sgd(steps={2**n})" for n in range(12)]).values())
    for one, other in combinations(given, 2):
        by_shade = min(apart(one, other, eyes) for eyes in SEEN) >= 14
        by_form = one.inside != other.inside and one.dash != other.dash
        assert by_shade or by_form
    legend = [look.sample() for look in given]
    lines = [sample[0] if isinstance(sample, tuple) else sample for sample in legend]
    assert len({str(line._unscaled_dash_pattern) for line in lines}) == 3
    modelled = [look.line("modelled")["linestyle"] for look in given]
    assert set(modelled[:4]) == {"--"}
    assert modelled[4:] == [look.dash for look in given[4:]], "as the legend has them"


def test_no_series_is_grey():
    names = [f"{name}(steps={n})" if n else name for name in FAMILIES for n in range(4)]
    given = looks(names)
    assert set(given) == set(names)
    for name, look in given.items():
        _, a, b = lab(look.color)
        assert family(name) == "serial" or np.hypot(a, b) > 12, name


def test_interval_wider_than_the_panel_becomes_a_mark(tmp_path):
    rows = [
        run_row(run_id=f"{n}-{r}", workers=n, repetition=r, train_s=4.0**r / n)
        for n in (1, 2)
        for r in (0, 1)
    ]
    rows += [
        run_row(run_id=f"8-{r}", workers=8, repetition=r, train_s=0.2 + 0.001 * r)
        for r in (0, 1)
    ]
    with Store(tmp_path / "wide", fsync=False) as store:
        for row in rows:
            store.append(row, [])
    canvas, (figure,) = draw(
        load(tmp_path / "wide"), "strong-scaling", choose_style("report")
    )
    assert canvas.shown[0].marks_wide
    assert canvas.data()["high"].max() > 1000, "the data keep the ends"
    assert [text.get_text() for text in figure.findobj(Text)].count(WIDE) == 1


def test_mark_of_wide_intervals_is_explained_where_it_is_drawn(tmp_path):
    """A page of panels without one says nothing of it."""
    rows = [
        run_row(
            run_id=f"{strategy}-{workers}-{repetition}",
            strategy=strategy,
            workers=workers,
            repetition=repetition,
            train_s=(9.0 if strategy == "allreduce" and workers == 1 else 1.001)
            ** repetition
            / workers,
        )
        for strategy in FAMILIES[:10]
        for workers in ((1,) if strategy == "serial" else (1, 2, 64))
        for repetition in (0, 1)
    ]
    with Store(tmp_path / "wide", fsync=False) as store:
        for row in rows:
            store.append(row, [])
    canvas, figures = draw(
        load(tmp_path / "wide"), "strong-scaling", choose_style("slides")
    )
    assert len(figures) > 1
    marked = [any(panel.marks_wide for panel in page.panels) for page in canvas._pages]
    assert not all(marked)
    assert [
        any(text.get_text() == WIDE for text in figure.findobj(Text))
        for figure in figures
    ] == marked


@pytest.mark.parametrize(
    "name", ["strong-scaling", "breakdown", "reduction-parts", "time-to-target"]
)
def test_legend_explains_what_its_page_shows_and_nothing_else(drawn, name):
    canvas, figures = drawn(name, "slides")
    assert len(figures) > 1
    for page, figure in zip(canvas._pages, figures, strict=True):
        said = {
            text.get_text().replace("\n", " ")
            for part in figure.findobj(Legend)
            for text in part.get_texts()
        }
        data = pd.concat([panel.data() for panel in page.panels])
        drawn = data[data["y"].notna() & (data["y"] != 0)]
        shown = {EXECUTION_WORDS[name] for name in drawn["execution"].dropna()}
        assert said & set(EXECUTION_WORDS.values()) == shown
        crosses = [
            line
            for ax in figure.axes
            for line in ax.get_lines()
            if line.get_marker() == "x"
        ]
        marks = [line for line in crosses if line.get_color() == NEUTRAL]
        assert ("oversubscribed (no baseline)" in said) == bool(marks)
        assert all(mark.zorder < 3 for mark in marks), (
            "points, at 3 and above, would be hidden"
        )


def test_part_of_a_reduction_without_bars_is_not_in_the_legend(tmp_path):
    rows = [
        run_row(
            run_id=f"{name}-{workers}",
            strategy=name,
            workers=workers,
            train_s=seconds / workers,
        )
        for name, seconds in (
            ("serial", 8.0),
            ("allreduce", 8.0),
            ("horovod", 8.0),
            ("epoch_average", 6.0),
        )
        for workers in ((1,) if name == "serial" else (1, 2, 4))
    ]
    with Store(tmp_path / "parts", fsync=False) as store:
        for row in rows:
            store.append(row, [])
    _, (figure,) = draw(
        load(tmp_path / "parts"), "reduction-parts", choose_style("report")
    )
    said = " ".join(
        text.get_text() for part in figure.findobj(Legend) for text in part.get_texts()
    )
    assert "saved by synchronising less often" in said
    assert "engine" not in said, (
        "allreduce takes as long as horovod: no bar has this part"
    )


def test_signs_behind_times_of_bars_are_explained(tmp_path):
    with Store(tmp_path / "disturbed", fsync=False) as store:
        for workers in (1, 2):
            busy = {
                "execution": "native",
                "engine": "mpi",
                "others_load": 0.9 * (workers == 2),
            }
            store.append(run_row(run_id=f"busy-{workers}", workers=workers, **busy), [])
    canvas, (figure,) = draw(
        load(tmp_path / "disturbed"), "breakdown", choose_style("slides")
    )
    texts = [text.get_text() for text in canvas.shown[0].ax.texts]
    assert sum(text.endswith(" †") for text in texts) == 1
    said = {
        text.get_text() for part in figure.findobj(Legend) for text in part.get_texts()
    }
    assert "disturbed by other programs (no baseline)" in said
    assert not any("oversubscribed" in words for words in said)
    assert "†: other programs took" in canvas.caption()


def test_front_is_in_the_legend_of_pages_that_have_one(tmp_path):
    with Store(tmp_path / "disturbed", fsync=False) as store:
        for workers in (1, 2):
            store.append(
                run_row(run_id=str(workers), workers=workers, execution="virtual"), []
            )
            busy = {"execution": "native", "engine": "mpi", "others_load": 0.9}
            store.append(run_row(run_id=f"busy-{workers}", workers=workers, **busy), [])
    canvas, (figure,) = draw(
        load(tmp_path / "disturbed"), "accuracy-cost", choose_style("report")
    )
    said = {
        text.get_text() for part in figure.findobj(Legend) for text in part.get_texts()
    }
    assert "Pareto front (number: workers)" in said
    native = [panel for panel in canvas.shown if "native" in panel.name]
    assert native
    assert not any(
        "Pareto front (number: workers)" in panel.explained for panel in native
    )


def test_label_of_a_study_names_model_and_data(tmp_path):
    with Store(tmp_path / "mine", fsync=False) as store:
        store.append(run_row(), [])
    (tmp_path / "mine/study.yaml").write_text(
        "name: mine\nlabel: A perceptron on digits\n"
    )
    canvas, _ = draw(load(tmp_path / "mine"), "strong-scaling", choose_style("report"))
    assert (
        canvas.caption()
        .partition("accuracy. ")[2]
        .startswith("A perceptron on digits. Virtual on")
    )


def test_plot_says_that_panels_are_on_further_pages(eight, tmp_path, invoke):
    flags = (
        "--figure",
        "strong-scaling",
        "--style",
        "ieee",
        "--format",
        "svg",
        "--caption",
        "none",
    )
    said = invoke("plot", str(eight.folder), *flags, "--output", str(tmp_path))
    assert together(
        said, "strong-scaling", "taller", "strong-scaling-2, strong-scaling-3"
    )
    assert "--columns 2 takes fewer" in said
