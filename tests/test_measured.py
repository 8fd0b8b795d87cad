"""A value with its interval."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalebench.measured import UNKNOWN, Measured

NUMBERS = st.floats(0.01, 100.0)


@given(st.lists(NUMBERS, min_size=3, max_size=3).map(sorted))
def test_bounds_stay_in_order_under_monotone_functions(ordered):
    low, value, high = ordered
    found = Measured(value, low, high, 5, "95 %")
    for function in (math.exp, lambda x: 1 - x, lambda x: 1 - 1 / x):
        mapped = found.map(function)
        assert mapped.low <= mapped.value <= mapped.high
        assert {mapped.low, mapped.high} == {function(low), function(high)}
        assert mapped[3:] == (5, "95 %")


def test_an_interval_ends_where_no_value_exists():
    assert Measured(0.9, 0.7, 1.1).within(0.0, 1.0)[:3] == (0.9, 0.7, 1.0)
    assert Measured(0.1, -0.1, 0.3).within(0.0, 1.0).low == 0
    assert math.isnan(Measured(0.5).within(0.0, 1.0).low)


def test_unknown_stays_unknown():
    unknown = UNKNOWN.map(math.exp)[:3]
    assert [math.isnan(each) for each in unknown] == [True] * 3


def test_columns_of_a_table_are_named():
    assert Measured(2.0, 1.0, 3.0).named("ratio") == {
        "ratio": 2.0,
        "ratio_low": 1.0,
        "ratio_high": 3.0,
    }
    assert Measured(2.0, 1.0).named("s", "low_s", "high_s")["high_s"] == pytest.approx(
        math.nan, nan_ok=True
    )
