"""Hosts known by a hostfile, reached through an agent that passes no environment on."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from scalebench.launch import engines
from scalebench.native.heartbeat import Phase, read_heartbeats
from tests.hosts.machines import until
from tests.hosts.studies import SCALEBENCH, finished, rows_in, study

PIPES = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
IMPATIENT = (
    "import scalebench.launch.mpirun as m; m.CONNECTING_LIMIT_S = 5.0; from scalebench.cli.main import main; main()"
)


@pytest.fixture
def begin(hosts, by_name, tmp_path):
    """Begin a study on n0, in a folder of its own."""

    def begin(text, command=(SCALEBENCH,), **environment):
        (tmp_path / "study.yaml").write_text(text)
        words = [*command, "run", "study.yaml", "--output", "results"]
        return hosts.nodes[0].start(words, cwd=tmp_path, env=by_name | environment, **PIPES)

    return begin


def test_nodes_cores_binding_and_names_are_those_of_the_launch(hosts, begin, tmp_path):
    """Every host knows only itself, by 127.0.1.1, as Debian writes it; mpirun gets addresses from its hostfile."""
    for node in hosts.nodes:
        node.resolve({"127.0.1.1": node.name} | {other.address: other.name for other in hosts.nodes if other != node})
    said = finished(begin(study(3, "allreduce", "ddp", "daso-fixed")), 200)
    hosts.resolve_all()
    for row in rows_in(tmp_path).values():
        assert row["status"] == "completed", f"{row['error']} {said}"
        assert (row["nodes"], row["workers_per_node"], row["oversubscribed"]) == ("3", "1", "false")
        assert row["binding"] == "core:2"
    assert set(rows_in(tmp_path)) == {"allreduce", "ddp", "daso-fixed"}


def test_a_host_that_does_not_see_the_results_is_named_before_anything_runs(hosts, begin, tmp_path):
    (tmp_path / "results").mkdir()
    hosts.nodes[2].call(["mount", "-t", "tmpfs", "none", tmp_path / "results"])
    began = time.monotonic()
    said = finished(begin(study(3, "allreduce")), 100)
    hosts.nodes[2].call(["umount", tmp_path / "results"])
    assert "node n2 does not see " in said
    assert str(tmp_path / "results" / "nodes" / "logs") in said.replace("\n", "")
    assert time.monotonic() - began < 60
    assert count_rows(tmp_path) == 0


def test_two_hosts_that_cannot_connect_are_named_with_their_ranks(hosts, begin, tmp_path):
    hosts.nodes[2].call(["ip", "route", "add", "blackhole", f"{hosts.nodes[1].address}/32"])
    finished(begin(study(3, "allreduce"), (sys.executable, "-c", IMPATIENT)), 300)
    hosts.nodes[2].call(["ip", "route", "del", "blackhole", f"{hosts.nodes[1].address}/32"])
    error = rows_in(tmp_path)["allreduce"]["error"]
    assert "rank 1 on n1 waited for rank 2 on n2" in error or "rank 2 on n2 waited for rank 1 on n1" in error
    assert "check that these hosts reach each other by TCP" in error


def test_options_that_are_environment_variables_reach_every_host(hosts, begin, tmp_path):
    """Rank 0 alone with another fusion threshold waits for ever."""
    if reason := engines.available("horovod"):
        pytest.skip(reason)
    said = finished(begin(study(3, "horovod: {cycle_time_ms: 25, fusion_threshold_mib: 0}")), 250)
    row = rows_in(tmp_path)["horovod"]
    assert (row["status"], row["nodes"]) == ("completed", "3"), f"{row['error']} {said}"


def test_a_killed_rank_and_a_lost_daemon_end_a_run_at_once(hosts, begin, tmp_path):
    text = study(3, "allreduce", "epoch_average", epochs=100000)
    process = begin(text, (SCALEBENCH,))
    for launch in (1, 2):
        until(lambda number=launch: is_training(tmp_path, number), f"launch {launch} trains", 100)
        began = time.monotonic()
        rank = str(beats(tmp_path, launch)[2].pid)
        hosts.nodes[2].call(["kill", "-KILL", rank] if launch == 1 else ["pkill", "-KILL", "-x", "prted"])
        until(lambda count=launch: count_rows(tmp_path) == count, f"row {launch} is there", 40)
        assert time.monotonic() - began < 30
    finished(process, 60)
    errors = {row["error"] for row in rows_in(tmp_path).values()}
    # Open MPI names the killed rank, or says only that a peer's socket closed, where another rank notices first.
    named = ("rank 2 on n2 was ended by signal 9", "mpirun exited with code 14: [n")
    assert any(error.startswith(named) for error in errors), errors
    assert any("lost its daemon on n2 with rank 2: check that host" in error for error in errors), errors


def beats(folder, launch):
    files = list((folder / "results").glob(f"nodes/logs/*/launch-{launch}/heartbeats"))
    return read_heartbeats(files[0]) if files else []


def is_training(folder, launch):
    found = beats(folder, launch)
    return bool(found) and all(beat.phase == Phase.TRAINING and beat.batches > 5 for beat in found)


def count_rows(folder):
    path = folder / "results" / "nodes" / "runs.csv"
    return len(path.read_text().splitlines()) - 1 if path.exists() else 0
