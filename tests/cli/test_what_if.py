from __future__ import annotations

import csv
import re

import pytest
from click.testing import CliRunner

from scalebench.cli.main import main
from scalebench.errors import UsageError
from scalebench.figures.drawing.canvas import Canvas
from tests.facts import in_order, together

BASE = [
    "predict",
    "resnet50",
    "--cluster",
    "ethernet-10g",
    "--step-time",
    "0.1",
    "--strategy",
    "allreduce",
]


def test_plane_is_written_and_drawn(tmp_path):
    table, figure = tmp_path / "cells.csv", tmp_path / "plane.png"
    axes = ["--vary", "link-bandwidth=1..100:5", "--vary", "workers=4,16"]
    arguments = [*BASE, *axes, "--csv", str(table), "--figure", str(figure)]
    result = CliRunner().invoke(
        main, arguments, standalone_mode=False, catch_exceptions=False
    )
    rows = re.findall(
        r"^ +[\d.]+ Gbit/s +(?:4|16)  .*\(.* to .*\)", result.output, re.MULTILINE
    )
    assert len(rows) == 10, "each of few cells has a row with its interval"
    assert "network-bandwidth" in result.output, "the old name is an alias"
    assert "cells, modelled" not in result.output, "the rows say which times there are"
    assert "of the cells, network" not in result.output, "and what binds them"
    with table.open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 10
    assert {"1.0", "100.0"} < {row["network_bandwidth_gbit_per_s"] for row in rows}
    assert {row["workers"] for row in rows} == {"4.0", "16.0"}
    assert figure.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("axes", "panels"),
    [
        (["network-bandwidth=1..100:5"], 1),
        (["network-bandwidth=1..100:5", "workers=4,16"], 2),
    ],
)
def test_strategies_share_one_figure(tmp_path, monkeypatch, axes, panels):
    drawn = []
    finish = Canvas.finish
    monkeypatch.setattr(
        Canvas, "finish", lambda canvas: drawn.append(canvas) or finish(canvas)
    )
    varied = [word for axis in axes for word in ("--vary", axis)]
    arguments = [
        *BASE,
        "--strategy",
        "local_sgd:steps=8",
        *varied,
        "--figure",
        str(tmp_path / "both.svg"),
    ]
    CliRunner().invoke(main, arguments, standalone_mode=False, catch_exceptions=False)
    assert [path.name for path in tmp_path.iterdir()] == ["both.svg"]
    (canvas,) = drawn
    assert len(canvas.shown) == panels
    titles = [panel.ax.get_title(loc="left") for panel in canvas.shown]
    if panels == 2:
        assert titles == ["(a) allreduce", "(b) local_sgd(steps=8)"]
    else:
        assert len(canvas.shown[0].ax.lines) == 4, (
            "for each strategy a line, and the crosses over it"
        )


def test_decision_between_links_is_one_command_with_an_interval():
    arguments = [
        "predict",
        "vit_b16",
        "--cluster",
        "juwels-booster",
        "--step-time",
        "0.075",
        "--workers",
        "256",
    ]
    arguments += [
        "--strategy",
        "ddp",
        "--strategy",
        "epoch_average",
        "--vary",
        "network-bandwidth=100,200",
        "--price",
        "2",
    ]
    output = (
        CliRunner()
        .invoke(main, arguments, standalone_mode=False, catch_exceptions=False)
        .output
    )
    decision, first, *_ = output.splitlines()
    span = r"[\d.,]+ \([\d.,]+ to [\d.,]+\)"
    time = r"[\d.,]+ \w+ \([\d.,]+ to [\d.,]+\)"
    cost = rf"[\d.,]+ GPU-hours \([\d.,]+ to [\d.,]+\), {span} at 2 each"
    assert re.fullmatch(
        rf"Decision: ddp .* 64 nodes \(256 workers\) .* 100 Gbit/s: {time} for {cost}; "
        rf".*200 Gbit/s .*{time} for {cost}, -[\d.]+ % \(-[\d.]+ to [-+][\d.]+ % .*\); "
        r".*both ends.*\.",
        decision,
    )
    assert re.match(
        rf"256 workers: .* 200 Gbit/s instead of 100 Gbit/s: ddp {time} instead of {time}, "
        r"-[\d.]+ % \(-[\d.]+ to [-+][\d.]+ % .*\); epoch_average ",
        first,
    )
    assert in_order(output, "Epochs", "equal", "epoch_average may need more")
    rows = [line for line in output.splitlines() if re.match(r" +[12]00 Gbit/s ", line)]
    assert len(rows) == 4
    assert all(row.endswith("compute") for row in rows)


