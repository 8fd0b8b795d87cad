"""Who waits at the parameter server: the gates alone, driven by workers of known speed. No tensor, no network."""

from __future__ import annotations

import heapq
import itertools
import math
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalebench.strategies.server_rules import (
    Bounded,
    Dynamic,
    Elastic,
    Gate,
    Lockstep,
    least_spread,
)


def drive(gate, seconds, *, until=float("inf"), order=lambda worker: worker):
    """Each worker computes `seconds(worker, step)`, pushes, and goes on when released.

    Returns (time, worker, lead at the push) of every push and (time, worker, lead) of
    every release.
    """
    pushed, released, steps = [], [], [0] * gate.workers
    heap = [
        (seconds(worker, 0), order(worker), worker) for worker in range(gate.workers)
    ]
    heapq.heapify(heap)
    while heap and heap[0][0] <= until:
        now, _, worker = heapq.heappop(heap)
        going = gate.on_push(worker, now)
        pushed.append((now, worker, gate.lead(worker)))
        for each in going:
            released.append((now, each, gate.lead(each)))
            steps[each] += 1
            if steps[each] < gate.total:
                heapq.heappush(
                    heap, (now + seconds(each, steps[each]), order(each), each)
                )
    return pushed, released


def counts(pushed, workers):
    return [sum(worker == each for _, worker, _ in pushed) for each in range(workers)]


speeds = st.lists(st.floats(0.2, 5.0), min_size=1, max_size=6)


def jittered(base, seed):
    """Step times around `base`, a pure function of worker and step."""
    import random

    return lambda worker, step: (
        base[worker] * random.Random(f"{seed} {worker} {step}").uniform(0.8, 1.25)
    )


RULES = {
    "asp": lambda workers, total: Gate(workers, total),
    "bsp": lambda workers, total: Lockstep(workers, total),
    "ssp 0": lambda workers, total: Bounded(workers, total, 0),
    "ssp 2": lambda workers, total: Bounded(workers, total, 2),
    "dssp strict": lambda workers, total: Dynamic(workers, total, 1, 4),
    "dssp paper": lambda workers, total: Dynamic(workers, total, 1, 4, "paper"),
    "elastic": lambda workers, total: Elastic(workers, [total], 4),
}


@pytest.mark.parametrize("rule", RULES)
@settings(deadline=None)
@given(base=speeds, total=st.integers(1, 25), seed=st.integers(0, 999))
def test_every_rule_lets_every_worker_finish(rule, base, total, seed):
    gate = RULES[rule](len(base), total)
    pushed, released = drive(gate, jittered(base, seed))
    assert counts(pushed, len(base)) == [total] * len(base)
    assert counts(released, len(base)) == [total] * len(base)
    assert gate.waiting == []
    assert gate.rounds == total


@settings(deadline=None)
@given(
    base=speeds,
    total=st.integers(1, 25),
    seed=st.integers(0, 999),
    staleness=st.integers(0, 4),
)
def test_ssp_bounds_the_lead_at_release_and_may_meet_one_more_at_the_push(
    base, total, seed, staleness
):
    pushed, released = drive(Bounded(len(base), total, staleness), jittered(base, seed))
    assert max(lead for *_, lead in released) <= staleness
    assert max(lead for *_, lead in pushed) <= staleness + 1


def test_ssp_3_logs_a_lead_of_4_at_the_push():
    pushed, released = drive(Bounded(2, 50, 3), lambda worker, step: (1.0, 9.0)[worker])
    assert max(lead for *_, lead in pushed) == 4
    assert max(lead for *_, lead in released) == 3


@settings(deadline=None)
@given(
    order=st.lists(st.integers(0, 4), min_size=1, max_size=60),
    rule=st.sampled_from((Gate, lambda *counts: Bounded(*counts, 3))),
)
def test_counts_of_a_gate_are_those_of_its_pushes(order, rule):
    gate = rule(5, 100)
    for now, worker in enumerate(order):
        gate.on_push(worker, float(now))
        slowest = min(gate.pushes)
        assert [gate.lead(each) for each in range(5)] == [
            pushes - slowest for pushes in gate.pushes
        ]
        assert gate.rounds == sum(gate.pushes) // 5


