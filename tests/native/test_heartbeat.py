import os
import platform
import re
import signal
import subprocess
import sys
import time
from contextlib import ExitStack

import pytest

from scalebench.cluster.mesh import Mesh
from scalebench.native.heartbeat import _OPERATION as OPERATION
from scalebench.native.heartbeat import (
    Beat,
    Heartbeat,
    Phase,
    create_heartbeats,
    is_stopped,
    mark_over,
    read_heartbeats,
)
from scalebench.native.postmortem import Pulse


def test_launcher_reads_what_ranks_write(tmp_path):
    path = tmp_path / "heartbeats"
    create_heartbeats(path, 3)
    hearts = [Heartbeat(path, rank) for rank in (0, 2)]
    hearts[0].enter(Phase.TRAINING)
    for _ in range(5):
        hearts[0].beat()
    assert read_heartbeats(path) == [
        Beat(os.getpid(), Phase.TRAINING, 0, 5, host=platform.node()),
        Beat(0, Phase.STARTING, 0, 0),
        Beat(os.getpid(), Phase.STARTING, 0, 0, host=platform.node()),
    ]
    hearts[0].begin_batch()
    hearts[0].beat()
    assert read_heartbeats(path)[0].progress == (Phase.TRAINING, 1, 1)
    hearts[0].enter(Phase.EVALUATING)
    assert read_heartbeats(path)[0].progress == (Phase.EVALUATING, 0, 0)


@pytest.mark.parametrize(
    ("cut", "ranks"), [(0.0, 3), (0.01, 2), (0.5, 1), (0.9, 0), (1.0, 0)]
)
def test_heartbeats_of_a_file_that_was_cut_are_those_that_are_left(
    tmp_path, cut, ranks
):
    path = tmp_path / "heartbeats"
    create_heartbeats(path, 3)
    os.truncate(path, round(path.stat().st_size * (1 - cut)))
    assert len(read_heartbeats(path)) == ranks


class Clock:
    now = 100.0

    def advance(self, seconds):
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(
        "scalebench.native.postmortem.time.monotonic", lambda: clock.now
    )
    return clock


@pytest.fixture
def four(tmp_path, clock):
    """The hearts of four ranks, and the pulse of their launch."""
    path = tmp_path / "heartbeats"
    create_heartbeats(path, 4)
    return [Heartbeat(path, rank) for rank in range(4)], Pulse(path)


def stopped(said):
    """The ranks that had stopped, the seconds before, and the phase; servers have none."""
    ranks, kind, seconds, phase = re.fullmatch(
        r"ranks? ([\d, ]+)( \(servers\))? had stopped ([\d.]+) s before(?:, while (\w+))?",
        said,
    ).groups()
    return (
        [int(rank) for rank in ranks.split(", ")],
        float(seconds),
        "serving" if kind and not phase else phase,
    )


def test_ranks_furthest_behind_are_named_as_stopped(four, clock):
    hearts, pulse = four
    for rank, heart in enumerate(hearts):
        heart.enter(Phase.TRAINING)
        for _ in range(10 - 3 * (rank == 2)):
            heart.beat()
    pulse.feel()
    assert pulse.stopped(4) == "all ranks were still working"
    clock.advance(5.0)
    assert stopped(pulse.stopped(4)) == ([2], 5.0, "training")
    hearts[2].beat()
    pulse.feel()
    assert stopped(pulse.stopped(4)) == ([0, 1, 3], 5.0, "training")
    assert stopped(pulse.stopped(1)) == ([0], 5.0, "training")


def test_rank_whose_thread_looks_no_more_is_the_one_that_was_stopped(four, clock):
    """All are in the same operation of the same batch, of which no clock tells when one waits."""
    hearts, pulse = four
    pulse.watch(4)
    for heart in hearts:
        heart.enter(Phase.TRAINING)
        heart.beat()
    for _ in range(8):
        for heart in (hearts[0], hearts[1], hearts[3]):
            heart._row[5] += 1
        pulse.feel()
        clock.advance(1.0)
    assert pulse.hush_s(5.0) == 8.0, "looking is no sign of life"
    assert stopped(pulse.stopped(4)) == ([2], 8.0, "training")


def test_beats_of_earlier_batches_are_not_compared(four, clock):
    hearts, pulse = four
    for rank, batches, beats_each in (
        (0, 9, 4),
        (1, 6, 40),
    ):  # rank 1 takes the snapshots
        hearts[rank].enter(Phase.TRAINING)
        for _ in range(batches):
            hearts[rank].begin_batch()
            for _ in range(beats_each):
                hearts[rank].beat()
    pulse.feel()
    clock.advance(5.0)
    assert stopped(pulse.stopped(2)) == ([1], 5.0, "training")


