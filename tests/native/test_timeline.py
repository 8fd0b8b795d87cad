"""Waiting times from event logs of every kind of communication, and laps and clocks that are set apart.

Nodes have a clock of their own: ranks here are ahead by a known time.
"""

from __future__ import annotations

import time
from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalebench.comm.base import ACTIVATIONS
from scalebench.comm.counters import EventLog
from scalebench.native.timeline import (
    ClockOffset,
    TracedDeviceClock,
    align,
    bubbles,
    by_epoch,
    clock_offsets,
    parted,
    waits,
)
from scalebench.system.clock import Task
from scalebench.training.outcome import Lap, Outcome, WorkerReport
from tests.comm.test_control import on_each

AHEAD = (0.0, 3600.0, -0.25)  # seconds, by rank
MOMENTS = st.lists(
    st.lists(st.floats(0, 1e3), min_size=4, max_size=4), min_size=1, max_size=6
)


def numbers(*entries):
    return array("d", [number for entry in entries for number in entry])


def met(*entries, group=()):
    """A journal of collectives: (came, stood still since, left)."""
    event_log = EventLog()
    event_log.collectives[group].extend(numbers(*entries))
    return event_log


def seconds(event_logs, served=()):
    return [float(np.diff(each).sum()) for each in waits(event_logs, served)]


def test_collective_waits_for_its_last_member():
    early, late = met((1, 1, 3), (10, 10, 13)), met((2.5, 2.5, 3), (12, 12, 12.5))
    assert [each.tolist() for each in waits([early, late])] == [
        [[1, 2.5], [10, 12]],
        [],
    ]


def test_wait_ends_when_the_operation_returns():
    assert seconds([met((1, 1, 1.1)), met((5, 5, 5.2))]) == [pytest.approx(0.1), 0]


def test_nonblocking_collective_waits_from_its_wait_call():
    """All have begun by second 4: a worker that needs the result at 3 waits 1 s, at 6 or never 0 s."""
    assert seconds([met((1, 3, 5)), met((4, 6, 6.5)), met((2, 2, 2))]) == [1, 0, 0]


def test_group_waits_for_its_own_members():
    left, right = ("split", 0), ("split", 1)
    event_logs = [
        met((1, 1, 9), group=left),
        met((3, 3, 9), group=left),
        met((9, 9, 9), group=right),
    ]
    assert seconds(event_logs) == [2, 0, 0]


def test_bubble_of_a_stage_is_its_waiting_for_others_alone():
    before, after = EventLog(), EventLog()
    between, other = ((), 0, 1, ACTIVATIONS), ((), 0, 1, 0)
    for mail, sent, received in (
        (between, (2, 2.1), (1, 4)),
        (other, (6, 6.1), (5, 7)),
    ):
        before.sent[mail].extend(numbers(sent))
        after.received[mail].extend(numbers(received))
    assert seconds([before, after]) == [0, 2]
    assert bubbles([before, after]) == [0, 1]


def test_receiver_waits_for_the_sender_but_not_the_transfer():
    sender, receiver, mail = EventLog(), EventLog(), ((), 0, 1, 7)
    sender.sent[mail].extend(numbers((2, 2.1), (5, 5.1)))
    # two seconds on the way; then it was there already
    receiver.received[mail].extend(numbers((1, 4), (6, 6.5)))
    assert seconds([sender, receiver]) == [
        pytest.approx(0.1),
        1,
    ]  # buffered: over when it was handed over


def test_sender_of_an_unbuffered_message_waits_for_the_receiver():
    sender, receiver, mail = EventLog(), EventLog(), ((), 0, 1, 0)
    sender.sent[mail].extend(numbers((2, 7.5)))
    receiver.received[mail].extend(numbers((7, 8)))
    assert seconds([sender, receiver]) == [5, 0]


def test_access_to_a_shared_vector_waits_for_the_previous_one():
    first, second, third = EventLog(), EventLog(), EventLog()
    first.accesses.append(numbers((1.0, 1.5, 4.0, 0)))  # half a second to fetch
    # asked before the third, was let in after it
    second.accesses.append(numbers((2.0, 6.5, 7.0, 2)))
    # nobody was there the second time
    third.accesses.append(numbers((3.0, 4.5, 6.0, 1), (9.0, 9.5, 10.0, 3)))
    assert seconds([first, second, third]) == [0, 4, 1]


