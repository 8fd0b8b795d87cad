"""Studies by real `sbatch` on three nodes."""

from __future__ import annotations

import pytest

from scalebench.comm import engines
from tests.facts import together
from tests.hosts.machines import until
from tests.hosts.studies import (
    SCALEBENCH,
    beats,
    errors_in,
    is_training,
    rows_in,
    study,
)

ALL = ["allreduce", "ddp", "epoch_async", "ssp", "daso-fixed"]


def submit(cluster, folder, text, *options):
    """Run a study in a job; return its output."""
    (folder / "study.yaml").write_text(text)
    job = cluster.sbatch(
        f"#!/bin/bash\n{SCALEBENCH} run study.yaml\n", folder, *options
    )
    state = cluster.wait(job)
    output = (folder / "job.txt").read_text()
    assert state == "COMPLETED", output
    return output


@pytest.mark.parametrize(
    ("tasks", "workers", "names"),
    [
        (1, 3, ["epoch_async", "ssp"]),
        pytest.param(1, 3, ALL, marks=pytest.mark.thorough),
        pytest.param(2, 6, ALL, marks=pytest.mark.thorough),
    ],
)
def test_every_kind_of_strategy_runs_on_three_nodes(
    cluster, tmp_path, tasks, workers, names
):
    """With every change those that need most of an MPI: one that merges into memory of others, one with a server."""
    names = [*names]
    if tasks == 2:
        names.remove("ssp")  # its server would be a seventh process
        if engines.available("horovod") is None:
            names.append("horovod")
    output = submit(
        cluster,
        tmp_path,
        study(workers, *names),
        "--nodes=3",
        f"--ntasks-per-node={tasks}",
    )
    rows = rows_in(tmp_path)
    assert set(rows) == set(names), output
    for name, row in rows.items():
        assert row["status"] == "completed", row["error"]
        assert (row["nodes"], row["workers_per_node"]) == ("3", str(tasks)), name
        assert row["scheduler_job_id"]
    crowded = {name for name, row in rows.items() if row["oversubscribed"] == "true"}
    assert crowded == ({"ddp", "horovod"} & set(names) if tasks == 2 else set()), (
        "a thread beside each worker"
    )
    if tasks == 1:
        assert together(
            output, "3 slots", "ssp", "3 workers", "4 processes", "1 server"
        )


def test_a_rank_killed_under_srun_is_named(cluster, hosts, tmp_path):
    (tmp_path / "study.yaml").write_text(
        study(3, "allreduce", engine="gloo", epochs=10**5)
    )
    script = f"#!/bin/bash\n{SCALEBENCH} run study.yaml --launcher srun\n"
    job = cluster.sbatch(script, tmp_path, "--nodes=3", "--ntasks-per-node=1")
    until(lambda: is_training(tmp_path, 1), "the ranks train")
    hosts.nodes[2].call(["kill", "-KILL", str(beats(tmp_path, 1)[2].pid)])
    assert cluster.wait(job) == "FAILED"
    assert errors_in(tmp_path) == [
        "rank 2 on n2 was ended by signal 9 (Killed, perhaps for want of memory)"
    ]


def test_end_of_the_batch_shell_alone_stops_the_study_without_a_failed_run(
    cluster, hosts, tmp_path
):
    """A trap lets the command go on for a moment, as a script does that tidies up."""
    text = study(3, "allreduce", engine="gloo", epochs=10**5, repetitions=2)
    (tmp_path / "study.yaml").write_text(text)
    script = f"#!/bin/bash\ntrap 'sleep 8' TERM\n{SCALEBENCH} run study.yaml --launcher srun &\nwait\n"
    job = cluster.sbatch(script, tmp_path, "--nodes=3", "--ntasks-per-node=1")
    until(lambda: is_training(tmp_path, 1), "the ranks train")
    hosts.login.call(["scancel", str(job)], env=cluster.environment)
    cluster.wait(job)
    until(
        lambda: "stopping" in (tmp_path / "job.txt").read_text(),
        "the command stops",
    )
    until(lambda: cluster._idle() == 3, "all nodes are free")
    assert errors_in(tmp_path) == []
    assert (
        not (tmp_path / "results" / "nodes" / "logs").exists()
        or beats(tmp_path, 2) == []
    )
