"""Figures for print: width, fonts, sizes, captions, and the part of a study that is drawn."""

from __future__ import annotations

import io
import re
import zlib

import pandas as pd
import pytest
from fontTools.ttLib import TTFont
from matplotlib.colors import to_rgb
from matplotlib.text import Text
from PIL import Image

from scalebench.analysis import Results, load
from scalebench.errors import ResultsError, UsageError
from scalebench.figures import PlotRequest, default_figures, plot_folder
from scalebench.figures.base import FIGURES
from scalebench.figures.drawing.canvas import Canvas
from scalebench.figures.drawing.series_style import (
    ENGINE_ALONE_PATTERN,
    MOST_SERIES,
    TASK_PATTERNS,
    TASKS,
    grouped,
)
from scalebench.figures.plotting import house_style
from scalebench.figures.selection import EVERYTHING, Selection
from scalebench.figures.style import _STYLES, Style, choose_style, parse_width
from scalebench.records.store import Store
from scalebench.study.choices import FIGURE_STYLES
from scalebench.tables.latex import to_latex
from tests.conftest import some
from tests.facts import in_order, naming, together
from tests.records_factory import run_row, study_rows


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> Results:
    folder = tmp_path_factory.mktemp("results") / "mine"
    with Store(folder, fsync=False) as store:
        for run, epochs in study_rows(
            workers=(1, 2, 4, 8), native_workers=(1, 2, 4), repetitions=3
        ):
            store.append(run, epochs)
    return load(folder)


def draw(results: Results, name: str, style: Style, selection=EVERYTHING, panels=()):
    """Return the finished canvas and figure of `name`."""
    with house_style(style):
        canvas = Canvas(name, style, selection, panels)
        FIGURES.create(name, {}).draw(results, canvas)
        return canvas, canvas.finish()[0]


def drawn(folder, request: PlotRequest, place) -> pd.DataFrame:
    (figure,) = plot_folder(folder, place, request, place=place)
    return pd.read_csv(figure.files[-1])


@pytest.mark.parametrize("style", ["ieee", "acm", "springer"])
@pytest.mark.parametrize("columns", [1, 2])
def test_texts_of_print_styles_have_seven_to_nine_points(results, style, columns):
    chosen = choose_style(style, columns=columns)
    for name in ("strong-scaling", "breakdown"):
        _, figure = draw(results, name, chosen)
        sizes = {
            text.get_fontsize()
            for text in figure.findobj(Text)
            if text.get_text().strip()
        }
        assert 7 <= min(sizes) <= max(sizes) <= 9
        assert figure.get_size_inches()[0] == pytest.approx(chosen.width_in)


def test_pdf_embeds_truetype_fonts_and_no_bitmap(results, tmp_path):
    figures = plot_folder(
        results.folder,
        tmp_path,
        PlotRequest(formats=("pdf",), style=choose_style("ieee")),
    )
    files = [figure.files[0] for figure in figures if figure.files]
    assert len(files) == 7
    for file in files:
        pdf = file.read_bytes()
        assert b"/FontFile2" in pdf
        assert b"/ToUnicode" in pdf  # text can be searched and copied
        assert b"/Type3" not in pdf
        assert b"/Subtype /Image" not in pdf


def test_pdf_embeds_letters_without_the_tables_that_lay_them_out(results, tmp_path):
    (figure,) = plot_folder(
        results.folder, tmp_path, PlotRequest(("strong-scaling",), ("pdf",))
    )
    streams = re.findall(
        rb"stream\n(.*?)\nendstream", figure.files[0].read_bytes(), re.DOTALL
    )
    fonts = [
        data for data in map(zlib.decompress, streams) if data.startswith(b"\0\1\0\0")
    ]
    assert fonts
    for data in fonts:
        tables = set(TTFont(io.BytesIO(data)).keys())
        assert {"glyf", "hmtx"} <= tables
        assert not {"GSUB", "GPOS", "GDEF"} & tables


def test_png_is_as_wide_as_asked_at_300_dots_per_inch(results, tmp_path):
    request = PlotRequest(
        ("agreement",), ("png",), choose_style("acm", width_in=parse_width("84mm"))
    )
    (figure,) = plot_folder(results.folder, tmp_path, request)
    with Image.open(figure.files[0]) as image:
        assert image.width == pytest.approx(84 / 25.4 * 300, abs=1)