@given(base=speeds, total=st.integers(1, 25), seed=st.integers(0, 999))
def test_staleness_0_releases_as_bsp_does(base, total, seed):
    barrier = drive(Lockstep(len(base), total), jittered(base, seed))
    for gate in (
        Bounded(len(base), total, 0),
        Dynamic(len(base), total, 0, 0),
        Dynamic(len(base), total, 0, 0, "paper"),
    ):
        pushed, released = drive(gate, jittered(base, seed))
        assert pushed == barrier[0]
        assert sorted(released) == sorted(barrier[1])
        assert gate.in_rounds


@settings(deadline=None)
@given(
    base=speeds,
    total=st.integers(1, 60),
    seed=st.integers(0, 999),
    lower=st.integers(0, 4),
    span=st.integers(0, 6),
)
def test_strict_dssp_never_exceeds_its_upper_bound(base, total, seed, lower, span):
    pushed, released = drive(
        Dynamic(len(base), total, lower, lower + span), jittered(base, seed)
    )
    assert max(lead for *_, lead in released) <= lower + span
    assert max(lead for *_, lead in pushed) <= lower + span + 1


@pytest.mark.parametrize(
    "order",
    [lambda worker: worker, lambda worker: -worker],
    ids=["fast first", "slow first"],
)
def test_the_published_dssp_with_exactly_steady_intervals_is_asp(order):
    """Intervals 1.0 and 2.0: 2000 and 1000 pushes, the lead grows without bound. Strict keeps to s_U = 15."""
    exact = {
        "seconds": lambda worker, step: (1.0, 2.0)[worker],
        "until": 2000.0,
        "order": order,
    }
    asp, _ = drive(Gate(2, 10**6), **exact)
    assert counts(asp, 2) == [2000, 1000]
    paper, released = drive(Dynamic(2, 10**6, 3, 15, "paper"), **exact)
    assert counts(paper, 2) == [2000, 1000]
    assert max(lead for *_, lead in released) >= 999
    strict, released = drive(Dynamic(2, 10**6, 3, 15), **exact)
    assert max(lead for *_, lead in released) <= 15
    assert counts(strict, 2)[0] <= 1000 + 16


def test_dssp_controller_grants_what_brings_the_pushes_together():
    """s_L 1, s_U 4; worker 0 pushes each 1 s, worker 1 each 3 s. By hand:

    At t=2 the lead is 2 > 1 but worker 1 has never pushed: wait. At 3 it pushes; at 4 the lead is 2 and worker 1 has
    one push only, so no interval: wait until 6. At 7 the lead is 4 - 2 = 2, both intervals known (worker 0's from its
    waits: 7 - 4 = 3): pushes of worker 1 at 9, 12, 15, 18, of worker 0 at 7, 10, 13, 16: nearest at distance 1, r = 1.
    """
    gate = Dynamic(2, 100, 1, 4)
    assert gate.on_push(0, 1.0) == [0]
    assert gate.on_push(0, 2.0) == []
    assert gate.on_push(1, 3.0) == [0, 1]
    assert gate.on_push(0, 4.0) == []
    assert gate.on_push(1, 6.0) == [0, 1]
    assert gate.on_push(0, 7.0) == [0]  # granted: r = 1, used up by this release
    # lead 3; now pushes of 0 at 8, 9, 10: r = 1 meets worker 1's at 9
    assert gate.on_push(0, 8.0) == [0]
    assert gate.on_push(0, 9.0) == []  # lead 4 = s_U
    assert gate.on_push(1, 9.0) == [1]  # the lead is 3 > s_L: worker 0 goes on waiting
    assert gate.on_push(1, 12.0) == [1]
    assert gate.on_push(1, 15.0) == [0, 1]


