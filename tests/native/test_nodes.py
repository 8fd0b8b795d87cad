"""Ranks on several nodes: each node is described, and every row names the file that describes its own."""

from __future__ import annotations

import csv
import json
import shutil
import subprocess
import sys

import pytest

from scalebench.analysis.methodology import check
from scalebench.cli.main import main
from scalebench.comm import engines
from scalebench.comm.launchers import mpirun
from scalebench.records.provenance import describe_node, host_hash

PYTHON = """\
#!/bin/sh
exec {unshare} sh -c 'hostname "node-${{OMPI_COMM_WORLD_RANK:-0}}" && exec "$0" "$@"' {python} "$@"
"""


AHEAD_S = 1000  # of the clock of durations of each later rank's node


@pytest.fixture
def nodes(tmp_path, monkeypatch):
    """Every rank finds itself on a node with a name of its own."""
    start_on_nodes(tmp_path, monkeypatch, ["unshare", "--uts"])


@pytest.fixture
def nodes_with_clocks(tmp_path, monkeypatch):
    """As `nodes`, and each node was booted at another time."""
    ahead = f"$((${{OMPI_COMM_WORLD_RANK:-0}} * {AHEAD_S}))"
    start_on_nodes(
        tmp_path,
        monkeypatch,
        ["unshare", "--uts", "--time", "--monotonic", ahead, "--fork"],
    )


def start_on_nodes(tmp_path, monkeypatch, unshare):
    if reason := engines.available("mpi"):
        pytest.skip(reason)
    tried = ["0" if word.startswith("$") else word for word in unshare]
    if subprocess.run([*tried, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no host can get another name, or another clock, here")
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(PYTHON.format(unshare=" ".join(unshare), python=sys.executable))
    python.chmod(0o755)
    (tmp_path / "bin" / "mpirun").symlink_to(mpirun.find())
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.chdir(tmp_path)


def run(*more):
    arguments = (
        "run",
        "--name",
        "far",
        "--dataset",
        "wine",
        "--epochs",
        "1",
        "--repetitions",
        "1",
        "--quiet",
        *more,
    )
    with pytest.raises(SystemExit) as end:
        main.main(
            [*arguments, "--execution", "native", "--engine", "mpi"],
            prog_name="scalebench",
        )
    assert end.value.code == 0


def test_run_on_other_nodes_names_their_provenance(nodes, tmp_path):
    run("--workers", "1,2", "--strategy", "allreduce")
    with (tmp_path / "results/far/runs.csv").open(newline="") as file:
        rows = {row["workers"]: row for row in csv.DictReader(file)}
    facts_of = {}
    for workers, row in rows.items():
        facts = json.loads(
            (tmp_path / f"results/far/provenance/{row['provenance']}.json").read_text()
        )
        assert row["host_hash"] == facts["host_hash"] == host_hash(), (
            "the node that launched them"
        )
        facts_of[workers] = facts["nodes"]
    assert len(facts_of["2"]) == 2
    assert facts_of["1"].items() <= facts_of["2"].items(), (
        "one worker ran on one of the two"
    )
    assert host_hash() not in facts_of["2"]
    here = describe_node()
    for host, facts in facts_of["2"].items():
        assert facts == here | {"host_hash": host}, (
            "the same machine under another name"
        )
    assert "node-" not in (tmp_path / "results/far/runs.csv").read_text()
    ours = {"mixed-machines", "no-provenance"}
    assert not [
        finding
        for finding in check(tmp_path / "results/far").findings
        if finding.rule in ours
    ]
    shutil.rmtree(tmp_path / "results/far/provenance")
    assert [
        finding.what
        for finding in check(tmp_path / "results/far").findings
        if finding.rule in ours
    ] == ["nothing in provenance/ describes the machine and packages of 2 runs"]


def test_a_trace_of_several_nodes_is_on_one_clock(nodes_with_clocks, tmp_path, invoke):
    invoke(
        "trace",
        "--strategy",
        "allreduce",
        "--workers",
        2,
        "--execution",
        "native",
        "--engine",
        "mpi",
    )
    (trace,) = tmp_path.glob("plots/**/*.trace.json")
    events = [
        event
        for event in json.loads(trace.read_text())["traceEvents"]
        if event["ph"] == "X"
    ]
    ends = {event["tid"]: (event["ts"] + event["dur"]) / 1e6 for event in events}
    assert len(ends) == 2
    assert all(0 < end < AHEAD_S / 2 for end in ends.values()), (
        "no clock is ahead of the other"
    )


def test_rows_say_where_each_worker_was_and_how_its_clock_was_set(
    nodes_with_clocks, tmp_path
):
    run("--workers", "2", "--strategy", "allreduce")
    with (tmp_path / "results/far/runs.csv").open(newline="") as file:
        (row,) = csv.DictReader(file)
    held = {
        name: json.loads(row[name])
        for name in row
        if name.startswith("worker_") and row[name].startswith("[")
    }
    assert len(set(held["worker_nodes"])) == 2
    assert all(step > 0 for step in held["worker_step_s"])
    assert all(held["worker_cores"])
    (zero, offset), (exact, error) = (
        held["worker_clock_offset_s"],
        held["worker_clock_error_s"],
    )
    assert zero == exact == 0
    assert error > 0
    assert abs(offset) <= error + 1e-4, (
        "the time of day is the machine's; two clocks are read in turn"
    )