WATCHED = """
import sys, time
from pathlib import Path
import scalebench.native.heartbeat as heartbeat
heartbeat._LOOK_S, heartbeat._LOOKS_AT_FILE = 0.05, 2
heart = heartbeat.Heartbeat(Path(sys.argv[1]), 0)
heart.watch()
def at_work(until):
    while time.monotonic() < until: pass
inside = compile("def allreduce(until):\\n  while time.monotonic() < until: pass", "/x/scalebench/comm/mpi.py", "exec")
exec(inside)
def _engine_run_backward(until):
    time.sleep(until - time.monotonic())
activities = {"computes": at_work, "waits": allreduce, "differentiates": _engine_run_backward}
activities["sleeps"] = lambda until: time.sleep(until - time.monotonic())
activities[sys.argv[2]](time.monotonic() + 3600)
"""


def test_computing_is_a_sign_of_life_and_waiting_in_communication_is_none(tmp_path):
    """Each activity in a process of its own, all at once: every one is watched for some looks of its thread."""
    operations = {
        "computes": "",
        "waits": "allreduce",
        "differentiates": "backward",
        "sleeps": "<lambda>",
    }
    paths = {activity: tmp_path / activity for activity in operations}

    def beat(activity):
        return read_heartbeats(paths[activity])[0]

    def has_begun(activity):
        return beat(activity).operation or beat(activity).computed > 3

    def look_on(times):
        until = {activity: beat(activity).looks + times for activity in operations}
        while any(beat(activity).looks < until[activity] for activity in operations):
            time.sleep(0.01)

    with ExitStack() as watched:
        ranks = []
        for activity, path in paths.items():
            create_heartbeats(path, 1)
            words = [sys.executable, "-c", WATCHED, path, activity]
            ranks.append(watched.enter_context(subprocess.Popen(words)))
        while not all(map(has_begun, operations)):
            time.sleep(0.01)
        look_on(4)  # what came before the activity has been looked at
        before = {activity: beat(activity).computed for activity in operations}
        look_on(4)
        for activity, operation in operations.items():
            assert beat(activity).operation == operation
            if activity != "computes":
                assert beat(activity).computed == before[activity], activity
        for path in paths.values():
            mark_over(path)
        assert [rank.wait() for rank in ranks] == [1] * 4, "each ends with its launch"


def test_silence_in_which_the_launcher_itself_was_stopped_does_not_count(four, clock):
    _, pulse = four
    pulse.watch(2)
    for _ in range(30):
        clock.advance(1.0)
        pulse.feel()
    clock.advance(3600.0)
    pulse.feel()
    assert pulse.hush_s(60.0) == 0.0
    for _ in range(31):
        clock.advance(1.0)
        pulse.feel()
    assert pulse.hush_s(60.0) == 61.0


def test_rank_for_which_the_others_wait_is_named_with_their_operation(
    four, clock, monkeypatch
):
    hearts, pulse = four
    for rank, heart in enumerate(hearts[:3]):
        heart.enter(Phase.TRAINING)
        heart.begin_batch()
        if rank != 1:
            heart.beat()
            heart._text[OPERATION : OPERATION + 9] = b"allreduce"
    pulse.feel()
    clock.advance(61.0)
    assert re.fullmatch(
        r"rank 1 .*training.* others waited in allreduce", pulse.silent(Mesh(3))
    )
    hearts[1].beat()
    hearts[1]._text[OPERATION : OPERATION + 9] = b"allreduce"
    pulse.feel()
    clock.advance(61.0)
    assert re.fullmatch(
        r"rank 0, rank 1, rank 2 .*training, in allreduce", pulse.silent(Mesh(3))
    )


def test_unusual_silence_of_all_workers_is_found(four, clock):
    hearts, pulse = four

    def silent(seconds, *, then):
        for _ in range(round(seconds)):
            clock.advance(1.0)
            pulse.feel()
        told = pulse.hush_s(60.0)
        for rank in then:
            hearts[rank].beat()
        pulse.feel()
        return told

    pulse.watch(2)
    assert silent(10.0, then=[0, 1]) == 0.0
    assert silent(55.0, then=[0]) == 0.0
    assert silent(100.0, then=[2, 3]) == 0.0, (
        "it has been silent for 55 s before, and others do not count"
    )
    assert silent(66.0, then=[]) == 166.0
    pulse.watch(2)
    assert silent(1.0, then=[1]) == 0.0
    assert silent(59.0, then=[]) == 0.0
    assert silent(2.0, then=[]) == 61.0
    pulse.watch(0)
    assert silent(500.0, then=[]) == 0.0, "between runs no rank is watched"