def test_request_waits_for_queue_and_rule_but_not_for_the_servers_work():
    """Worker 0 is held until worker 1's request is taken up; worker 1's stands in the queue behind it until 2.0."""
    workers = [EventLog(), EventLog()]
    workers[0].requests.extend(numbers((0, 0.9, 2.4), (1, 5.0, 5.3)))
    # its request 0 was made before training
    workers[1].requests.extend(numbers((1, 1.2, 2.5)))
    server = {
        0: numbers((0.0, 1.0, 2.0), (2.3, 5.1, 5.1)),  # free, taken up, let go
        1: numbers((0.0, 0.5, 0.5), (2.0, 2.0, 2.0)),
    }
    assert seconds(workers, [server]) == [pytest.approx(1.0), pytest.approx(0.8)]
    slower = {0: numbers((0.0, 1.0, 2.2), (2.3, 5.1, 5.1)), 1: server[1]}
    # side by side: the slowest decides
    assert seconds(workers, [server, slower])[0] == pytest.approx(1.2)


def test_inconsistent_or_incomplete_logs_give_no_waits():
    assert waits([met((1, 1, 2)), met((1, 1, 2), (3, 3, 4))]) is None
    unanswered = EventLog()
    unanswered.sent[(), 0, 1, 0].extend(numbers((1, 2)))
    assert waits([unanswered, EventLog()]) is None
    background = met((1, 1, 2))
    background.complete = False
    assert waits([background, met((1, 1, 2))]) is None


def test_wait_counts_in_the_epoch_in_which_it_began():
    (waited, _) = waits(
        [met((1, 1, 2), (3, 3, 5), (6, 6, 9)), met((2, 2, 2), (4, 4, 5), (9, 9, 9))]
    )
    assert by_epoch(waited, [2.5, 5.5]) == [1, 1]
    assert by_epoch(waited, [0.5, 5.5, 9]) == [0, 2, 3]


@given(MOMENTS)
def test_waits_are_nonnegative_and_the_last_worker_has_none(moments):
    """moments[k][i]: when worker i came to collective k; all leave when all have come."""
    workers = [
        met(*((moment[i], moment[i], max(moment)) for moment in moments))
        for i in range(4)
    ]
    waited = seconds(workers)
    assert min(waited) >= 0
    assert sum(waited) == pytest.approx(
        sum(max(moment) - came for moment in moments for came in moment), abs=1e-6
    )


@given(st.lists(st.floats(0.01, 5), min_size=1, max_size=12), st.data())
def test_dividing_laps_at_waits_keeps_their_total_time(lengths, data):
    ends = np.cumsum(lengths).tolist()
    kinds = data.draw(
        st.lists(
            st.sampled_from(["forward", "communication"]),
            min_size=len(ends),
            max_size=len(ends),
        )
    )
    laps = [
        Lap(kind, end - length, end)
        for kind, end, length in zip(kinds, ends, lengths, strict=True)
    ]
    cuts = sorted(data.draw(st.lists(st.floats(0, ends[-1]), max_size=8, unique=True)))
    waited = np.array(list(zip(cuts[::2], cuts[1::2], strict=False))).reshape(-1, 2)
    found = parted(laps, waited)
    assert [lap.begin_s for lap in found[1:]] == pytest.approx(
        [lap.end_s for lap in found[:-1]]
    )
    assert sum(lap.end_s - lap.begin_s for lap in found) == pytest.approx(ends[-1])
    inside = sum(
        max(0.0, min(until, lap.end_s) - max(since, lap.begin_s))
        for since, until in waited.tolist()
        for lap in laps
        if lap.activity == "communication"
    )
    assert sum(
        lap.end_s - lap.begin_s for lap in found if lap.activity == "waiting"
    ) == pytest.approx(inside)


