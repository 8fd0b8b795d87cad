"""Costs from the timed windows of the engine probe; no message is sent."""

from __future__ import annotations

import pytest

from scalebench.calibration.probes.probe_rounds import Found, Sample, entry
from scalebench.calibration.quiet_rounds import Round


def rounds(*seconds, key=("mpi", 4), reference=1e-3, ranks=2, disturbed=()):
    """One window a round of each rank; `disturbed` names pairs of round and rank."""
    made = [
        [
            [Sample(key, each + rank, undisturbed=(number, rank) not in disturbed)]
            for rank in range(ranks)
        ]
        for number, each in enumerate(seconds)
    ]
    return Found([Round(reference, samples) for samples in made])


def test_cost_is_the_median_of_the_first_ranks_undisturbed_windows():
    times = [float(number) for number in range(1, 22)]
    found = rounds(*times)
    assert found.seconds(("mpi", 4)) == 11.0
    assert found.least(("mpi", 4)) == pytest.approx(3.0)
    assert found.share_undisturbed() == 1.0
    held_up = rounds(*times, disturbed={(20, 0), (19, 1)})  # on any rank
    assert held_up.values(("mpi", 4), relative=True) == times[:19]
    assert held_up.seconds(("mpi", 4)) == 10.0
    assert held_up.share_undisturbed() == pytest.approx(19 / 21)


def test_lower_decile_counts_where_few_windows_are_undisturbed():
    times = [float(number) for number in range(1, 42)]
    all_but_11 = {(number, 0) for number in range(30)}
    found = rounds(*times, disturbed=all_but_11)
    assert found.seconds(("mpi", 4)) == found.least(("mpi", 4)) == 5.0
    assert (
        rounds(*times, disturbed=all_but_11 - {(0, 0)}).seconds(("mpi", 4)) == 35.5
    ), "twelve are enough"


def test_disturbed_operations_are_told_apart_by_their_phase():
    made = []
    for number in range(11):
        late = 5.0 if number % 3 else 0.0  # waits for a core, of either operation
        each = (1.0 + late, 3.0 + 5.0 - late)
        made.append(
            Round(
                1e-3,
                [[Sample(("horovod", 4), sum(each) / 2, undisturbed=False, each=each)]],
            )
        )
    found = Found(made)
    assert found.seconds(("horovod", 4), relative=False) == pytest.approx(2.0), (
        "no window has less than 4.5"
    )


def test_cost_is_not_negative_where_the_subtracted_step_was_disturbed():
    found = rounds(-3e-6, -2e-6, -1e-6)
    assert found.seconds(("mpi", 4)) == found.least(("mpi", 4)) == 0.0


def test_all_of_few_windows_must_be_undisturbed():
    times = [3.0, 1.0, 2.0, 9.0, 8.0]
    assert rounds(*times).seconds(("mpi", 4)) == 3.0
    assert rounds(*times, disturbed={(3, 1)}).seconds(("mpi", 4)) == pytest.approx(
        1.4
    ), "the lower decile"


def test_windows_are_matched_by_name_and_place_in_their_round():
    mine = [Sample(("alone", 0), seconds, undisturbed=True) for seconds in (1.0, 2.0)]
    its = [Sample(("alone", 0), 5.0, undisturbed=seconds > 5) for seconds in (5.0, 6.0)]
    whole = [mine, [*its, Sample(("mpi-onesided", 4), 7.0, undisturbed=True)]]
    found = Found([Round(1e-3, whole), Round(1e-3, [[], []])])
    assert found.values(("mpi-onesided", 4), relative=False) == [7.0]
    assert found.share_undisturbed() == pytest.approx(2 / 3)
    assert found.values(("alone", 0), relative=False) == pytest.approx([1.1]), (
        "one of two is not enough"
    )


def test_relative_cost_is_independent_of_the_machine_speed():
    fast, slow = (
        Round(factor * 1e-3, [[Sample(("mpi", 4), factor * 10.0, undisturbed=True)]])
        for factor in (1, 2)
    )
    found = Found([fast, slow] * 12)
    assert found.reference_s == pytest.approx(1.5e-3)
    assert found.values(("mpi", 4), relative=True) == pytest.approx([15.0] * 24)
    assert found.precise(relative=True)
    # the mean of the two in the middle
    assert found.seconds(("mpi", 4), relative=False) == 15.0
    assert not found.precise(relative=False)


def test_costs_that_fall_with_the_bytes_are_not_precise():
    costs = {4: 1.0, 4096: 2.0, 65536: 1.99}  # within 2 % of the smaller message's
    first = [
        Round(
            1e-3,
            [
                [
                    Sample(("mpi", nbytes), cost, undisturbed=True)
                    for nbytes, cost in costs.items()
                ]
            ],
        )
    ] * 12
    assert Found(first).precise(relative=True)
    found = Found(
        first + [Round(1e-3, [[Sample(("mpi", 65536), 1.5, undisturbed=True)]])] * 30
    )
    assert found.seconds(("mpi", 65536)) == 1.5
    assert not found.precise(relative=True)


def test_one_disturbed_round_counts_its_fastest_operations():
    """Operations that each begin at another phase of a cycle count all: their mean is the cost."""
    each = tuple(float(n) for n in range(1, 12))
    for in_phases, expected in ((False, 2.0), (True, 6.0)):
        found = Found([Round(1.0, [[Sample(("sum", 4), 6.0, False, each, in_phases)]])])
        assert found.seconds(("sum", 4)) == pytest.approx(expected)


def test_a_delayed_small_message_costs_no_more_than_a_larger_one():
    """One that was held up for a millisecond had made all up to 4 MiB cost the mean of all."""
    points = [
        (4, 1e-3),
        (4 << 10, 2e-5),
        (64 << 10, 5e-5),
        (1 << 20, 4e-4),
        (4 << 20, 3e-4),
    ]
    found = entry("mpi-reduce", points, ranks=2, source="invented")
    assert [seconds for _, seconds in found.points] == [2e-5, 2e-5, 5e-5, 3e-4, 3e-4]
    assert found.alpha_s == 2e-5
