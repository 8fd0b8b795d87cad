"""Allreduce between three hosts on slow links: measured, charged, and compared with a ring."""

from __future__ import annotations

import csv
import json
import subprocess
import tempfile
from pathlib import Path

import pytest

from scalebench.cluster.cluster_file import preset
from scalebench.cluster.engine_costs import EngineCosts
from scalebench.comm import engines
from tests.hosts import machines
from tests.hosts.conftest import reached_by_name
from tests.hosts.machines import Hosts
from tests.hosts.studies import SCALEBENCH, finished, study

PIPES = {
    "stdin": subprocess.DEVNULL,
    "stdout": subprocess.PIPE,
    "stderr": subprocess.PIPE,
}


@pytest.fixture(scope="module")
def slow():
    """Three hosts on links of 100 Mbit/s, and the environment of mpirun on n0."""
    if reason := machines.why_not() or engines.available("mpi"):
        pytest.skip(reason)
    with tempfile.TemporaryDirectory(
        prefix="scalebench-slow-", ignore_cleanup_errors=True
    ) as folder:
        Path(folder).chmod(0o755)
        hosts = Hosts(Path(folder), 3, "100mbit")
        yield hosts, reached_by_name(hosts)
        hosts.close()


def scalebench(slow, folder, *words, **more):
    hosts, environment = slow
    return finished(
        hosts.nodes[0].start(
            [SCALEBENCH, *words], cwd=folder, env=environment | more, **PIPES
        ),
    )


def compared(slow, folder, **settings):
    """Return the finding of `scalebench doctor` about allreduce."""
    findings = json.loads(
        scalebench(slow, folder, "doctor", "--json", "--network", **settings)
    )
    return next(finding for finding in findings if finding["part"] == "allreduce")


@pytest.mark.thorough
def test_doctor_compares_allreduce_with_a_ring_and_names_the_setting_that_forces_it(
    slow, tmp_path
):
    """No assertion on which is slower, as it depends on the load; MPI accepts the setting."""
    found = compared(slow, tmp_path)
    print(found["detail"])
    assert "1 MiB among 3 ranks on 3 nodes: " in found["detail"]
    if not found["present"]:
        settings = found["detail"].partition("force the ring with: export ")[2].split()
        assert len(settings) == 2, found["detail"]
        ring = compared(
            slow, tmp_path, **dict(setting.split("=") for setting in settings)
        )
        assert "1 MiB among 3 ranks on 3 nodes: " in ring["detail"]


@pytest.mark.thorough
def test_virtual_allreduce_costs_what_the_nodes_of_an_allocation_measured(
    slow, tmp_path
):
    """1 MiB takes 2 ms at the 10 Gbit/s of the network model, and some 100 ms on these links."""
    cluster = (
        preset("this-machine")
        .read_text()
        .replace("workers_per_node: this-machine", "workers_per_node: 1")
    )
    (tmp_path / "cluster.yaml").write_text(cluster)
    keys = {"execution": "auto", "cluster": "cluster.yaml", "calibration_budget_s": 5}
    text = study(3, "allreduce", model="{mlp: {hidden: [512, 500]}}", **keys)
    (tmp_path / "study.yaml").write_text(text)
    output = scalebench(slow, tmp_path, "run", "study.yaml", "--output", "results")
    print(output)
    folder = tmp_path / "results" / "nodes"
    kept = EngineCosts.model_validate(
        json.loads((folder / "calibration.json").read_text())["engines"]
    )
    assert {entry.nodes for entry in kept.entries if entry.engine == "mpi"} == {1, 2, 3}
    assert kept.of("gloo", 3, 3).ranks == 3
    with (folder / "runs.csv").open(newline="") as file:
        rows = [
            row
            for row in csv.DictReader(file)
            if row["strategy"] == "allreduce" and row["workers"] == "3"
        ]
    waits = {row["execution"]: float(row["comm_s"]) / int(row["syncs"]) for row in rows}
    print(waits)
    assert waits["virtual"] > 0.05
    assert 0.2 < waits["virtual"] / waits["native"] < 5, (
        "links and cores are shared by all hosts, and by others"
    )
