"""Figures of synthetic studies: files, drawn data, captions, legibility, reproducibility."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pandas as pd
import pytest
from matplotlib.colors import to_rgb
from matplotlib.text import Text
from PIL import Image

from scalebench.analysis import Results, load, ratios
from scalebench.errors import ResultsError, UsageError
from scalebench.figures import (
    PlotRequest,
    default_figures,
    describe_figures,
    figure_names,
    plot,
    plot_folder,
)
from scalebench.figures.base import FIGURES
from scalebench.figures.drawing.canvas import Canvas
from scalebench.figures.drawing.panel import tint
from scalebench.figures.drawing.series_style import ENGINE_ALONE, TASKS
from scalebench.figures.plotting import house_style
from scalebench.figures.style import choose_style
from scalebench.records.schema import RunRow
from scalebench.records.store import Store
from scalebench.study.choices import FIGURE_FORMATS
from tests.conftest import some
from tests.facts import in_order, together
from tests.records_factory import epoch_row, run_row, study_rows


def keep(folder: Path, rows) -> Results:
    with Store(folder, fsync=False) as store:
        for run, epochs in rows:
            store.append(run, epochs)
    return load(folder)


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> Results:
    return keep(tmp_path_factory.mktemp("results") / "default", study_rows())


@pytest.fixture(scope="module")
def plots(results, tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("plots")
    plot(results, output, formats=FIGURE_FORMATS)
    return output / "synthetic"


def digests(folder: Path) -> dict[str, str]:
    return {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest()
        for file in folder.iterdir()
    }


def test_every_figure_has_own_file_and_summary():
    assert figure_names() == sorted(
        [
            *(
                "accuracy-cost",
                "agreement",
                "breakdown",
                "communication",
                "convergence",
                "epochs-to-target",
            ),
            *(
                "reduction-parts",
                "scaling-laws",
                "strong-scaling",
                "time-reduction",
                "time-to-target",
                "tuning",
            ),
            "weak-scaling",
        ]
    )
    assert all(summary and "\n" not in summary for _, summary in describe_figures())


SUFFIXES = ("pdf", "svg", "png", "csv", "txt", "tex")


def test_figures_are_written_in_all_formats_with_csv(plots):
    names = [
        name
        for name in default_figures()
        if name not in ("weak-scaling", "time-to-target")
    ]
    assert {file.name for file in plots.iterdir()} == {
        f"{n}.{s}" for n in names for s in SUFFIXES
    }
    for name in names:
        assert (plots / f"{name}.pdf").read_bytes().startswith(b"%PDF")
        assert "<svg" in (plots / f"{name}.svg").read_text()
        with Image.open(plots / f"{name}.png") as image:
            assert image.width == 1440


def test_same_records_give_same_bytes(results, plots, tmp_path):
    plot(results, tmp_path, ["strong-scaling", "breakdown"])
    again = digests(tmp_path / "synthetic")
    assert {name.partition(".")[2] for name in again} == {"png", "csv", "txt", "tex"}
    assert again == {
        name: digest for name, digest in digests(plots).items() if name in again
    }


@pytest.mark.thorough
def test_several_processes_draw_the_same_bytes(results, plots, tmp_path):
    names = ["time-reduction", "strong-scaling", "agreement"]
    drawn = plot_folder(
        results.folder,
        tmp_path,
        PlotRequest(names=tuple(names), formats=("svg",)),
        jobs=2,
    )
    assert [figure.name for figure in drawn] == names
    again = digests(tmp_path / "synthetic")
    assert len(again) == 4 * len(names)  # picture, numbers, and the caption twice
    assert again == {
        name: digest for name, digest in digests(plots).items() if name in again
    }


def test_drawn_data_equal_the_analysis(results, plots):
    drawn = pd.read_csv(plots / "time-reduction.csv")
    headline = drawn[drawn["panel"] == "against allreduce"]
    headline = headline[headline["quantity"] == "reduction"].set_index(
        ["series", "execution", "workers"]
    )["y"]
    computed = ratios(results)
    computed = computed[
        (computed["baseline"] == "allreduce") & computed["reduction"].notna()
    ]
    computed = computed.set_index(["label", "execution", "workers"])["reduction"]
    assert len(headline) == len(computed) == 18
    for key, value in computed.items():
        assert headline[key] == pytest.approx(100 * value)


def test_drawn_parts_add_up_to_total(plots):
    drawn = pd.read_csv(plots / "reduction-parts.csv")
    bars = drawn[drawn["quantity"].str.startswith("reduction: ", na=False)]
    table = bars.pivot_table(
        index=["panel", "execution", "workers"], columns="quantity", values="y"
    )
    parts = table["reduction: engine"] + table["reduction: frequency"]
    assert len(parts) == 36
    assert parts.to_numpy() == pytest.approx(table["reduction: total"].to_numpy())


def test_unmeasured_share_is_drawn_as_not_measured(plots):
    drawn = pd.read_csv(plots / "breakdown.csv")
    ddp = drawn[(drawn["series"] == "ddp") & (drawn["execution"] == "native")]
    assert set(ddp["quantity"]) == {"share of training time: split not measured"}
    assert ddp["y"].isna().all()
    shares = (
        drawn[drawn["y"].notna()].groupby(["series", "execution", "workers"])["y"].sum()
    )
    assert shares.to_numpy() == pytest.approx(100)


def test_csv_escapes_formulas(tmp_path):
    rows = [
        run_row(
            run_id=f"{n}", workers=n, strategy="=cmd()", train_s=4.0 / n, compute_s=1.0
        )
        for n in (1, 2)
    ]
    plot(
        keep(tmp_path / "study", some(*rows)),
        tmp_path / "plots",
        ["strong-scaling"],
        ["svg"],
    )
    drawn = pd.read_csv(next((tmp_path / "plots").rglob("strong-scaling.csv")))
    assert "'=cmd()" in set(drawn["series"])
    assert not [
        text
        for text in drawn.select_dtypes(exclude="number").to_numpy().ravel()
        if str(text)[0] in "=+-@"
    ]


def test_engine_time_at_one_worker_is_not_communication(tmp_path):
    split = {
        "strategy": "horovod",
        "train_s": 10.0,
        "compute_s": 6.0,
        "comm_s": 3.0,
        "wait_s": 0.0,
        "data_s": 1.0,
        "other_s": 0.0,
    }
    kept = keep(
        tmp_path / "study",
        some(*(run_row(run_id=f"{n}", workers=n, **split) for n in (1, 2))),
    )
    plot(kept, tmp_path / "plots", ["breakdown"])
    (file,) = (tmp_path / "plots").rglob("breakdown.csv")
    drawn = pd.read_csv(file)
    parts = drawn["quantity"].str.removeprefix("share of training time: ")
    assert drawn.loc[
        parts == "engine, at one worker", ["workers", "y"]
    ].to_numpy().tolist() == [[1, 30]]
    assert drawn.loc[
        parts == "communication", ["workers", "y"]
    ].to_numpy().tolist() == [[2, 30]]


def test_data_keep_execution_and_oversubscription(plots):
    drawn = pd.read_csv(plots / "strong-scaling.csv")
    times = drawn[drawn["quantity"] == "train_s"]
    assert set(times["execution"]) == {"native", "virtual"}
    assert set(times.loc[times["execution"] == "native", "interval"]) == {
        "95 % confidence interval"
    }
    assert set(times.loc[times["execution"] == "virtual", "interval"]) == {
        "calibration interval with virtual-native error"
    }
    assert times["median_s"].notna().all()
    crossed = times[times["oversubscribed"].astype(bool)]
    assert set(crossed["workers"]) == {4}
    assert set(crossed["execution"]) == {"native"}


SEEDS = {
    0: [0.9, 0.92, 0.91],
    1: [0.95, 0.95, 0.95],
}  # by epoch: three seeds that differ, and that agree


def seeds_alone(number: int):
    """A study of one cell with the metrics `SEEDS` of the first `number` seeds."""
    return [
        (
            run_row(
                run_id=f"{seed}",
                workers=2,
                epochs=len(SEEDS),
                repetition=seed,
                seed=seed,
                final_metric=SEEDS[1][seed],
            ),
            [
                epoch_row(run_id=f"{seed}", epoch=epoch, test_metric=metrics[seed])
                for epoch, metrics in SEEDS.items()
            ],
        )
        for seed in range(number)
    ]


def test_metric_interval_needs_three_seeds(tmp_path):
    kept = keep(tmp_path / "study", seeds_alone(3))
    plot(kept, tmp_path / "plots", ["convergence", "strong-scaling"], formats=["svg"])
    drawn = pd.read_csv(next((tmp_path / "plots").rglob("convergence.csv")))
    differ, agree = (
        drawn[drawn["y"] < 0.93],
        drawn[drawn["y"] > 0.93],
    )  # each against epochs, and against time
    half = 4.302653 * 0.01 / math.sqrt(3)  # Student's t of two degrees of freedom
    assert differ["interval"].tolist() == ["95 % confidence interval"] * 2
    assert differ[["low", "high"]].to_numpy().ravel() == pytest.approx(
        [0.91 - half, 0.91 + half] * 2
    )
    assert len(agree) == 2
    assert agree[["interval", "low", "high"]].isna().all(axis=None)
    scaling = pd.read_csv(next((tmp_path / "plots").rglob("strong-scaling.csv")))
    assert scaling.loc[scaling["quantity"] == "metric", "interval"].isna().all(), (
        "the interval of the time is in other rows"
    )
    assert "interval over seeds" in caption(kept, "convergence")
    assert "interval over seeds" not in caption(kept, "strong-scaling")


def test_two_seeds_have_no_interval(tmp_path):
    kept = keep(tmp_path / "study", seeds_alone(2))
    plot(kept, tmp_path / "plots", ["convergence"], formats=["svg"])
    drawn = pd.read_csv(next((tmp_path / "plots").rglob("convergence.csv")))
    assert drawn["n"].tolist() == [2, 2, 2, 2]
    assert drawn[["interval", "low", "high"]].isna().all(axis=None)
    assert "interval over seeds" not in caption(kept, "convergence")


def test_epochs_that_some_repetitions_did_not_evaluate_are_averaged_over_the_others(
    tmp_path,
):
    study = seeds_alone(3)
    row, (first, last) = study[2]
    study[2] = (row, [first.model_copy(update={"test_metric": None}), last])
    kept = keep(tmp_path / "study", study)
    plot(kept, tmp_path / "plots", ["convergence"], formats=["svg"])
    drawn = pd.read_csv(next((tmp_path / "plots").rglob("convergence.csv")))
    drawn = drawn[drawn["panel"].str.endswith("epochs")]
    assert drawn[["x", "n"]].to_numpy().tolist() == [[1, 2], [2, 3]]
    assert drawn["y"].tolist() == pytest.approx([0.91, 0.95])


def test_legend_names_serial_only_if_drawn(tmp_path, results):
    assert together(caption(results, "convergence"), "Serial", "every panel")
    assert "Serial" not in caption(keep(tmp_path, seeds_alone(3)), "convergence")


def caption(results: Results, name: str) -> str:
    with house_style():
        canvas = Canvas(name)
        FIGURES.create(name, {}).draw(results, canvas)
    return canvas.caption()


def test_caption_names_data_cluster_and_interval(results):
    text = caption(results, "strong-scaling")
    for part in (
        "Strong scaling: mlp(hidden=[128]) (9,610 parameters) on digits_shifted (7,185 training samples",
        "Batch 8 per worker at every worker count",
        "899/450/225/113/57/29/15 steps per epoch at 1/2/4/8/16/32/64 workers",
        "Native on this-machine through gloo, horovod, mpi (3 repetitions, error bars: 95 % confidence interval)",
        "virtual on this-machine (3 repetitions, error bars: calibration interval with virtual-native error; off "
        "native times by 9.5 % (root mean square of 6 checks), of which the factor common to all points is in no bar)",
        "each execution against its own serial run",
    ):
        assert part in text
    assert together(
        caption(results, "time-reduction"), "allreduce", "per-batch", "same engine"
    )


def test_caption_names_drawn_executions_only(results):
    # native runs have three worker counts, too few for a law
    text = caption(results, "scaling-laws")
    assert "Virtual on this-machine" in text
    assert "ative on" not in text
    assert "Real runs" not in text


@pytest.mark.parametrize(
    ("cluster", "said"),
    [("juwels-booster", "JUWELS Booster, 4"), ("mine/net.yaml", "net (")],
)
def test_caption_names_the_cluster(tmp_path, cluster, said):
    rows = [
        run_row(strategy="serial", cluster=cluster),
        run_row(run_id="two", workers=2, cluster=cluster),
    ]
    assert said in caption(
        keep(tmp_path, [(row, []) for row in rows]), "strong-scaling"
    )


def test_breakdown_caption_names_machine_and_network(tmp_path, results):
    stated = caption(results, "breakdown")
    assert in_order(stated, "Real runs", "nothing describes", "one node")
    assert in_order(stated, "Virtual runs", "this machine", "10 Gbit/s Ethernet")
    assert in_order(stated, "Ethernet", "0.600 µs + n / (8.70 GB/s)")
    wide = {"strategy": "serial", "nodes": 2, "workers_per_node": 4}
    rows = [
        run_row(execution="native", engine="mpi", provenance="a", **wide),
        run_row(run_id="virtual", **wide),
    ]
    own = keep(tmp_path / "own", some(*rows))
    card = {"name": "eth0", "driver": "virtio_net", "speed_mbit_s": 25000}
    facts = {
        "host_hash": "h",
        "cpu": {"model": "EPYC 9654", "usable_cores": 4},
        "network": [card],
    }
    (own.folder / "provenance").mkdir(exist_ok=True)
    (own.folder / "provenance" / "a.json").write_text(json.dumps(facts))
    said = caption(own, "breakdown")
    assert in_order(
        said, "Real runs", "EPYC 9654", "4 cores", "2 nodes", "eth0 (25 Gbit/s)"
    )
    assert in_order(
        said,
        "Virtual runs",
        "10 Gbit/s Ethernet",
        "2 nodes of 4 workers",
        "0.600 µs + n / (8.70 GB/s) within a node",
        "20.0 µs + n / (1.25 GB/s) between nodes",
        "assumed by recursive doubling",
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            "{}",
            "; allreduce between nodes assumed by recursive doubling up to 2 KiB and Rabenseifner's algorithm above.",
        ),
        ("{collective: ring}", "; allreduce between nodes assumed by ring."),
        (
            "{engine: gloo, collective: ring}",
            "; collectives at the cost of gloo's; allreduce between nodes assumed by",
        ),
    ],
)
def test_caption_names_engine_and_algorithm_of_virtual_runs(tmp_path, options, said):
    own = keep(tmp_path, some(run_row(strategy="serial", nodes=2, workers_per_node=4)))
    (own.folder / "study.yaml").write_text(f"name: s\nvirtual: {options}\n")
    assert f"between nodes{said}" in caption(load(own.folder), "breakdown")


def test_caption_names_number_of_measured_nodes(tmp_path):
    own = keep(tmp_path, some(run_row(strategy="serial", nodes=2, workers_per_node=4)))
    entries = [
        {"engine": "mpi", "ranks": n, "nodes": n, "alpha_s": 1e-6, "source": "measured"}
        for n in (3, 1)
    ]
    calibration = {"key": "measured", "tables": [], "engines": {"entries": entries}}
    (own.folder / "calibration.json").write_text(json.dumps(calibration))
    said = caption(load(own.folder), "breakdown")
    assert in_order(said, "measured between 3", "recursive doubling up to 2 KiB")


def test_breakdown_panels_have_letters_and_a_bar_per_tick(results):
    with house_style():
        canvas = Canvas("breakdown")
        FIGURES.create("breakdown", {}).draw(results, canvas)
        axes = [
            ax
            for ax in canvas.finish()[0].axes
            if ax.get_title(loc="left") or ax.get_title()
        ]
    titles = [ax.get_title(loc="left") or ax.get_title() for ax in axes]
    assert titles[:3] == ["(a) serial", "(b) allreduce", "(c) horovod"]
    assert [label.get_text() for label in axes[0].get_xticklabels()] == ["1", "1"]
    widths = {round(ax.get_xlim()[1] - ax.get_xlim()[0], 6) for ax in axes}
    assert len(widths) == 1  # bars are as wide in every panel


def test_bar_colours_differ():
    """The tinted colour of communication must differ from that of waiting."""
    colors = [*TASKS.values(), ENGINE_ALONE]
    shown = [to_rgb(color) for color in colors] + [tint(color) for color in colors]
    apart = [
        math.dist(one, other)
        for index, one in enumerate(shown)
        for other in shown[index + 1 :]
    ]
    assert min(apart) > 0.1


def texts_overlap(results: Results, name: str) -> list[tuple[str, str]]:
    """Return the pairs of texts (ticks, titles, labels, legends, caption) that overlap."""
    with house_style():
        canvas = Canvas(name)
        FIGURES.create(name, {}).draw(results, canvas)
        pages = [_overlaps(figure) for figure in canvas.finish()]
    assert sum(number for _, number in pages) > 20
    return [pair for found, _ in pages for pair in found]


def overlapping(figure) -> list[tuple[str, str]]:
    """Return the pairs of texts of a finished figure that overlap."""
    return _overlaps(figure)[0]


def _overlaps(figure) -> tuple[list[tuple[str, str]], int]:
    figure.draw_without_rendering()
    shown = [
        text
        for text in _texts(figure)
        if text.get_text().strip() and text.get_color() != "none"
    ]
    # without the line of an annotation
    boxes = [(text.get_text(), Text.get_window_extent(text)) for text in shown]
    found = [
        (one, other)
        for index, (one, box) in enumerate(boxes)
        for other, rival in boxes[index + 1 :]
        if box.padded(-0.5).overlaps(rival.padded(-0.5))
    ]
    return found, len(boxes)


def _texts(figure) -> Iterator[Text]:
    for ax in filter(lambda ax: ax.axison, figure.axes):  # spare panels are not drawn
        yield from (ax.title, ax._left_title, ax.xaxis.label, ax.yaxis.label, *ax.texts)
        for axis in (
            ax.xaxis,
            ax.yaxis,
        ):  # matplotlib keeps ticks outside the axes that it does not draw
            yield from (
                tick.label1
                for tick in axis._update_ticks()
                if tick.label1.get_visible()
            )
    for part in figure.subfigs:
        yield from part.texts
        for legend in part.legends:
            yield from legend.get_texts()


def test_second_ticks_have_minimal_digits():
    with house_style():
        panel, *_ = Canvas("test").rows((3, 2.0))
        panel.ax.plot([0.02, 9], [0, 1])
        panel.seconds_axis("x")
    shown = [label.get_text() for label in panel.ax.get_xticklabels()]
    assert shown[:7] == ["0.01", "0.03", "0.1", "0.3", "1", "3", "10"]
    with house_style():
        panel, *_ = Canvas("test").rows((1, 2.0))
        panel.ax.plot([900, 9000], [0, 1])
        panel.seconds_axis("x")
    shown = [label.get_text() for label in panel.ax.get_xticklabels()]
    assert shown[shown.index("1,000") :][:3] == ["1,000", "2,000", "5,000"]


def test_log_axis_within_a_decade_has_more_than_two_labels():
    with house_style():
        panel, *_ = Canvas("test").rows((2, 2.0))
        panel.ax.plot([30, 110], [0, 1])
        panel.seconds_axis("x")
    low, high = panel.ax.get_xlim()
    assert sum(low <= tick <= high for tick in panel.ax.get_xticks()) >= 3


@pytest.mark.parametrize(
    ("low", "high"), [(378, 399), (383.1, 383.9), (1100, 1130), (0.0123, 0.0129)]
)
def test_labels_of_a_nearly_linear_axis_are_where_they_say(low, high):
    """Of memory between 377.5 and 400 MiB: ticks at 377.5 and 382.5 were rounded to whole numbers."""
    with house_style():
        panel, *_ = Canvas("test").rows((2, 2.0))
        panel.ax.plot([low, high], [0, 1])
        panel.seconds_axis("x")
    places = panel.ax.get_xticks().tolist()
    shown = [
        float(label.get_text().replace(",", "")) for label in panel.ax.get_xticklabels()
    ]
    assert len(set(shown)) >= 2
    assert shown == pytest.approx(places, rel=1e-9)


@pytest.mark.parametrize(
    ("low", "high"),
    [(0.00028, 0.00095), (0.00021, 0.0009), (0.11, 0.19), (3e-5, 7e-5), (0.002, 8)],
)
def test_labels_of_a_short_log_axis_do_not_touch(low, high):
    with house_style(choose_style("slides")):
        canvas = Canvas("test")
        panel, *_ = canvas.rows((2, 1.6))
        panel.ax.plot([low, high], [0, 1])
        panel.seconds_axis("x", "core-hours")
        canvas.finish()
        boxes = [
            label.get_window_extent()
            for label in panel.ax.get_xticklabels()
            if label.get_text()
        ]
        begin, end = panel.ax.get_window_extent().intervalx
    shown = [box for box in boxes if begin <= (box.x0 + box.x1) / 2 <= end]
    assert len(shown) >= 2
    assert all(left.x1 < right.x0 for left, right in pairwise(shown))


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in figure_names()
        if name not in ("weak-scaling", "tuning") and "target" not in name
    ],
)
def test_texts_do_not_overlap(results, name):
    assert texts_overlap(results, name) == []


@pytest.mark.parametrize(
    "name",
    some(
        ["strong-scaling", "breakdown", "time-reduction", "convergence"],
        "breakdown",
        "time-reduction",
    ),
)
def test_large_study_has_no_overlapping_texts(tmp_path, name):
    counts = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
    rows = study_rows(workers=counts, native_workers=counts[:8], cores=8, repetitions=1)
    variants = [
        (
            run.model_copy(
                update={
                    "run_id": f"{run.run_id}-{every}",
                    "strategy_options": f'{{"every": {every}}}',
                }
            ),
            [
                epoch.model_copy(update={"run_id": f"{run.run_id}-{every}"})
                for epoch in epochs
            ],
        )
        for run, epochs in rows
        if run.strategy == "epoch_average"
        for every in (2, 3)
    ]
    assert texts_overlap(keep(tmp_path / "many", rows + variants), name) == []


def test_weak_study_draws_weak_scaling(tmp_path):
    weak = keep(
        tmp_path / "weak", study_rows(scaling="weak", workers=(1, 2, 4), repetitions=2)
    )
    names = ["weak-scaling", "strong-scaling"]
    figures = {
        figure.name: figure
        for figure in plot(weak, tmp_path / "plots", names, formats=["svg"])
    }
    assert (
        figures["weak-scaling"].files[0]
        == tmp_path / "plots/synthetic/weak-scaling.svg"
    )
    assert (
        figures["strong-scaling"].absent == "the study scales weakly; see weak-scaling"
    )
    drawn = pd.read_csv(tmp_path / "plots/synthetic/weak-scaling.csv")
    epoch_average = drawn[
        (drawn["quantity"] == "efficiency") & (drawn["series"] == "epoch_average")
    ]
    assert (epoch_average["y"] > 0.4).all(), (
        "efficiency is T(1)/T(N), without the division by N"
    )
    assert "Weak scaling" in caption(weak, "weak-scaling")
    assert "(898 training samples per worker)" in caption(weak, "weak-scaling")


def some(*rows: RunRow):
    return [(row, []) for row in rows]


@pytest.mark.parametrize(
    "rows",
    [
        some(run_row()),
        some(
            run_row(strategy="serial"),
            run_row(run_id="n", execution="native", engine="mpi", strategy="serial"),
        ),
        some(
            run_row(
                run_id="a",
                workers=2,
                final_metric=None,
                metric_name=None,
                parameters=None,
                n_train=None,
            )
        ),
        some(
            run_row(strategy="epoch_average", workers=8),
            run_row(run_id="x", workers=8, status="failed", train_s=None),
        ),
        some(
            run_row(strategy="$x^2 {", strategy_options={"<b>": "%s"}),
            run_row(run_id="b", study="../../x"),
        ),
        some(
            *(
                run_row(
                    run_id=f"{n}",
                    workers=n,
                    train_s=1 / n,
                    metric_name="r2",
                    final_metric=-3.0,
                )
                for n in range(1, 65)
            )
        ),
        some(
            *(
                run_row(
                    run_id=s,
                    strategy=s,
                    execution="paced",
                    engine="mpi",
                    paced_overrun=0.5,
                )
                for s in "ab"
            )
        ),
        study_rows(
            strategies=("serial", "allreduce", "epoch_async"),
            workers=(1,),
            native_workers=(),
            repetitions=1,
        ),
    ],
    ids=[
        "one run",
        "serial only",
        "no metric",
        "no baseline",
        "odd names",
        "many counts",
        "paced",
        "one count",
    ],
)
def test_minimal_studies_are_drawn_without_warnings(tmp_path, rows):
    drawn = plot(keep(tmp_path / "study", rows), tmp_path / "plots", formats=["svg"])
    files = [file for figure in drawn for file in figure.files]
    assert len(files) >= 4
    assert all(
        tmp_path / "plots" in file.parents and file.stat().st_size for file in files
    )
    assert not any(".." in file.parts for file in files)


def test_wide_interval_does_not_hide_points(tmp_path):
    # Two repetitions a factor of four apart: the t interval spans ten orders of
    # magnitude around them.
    rows = some(
        *(
            run_row(run_id=f"{n}-{r}", workers=n, repetition=r, train_s=4.0**r / n)
            for n in (1, 2)
            for r in (0, 1)
        )
    )
    results = keep(tmp_path / "study", rows)
    with house_style():
        canvas = Canvas("strong-scaling")
        FIGURES.create("strong-scaling", {}).draw(results, canvas)
        canvas.finish()
    low, high = canvas.panels[0].ax.get_ylim()
    assert 0.2 < low < 1.0 < 2.0 < high < 10
    assert canvas.data()["high"].max() > 1000
    assert canvas.panels[0].marks_wide


def test_study_without_completed_runs_is_refused(tmp_path):
    failed = keep(tmp_path / "study", some(run_row(status="failed", train_s=None)))
    with pytest.raises(
        ResultsError, match="no figure can be drawn: no run was completed"
    ):
        plot(failed, tmp_path)


def test_named_figure_that_is_absent_is_refused(results, tmp_path):
    with pytest.raises(
        UsageError, match="unknown figure 'strong'; did you mean 'strong-scaling'"
    ):
        plot(results, tmp_path, ["strong"])
    with pytest.raises(
        ResultsError, match="weak-scaling cannot be drawn: the study scales strongly"
    ):
        plot(results, tmp_path, ["weak-scaling"])


def test_unwritable_output_is_refused(results, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ResultsError, match=r"cannot write .*--output"):
        plot(results, tmp_path / "file")


def test_disturbed_points_have_a_plus_sign_and_a_sentence(tmp_path):
    rows = study_rows(
        strategies=("serial", "allreduce"),
        workers=(1, 2),
        native_workers=(1, 2),
        repetitions=2,
    )
    busy = [
        (
            run.model_copy(
                update={"others_load": 0.8 if run.execution == "native" else 0.1}
            ),
            epochs,
        )
        for run, epochs in rows
    ]
    found = keep(tmp_path / "busy", busy)
    text = caption(found, "strong-scaling")
    assert in_order(text, "Plus signs", "25 % of the cores", "never a baseline.")
    assert "Crosses" not in text
    with house_style():
        canvas = Canvas("strong-scaling")
        FIGURES.find("strong-scaling")().draw(found, canvas)
        data = canvas.data()
    disturbed = data[data["disturbed"].fillna(False).astype(bool)]
    assert set(disturbed["execution"]) == {"native"}
    assert len(disturbed) == len(data[data["execution"] == "native"])
