"""Arguments of srun, and where it is refused."""

from __future__ import annotations

import os

import pytest

from scalebench.comm import engines
from scalebench.comm.launchers import chosen, mpirun, srun
from scalebench.comm.launchers.srun import Srun
from scalebench.errors import EngineError
from scalebench.launch import processes
from scalebench.launch.hosts import Allocation, Host
from scalebench.launch.processes import launch_command
from scalebench.native.postmortem import cause_of_death
from tests.conftest import needs_mpi
from tests.facts import naming


@pytest.fixture
def job(monkeypatch, tmp_path):
    """A job of Slurm, whose srun knows the MPI plugins that `plugins` writes."""
    (tmp_path / "srun").write_text(f"#!/bin/sh\ncat {tmp_path}/plugins >&2\n")
    (tmp_path / "srun").chmod(0o755)
    (tmp_path / "plugins").write_text(
        "srun: MPI types are...\nsrun: none\nsrun: pmi2\n"
    )
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SCALEBENCH_LAUNCHER", "srun")
    return tmp_path


@pytest.fixture
def nodes(monkeypatch):
    known = Allocation(tuple(Host(f"n{i}", 2, 4, 4) for i in range(2)))
    monkeypatch.setattr(processes, "reachable", lambda: known)


def words(command, name):
    return [word.partition("=")[2] for word in command if word.startswith(f"--{name}=")]


def test_ranks_fill_the_slots_of_nodes_in_turn_and_are_bound_where_there_are_cores(
    job, nodes
):
    command, binding = launch_command(3, progress_threads=1, mpi=False)
    assert (words(command, "nodelist"), words(command, "mpi"), binding) == (
        ["n0,n0,n1"],
        ["none"],
        "core:2",
    )
    assert words(command, "cpus-per-task") == ["2"]
    command, binding = launch_command(9)
    assert (words(command, "nodelist"), words(command, "mpi"), binding) == (
        ["n0," * 5 + "n1,n1,n1,n1"],
        ["pmix"],
        "none",
    )
    assert "--overcommit" in command
    assert words(launch_command(2, alone=True)[0], "nodelist") == ["n0,n0"]


@needs_mpi
def test_mpi_and_horovod_are_refused_without_pmix_and_gloo_is_not(job):
    assert engines.available("gloo") is None
    for engine in ("mpi", "horovod"):
        assert "Slurm here has no PMIx" in engines.available(engine)
        assert "--engine gloo" in engines.available(engine)
    srun._names_pmix.cache_clear()
    (job / "plugins").write_text("MPI plugin types are...\n\tpmix\n\tnone\n")
    assert engines.available("mpi") is None
    srun._names_pmix.cache_clear()


def test_srun_starts_ranks_in_a_job_alone(job, monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID")
    assert "inside a job only" in engines.available("gloo")


def test_auto_takes_srun_where_a_job_has_no_mpirun(job, monkeypatch):
    monkeypatch.setenv("SCALEBENCH_LAUNCHER", "auto")
    assert chosen().name == "mpirun"
    monkeypatch.setattr(mpirun, "find", lambda: None)
    assert chosen().name == "srun"
    monkeypatch.delenv("SLURM_JOB_ID")
    assert chosen().name == "local"
    monkeypatch.setenv("SCALEBENCH_LAUNCHER", "slurm")
    with pytest.raises(
        EngineError,
        match=naming("'slurm'", "auto, horovodrun, local, mpirun, srun, torchrun"),
    ):
        chosen()


def test_slots_are_the_tasks_of_each_node(monkeypatch):
    monkeypatch.setenv("SLURM_TASKS_PER_NODE", "2(x3),1")
    assert Srun.job.slots() == [2, 2, 2, 1]
    monkeypatch.delenv("SLURM_TASKS_PER_NODE")
    assert Srun.job.slots() == []


def test_gpus_of_a_task_are_a_number_with_or_without_a_type(monkeypatch):
    for stated, count in {"2": 2, "a100:4": 4, "": 0}.items():
        monkeypatch.setenv("SLURM_GPUS_PER_TASK", stated)
        assert Srun().gpus_per_task() == count


def test_what_the_batch_script_asked_for_does_not_contradict_the_command():
    assert Srun().environment(
        {"SLURM_CPUS_PER_TASK": "4", "SLURM_JOB_ID": "7", "SLURM_CPU_BIND_TYPE": "x"}
    ) == {"SLURM_JOB_ID": "7"}


@pytest.mark.parametrize(
    ("line", "error"),
    [
        (
            "n1: task 1: Killed",
            "rank 1 on n1 was ended by signal 9 (Killed, perhaps for want of memory)",
        ),
        (
            "n1: tasks 1-2: Segmentation fault (core dumped)",
            "rank 1 on n1 was ended by signal 11 (Segmentation fault)",
        ),
        ("n1: task 1: Exited with exit code 3", "rank 1 on n1 exited before reporting"),
    ],
)
def test_the_task_that_ended_first_is_named(tmp_path, line, error):
    (tmp_path / "stderr.txt").write_text(
        f"srun: error: {line}\nsrun: launch/slurm: _step_signal: Terminating StepId=5.5\n"
        "srun: error: n0: task 0: Terminated\nsrun: Force Terminated StepId=5.5\n"
    )
    hosts = ["n0", "n1", "n1"]
    assert cause_of_death(tmp_path, 143, hosts, launcher="srun").error == error


@pytest.mark.parametrize(
    ("answer", "ending"),
    [
        ("echo RUNNING", False),
        ("echo COMPLETING", True),
        ("echo CANCELLED", True),
        ("exit 1", False),
        ("echo slurm_load_jobs error: Invalid job id specified >&2; exit 1", False),
    ],
)
def test_job_that_is_ending_is_known_by_its_state(job, answer, ending):
    (job / "squeue").write_text(f"#!/bin/sh\n{answer}\n")
    (job / "squeue").chmod(0o755)
    assert Srun.job.is_ending() is ending


def test_few_ranks_of_a_large_allocation_lie_on_all_its_nodes(job, nodes, monkeypatch):
    large = Allocation(tuple(Host(f"n{i}", 64, 64, 64) for i in range(2)))
    few = large.with_at_most(4)
    assert few.slots == 8
    assert words(launch_command(8, on=few)[0], "nodelist") == [
        "n0,n0,n0,n0,n1,n1,n1,n1"
    ]
    assert (
        Allocation(tuple(Host(f"n{i}", 64, 2, 2) for i in range(3)))
        .with_at_most(4)
        .slots
        == 6
    )
    monkeypatch.setenv("SCALEBENCH_LAUNCHER", "mpirun")
    monkeypatch.setattr(mpirun, "find", lambda: "mpirun")
    command, _ = launch_command(8, on=few)
    assert command[command.index("--map-by") + 1] == "ppr:4:node:OVERSUBSCRIBE"