def test_offsets_are_found_within_their_error():
    def program(world):
        ahead = AHEAD[world.rank]
        return clock_offsets(
            world, lambda: time.time() + ahead, lambda: time.perf_counter() - 2 * ahead
        )

    found, _ = on_each(3, program)
    assert found[1] is found[2] is None, "rank 0 alone knows them"
    assert found[0][0] == ClockOffset(), "against itself"
    for offset, ahead in zip(found[0][1:], AHEAD[1:], strict=True):
        assert offset.error_s > 0
        # 0.1 ms: two clocks are read in turn
        assert offset.wall_s == pytest.approx(ahead, abs=offset.error_s + 1e-4)
        assert offset.monotonic_s == pytest.approx(
            -2 * ahead, abs=offset.error_s + 1e-4
        )


def report(rank, *laps):
    return WorkerReport(
        rank,
        1.0,
        1.0,
        0.0,
        0.0,
        0.0,
        0.0,
        1,
        0,
        0,
        [],
        laps=[Lap(*lap) for lap in laps],
    )


def test_laps_of_several_nodes_are_drawn_on_one_clock():
    """Worker 1 works from 0.5 to 1 s by worker 0's clock; its own is 100 s ahead."""
    zero = time.perf_counter()
    workers = [
        report(0, ("forward", zero, zero + 1)),
        report(1, ("forward", zero + 100.5, zero + 101)),
    ]
    outcome = Outcome("run", "completed", workers=workers)
    align(outcome, None, (), [ClockOffset(), ClockOffset(monotonic_s=100.0)])
    assert [tuple(worker.laps[0]) for worker in workers] == [
        ("forward", 0.0, pytest.approx(1.0)),
        ("forward", pytest.approx(0.5), pytest.approx(1.0)),
    ]


class Device:
    """A device that works off a queue; its clock is at `ms` where the queue ends."""

    def __init__(self):
        self.ms = 0.0
        self.waits = 0

    def event(self):
        return Place(self, self.ms)


class Place:
    def __init__(self, device, at):
        self.device, self.at = device, at

    def synchronize(self):
        self.device.waits += 1

    def elapsed_time(self, end_event):
        return end_event.at - self.at


def test_laps_of_a_device_end_where_its_queue_comes_to_them():
    device, beats = Device(), []
    clock = TracedDeviceClock(lambda: beats.append(1), device.event)
    clock.start()
    begun, marks = device.waits, [clock.mark]
    for task, ms in ((Task.FORWARD, 30), (Task.COMM, 500), (Task.BACKWARD, 60)):
        device.ms += ms
        clock.did(task)
        marks.append(clock.mark)
    assert device.waits == begun, "the queue runs on"
    assert len(beats) > 3
    ledger = clock.ledger
    assert device.waits == begun + 1
    assert (ledger.compute_s, ledger.comm_s) == pytest.approx((0.09, 0.5))
    device.ms += 10
    assert clock.elapsed() == pytest.approx(0.6)
    with clock.paused():
        device.ms += 4000
    device.ms += 20
    clock.did(Task.DATA)
    assert clock.elapsed() == pytest.approx(clock.ledger.total_s) == pytest.approx(0.62)
    assert np.diff(clock.moments(marks)) == pytest.approx([0.03, 0.5, 0.06])
    lengths = [lap.end_s - lap.begin_s for lap in clock.timed_laps()]
    assert lengths == pytest.approx([0.03, 0.5, 0.06, 0.01, 0.02])
    assert abs(clock.moments(marks)[0] - time.perf_counter()) < 3600, "of this host"


def test_logs_of_a_device_are_dated_when_its_marks_are_known():
    log = EventLog()
    log.collectives[()].extend((0, 0, 1))
    log.sent[(), 0, 1, ACTIVATIONS].extend((1, 2))
    dated = log.dated(lambda marks: array("d", (10 * mark for mark in marks)))
    assert list(dated.collectives[()]) == [0, 0, 10]
    assert list(dated.sent[(), 0, 1, ACTIVATIONS]) == [10, 20]
    log.collectives[()].extend((2, 2, 3))
    assert len(dated.collectives[()]) == 3, "a copy"