def test_every_style_that_the_command_names_is_there():
    assert tuple(_STYLES) == FIGURE_STYLES


@pytest.mark.parametrize("style", some(list(FIGURE_STYLES), "ieee", "slides"))
def test_texts_of_a_column_do_not_overlap(results, style):
    from tests.figures.test_plotting import overlapping

    for name in (
        "strong-scaling",
        "time-reduction",
        "convergence",
        "breakdown",
        "agreement",
    ):
        _, figure = draw(results, name, choose_style(style, columns=1))
        assert overlapping(figure) == []


def test_caption_stands_in_picture_beside_it_or_nowhere(results, tmp_path):
    for caption in ("none", "below", "file"):
        style = choose_style("ieee", caption=caption)
        _, figure = draw(results, "strong-scaling", style)
        inside = any(
            "mlp(hidden=[128]) on digits_shifted." in text.get_text()
            for text in figure.findobj(Text)
        )
        assert inside == (caption == "below")
        (written,) = plot_folder(
            results.folder,
            tmp_path / caption,
            PlotRequest(("strong-scaling",), ("svg",), style),
            place=tmp_path / caption,
        )
        assert [file.suffix for file in written.files] == (
            [".svg", ".csv"] if caption == "none" else [".svg", ".txt", ".tex", ".csv"]
        )
    text = (tmp_path / "file" / "strong-scaling.txt").read_text()
    titles, model, *_ = text.split(". ")
    assert titles == "(a) training time; (b) efficiency; (c) test accuracy"
    assert in_order(model, "mlp(hidden=[128])", "digits_shifted")
    assert "Method: Strong scaling: mlp(hidden=[128])" in text
    latex = (tmp_path / "file" / "strong-scaling.tex").read_text()
    assert r"\includegraphics[width=3.5in]{strong-scaling}" in latex
    assert "\\caption{(a) training time" in latex
    assert r"digits\_shifted" in latex
    assert latex.endswith("\\label{fig:strong-scaling}\n")
    assert re.sub(r"\s+", " ", latex).count("95\\,\\%") == text.count("95 %")


def test_latex_escapes_special_characters():
    assert to_latex("a_b 95 % of {x} & 2^3 ~ \\") == (
        r"a\_b 95\,\% of \{x\} \& 2\textasciicircum{}3 \textasciitilde{} \textbackslash{}"
    )


def test_without_titles_letters_stay_and_caption_names_the_panels(results):
    _, figure = draw(results, "strong-scaling", choose_style("report", titles=False))
    assert [ax.get_title(loc="left") for ax in figure.axes] == ["(a)", "(b)", "(c)"]
    assert any(
        text.get_text().startswith("(a) training time; (b)")
        for text in figure.findobj(Text)
    )


@pytest.mark.parametrize("asked", ["b", "efficiency"])
def test_single_panel_has_no_letter(results, asked):
    request = PlotRequest(("strong-scaling",), panels=(asked,))
    canvas, figure = draw(
        results,
        "strong-scaling",
        choose_style("ieee"),
        panels=request.panels_of(FIGURES.find("strong-scaling")),
    )
    assert [ax.get_title(loc="left") for ax in figure.axes] == ["efficiency"]
    assert canvas.caption().startswith("Efficiency. mlp(hidden=[128])")
    assert "Times are geometric means" not in canvas.caption()


def test_panel_limits_the_figures_to_those_that_have_it(results, tmp_path):
    figures = plot_folder(
        results.folder, tmp_path, PlotRequest(formats=("svg",), panels=("ratio",))
    )
    assert [figure.name for figure in figures] == ["agreement"]
    with pytest.raises(
        UsageError,
        match=naming("--panel", "breakdown", "'time'", "--strategy"),
    ):
        plot_folder(
            results.folder, tmp_path, PlotRequest(("breakdown",), panels=("time",))
        )
    with pytest.raises(
        UsageError, match="strong-scaling has no 'effiency'; did you mean"
    ):
        plot_folder(
            results.folder,
            tmp_path,
            PlotRequest(("strong-scaling",), panels=("effiency",)),
        )


