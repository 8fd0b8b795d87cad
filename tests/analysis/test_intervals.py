"""Centres and intervals: laws, a textbook value, and coverage by simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalebench.analysis.intervals import mean_interval, paired_ratio, time_interval, unpaired_ratio

TIMES = st.lists(st.floats(1e-3, 1e3), min_size=2, max_size=8)


def test_a_textbook_interval():
    # mean 2, s 1, n 3: t(0.975, 2) = 4.302653, half width 4.302653 / sqrt(3)
    centre, low, high, n = mean_interval([1.0, 2.0, 3.0])
    assert (centre, n) == (2.0, 3)
    assert high - centre == pytest.approx(4.302652729911275 / math.sqrt(3), rel=1e-9)
    assert centre - low == pytest.approx(high - centre)


@pytest.mark.parametrize("estimate", [mean_interval([2.0]), time_interval([2.0]), paired_ratio([4.0], [2.0])])
def test_one_value_has_no_interval(estimate):
    assert estimate.centre == pytest.approx(2.0)
    assert math.isnan(estimate.low)
    assert math.isnan(estimate.high)


@given(TIMES, st.floats(0.1, 10))
def test_times_scale_with_their_unit(seconds, factor):
    once, scaled = time_interval(seconds), time_interval([factor * value for value in seconds])
    np.testing.assert_allclose(scaled[:3], [factor * value for value in once[:3]], rtol=1e-6)


@given(st.lists(st.tuples(st.floats(1e-3, 1e3), st.floats(1e-3, 1e3)), min_size=2, max_size=8))
def test_a_ratio_and_its_inverse_say_the_same(pairs):
    top, bottom = zip(*pairs, strict=True)
    ratio, inverse = paired_ratio(top, bottom), paired_ratio(bottom, top)
    assert ratio.centre * inverse.centre == pytest.approx(1, rel=1e-6)
    assert math.log(ratio.low) == pytest.approx(-math.log(inverse.high), abs=1e-6)
    assert ratio.centre == pytest.approx(time_interval(top).centre / time_interval(bottom).centre, rel=1e-6)


@pytest.mark.parametrize("n", [3, 5])
@pytest.mark.parametrize("kind", ["time", "paired", "unpaired"])
def test_nominal_95_percent_covers_93_to_97(n, kind):
    # 4,000 simulated studies: the standard error of the coverage is 0.35 %, so a true 95 % passes surely.
    random = np.random.default_rng(n)
    hits = 0
    for _ in range(4000):
        block = random.lognormal(0, 0.2, n)  # noise that pairs share
        top, bottom = 3 * block * random.lognormal(0, 0.1, n), 2 * block * random.lognormal(0, 0.15, n)
        if kind == "time":
            _, low, high, _ = time_interval(top)
            hits += low <= 3 <= high
        elif kind == "paired":
            _, low, high, _ = paired_ratio(top, bottom)
            hits += low <= 1.5 <= high
        else:
            _, low, high, _ = unpaired_ratio(top / block, bottom / block)
            hits += low <= 1.5 <= high
    assert 0.93 <= hits / 4000 <= 0.97


def test_unpaired_ratio_of_constant_samples_is_exact():
    assert unpaired_ratio([4.0] * 3, [2.0] * 3)[:3] == pytest.approx((2, 2, 2))
