"""`scalebench trace` writes a figure and a trace file of one run, with Horovod's own timeline beside it."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from click.testing import CliRunner

from scalebench.cli.main import main
from scalebench.comm import engines
from tests.figures.trace_rules import broken_rules

SHORT = [
    "--strategy",
    "epoch_average",
    "--cluster",
    "marenostrum5-acc",
    "--device-step-time",
    "0.001",
]


def trace(folder: Path, *arguments: str) -> tuple[list[Path], dict]:
    result = CliRunner().invoke(
        main,
        [
            "trace",
            "--batch-per-worker",
            "8",
            *arguments,
            "--output",
            str(folder),
            "--format",
            "png",
        ],
    )
    assert result.exit_code == 0, result.output
    files = [Path(line) for line in result.output.split()]
    assert [file.suffix for file in files] == [".png", ".csv", ".json"]
    assert all(file.stat().st_size > 500 for file in files)
    return files, json.loads(files[-1].read_text())


def lanes(document: dict) -> dict[str, list[dict]]:
    names = {
        e["tid"]: e["args"]["name"]
        for e in document["traceEvents"]
        if e["name"] == "thread_name"
    }
    return {
        name: [e for e in document["traceEvents"] if e["ph"] == "X" and e["tid"] == tid]
        for tid, name in names.items()
    }


def test_virtual_lanes_have_no_gaps(tmp_path: Path) -> None:
    files, document = trace(
        tmp_path,
        *SHORT,
        "--set",
        "virtual.slowdown={1: 2.0}",
        "--set",
        "virtual.jitter=none",
    )
    found = lanes(document)
    assert list(found) == [f"worker {rank}" for rank in range(4)]
    for events in found.values():
        for before, after in pairwise(events):
            # microseconds, rounded to 1e-3
            assert after["ts"] == pytest.approx(before["ts"] + before["dur"], abs=0.01)
        assert events[0]["ts"] == 0
    ends = {
        name: events[-1]["ts"] + events[-1]["dur"] for name, events in found.items()
    }
    # the last thing all do is average
    assert max(ends.values()) == pytest.approx(min(ends.values()), abs=0.01)
    compute = {
        name: sum(e["dur"] for e in events if e["cat"] == "compute")
        for name, events in found.items()
    }
    # a batch may differ by a sample
    assert compute["worker 1"] == pytest.approx(2 * compute["worker 0"], rel=0.05)
    waited = {
        name: sum(e["dur"] for e in events if e["cat"] == "waiting")
        for name, events in found.items()
    }
    assert waited["worker 1"] == 0
    assert waited["worker 0"] + compute["worker 0"] == pytest.approx(
        compute["worker 1"], rel=1e-3
    )
    assert files[0].stem == "timeline-epoch_average-at-4-workers-virtual"
    assert (
        files[1]
        .read_text()
        .startswith("lane,activity,begin_s,end_s\nworker 0,compute,0.0,")
    )


@pytest.mark.parametrize("said", [[], ["--workers", "1"]])
def test_serial_is_traced_on_one_worker(tmp_path: Path, said: list[str]) -> None:
    files, document = trace(
        tmp_path, *SHORT[2:], "--strategy", "serial", "--epochs", "1", *said
    )
    assert list(lanes(document)) == ["worker 0"]
    assert files[0].stem == "timeline-serial-at-1-worker-virtual"


def test_trace_is_deterministic(tmp_path: Path) -> None:
    first, second = (trace(tmp_path / name, *SHORT)[0] for name in ("a", "b"))
    assert [file.read_bytes() for file in first] == [
        file.read_bytes() for file in second
    ]


@pytest.mark.skipif(engines.available("mpi") is not None, reason="no MPI here")
def test_real_run_has_laps_of_every_rank(tmp_path: Path) -> None:
    _, document = trace(
        tmp_path,
        "--strategy",
        "allreduce",
        "--workers",
        "2",
        "--execution",
        "native",
        "--epochs",
        "1",
    )
    found = lanes(document)
    assert list(found) == ["worker 0", "worker 1"]
    for events in found.values():
        assert {"compute", "communication", "data"} <= {
            event["cat"] for event in events
        }
        assert sum(event["name"] == "forward" for event in events) == 9
        assert all(after["ts"] >= before["ts"] for before, after in pairwise(events))
    # Who waits for the other ends waiting when the other comes: at each step one of the
    # two waits, or nobody.
    assert any(
        event["cat"] == "waiting" for events in found.values() for event in events
    )


@pytest.mark.skipif(engines.available("mpi") is not None, reason="no MPI here")
@pytest.mark.thorough
@pytest.mark.parametrize("strategy", ["epoch_async", "dssp", "gossip"])
def test_trace_file_of_a_real_run_is_valid_for_viewers(
    tmp_path: Path, strategy: str
) -> None:
    """Waits at a server, at one-sided accesses and in messages."""
    _, document = trace(
        tmp_path,
        "--strategy",
        strategy,
        "--workers",
        "2",
        "--execution",
        "native",
        "--epochs",
        "1",
    )
    assert broken_rules(document) == []
    found = lanes(document)
    workers = [f"worker {rank}" for rank in range(2)]
    assert list(found) == workers + ["server"] * (strategy == "dssp")
    for worker in workers:
        assert sum(event["name"] == "forward" for event in found[worker]) == 9
    if strategy == "dssp":
        assert {event["name"] for event in found["server"]} == {"serving"}
        assert len(found["server"]) >= 2 * 9


@pytest.mark.thorough
@pytest.mark.skipif(engines.available("horovod") is not None, reason="no Horovod here")
def test_horovod_timeline_is_included(tmp_path: Path) -> None:
    _, document = trace(
        tmp_path,
        "--strategy",
        "horovod",
        "--workers",
        "2",
        "--execution",
        "native",
        "--epochs",
        "1",
    )
    assert broken_rules(document) == []
    found = lanes(document)
    own = [name for name in found if name.startswith("Horovod: allreduce.")]
    assert len(own) == 4  # two layers, weights and biases
    end = max(
        event["ts"] + event["dur"]
        for name in found
        if name not in own
        for event in found[name]
    )
    for name in own:
        # what came before training is out
        assert sum(event["cat"] == "communication" for event in found[name]) >= 9 - 1
        assert all(
            event["ts"] >= 0 and event["ts"] + event["dur"] <= end + 1e5
            for event in found[name]
        )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["--workers", "2,4", "--strategy", "allreduce"],
            "a timeline, or a graph of tasks, is of one run, the study",
        ),
        (
            ["--workers", "2"],
            "a timeline is of one strategy; choose one of serial, allreduce, horovod",
        ),
        (
            ["--workers", "4", "--strategy", "serial"],
            "strategy serial trains on one worker; leave the number of workers",
        ),
        (
            ["--set", "workers=2", "--strategy", "serial"],
            "strategy serial trains on one worker",
        ),
        (
            [*SHORT, "--window", "3:1"],
            "--window 3:1: expected BEGIN:END in seconds, such as 0.5:1.5",
        ),
        ([*SHORT, "--window", "100:"], "nothing happened between 100 and inf s"),
        (
            ["--horovod-timeline", "no-such.json"],
            "cannot read no-such.json: No such file",
        ),
        (
            ["--strategy", "epoch_averag"],
            "unknown strategy 'epoch_averag'; did you mean 'epoch_average'?",
        ),
    ],
)
def test_usage_error_is_one_line(
    tmp_path: Path, arguments: list[str], said: str
) -> None:
    result = CliRunner().invoke(main, ["trace", *arguments, "--output", str(tmp_path)])
    assert result.exit_code == 2, result.output
    assert said in result.output
    assert len(result.output.strip().splitlines()) == 1


def test_a_folder_of_results_stands_for_its_study(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = [
        "run",
        "--name",
        "mine",
        "--dataset",
        "wine",
        "--execution",
        "modelled",
        "--workers",
        "1,2",
    ]
    words += [
        "--strategy",
        "allreduce",
        "--cluster",
        "marenostrum5-acc",
        "--device-step-time",
        "0.001",
    ]
    assert CliRunner().invoke(main, words).exit_code == 0
    done = CliRunner().invoke(
        main, ["trace", "results/mine", "--workers", "2", "--format", "png"]
    )
    assert done.exit_code == 0, done.output