def test_selection_limits_what_is_drawn_but_not_its_baselines(results, tmp_path):
    whole = drawn(
        results.folder, PlotRequest(("time-reduction",), ("svg",)), tmp_path / "whole"
    )
    selection = Selection(("epoch_average",), (2, 8), ("virtual",))
    part = drawn(
        results.folder,
        PlotRequest(("time-reduction",), ("svg",), selection=selection),
        tmp_path / "part",
    )
    headline = part[part["panel"] == "against allreduce"].dropna(subset="workers")
    assert set(headline["series"]) == {"epoch_average"}
    assert set(headline["workers"]) == {2, 8}
    same = whole.merge(
        headline,
        on=["panel", "series", "execution", "workers", "quantity"],
        suffixes=("", "_part"),
    )
    assert len(same) == len(headline) == 2
    assert same["y"].tolist() == same["y_part"].tolist()
    assert same["high"].tolist() == same["high_part"].tolist()


@pytest.mark.parametrize(
    ("virtual", "said"),
    [
        ("{}", "no jitter."),
        ("{jitter: normal, jitter_sigma: 0.1}", "normal jitter of 10 %."),
    ],
)
@pytest.mark.parametrize("name", ["strong-scaling", "convergence", "time-to-target"])
def test_caption_states_step_time_links_and_jitter(tmp_path, virtual, said, name):
    facts = {
        "nodes": 2,
        "workers_per_node": 4,
        "target_metric": 0.5,
        "time_to_target_s": 0.1,
        "epochs_to_target": 1,
    }
    with Store(tmp_path / "mine", fsync=False) as store:
        for run, epochs in study_rows(workers=(1, 2), native_workers=(), repetitions=2):
            store.append(run.model_copy(update=facts), epochs)
    (tmp_path / "mine/study.yaml").write_text(
        f"name: mine\ndevice_step_time: 0.02\nvirtual: {virtual}\n"
    )
    canvas, _ = draw(load(tmp_path / "mine"), name, choose_style("ieee"))
    text = canvas.caption()
    assert in_order(text, "stated as 20.0 ms", "0.600 µs + n / (8.70 GB/s)")
    assert f"Rabenseifner's algorithm above; {said}" in text


def test_caption_of_a_selection_tells_of_drawn_runs_only(results):
    canvas, _ = draw(
        results,
        "strong-scaling",
        choose_style("ieee"),
        Selection(executions=("virtual",), workers=(2, 4)),
    )
    text = canvas.caption()
    assert "450/225 steps per epoch at 2/4 workers" in text
    assert "Native" not in text
    assert "Real runs" not in text


@pytest.mark.parametrize(
    ("selection", "message"),
    [
        (
            Selection(("epoch_averag",)),
            "--strategy: no completed run of 'epoch_averag'.*did you mean 'epoch_average'",
        ),
        (
            Selection(workers=(3, 5)),
            "--workers: no completed run of 3 in .*; the study has 1, 2, 4, 8",
        ),
        (Selection(executions=("paced",)), "--execution: no completed run of 'paced'"),
        (
            Selection(("ddp",), engines=("horovod",)),
            "no completed run has all that was selected",
        ),
    ],
)
def test_empty_selection_is_refused_with_what_there_is(
    results, tmp_path, selection, message
):
    with pytest.raises((UsageError, ResultsError), match=message):
        plot_folder(results.folder, tmp_path, PlotRequest(selection=selection))


def test_figures_without_selected_data_are_left_out_with_reason(results, tmp_path):
    request = PlotRequest(
        formats=("svg",), selection=Selection(("allreduce",), executions=("native",))
    )
    absent = {
        figure.name: figure.absent
        for figure in plot_folder(results.folder, tmp_path, request)
    }
    assert "no strategy synchronises less often" in absent["time-reduction"]
    assert "ran both virtually and natively" in absent["agreement"]
    assert together(absent["scaling-laws"], "no law", "series")
    assert absent["strong-scaling"] == ""
    assert set(absent) == set(default_figures())


