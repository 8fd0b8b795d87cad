"""The graph of tasks of a strategy: its nodes, what each waits for, and its drawing."""

from __future__ import annotations

import csv
from collections import Counter
from pathlib import Path

import pytest
from click.testing import CliRunner

from scalebench.cli.main import main
from scalebench.pricing.schedule import task_graph


def kinds(nodes):
    return Counter(node.kind for node in nodes)


def test_an_average_waits_for_all_blocks_of_its_epoch(recorded):
    nodes = task_graph(recorded("epoch_average", 3, epochs=2))
    assert kinds(nodes) == {"train": 6, "average": 2}
    (first, second) = (node for node in nodes if node.kind == "average")
    assert sorted(first.after) == [f"train-e0-w{rank}" for rank in range(3)]
    assert all(
        node.after == [first.name]
        for node in nodes
        if node.kind == "train" and node.epoch == 1
    )
    assert [node.depth for node in (first, second)] == [1, 3]


@pytest.mark.parametrize("aggregation", ["allreduce", "master"])
def test_every_second_epoch_is_averaged_by_one_task(recorded, aggregation):
    nodes = task_graph(
        recorded(
            {"epoch_average": {"every": 2, "aggregation": aggregation}}, 2, epochs=4
        )
    )
    assert kinds(nodes) == {"train": 8, "average": 2}


def test_merges_wait_for_no_other_worker(recorded):
    nodes = task_graph(recorded("epoch_async", 2, epochs=2))
    assert kinds(nodes) == {"train": 4, "merge": 4, "average": 1}
    for node in nodes:
        if node.kind == "merge":
            assert node.after == [node.name.replace("merge", "train")]


def test_the_graph_is_drawn_and_listed(tmp_path):
    words = [
        "--graph",
        "--strategy",
        "epoch_average",
        "--epochs",
        "2",
        "--output",
        str(tmp_path),
        "--format",
        "png",
    ]
    done = CliRunner().invoke(main, ["trace", *words])
    assert done.exit_code == 0, done.output
    picture, table = done.output.split()
    assert picture.endswith(".png")
    rows = list(csv.DictReader(Path(table).read_text().splitlines()))
    assert Counter(row["kind"] for row in rows) == {"train": 8, "average": 2}


def test_a_run_by_tasks_has_a_timeline(tmp_path):
    words = [
        "--strategy",
        "epoch_average",
        "--workers",
        "2",
        "--execution",
        "native",
        "--engine",
        "tasks",
    ]
    done = CliRunner().invoke(
        main, ["trace", *words, "--output", str(tmp_path), "--format", "png"]
    )
    assert done.exit_code == 0, done.output
    rows = list(csv.DictReader(Path(done.output.split()[1]).read_text().splitlines()))
    for worker in ("worker 0", "worker 1"):
        own = [row for row in rows if row["lane"] == worker]
        assert [row["activity"] for row in own].count("compute") == 2, (
            "one block in each of two epochs"
        )


def test_a_strategy_that_exchanges_between_batches_has_no_such_graph(tmp_path):
    done = CliRunner().invoke(
        main, ["trace", "--graph", "--strategy", "allreduce", "--output", str(tmp_path)]
    )
    assert done.exit_code == 2
    assert "has no batches" in done.output
