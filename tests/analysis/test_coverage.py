"""Every interval holds what it is about 95 times in 100, and tests raise 5 false alarms in 100 at most, by simulation.

4,000 simulated studies leave a standard error of 0.35 percentage points. Seeds are fixed: an entry stays the same.
"""

from __future__ import annotations

import pytest

from benchmarks.coverage import ALARMS, GROUPS, INTERVALS, NOISES, share, taken_for_two, time_mean_of_all

QUIET, *ODD = NOISES
# t quantiles of few values, added in quadrature, are more than they need be: 97 % from five values on.
QUADRATURE = {"virtual / native": 1.0, "ratio of two calibrations": 1.0}
# Where delayed runs make an interval hold more or less than 93 to 97 %, which docs/statistics.md says with the number.
WIDE = {
    "ratio, independent: Welch": 0.99,
    "virtual time: with error": 1.0,  # the delays are inside the error as well as in the calibration
    "virtual ratio: with error": 1.0,
    **QUADRATURE,
}
NARROW = {
    "time: stopped when narrow": 0.895,
    "virtual time: calibration": 0.8,
    "virtual / native": 0.92,
}


@pytest.mark.parametrize("claim", INTERVALS, ids=lambda claim: claim.name)
def test_an_interval_covers_95_percent_from_where_it_is_offered(claim):
    quiet = share(claim, QUIET, claim.numbers[0], 4000)
    assert 0.93 <= quiet <= (QUADRATURE | {"virtual time: with error": 0.985}).get(claim.name, 0.97)


@pytest.mark.parametrize("noise", ODD, ids=lambda noise: noise.name)
@pytest.mark.parametrize("claim", INTERVALS, ids=lambda claim: claim.name)
def test_an_interval_covers_95_percent_with_odd_runs(claim, noise):
    covered = share(claim, noise, claim.numbers[0], 2000 if "bootstrap" in claim.name else 4000)
    assert NARROW.get(claim.name, 0.925) <= covered <= WIDE.get(claim.name, 0.975)


def test_the_simulation_can_tell_an_interval_that_does_not():
    delayed = next(noise for noise in NOISES if noise.name == "1 in 10 x3")
    claim = INTERVALS[0]
    assert share(type(claim)("mean of all", time_mean_of_all, (5,)), delayed, 5, 2000) < 0.6


@pytest.mark.parametrize("noise", NOISES, ids=lambda noise: noise.name)
@pytest.mark.parametrize("claim", ALARMS, ids=lambda claim: claim.name)
def test_alarms_are_false_5_times_in_100_at_most(claim, noise):
    # 500 studies: a true 5 % lies below 8 % with a probability of 99.8 %.
    assert share(claim, noise, claim.numbers[0], 2000) < 0.08


@pytest.mark.parametrize("shape", [name for name in GROUPS if not name.startswith("two")])
@pytest.mark.parametrize("n", [5, 10])
def test_one_group_is_seldom_taken_for_two(shape, n):
    assert taken_for_two(shape, n, 1500) < 0.07


def test_two_groups_are_found():
    assert taken_for_two("two states 30 % apart", 8, 500) > 0.5
