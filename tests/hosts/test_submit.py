"""Studies submitted by `scalebench submit` to a real Slurm on three nodes, watched and collected."""

from __future__ import annotations

import csv
import json
from collections import Counter

import pytest

from tests.hosts.studies import SCALEBENCH, study

ONE_EACH = ["--tasks-per-node", "1"]  # a worker on each node


@pytest.fixture
def site(cluster, tmp_path):
    """A user's folder on the login node; return the function that runs a command there."""
    (tmp_path / "site.yaml").write_text("partition: p\n")

    def call(*words, timeout=200, codes=(0,)):
        command = ["bash", "-c", '"$@"; echo "exit $?"', "-", SCALEBENCH, *words]
        printed = cluster.hosts.login.call(command, cwd=tmp_path, env=cluster.environment, timeout=timeout)
        assert int(printed.splitlines()[-1].split()[1]) in codes, printed
        return printed

    return call


def write_study(folder, *strategies, **values):
    counts = study(3, *strategies, **values).replace("workers: [3]", "workers: [1, 2, 3]")
    (folder / "study.yaml").write_text(counts)


def rows(folder, table="runs"):
    with (folder / "results" / "nodes" / f"{table}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def jobs_of(folder):
    return json.loads((folder / "results" / "nodes" / "jobs" / "submission.json").read_text())["jobs"]


def output_of(folder):
    return "\n".join(path.read_text() for path in sorted((folder / "results" / "nodes" / "jobs").glob("*.txt")))


def test_submitted_study_runs_as_a_job_for_each_number_of_nodes_and_is_collected(cluster, site, tmp_path):
    write_study(tmp_path, "serial", "allreduce", repetitions=2)
    said = site("submit", "study.yaml", *ONE_EACH)
    assert said.count("job ") == 4, said
    largest, *_, collection = jobs_of(tmp_path)
    assert "NumNodes=3" in cluster.shown(int(largest["job"]))
    assert "0 of 8 runs done" in site("status", "results/nodes")
    assert cluster.wait(int(collection["job"])) == "COMPLETED", output_of(tmp_path)
    made = rows(tmp_path)
    assert Counter((row["strategy"], row["workers"], row["nodes"]) for row in made) == {
        ("serial", "1", "1"): 2, ("allreduce", "1", "1"): 2, ("allreduce", "2", "2"): 2, ("allreduce", "3", "3"): 2,
    }  # fmt: skip
    assert {row["status"] for row in made} == {"completed"}
    assert sorted(int(row["run_order"]) for row in made) == list(range(8)), "as if it had run in one piece"
    assert len({row["scheduler_job_id"] for row in made}) == 3
    assert len(rows(tmp_path, "epochs")) == 16
    facts = json.loads(site("status", "results/nodes", "--json").rpartition("\n")[0].partition("exit")[0])
    assert {shard["state"] for shard in facts["shards"]} == {"done"}
    assert "nothing to submit" in site("submit", "results/nodes")