@pytest.mark.parametrize("number", range(1, 30))
def test_groups_of_series_stay_small_and_lose_none(number):
    names = ["serial", "allreduce", *(f"s{place}" for place in range(number))]
    groups = grouped(names)
    assert [name for group in groups for name in group] == names
    assert max(map(len, groups)) <= MOST_SERIES
    assert (len(groups) == 1) == (len(names) <= MOST_SERIES)


def test_many_series_are_spread_over_panels(tmp_path):
    with Store(tmp_path / "many", fsync=False) as store:
        for steps in range(1, 9):
            for workers in (1, 2):
                store.append(
                    run_row(
                        run_id=f"{steps}-{workers}",
                        strategy="local_sgd",
                        strategy_options={"steps": steps},
                        workers=workers,
                        train_s=4.0 / workers,
                    ),
                    [],
                )
    canvas, _ = draw(
        load(tmp_path / "many"),
        "strong-scaling",
        choose_style("ieee"),
        panels=("time",),
    )
    assert [len(panel.series) for panel in canvas.panels] == [4, 4]
    assert len(canvas.data()) == 16, "context is not drawn data"
    assert {panel.ax.get_ylim() for panel in canvas.panels} == {
        canvas.panels[0].ax.get_ylim()
    }


def test_intervals_of_accuracy_end_at_one(tmp_path):
    with Store(tmp_path / "sure", fsync=False) as store:
        for seed, metric in enumerate((0.93, 1.0, 0.99)):
            store.append(
                run_row(
                    run_id=f"{seed}", seed=seed, repetition=seed, final_metric=metric
                ),
                [],
            )
    canvas, _ = draw(load(tmp_path / "sure"), "strong-scaling", choose_style("ieee"))
    metric = canvas.data().query("quantity == 'metric'")
    assert metric["high"].tolist() == [1.0]
    assert metric["low"].item() < 0.93
    assert canvas.panels[-1].ax.get_ylim()[1] < 1.01


def test_parts_of_bars_differ_in_grey():
    """Neighbours in a bar differ by luminance, or one of them has another pattern."""
    grey = {
        task: 0.2126 * r + 0.7152 * g + 0.0722 * b
        for task, (r, g, b) in ((t, to_rgb(c)) for t, c in TASKS.items())
    }
    tasks = list(TASKS)
    assert ENGINE_ALONE_PATTERN not in {"", *TASK_PATTERNS.values()}
    for place, one in enumerate(tasks):
        for other in tasks[place + 1 :]:
            patterns = {TASK_PATTERNS.get(one, ""), TASK_PATTERNS.get(other, "")}
            assert len(patterns) == 2 or abs(grey[one] - grey[other]) > 0.2, (
                one,
                other,
            )


def test_engine_at_one_worker_is_labelled_only_where_drawn(results):
    canvas, _ = draw(
        results,
        "breakdown",
        choose_style("ieee"),
        Selection(("epoch_average",), executions=("virtual",)),
    )
    entries = [name for row in canvas._legend for _, name in row]
    parts = {quantity.rpartition(": ")[2] for quantity in canvas.data()["quantity"]}
    assert set(entries) == parts | {"virtual (computed time)"}


@pytest.mark.parametrize(
    ("text", "inches"),
    [
        ("3.5in", 3.5),
        ("84 mm", 84 / 25.4),
        ("8.4cm", 8.4 / 2.54),
        ("252pt", 252 / 72.27),
    ],
)
def test_widths_have_units(text, inches):
    assert parse_width(text) == pytest.approx(inches)


@pytest.mark.parametrize(
    "text", ["wide", "7", "3.5px", "0.1in", "4in wide", "500in", "-3in"]
)
def test_odd_widths_are_refused(text):
    with pytest.raises(ValueError, match="expected a width such as"):
        parse_width(text)


def test_unknown_styles_and_fonts_are_refused():
    with pytest.raises(UsageError, match="unknown style 'iee'; did you mean 'ieee'"):
        choose_style("iee")
    with pytest.raises(
        UsageError,
        match=naming("--font", "'STIXGenera'", "'STIXGeneral'"),
    ):
        choose_style(font="STIXGenera")
    assert choose_style("springer", font="DejaVu Serif").font == "DejaVu Serif"