def nearest_meeting(now, own, last, other, span):
    """The rule to the letter: every r against every predicted push of the slowest worker; 1 ns is a tie."""
    meetings = [last + (k + 1) * other for k in range(span + 1)]
    distance = [
        min(abs(at - (now + r * own)) for at in meetings) for r in range(span + 1)
    ]
    return next(r for r in range(span + 1) if distance[r] <= min(distance) + 1e-9)


def granted(before, now, before_of_other, last, span):
    """r by DSSP(0, span) when worker 0, whose last push was at `before`, comes `now`; paper's credits are r itself."""
    gate = Dynamic(2, 100, 0, span, "paper")
    for worker, at in (
        (0, before),
        (1, before_of_other),
        (0, before),
        (1, last),
        (0, now),
    ):
        gate.on_push(worker, at)
    return gate._credits[0]


@pytest.mark.parametrize(
    "step_s", [Fraction(1), Fraction(3, 10_000), Fraction(1, 7000)], ids=str
)
@pytest.mark.parametrize("bounds", [(3, 15), (1, 4), (0, 3)], ids=str)
def test_rounding_decides_no_tie_of_dssp(bounds, step_s):
    """Steady speeds as 1 : 1.37 : 1.93 : 2.71 make predicted pushes coincide; with exact fractions ties are ties."""
    total, exact = 400, [step_s * slower / 100 for slower in (100, 137, 193, 271)]

    def leads(base):
        gate = Dynamic(4, total, *bounds)
        return [
            (worker, lead)
            for _, worker, lead in drive(gate, lambda worker, step: base[worker])[0]
        ]

    assert leads([float(seconds) for seconds in exact]) == leads(exact)


# ties are the rule, not the exception
quarters = st.integers(0, 30).map(lambda each: each / 4)


@settings(deadline=None, max_examples=300)
@given(
    times=st.one_of(st.tuples(*[quarters] * 4), st.tuples(*[st.floats(0.0, 1e3)] * 4)),
    span=st.integers(0, 40),
)
def test_dssp_controller_weighs_every_push_against_every_other(times, span):
    own, other, last, ahead = times
    before, now = last + ahead, last + ahead + own
    before_of_other = last - other
    expected = nearest_meeting(now, now - before, last, last - before_of_other, span)
    assert granted(before, now, before_of_other, last, span) == expected


def test_dssp_controller_takes_one_walk_along_its_bounds():
    """Seconds that count how often they are subtracted: at s_U - s_L = 10,000, some for each r, not one per r and k."""
    taken = itertools.count()

    class Seconds(float):
        def __sub__(self, other):
            next(taken)
            return Seconds(float(self) - other)

        def __add__(self, other):
            return Seconds(float(self) + other)

        def __rmul__(self, times):
            return Seconds(times * float(self))

    span = 10_000
    r = granted(Seconds(0.0), Seconds(1.0), Seconds(0.0), Seconds(math.pi), span)
    assert span < next(taken) < 5 * span
    assert abs((1 + r) / math.pi % 1 - 0.5) > 0.49  # 1 + r is nearly a multiple of pi


def test_dssp_grants_to_the_fastest_only_and_ties_are_fastest():
    """s_L 0, s_U 9, three steady workers: a worker that is a push behind the fastest waits at a lead > s_L."""
    gate = Dynamic(3, 100, 0, 9)
    for worker, now in ((0, 1.0), (1, 1.1), (2, 4.0)):
        gate.on_push(worker, now)  # a first round for all: no interval is known yet
    assert gate.on_push(0, 5.0) == []
    assert gate.on_push(1, 5.5) == []
    assert sorted(gate.on_push(2, 8.0)) == [
        0,
        1,
        2,
    ]  # both intervals of the slowest are known now
    assert gate.on_push(0, 9.0) == [0]  # the fastest, alone in front: granted
    assert gate.on_push(0, 10.0) == [0]
    assert gate.pushes == [4, 2, 2]
    # one push behind 0, lead 1 > s_L: no controller is asked
    assert gate.on_push(1, 10.5) == []


