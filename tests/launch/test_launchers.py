"""The contract of every launcher that starts ranks here, with real ranks; tests/hosts hold srun's in a cluster."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import get_args

import pytest

from scalebench.cli.doctor import doctor
from scalebench.comm import engines, launchers
from scalebench.comm.launchers import NAMES, chosen, mpirun, named, using
from scalebench.comm.launchers.base import Placement, ReportedEnd
from scalebench.errors import EngineError
from scalebench.launch.processes import environment, launch_command
from scalebench.notebook import run
from scalebench.study.load import load_study
from scalebench.study.spec import Study
from tests.facts import together
from tests.launch.test_real_runs import Recorder, faulty, make_run

PROGRAM = Path(__file__).parent / "programs" / "told.py"
RANKS = 2
HERE = [name for name in NAMES if named(name).job is None]  # outside of a job


@pytest.fixture(scope="module", params=HERE)
def launcher(request):
    """A launcher that can start ranks here, chosen by its name."""
    found = named(request.param)
    if reason := found.lacks(by_mpi=not found.without_mpi):
        pytest.skip(reason)
    with using(found.name):
        yield found


@pytest.fixture(scope="module")
def ended_well(launcher, tmp_path_factory):
    """The ranks of a launch that ended well."""
    return started(
        launcher, tmp_path_factory.mktemp("well"), "well", SCALEBENCH_SAID="to all"
    )


@pytest.fixture
def engine(launcher):
    """An engine whose ranks the launcher starts."""
    name = "gloo" if launcher.without_mpi else "mpi"
    if reason := engines.available(name):
        pytest.skip(reason)
    return name


def started(launcher, tmp_path, *words, **variables):
    """Start the ranks of the program; return the process that has ended, and what each rank wrote."""
    command, binding = launch_command(RANKS, mpi=not launcher.without_mpi)
    done = subprocess.run(
        [*command, sys.executable, str(PROGRAM), launcher.name, str(tmp_path), *words],
        env=environment(1, oversubscribed=binding == "none") | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    facts = [
        json.loads(path.read_text()) for path in sorted(tmp_path.glob("rank-*.json"))
    ]
    return done, binding, facts


def test_ranks_know_their_number_their_world_and_their_environment(
    launcher, ended_well
):
    done, binding, facts = ended_well
    assert done.returncode == 0, done.stderr
    assert [(each["rank"], each["size"]) for each in facts] == [(0, RANKS), (1, RANKS)]
    for each in facts:
        assert (each["said"], each["threads"]) == ("to all", "1")
    if binding != "none":
        assert not set(facts[0]["cpus"]) & set(facts[1]["cpus"])


def test_output_of_the_ranks_is_kept(ended_well):
    done, _, _ = ended_well
    for rank in range(RANKS):
        assert f"rank {rank} on standard output" in done.stdout
        assert f"rank {rank} on standard error" in done.stderr


@pytest.mark.parametrize(
    ("how", "signum"),
    [
        pytest.param("killed", int(signal.SIGKILL), marks=pytest.mark.thorough),
        ("exits", None),
    ],
)
def test_the_rank_that_ended_first_is_named(launcher, tmp_path, how, signum):
    done, _, _ = started(launcher, tmp_path, how)
    assert done.returncode != 0
    ends = list(launcher.reported_ends(f"{done.stderr}\n{done.stdout}"))
    assert ends, done.stderr
    assert (ends[0].rank, ends[0].signal) == (1, signum)


def test_an_ended_launcher_leaves_no_rank(launcher, tmp_path):
    command, _ = launch_command(RANKS, mpi=not launcher.without_mpi)
    process = subprocess.Popen(
        [*command, sys.executable, str(PROGRAM), launcher.name, str(tmp_path), "waits"],
        env=environment(1),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        until(lambda: len(list(tmp_path.glob("rank-*.json"))) == RANKS)
        pids = [
            json.loads(path.read_text())["pid"] for path in tmp_path.glob("rank-*.json")
        ]
        process.send_signal(signal.SIGTERM)
        process.wait()
        until(lambda: not any(map(is_running, pids)))
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def test_runs_are_made_and_a_killed_rank_is_named(launcher, engine, tmp_path):
    """The whole way of a study's real runs: a completed one, and one whose rank dies."""
    runs = [
        make_run("before", engine=engine),
        faulty("killed", "kill", engine=engine),
    ]
    found = Recorder(runs, tmp_path, ranks=RANKS)
    assert found.outcomes["before"].status == "completed", found.outcomes[
        "before"
    ].error
    assert found.outcomes["killed"].status == "failed"
    assert re.match(
        r"rank 1 was ended by signal 9 \(Killed", found.outcomes["killed"].error
    )
    assert found.outcomes["before"].facts.launcher == launcher.name


