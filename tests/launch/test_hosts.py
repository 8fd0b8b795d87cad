"""Which host holds which ranks, and whether it has the cores for them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalebench.cluster.cluster_file import load_cluster
from scalebench.errors import EngineError
from scalebench.launch import hosts, processes, sweep
from scalebench.launch.hosts import Allocation, Host
from scalebench.launch.planning import beyond_the_slots
from scalebench.launch.processes import launch_command
from scalebench.study.spec import Study
from scalebench.system import hardware
from tests.conftest import needs_mpi
from tests.facts import in_order


def alike(count, slots, cores):
    return Allocation(tuple(Host(f"n{i}", slots, cores, cores) for i in range(count)))


@pytest.fixture
def three(monkeypatch):
    """Three hosts of one slot and two cores."""
    known = alike(3, 1, 2)
    monkeypatch.setattr(processes, "reachable", lambda: known)
    return known


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.integers(0, 60))
def test_every_rank_lies_on_a_host_and_slots_are_filled_first(slots, ranks):
    known = Allocation(
        tuple(Host(f"n{i}", count, count, count) for i, count in enumerate(slots))
    )
    held = known.ranks_on(ranks)
    assert sum(held) == ranks
    if ranks <= known.slots:
        assert all(count <= slot for count, slot in zip(held, slots, strict=True))
        partly = next(
            (place for place, slot in enumerate(slots) if held[place] < slot),
            len(slots),
        )
        assert not any(held[partly + 1 :])
    else:
        over = [count - slot for count, slot in zip(held, slots, strict=True)]
        assert max(over) - min(over) <= 1


def test_a_host_is_oversubscribed_by_its_own_ranks():
    assert not alike(3, 1, 2).is_oversubscribed("gloo", 3, 1), (
        "a worker and its thread on each host"
    )
    assert alike(3, 2, 2).is_oversubscribed("gloo", 3, 1), "the first host holds two"
    assert not alike(3, 2, 2).is_oversubscribed("mpi", 6, 1)
    assert alike(3, 2, 2).is_oversubscribed("mpi", 7, 1)
    assert alike(3, 2, 2).is_oversubscribed("mpi", 2, 2)
    assert not alike(1, 2, 2).is_oversubscribed("nccl", 8, 1)
    assert alike(4, 16, 16).most(1, [1, 16, 32, 64, 128]) == [1, 16, 32, 64]
    assert alike(3, 1, 2).most(1, [1, 2, 3, 4, 6]) == [1, 2, 3], "no more than slots"


def test_where_nothing_speaks_of_hosts_this_one_is_taken_without_asking(monkeypatch):
    for name in hosts.SPEAK_OF_HOSTS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(hosts, "_ask", lambda *_: pytest.fail("asked"))
    monkeypatch.setattr(hardware, "cores", lambda: 16)
    assert hosts.reachable().cores == hosts.reachable().slots == 16


@needs_mpi
@pytest.mark.parametrize("failures", [1, 2])
def test_hosts_are_asked_again_after_a_launch_that_failed_at_once(tmp_path, failures):
    launcher = tmp_path / "mpirun"
    launcher.write_text(
        f"""#!/bin/sh
echo try >>{tmp_path}/tries
[ $(wc -l <{tmp_path}/tries) -gt {failures} ] || {{ echo "NO PATH TO TARGET" >&2; exit 1; }}
echo 'scalebench-host {{"rank": "0", "name": "n0"}}'
"""
    )
    launcher.chmod(0o755)
    if failures == 1:
        assert hosts._ask([str(launcher)], [])[0] == [{"rank": "0", "name": "n0"}]
    else:
        with pytest.raises(
            EngineError, match=r"a node did not answer as .*: NO PATH TO TARGET"
        ):
            hosts._ask([str(launcher)], [])
    assert len((tmp_path / "tries").read_text().splitlines()) == 2


def test_a_host_that_no_longer_answers_is_named_before_the_path_that_it_misses(
    monkeypatch,
):
    def unseen(paths):
        raise EngineError("node n2 does not see /results")

    there = SimpleNamespace(hosts=[SimpleNamespace(name=name) for name in ("n1", "n2")])
    monkeypatch.setattr(hosts, "require_seen", unseen)
    monkeypatch.setattr(hosts, "reachable", lambda: there)
    monkeypatch.setattr(
        "scalebench.native.postmortem._answers", lambda host: host != "n2"
    )
    with pytest.raises(EngineError, match=r"^n2 no longer answers: node n2 does not"):
        hosts.require_there([])


MISSED = """\
A daemon failed to report back after being spawned. This could
be due to several factors:

  Local host:    n0
  Remote host:   n2
  Daemon exit status: 1
"""


@pytest.mark.parametrize(
    ("output", "error", "message"),
    [
        (
            MISSED,
            "[n0:00012] plm:ssh: Warning: setpgid failed",
            "node n2 did not answer .*: check that host and its",
        ),
        (
            "<allocation>\nno such thing as a slot",
            "",
            "a node did not answer .*: no such thing as a slot",
        ),
    ],
)
def test_hosts_that_mpirun_names_on_its_standard_output_are_told(
    tmp_path, output, error, message
):
    (tmp_path / "output").write_text(output)
    launcher = tmp_path / "mpirun"
    launcher.write_text(
        f"#!/bin/sh\ncat {tmp_path}/output; echo '{error}' >&2; exit 1\n"
    )
    launcher.chmod(0o755)
    with pytest.raises(EngineError, match=message):
        hosts._ask([str(launcher)], [])


def test_native_points_reach_over_the_hosts(three):
    study = Study(
        name="spread",
        workers="1..64",
        strategies=["allreduce"],
        dataset="wine",
        execution="auto",
    )
    runs = sweep.expand(study, load_cluster("this-machine"), three, timed=False).runs
    assert max(run.workers for run in runs if run.engine == "mpi") == 2


@needs_mpi
def test_the_slot_of_a_server_is_named_when_planning(three):
    study = Study(
        name="s",
        workers="3",
        strategies=["ssp", "allreduce"],
        dataset="wine",
        execution="native",
    )
    runs = sweep.expand(study, load_cluster("this-machine"), three).runs
    (said,) = beyond_the_slots(runs, three)
    assert in_order(said, "3 slots", "ssp at 3 workers", "4 processes", "1 server")
    assert in_order(said, "1 server", "shares", "cores", "4 tasks")
    others = [run for run in runs if run.strategy.name == "allreduce"]
    assert others
    assert not beyond_the_slots(others, three)


def test_ranks_on_other_hosts_get_by_name_what_a_run_sets(three, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    monkeypatch.setenv("HOROVOD_CYCLE_TIME", "9")
    command, binding = launch_command(
        3, progress_threads=1, settings={"HOROVOD_FUSION_THRESHOLD": "0"}
    )
    passed = {command[place + 1] for place, word in enumerate(command) if word == "-x"}
    assert {
        "GLOO_SOCKET_IFNAME",
        "HOROVOD_FUSION_THRESHOLD",
        "OMP_NUM_THREADS",
    } <= passed
    assert "HOROVOD_CYCLE_TIME" not in passed, "a run says it, not the shell"
    assert binding == "core:2"
    command, _ = launch_command(4)
    assert "slot:PE=1:OVERSUBSCRIBE" in command, (
        "one more than slots, but each has a core"
    )
    assert launch_command(7)[1] == "none"
    assert "-x" not in launch_command(2, alone=True)[0]