def test_difference_at_an_end_of_the_interval_is_said():
    arguments = [
        "predict",
        "vit_b16",
        "--cluster",
        "juwels-booster",
        "--device",
        "a100-40gb",
        "--workers",
        "256",
    ]
    arguments += [
        "--roofline",
        "--dtype",
        "bf16-mixed",
        "--strategy",
        "ddp",
        "--strategy",
        "epoch_average",
    ]
    arguments += ["--vary", "network-bandwidth=100,200"]
    decision, first, *_ = (
        CliRunner().invoke(main, arguments, standalone_mode=False).output.splitlines()
    )
    assert in_order(first, "a tenth", "ddp", "an end of the interval only.")
    assert decision.endswith("epoch_average in both cells with slow links.")


def test_eight_strategies_have_one_sentence_and_their_rows():
    arguments = [
        "predict",
        "vit_b16",
        "--cluster",
        "juwels-booster",
        "--step-time",
        "0.075",
        "--workers",
        "256",
    ]
    names = [
        "ddp",
        "allreduce",
        "epoch_average",
        "epoch_average:every=2",
        *(f"local_sgd:steps={2**n}" for n in range(1, 5)),
    ]
    arguments += [word for name in names for word in ("--strategy", name)]
    arguments += ["--vary", "network-bandwidth=100,200"]
    output = (
        CliRunner()
        .invoke(main, arguments, standalone_mode=False, catch_exceptions=False)
        .output
    )
    decision, caveat, title, *_ = output.splitlines()
    assert decision.startswith("Decision: ")
    assert decision.endswith(".")
    assert "local_sgd(steps=16)" in caveat
    assert title.startswith("modelled")
    assert (
        sum(bool(re.match(r" +[12]00 Gbit/s ", line)) for line in output.splitlines())
        == 16
    )


def test_axis_without_effect_says_why():
    def said(cluster, workers, axis):
        arguments = [
            "what-if",
            "resnet50",
            "--strategy",
            "allreduce",
            "--cluster",
            cluster,
            "--step-time",
            "0.1",
            "--workers",
            str(workers),
        ]
        return (
            CliRunner()
            .invoke(main, [*arguments, "--vary", axis], standalone_mode=False)
            .output
        )

    assert together(
        said("juwels-booster", 4, "network-bandwidth=1,200"),
        "network-bandwidth",
        "4 workers",
        "one node",
    )
    assert together(
        said("ethernet-10g", 4, "node-bandwidth=1,200"), "node-bandwidth", "one worker"
    )
    assert together(
        said("ethernet-10g", 1, "latency=0.1,10"), "latency", "single worker", "neither"
    )
    hidden = said("juwels-booster", 8, "latency=0.9,1.1")
    assert re.search(
        r"latency: exposed .* [\d.]+ % .* [\d.]+ % hides behind compute",
        hidden,
    )


def test_cells_outside_the_inputs_range_or_too_large_are_marked(tmp_path):
    table, figure = tmp_path / "cells.csv", tmp_path / "plane.png"
    asked = [
        "what-if",
        "resnet50",
        "--strategy",
        "allreduce",
        "--cluster",
        "juwels-booster",
        "--device",
        "v100-16gb",
    ]
    axes = ["--vary", "workers=64,4096", "--vary", "batch=32,512"]
    arguments = [*asked, *axes, "--csv", str(table), "--figure", str(figure)]
    output = (
        CliRunner()
        .invoke(main, arguments, standalone_mode=False, catch_exceptions=False)
        .output
    )
    assert re.search(
        r"^the least time of allreduce .* \(.* to .*\), .*64, batch 32\.",
        output,
        re.MULTILINE,
    )
    assert in_order(output, "outside", "50 % of the cells", "3,744 workers")
    assert re.search(r"too large, 50 % .*: resnet50 at batch 5", output)
    with table.open() as file:
        rows = {(row["workers"], row["batch"]): row for row in csv.DictReader(file)}
    assert {place for place, row in rows.items() if row["fits"] == "no"} == {
        ("64.0", "512.0"),
        ("4096.0", "512.0"),
    }
    assert {place for place, row in rows.items() if row["outside"]} == {
        ("4096.0", "32.0"),
        ("4096.0", "512.0"),
    }


@pytest.mark.parametrize(
    "axis",
    [
        "flops=1..inf",
        "latency=0..1",
        "flops=10..1",
        "flops=1..2:1000000",
        "flops=nan",
        "batch",
        "batch=8..4",
        "batch=0..4",
        "latency=a,b",
        "batch=1..8:x",
        "latnecy=1..2",
        "network-bandwidth=0.5x,2",
        "workers=2x,4x",
    ],
)
def test_bad_axis_is_one_line(axis):
    with pytest.raises(UsageError) as caught:
        CliRunner().invoke(
            main, [*BASE, "--vary", axis], standalone_mode=False, catch_exceptions=False
        )
    assert "\n" not in str(caught.value)
