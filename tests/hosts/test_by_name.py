"""Hosts known by a hostfile, reached through an agent that passes no environment on."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from scalebench.comm import engines
from tests.facts import together
from tests.hosts.machines import until
from tests.hosts.studies import (
    SCALEBENCH,
    beats,
    errors_in,
    finished,
    is_training,
    rows_in,
    study,
)

PIPES = {
    "stdin": subprocess.DEVNULL,
    "stdout": subprocess.PIPE,
    "stderr": subprocess.PIPE,
}
IMPATIENT = """
import scalebench.launch.real_runs as mpirun
from scalebench.cli.main import main
mpirun._BARREN_LAUNCHES = 1
main()
"""
HANGING = """
import os, sys, time
if os.environ.get("OMPI_COMM_WORLD_RANK") == "2" and "scalebench.native" in sys.orig_argv:
    import horovod.torch
    horovod.torch.init = lambda **_: time.sleep(3600)
"""


@pytest.fixture
def begin(hosts, by_name, tmp_path):
    """Begin a study on n0, in a folder of its own."""

    def begin(text, command=(SCALEBENCH,), **environment):
        (tmp_path / "study.yaml").write_text(text)
        words = [*command, "run", "study.yaml", "--output", "results"]
        return hosts.nodes[0].start(
            words, cwd=tmp_path, env=by_name | environment, **PIPES
        )

    return begin


def test_nodes_cores_binding_names_and_variables_are_those_of_the_launch(
    hosts, begin, tmp_path
):
    """A host knows its own name as 127.0.1.1, as Debian writes it; mpirun gets addresses from its hostfile.

    Horovod would wait for ever if rank 0 alone had this fusion threshold.
    """
    names = ["allreduce", "ddp", "daso-fixed"]
    if engines.available("horovod") is None:
        names.append("horovod: {cycle_time_ms: 25, fusion_threshold_mib: 0}")
    for node in hosts.nodes:
        node.resolve(
            {"127.0.1.1": node.name}
            | {other.address: other.name for other in hosts.nodes if other != node}
        )
    printed = finished(begin(study(3, *names)))
    hosts.resolve_all()
    rows = rows_in(tmp_path)
    assert set(rows) == {name.partition(":")[0] for name in names}, printed
    for row in rows.values():
        assert row["status"] == "completed", f"{row['error']} {printed}"
        assert (row["nodes"], row["workers_per_node"], row["oversubscribed"]) == (
            "3",
            "1",
            "false",
        )
        assert row["binding"] == "core:2"


def test_a_host_that_does_not_see_the_results_is_named_before_anything_runs(
    hosts, begin, tmp_path
):
    (tmp_path / "results").mkdir()
    hosts.nodes[2].call(["mount", "-t", "tmpfs", "none", tmp_path / "results"])
    printed = finished(begin(study(3, "allreduce")))
    hosts.nodes[2].call(["umount", tmp_path / "results"])
    assert "node n2 does not see " in printed
    assert str(tmp_path / "results" / "nodes" / "logs") in printed.replace("\n", "")
    assert errors_in(tmp_path) == []


@pytest.mark.parametrize(
    "killed",
    [["allreduce"], pytest.param(["allreduce", "ddp"], marks=pytest.mark.thorough)],
)
def test_killed_ranks_a_lost_daemon_and_hosts_that_cannot_connect_are_named(
    hosts, begin, tmp_path, killed
):
    """A launch for each run: a rank of MPI or of gloo is killed, then a daemon, then two hosts cannot connect.

    The other ranks notice broken connections before the launcher learns of a death.
    """
    there, other = hosts.nodes[2], hosts.nodes[1]
    cut = ["blackhole", f"{other.address}/32"]
    text = study(
        3, *killed, "epoch_average", "bmuf", epochs=10**5, warmup_runs=0, patience=10
    )
    process = begin(text, (sys.executable, "-c", IMPATIENT))
    last = len(killed) + 1
    for launch in range(1, last + 1):
        until(
            lambda number=launch: is_training(tmp_path, number),
            f"launch {launch} trains",
        )
        if launch == last:
            there.call(["ip", "route", "add", *cut])
        rank = str(beats(tmp_path, launch)[2].pid)
        there.call(
            ["kill", "-KILL", rank]
            if launch < last
            else ["pkill", "-KILL", "-x", "prted"]
        )
        until(
            lambda count=launch: len(errors_in(tmp_path)) == count,
            f"row {launch} is there",
        )  # before the time limit
    finished(process)
    there.call(["ip", "route", "del", *cut])

    *errors, lost, unconnected = errors_in(tmp_path)
    assert len(errors) == len(killed)
    for error in errors:
        assert (
            error
            == "rank 2 on n2 was ended by signal 9 (Killed, perhaps for want of memory)"
        )
    # mpirun names the host, unless it sees the end of the daemon before that of the
    # connection.
    assert together(lost, "daemon", "n2", "rank 2", "check") or together(
        lost, "one of n0, n1, n2", "check"
    )
    assert together(unconnected, "rank 1 on n1", "rank 2 on n2") or together(
        unconnected, "rank 2 on n2", "rank 1 on n1"
    )
    assert together(unconnected, "check", "hosts", "TCP")


@pytest.mark.thorough
@pytest.mark.parametrize("strategy", ["allreduce", "ddp"])
def test_host_whose_link_is_down_for_good_is_named(hosts, begin, tmp_path, strategy):
    """All wait for one another then; only the lost host does not answer, at the launch that follows neither."""
    process = begin(study(3, strategy, epochs=10**5, patience=10, repetitions=2))
    until(lambda: is_training(tmp_path, 1), "the ranks train")
    login = [
        "nsenter",
        "--net",
        f"--target={hosts.login.pid}",
        "ip",
        "link",
        "set",
        "to-n2",
    ]
    subprocess.run([*login, "down"], check=True)
    try:
        printed = finished(process)
    finally:
        subprocess.run([*login, "up"], check=True)
    (error,) = errors_in(tmp_path)
    assert re.match(
        r"no worker showed a sign of life for \d+ s \(patience\): .* had stopped while training",
        error,
    )
    assert together(error, "n2", "rank 2", "not answer", "check", "network")
    assert process.returncode == 2
    assert "n2 no longer answers" in " ".join(printed.split())


@pytest.mark.thorough
def test_a_horovod_that_does_not_start_is_ended_and_its_ranks_and_hosts_are_named(
    begin, tmp_path
):
    """Rank 2 never comes to Horovod's start, in which the others wait."""
    if reason := engines.available("horovod"):
        pytest.skip(reason)
    (tmp_path / "sitecustomize.py").write_text(HANGING)
    finished(
        begin(
            study(3, "horovod", patience=10),
            (sys.executable, "-c", IMPATIENT),
            PYTHONPATH=str(tmp_path),
        ),
    )
    (error,) = errors_in(tmp_path)
    assert error.startswith(
        "ranks 0, 1, 2 on n0, n1, n2 waited for the others 10 s while connecting; check that"
    )
