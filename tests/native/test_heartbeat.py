import os
import platform

import pytest

from scalebench.native.heartbeat import Beat, Heartbeat, Phase, create_heartbeats, read_heartbeats
from scalebench.native.postmortem import Pulse


def test_launcher_reads_what_ranks_write(tmp_path):
    path = tmp_path / "heartbeats"
    create_heartbeats(path, 3)
    hearts = [Heartbeat(path, rank) for rank in (0, 2)]
    hearts[0].enter(Phase.TRAINING)
    for _ in range(5):
        hearts[0].beat()
    assert read_heartbeats(path) == [
        Beat(os.getpid(), Phase.TRAINING, 0, 5, platform.node()),
        Beat(0, Phase.STARTING, 0, 0),
        Beat(os.getpid(), Phase.STARTING, 0, 0, platform.node()),
    ]
    hearts[0].begin_batch()
    hearts[0].beat()
    assert read_heartbeats(path)[0].progress == (Phase.TRAINING, 1, 1)
    hearts[0].enter(Phase.EVALUATING)
    assert read_heartbeats(path)[0].progress == (Phase.EVALUATING, 0, 0)


class Clock:
    now = 100.0

    def advance(self, seconds):
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("scalebench.native.postmortem.time.monotonic", lambda: clock.now)
    return clock


@pytest.fixture
def four(tmp_path, clock):
    """The hearts of four ranks, and the pulse of their launch."""
    path = tmp_path / "heartbeats"
    create_heartbeats(path, 4)
    return [Heartbeat(path, rank) for rank in range(4)], Pulse(path)


def test_ranks_furthest_behind_are_named_as_stopped(four, clock):
    hearts, pulse = four
    for rank, heart in enumerate(hearts):
        heart.enter(Phase.TRAINING)
        for _ in range(10 - 3 * (rank == 2)):
            heart.beat()
    pulse.feel()
    assert pulse.stopped(4) == "all ranks were still working"
    clock.advance(5.0)
    assert pulse.stopped(4) == "rank 2 had stopped 5.0 s before, while training"
    hearts[2].beat()
    pulse.feel()
    assert pulse.stopped(4) == "ranks 0, 1, 3 had stopped 5.0 s before, while training"
    assert pulse.stopped(1) == "rank 0 had stopped 5.0 s before, while training"


def test_beats_of_earlier_batches_are_not_compared(four, clock):
    hearts, pulse = four
    for rank, batches, beats_each in ((0, 9, 4), (1, 6, 40)):  # rank 1 takes the snapshots
        hearts[rank].enter(Phase.TRAINING)
        for _ in range(batches):
            hearts[rank].begin_batch()
            for _ in range(beats_each):
                hearts[rank].beat()
    pulse.feel()
    clock.advance(5.0)
    assert pulse.stopped(2) == "rank 1 had stopped 5.0 s before, while training"


def test_unusual_silence_of_all_workers_is_reported_once(four, clock):
    hearts, pulse = four

    def silent(seconds, *, then):
        clock.advance(seconds)
        pulse.feel()
        told = pulse.hush_s()
        for rank in then:
            hearts[rank].beat()
        pulse.feel()
        return told

    pulse.watch(2)
    assert silent(10.0, then=[0, 1]) == 0.0
    assert silent(90.0, then=[2, 3]) == 0.0, "it has been silent for 10 s before, and others do not count"
    assert silent(90.0, then=[1]) == 0.0
    assert silent(190.0, then=[0]) == 0.0
    assert silent(3700.0, then=[]) == 0.0, "and for 190 s"
    assert silent(101.0, then=[]) == 3801.0
    assert silent(5000.0, then=[0]) == 0.0, "it is said once"
    pulse.watch(2)
    assert silent(1.0, then=[1]) == 0.0
    assert silent(59.0, then=[]) == 0.0
    assert silent(2.0, then=[]) == 61.0
    pulse.watch(0)
    assert silent(5000.0, then=[]) == 0.0, "between runs nobody works"


def test_silent_server_is_named_instead_of_its_waiting_workers(four, clock):
    hearts, pulse = four
    for heart in hearts:
        heart.enter(Phase.TRAINING)
    hearts[0].beat()
    pulse.feel()
    clock.advance(3.0)
    assert pulse.stopped(2, servers=2) == "ranks 2, 3 (servers) had stopped 3.0 s before"
    for server in hearts[2:]:
        server.beat()  # it waits, for workers that say nothing
    pulse.feel()
    assert pulse.stopped(2, servers=2) == "rank 1 had stopped 3.0 s before, while training"
    clock.advance(0.5)
    assert pulse.stopped(2) == "rank 1 had stopped 3.5 s before, while training"
    clock.advance(1.5)
    said = pulse.stopped(2, servers=2)
    assert said == "rank 1 had stopped 5.0 s before, while training", "the servers fell silent later: the core is taken"


def test_connecting_is_timed_from_the_last_rank_that_began(four, clock):
    hearts, pulse = four

    def connecting_s(seconds):
        pulse.feel()
        clock.advance(seconds)
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
    assert pulse.unconnected(3) == "rank 1 waited for rank 2", "and rank 0 for what became of them"
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
