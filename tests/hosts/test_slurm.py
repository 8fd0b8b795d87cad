"""Studies by real `sbatch` on three nodes."""

from __future__ import annotations

import pytest

from scalebench.comm import engines
from tests.hosts.studies import SCALEBENCH, rows_in, study

ALL = ["allreduce", "ddp", "epoch_async", "ssp", "daso-fixed", "horovod"]


def submit(cluster, folder, text, *options):
    """Run a study in a job; what the job printed."""
    (folder / "study.yaml").write_text(text)
    job = cluster.sbatch(f"#!/bin/bash\n{SCALEBENCH} run study.yaml\n", folder, *options)
    state = cluster.wait(job)
    said = (folder / "job.txt").read_text()
    assert state == "COMPLETED", said
    return said


@pytest.mark.parametrize(("tasks", "workers"), [(1, 3), pytest.param(2, 6, marks=pytest.mark.thorough)])
def test_every_kind_of_strategy_runs_on_three_nodes(cluster, tmp_path, tasks, workers):
    names = [name for name in ALL if name != "horovod" or engines.available("horovod") is None]
    if tasks == 2:
        names.remove("ssp")  # its server would be a seventh process
    said = submit(cluster, tmp_path, study(workers, *names), "--nodes=3", f"--ntasks-per-node={tasks}")
    rows = rows_in(tmp_path)
    assert set(rows) == set(names), said
    for name, row in rows.items():
        assert row["status"] == "completed", row["error"]
        assert (row["nodes"], row["workers_per_node"]) == ("3", str(tasks)), name
        assert row["scheduler_job_id"]
    crowded = {name for name, row in rows.items() if row["oversubscribed"] == "true"}
    assert crowded == ({"ddp", "horovod"} & set(names) if tasks == 2 else set()), "a thread beside each worker"
    if tasks == 1:
        assert "the allocation has 3 slots, and ssp at 3 workers takes 4 processes (1 server beside" in said