@pytest.mark.parametrize("name", ["local", "torchrun"])
def test_launchers_without_an_mpi_refuse_the_engines_that_need_one(name, monkeypatch):
    monkeypatch.setenv(launchers.VARIABLE, name)
    if mpirun.find() is not None:
        assert together(engines.available("mpi"), name, "MPI", "--launcher mpirun")
        with pytest.raises(EngineError, match="starts no ranks of an MPI"):
            launch_command(2)
    monkeypatch.setattr(mpirun, "find", lambda: None)
    assert "no mpirun" in engines.available("mpi")
    assert engines.available("gloo") is None


def test_the_launcher_of_a_study_is_used_unless_the_command_names_one(monkeypatch):
    monkeypatch.delenv(launchers.VARIABLE, raising=False)
    with using("torchrun"):
        assert chosen().name == "torchrun"
    assert launchers.VARIABLE not in os.environ
    for stated in ("auto", ""):
        monkeypatch.setenv(launchers.VARIABLE, stated)
        with using("local"):
            assert chosen().name == "local"
        assert os.environ[launchers.VARIABLE] == stated
    monkeypatch.setenv(launchers.VARIABLE, "mpirun")
    with using("local"):
        assert chosen().name == "mpirun"


def test_studies_and_commands_can_name_every_launcher():
    assert set(get_args(Study.model_fields["launcher"].annotation)) == {
        launchers.AUTO,
        *NAMES,
    }
    (option,) = [each for each in doctor.params if each.name == "launcher"]
    assert set(option.type.choices) == {launchers.AUTO, *NAMES}


def test_a_study_runs_by_the_launcher_that_it_names(tmp_path, monkeypatch):
    monkeypatch.delenv(launchers.VARIABLE, raising=False)
    if reason := engines.available("gloo"):
        pytest.skip(reason)
    keys = {
        "name": "started",
        "dataset": "wine",
        "strategies": ["allreduce"],
        "engine": "gloo",
        "workers": [2],
        "epochs": 1,
    }
    found = run(
        keys | {"repetitions": 1, "execution": "native", "launcher": "local"},
        output=tmp_path,
    )
    assert list(found.completed["launcher"]) == ["local"]
    assert load_study(tmp_path / "started" / "study.yaml", {}, []).launcher == "local"
    assert launchers.VARIABLE not in os.environ


def until(holds):
    while not holds():
        time.sleep(0.05)


def is_running(pid):
    try:
        return (
            "Z"
            not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        )
    except OSError:
        return False


def test_an_elastic_torchrun_names_every_rank_that_died():
    said = (
        "E1127 10:00:00 api.py:1] failed (exitcode: -9) local_rank: 1 (pid: 2) of binary: python\n"
        "E1127 10:00:09 api.py:1] failed (exitcode: 1) local_rank: 0 (pid: 3) of binary: python\n"
    )
    assert list(named("torchrun").reported_ends(said)) == [
        ReportedEnd(1, 9),
        ReportedEnd(0),
    ]
    command = named("torchrun").command(
        Placement(("here", "here"), by_mpi=False, restarts=2)
    )
    assert "--max-restarts=2" in command


def test_an_elastic_horovodrun_has_a_host_for_each_rank_and_names_those_that_died(
    monkeypatch,
):
    monkeypatch.setattr(
        "scalebench.comm.launchers.horovodrun.find", lambda: Path("horovodrun")
    )
    command = named("horovodrun").command(
        Placement(("here",) * 3, by_mpi=False, restarts=1)
    )
    options = dict(pairwise(command))
    counts = [
        options[name] for name in ("-np", "--min-np", "--max-np", "--reset-limit")
    ]
    assert counts == ["3", "2", "3", "1"]
    found = subprocess.run(
        ["sh", "-c", options["--host-discovery-script"]],
        capture_output=True,
        text=True,
        check=True,
    )
    hosts = [line.removesuffix(":1") for line in found.stdout.splitlines()]
    assert len(set(hosts)) == 3
    assert {socket.gethostbyname(host) for host in hosts} == {"127.0.0.1"}
    said = "Process 2 exit with status code 137.\nProcess 0 exit with status code 1.\n"
    assert list(named("horovodrun").reported_ends(said)) == [
        ReportedEnd(2, 9),
        ReportedEnd(0),
    ]