def test_silent_server_is_named_instead_of_its_waiting_workers(four, clock):
    hearts, pulse = four
    for heart in hearts:
        heart.enter(Phase.TRAINING)
    hearts[0].beat()
    pulse.feel()
    clock.advance(3.0)
    assert stopped(pulse.stopped(2, servers=2)) == ([2, 3], 3.0, "serving")
    for server in hearts[2:]:
        server.beat()  # it waits, for workers that say nothing
    pulse.feel()
    assert stopped(pulse.stopped(2, servers=2)) == ([1], 3.0, "training")
    clock.advance(0.5)
    assert stopped(pulse.stopped(2)) == ([1], 3.5, "training")
    clock.advance(1.5)
    later = stopped(pulse.stopped(2, servers=2))
    assert later == ([1], 5.0, "training"), (
        "the servers fell silent later: the core is taken"
    )


def test_connecting_is_timed_from_the_last_rank_that_began(four, clock):
    hearts, pulse = four

    def connecting_s(seconds):
        for _ in range(round(seconds)):
            pulse.feel()
            clock.advance(1.0)
        return pulse.connecting_s(3)

    for heart in hearts[:2]:
        heart.wait_for(None)
    assert connecting_s(50.0) == 0.0, "rank 2 prepares"
    hearts[2].wait_for(0)
    assert connecting_s(50.0) == 50.0
    assert pulse.unconnected(3) == "rank 2 waited for rank 0"
    hearts[2].wait_for(1)
    assert connecting_s(5.0) == 5.0, "it came further"
    hearts[2].enter(Phase.TRAINING)
    assert pulse.unconnected(3) == "rank 2 waited for rank 1", "as of the last look"
    assert connecting_s(60.0) == 165.0, "the other two have not"
    assert pulse.unconnected(3) == "ranks 0, 1 waited for the others"
    for rank, awaited in ((0, 1), (1, 2), (2, 1)):
        hearts[rank].wait_for(awaited)
    assert connecting_s(60.0) == 60.0
    assert pulse.unconnected(3) == "rank 1 waited for rank 2", (
        "and rank 0 for what became of them"
    )
    for heart in hearts:
        heart.enter(Phase.TRAINING)
    assert connecting_s(60.0) == 0.0


def test_ranks_of_other_hosts_are_named_with_host_and_not_killed(four, monkeypatch):
    hearts, pulse = four
    here = platform.node()
    assert pulse.hosts == [], "all of this one"
    monkeypatch.setattr("scalebench.native.postmortem.platform.node", lambda: "n0")
    assert pulse.pids == []
    hearts[2].wait_for(1)
    pulse.feel()
    assert pulse.unconnected(3) == f"rank 2 on {here} waited for rank 1 on {here}"


def test_silent_hosts_that_do_not_answer_are_named(four, clock, monkeypatch):
    """As one whose link is down for good, for which all others wait."""
    _, pulse = four
    here = platform.node()
    monkeypatch.setattr("scalebench.native.postmortem.platform.node", lambda: "n0")
    answering = set()
    monkeypatch.setattr("scalebench.native.postmortem._answers", answering.__contains__)
    clock.advance(61.0)
    lost = f"; {here} with ranks 0, 1, 2, 3 does not answer: check that host and its network"
    assert pulse.silent(Mesh(3)).endswith(lost)
    answering.add(here)
    assert "answer" not in pulse.silent(Mesh(3))


RANK = """
import atexit, sys
from pathlib import Path
from scalebench.native import heartbeat, rank
heartbeat._LOOK_S = 0.02
heart = heartbeat.Heartbeat(Path(sys.argv[1]), 0)
heart.watch()
print("up", flush=True)
sys.stdin.readline()
rank._leave(heart)
print("left", flush=True)
"""
DAEMON = "import subprocess, sys; sys.exit(subprocess.run([sys.executable, '-c', *sys.argv[1:]]).returncode)"


def test_rank_that_leaves_ends_with_its_stopped_daemon_once_the_launch_is_over(
    tmp_path,
):
    path = tmp_path / "heartbeats"
    create_heartbeats(path, 1)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(
        [sys.executable, "-c", DAEMON, RANK, str(path)], **pipes
    ) as daemon:
        assert daemon.stdout.readline() == "up\n"
        daemon.send_signal(signal.SIGSTOP)
        while not is_stopped(daemon.pid):  # on a busy core it runs on for a while
            time.sleep(0.01)
        daemon.stdin.write("leave\n")
        daemon.stdin.flush()
        while read_heartbeats(path)[0].phase is not Phase.LEAVING:
            time.sleep(0.01)
        assert daemon.poll() is None  # it waits, as long as the launch may go on
        mark_over(path)
        assert daemon.wait() == -signal.SIGKILL
        assert daemon.stdout.read() == ""  # the rank has ended too, and did not go on


def test_rank_leaves_where_its_daemon_runs(tmp_path):
    path = tmp_path / "heartbeats"
    create_heartbeats(path, 1)
    command = [sys.executable, "-c", DAEMON, RANK, str(path)]
    done = subprocess.run(command, input="leave\n", capture_output=True, text=True)
    assert done.stdout == "up\nleft\n"
