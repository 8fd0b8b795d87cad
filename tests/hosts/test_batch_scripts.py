"""The batch scripts of docs/clusters.md, run by real `sbatch` or, without Slurm, on hosts of a hostfile."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from scalebench.comm import engines
from tests.hosts.machines import until
from tests.hosts.studies import finished, rows_in, study

DOCS = Path(__file__).parents[2] / "docs"
SCRIPTS = DOCS / "batch"
HOROVOD = ["horovod"] if engines.available("horovod") is None else []
ONE, TWO = (
    ["--ntasks-per-node=1", "--cpus-per-task=2"],
    ["--ntasks-per-node=2", "--cpus-per-task=1"],
)


@pytest.fixture
def user(tmp_path):
    """A user's home, with scalebench and modules as the scripts expect them; return the environment for them."""
    activate = tmp_path / "scalebench" / "bin" / "activate"
    activate.parent.mkdir(parents=True)
    activate.write_text(f'PATH="{Path(sys.executable).parent}:$PATH"\n')
    (tmp_path / "modules").write_text("module() { :; }\n")
    return {"HOME": str(tmp_path), "BASH_ENV": str(tmp_path / "modules")}


@pytest.fixture
def submit(cluster, user, tmp_path):
    """Submit a script of the page for a study in its own folder; return the number of the job."""

    def submit(name, text, *options):
        (tmp_path / "study.yaml").write_text(text)
        script = (SCRIPTS / f"{name}.sh").read_text()
        return cluster.sbatch(script, tmp_path, "--nodes=3", *options, **user)

    return submit


def test_the_page_shows_every_script():
    shown = re.findall(r"batch/([\w-]+\.sh)", (DOCS / "clusters.md").read_text())
    assert set(shown) == {path.name for path in SCRIPTS.iterdir()}


@pytest.mark.parametrize(
    ("name", "layout", "workers", "strategies", "launcher", "binding"),
    [
        pytest.param(
            "mpirun",
            TWO,
            6,
            ["allreduce", "ddp"],
            "mpirun",
            "core",
            marks=pytest.mark.thorough,
        ),
        (
            "srun-pmix",
            ONE,
            3,
            ["allreduce", "epoch_async", *HOROVOD],
            "srun",
            "core:2" if HOROVOD else "core",
        ),
        pytest.param(
            "srun-gloo",
            ONE,
            3,
            ["allreduce", "ddp"],
            "srun",
            "core:2",
            marks=pytest.mark.thorough,
        ),
        pytest.param(
            "one-task",
            ONE,
            3,
            ["allreduce"],
            "mpirun",
            "core",
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_a_batch_script_runs(
    cluster, submit, tmp_path, name, layout, workers, strategies, launcher, binding
):
    state = cluster.wait(submit(name, study(workers, *strategies), *layout))
    output = (tmp_path / "job.txt").read_text()
    assert state == "COMPLETED", output
    rows = rows_in(tmp_path)
    assert set(rows) == set(strategies), output
    for row in rows.values():
        assert (row["status"], row["launcher"], row["nodes"]) == (
            "completed",
            launcher,
            "3",
        ), row["error"]
        assert row["binding"] == binding


@pytest.mark.thorough
def test_a_study_stopped_before_the_time_limit_continues_when_the_job_is_requeued(
    cluster, submit, tmp_path
):
    """The test sends the signal of the script's `--signal`, which Slurm sends minutes before the limit.

    Slurm starts a requeued job 120 s later, as messages of the first start that come
    late would end the second one. Here it starts as soon as all nodes have reported the
    first one's end, after which no such message follows.
    """
    repetitions = 8
    job = submit(
        "resume", study(3, "allreduce", repetitions=repetitions, epochs=60), *ONE
    )
    rows = tmp_path / "results" / "nodes" / "runs.csv"
    until(lambda: rows.exists() and rows.read_text().count("\n") > 1, "a run is done")
    cluster.hosts.login.call(
        ["scancel", "--batch", "--signal=USR1", str(job)], env=cluster.environment
    )
    until(lambda: "Restarts=1" in cluster.shown(job), "the job is requeued")
    until(
        lambda: cluster.state(job) == "PENDING",
        "the first start has ended on all nodes",
    )
    assert len(rows.read_text().splitlines()) - 1 < repetitions
    cluster.hosts.login.call(
        ["scontrol", "update", f"JobId={job}", "StartTime=now"], env=cluster.environment
    )
    assert cluster.wait(job) == "COMPLETED", (tmp_path / "job.txt").read_text()
    assert len(rows.read_text().splitlines()) - 1 == repetitions


def test_all_gpus_of_the_nodes_are_counted(cluster, user, tmp_path):
    program = "from scalebench.launch.hosts import reachable; print(reachable().gpus, reachable().slots)"
    script = f"#!/bin/bash\nexport SCALEBENCH_LAUNCHER=srun\n{sys.executable} -c '{program}'\n"
    job = cluster.sbatch(
        script, tmp_path, "--nodes=3", "--ntasks-per-node=2", "--gpus-per-task=1"
    )
    assert cluster.wait(job) == "COMPLETED", (tmp_path / "job.txt").read_text()
    assert (tmp_path / "job.txt").read_text().splitlines()[-1] == "6 6"
    shape = [
        "--nodes=2",
        "--ntasks-per-node=2",
        "--cpus-per-task=1",
        "--gpus-per-node=2",
    ]
    cluster.sbatch(
        (SCRIPTS / "gpus.sh").read_text(), tmp_path, "--test-only", *shape, **user
    )


@pytest.mark.thorough
def test_hostfile_script_runs_without_a_scheduler(hosts, by_name, user, tmp_path):
    (tmp_path / "study.yaml").write_text(study(3, "allreduce"))
    (tmp_path / "hosts.txt").write_text(
        "".join(f"{node.name} slots=1\n" for node in hosts.nodes)
    )
    environment = by_name | user
    del environment["PRTE_MCA_prte_default_hostfile"]  # the script's to set
    pipes = {
        "stdin": subprocess.DEVNULL,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
    }
    process = hosts.nodes[0].start(
        [SCRIPTS / "hostfile.sh"], cwd=tmp_path, env=environment, **pipes
    )
    output = finished(process)
    assert process.returncode == 0, output
    row = rows_in(tmp_path)["allreduce"]
    assert (row["status"], row["nodes"], row["launcher"]) == (
        "completed",
        "3",
        "mpirun",
    ), output