def test_published_dssp_grants_one_push_more_than_the_strict_one():
    strict, paper = Dynamic(2, 100, 1, 4), Dynamic(2, 100, 1, 4, "paper")
    for gate in (strict, paper):
        for worker, now in ((0, 1.0), (0, 2.0), (1, 3.0), (0, 4.0), (1, 6.0), (0, 7.0)):
            gate.on_push(worker, now)
    assert strict._credits[0] == 0
    assert paper._credits[0] == 1


@settings(deadline=None)
@given(
    base=st.lists(st.floats(0.2, 5.0), min_size=2, max_size=6),
    total=st.integers(1, 25),
    seed=st.integers(0, 999),
)
def test_backup_workers_end_a_round_with_its_first_pushes(base, total, seed):
    backup = 1 + seed % (len(base) - 1)
    gate = Lockstep(len(base), total, backup)
    seconds = jittered(base, seed)
    heap = [(seconds(worker, 0), worker) for worker in range(len(base))]
    heapq.heapify(heap)
    used = [0]
    while heap:
        now, worker = heapq.heappop(heap)
        accepted, rounds = gate.accepts(worker), gate.rounds
        released = gate.on_push(worker, now)
        used[-1] += accepted
        if not accepted:
            assert released == [worker]  # dropped, and on with the round under way
        if gate.rounds > rounds:
            assert used[-1] == len(base) - backup
            used.append(0)
        for each in released:
            if gate.rounds < total:
                heapq.heappush(heap, (now + seconds(each, gate.pushes[each]), each))
    assert gate.rounds == total
    assert used == [len(base) - backup] * total + [0]


@settings(deadline=None)
@given(
    times=st.lists(
        st.lists(st.integers(0, 40), min_size=1, max_size=4, unique=True).map(sorted),
        min_size=1,
        max_size=4,
    )
)
def test_least_spread_is_that_of_all_combinations(times):
    chosen = least_spread([[float(x) for x in row] for row in times])
    spreads = {
        combination: max(c) - min(c)
        for combination in itertools.product(*(range(len(row)) for row in times))
        if (c := [row[i] for row, i in zip(times, combination, strict=True)])
    }
    picked = [row[i] for row, i in zip(times, chosen, strict=True)]
    assert max(picked) - min(picked) == min(spreads.values())
    best = [c for c, spread in spreads.items() if spread == min(spreads.values())]
    assert min(picked) == min(
        min(row[i] for row, i in zip(times, c, strict=True)) for c in best
    )


def test_elastic_barriers_lie_where_steady_workers_meet():
    """1 s, 2 s and 3 s per step: after the first round they meet every 6 s and no worker waits again."""
    pushed, released = drive(
        Elastic(3, [61], 10), lambda worker, step: float(worker + 1), until=33.0
    )
    waits = {}
    for now, worker, _ in pushed:
        waits[worker, now] = (
            next(at for at, who, _ in released if who == worker and at >= now) - now
        )
    late = [wait for (_, now), wait in waits.items() if now > 3.0]
    assert late
    assert max(late) == 0.0
    assert counts([each for each in pushed if each[0] > 3.0], 3) == [30, 15, 10]


@settings(deadline=None)
@given(
    base=speeds,
    epochs=st.lists(st.integers(1, 8), min_size=1, max_size=4),
    lookahead=st.integers(1, 12),
    seed=st.integers(0, 999),
)
def test_elastic_barriers_keep_no_worker_from_a_meeting(base, epochs, lookahead, seed):
    """Rows move after each epoch: a worker computes on only when all others have made its pushes, too."""
    workers, meetings = len(base), list(itertools.accumulate(epochs))
    gate = Elastic(workers, meetings, lookahead)
    seconds, now = jittered(base, seed), 0.0
    for before, meeting in itertools.pairwise([0, *meetings]):
        heap = [(now + seconds(worker, before), worker) for worker in range(workers)]
        heapq.heapify(heap)
        while heap:
            now, worker = heapq.heappop(heap)
            for each in gate.on_push(worker, now):
                if (done := gate.pushes[each]) < meeting:
                    heapq.heappush(heap, (now + seconds(each, done), each))
        assert gate.pushes == [meeting] * workers
        assert gate.waiting == []
