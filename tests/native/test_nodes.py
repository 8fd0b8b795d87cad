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
exec unshare --uts sh -c 'hostname "node-${{OMPI_COMM_WORLD_RANK:-0}}" && exec "$0" "$@"' {python} "$@"
"""


@pytest.fixture
def nodes(tmp_path, monkeypatch):
    """Every rank finds itself on a node with a name of its own."""
    if reason := engines.available("mpi"):
        pytest.skip(reason)
    if subprocess.run(["unshare", "--uts", "true"], capture_output=True, check=False).returncode:
        pytest.skip("no host can get another name here")
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(PYTHON.format(python=sys.executable))
    python.chmod(0o755)
    (tmp_path / "bin" / "mpirun").symlink_to(mpirun.find())
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.chdir(tmp_path)


def run(*more):
    arguments = ("run", "--name", "far", "--dataset", "wine", "--epochs", "1", "--repetitions", "1", "--quiet", *more)
    with pytest.raises(SystemExit) as end:
        main.main([*arguments, "--execution", "native", "--engine", "mpi"], prog_name="scalebench")
    assert end.value.code == 0


def test_run_on_other_nodes_names_their_provenance(nodes, tmp_path):
    run("--workers", "1,2", "--strategy", "allreduce")
    with (tmp_path / "results/far/runs.csv").open(newline="") as file:
        rows = {row["workers"]: row for row in csv.DictReader(file)}
    facts_of = {}
    for workers, row in rows.items():
        facts = json.loads((tmp_path / f"results/far/provenance/{row['provenance']}.json").read_text())
        assert row["host_hash"] == facts["host_hash"] == host_hash(), "the node that launched them"
        facts_of[workers] = facts["nodes"]
    assert len(facts_of["2"]) == 2
    assert facts_of["1"].items() <= facts_of["2"].items(), "one worker ran on one of the two"
    assert host_hash() not in facts_of["2"]
    here = describe_node()
    for host, facts in facts_of["2"].items():
        assert facts == here | {"host_hash": host}, "the same machine under another name"
    assert "node-" not in (tmp_path / "results/far/runs.csv").read_text()
    ours = {"mixed-machines", "no-provenance"}
    assert not [finding for finding in check(tmp_path / "results/far").findings if finding.rule in ours]
    shutil.rmtree(tmp_path / "results/far/provenance")
    assert [finding.what for finding in check(tmp_path / "results/far").findings if finding.rule in ours] == [
        "nothing in provenance/ describes the machine and packages of 2 runs"
    ]
