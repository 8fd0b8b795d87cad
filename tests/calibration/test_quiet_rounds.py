"""Rounds of measurement by a clock that the test moves."""

from __future__ import annotations

import math

import pytest

from scalebench.calibration.quiet_rounds import Round, Until, are_enough, quiet_rounds
from scalebench.system.disturbance import FEWEST, typical


class Machine:
    """A machine on which the reference step takes `speed` seconds and a round `round_s`; its windows are `quiet`."""

    def __init__(self, round_s=1.0, speed=1e-3, quiet=True):
        self.now, self.round_s, self.speed, self.quiet = 0.0, round_s, speed, quiet
        self.events = []

    def reference(self):
        self.events.append("reference")
        return self.speed

    def measure(self):
        """Four windows of ten reference steps each, with their disturbance."""
        self.events.append("measure")
        self.now += self.round_s
        return [(10 * self.speed, self.quiet)] * 4

    def rounds(self, seconds, **limits):
        until = Until(seconds, precise=is_precise, now=lambda: self.now, **limits)
        return quiet_rounds(self.measure, self.reference, until)


def is_precise(rounds):
    return typical(
        [seconds for each in rounds for seconds, quiet in each.found if quiet]
    ).precise


def test_quiet_machine_is_measured_until_the_value_is_precise():
    machine = Machine()
    rounds = machine.rounds(100.0)
    assert len(rounds) == math.ceil(FEWEST / 4), "as soon as the median has an interval"
    assert rounds[0] == Round(1e-3, [(1e-2, True)] * 4)
    assert machine.events == ["reference", "measure"] * len(rounds), (
        "each round at the speed of its moment"
    )


def test_precise_value_does_not_end_before_the_least_rounds():
    assert len(Machine().rounds(100.0, least=8)) == 8


def test_disturbed_machine_is_measured_until_the_time_is_over():
    assert len(Machine(quiet=False).rounds(20.0, least=5)) == 20


def test_rounds_end_at_most_there():
    assert len(Machine(quiet=False).rounds(20.0, most=7)) == 7


@pytest.mark.parametrize(
    ("limits", "count"),
    [
        ({}, 1),
        ({"least": 5}, 1),
        ({"fewest": 8}, 8),
        ({"fewest": 2, "patience": 2.0}, 1),
        ({"fewest": 2, "patience": 4.0}, 2),
    ],
    ids=[
        "one",
        "the least is of the time",
        "the fewest whatever the time",
        "without patience",
        "with patience",
    ],
)
def test_rounds_that_take_longer_than_the_budget(limits, count):
    assert len(Machine(round_s=3.0).rounds(1.0, **limits)) == count


def test_speed_of_each_round_is_kept():
    machine = Machine(quiet=False)

    def slower():
        machine.speed *= 2
        return machine.speed

    rounds = quiet_rounds(machine.measure, slower, Until(3.0, now=lambda: machine.now))
    assert [each.reference_s for each in rounds] == [2e-3, 4e-3, 8e-3]
    assert [each.found[0][0] / each.reference_s for each in rounds] == pytest.approx(
        [10.0] * 3
    )


def test_undisturbed_windows_are_enough_for_a_median_or_all_of_few():
    assert are_enough(FEWEST, 1000)
    assert not are_enough(FEWEST - 1, 1000)
    assert are_enough(5, 5)
    assert not are_enough(4, 5)
