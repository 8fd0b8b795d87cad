"""Formatting of durations and natural sorting."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalebench.formatting import (
    BETWEEN_MEANS,
    ROUGH_MEANS,
    counted,
    digits_with_interval,
    listed,
    memory_size,
    natural,
    percent_with_interval,
    roughly,
    seconds_as_known,
    seconds_with_interval,
    tell_marks,
)


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0.02, "1 s"), (46.4, "46 s"), (90, "90 s"), (119, "119 s"), (150, "2 min"), (2787, "46 min"),
        (5399, "90 min"), (5400, "1.5 h"), (40_000, "11 h"),
        (400_000, "5 days"),
    ],
)  # fmt: skip
def test_duration_has_a_suitable_unit(seconds, said):
    assert roughly(seconds) == said


@given(st.floats(1, 1e8))
def test_formatted_duration_is_within_a_quarter(seconds):
    number, unit = roughly(seconds).split()
    factor = {"s": 1, "min": 60, "h": 3600, "days": 86400}[unit]
    assert abs(float(number) * factor - seconds) <= max(0.5, 0.25 * seconds)


@pytest.mark.parametrize(
    ("value", "low", "high", "known", "with_interval"),
    [
        (3.752, 3.6, 3.9, "3.75 s", "3.75 s [3.60, 3.90]"),
        (3.752, 0.7015, 20.07, "~4 s", "~4 s [0.7, 20]"),
        (0.0714, 0.02, 0.3, "~70 ms", "~70 ms [20, 300]"),
        (3.752, 0.3, 40.0, "0.3..40 s", "0.3..40 s"),
        (3.752, -1.0, 9.0, "0..9 s", "0..9 s"),
        (16.6, 0.036, 1200.0, "40 ms..20 min", "40 ms..20 min"),
        (0.02, 0.0004, 1.2, "400 µs..1 s", "400 µs..1 s"),
        (float("inf"), float("nan"), float("nan"), "never", "never"),
    ],
)
def test_time_has_the_digits_that_its_interval_leaves(
    value, low, high, known, with_interval
):
    assert seconds_as_known(value, low, high) == known
    assert seconds_with_interval(value, low, high) == with_interval


def test_ratio_has_the_digits_that_its_interval_leaves():
    assert digits_with_interval(1.3, 1.21, 1.4) == "1.30 [1.21, 1.40]"
    assert digits_with_interval(3.7, 1.0, 14.0) == "~4 [1, 10]"
    assert percent_with_interval(0.5, -0.8, 0.9) == "-80..+90 %", (
        "a reduction by a ratio of .1 to 1.8 has no digit"
    )


def test_memory_has_a_suitable_unit():
    said = {memory_size(n) for n in (45.6 * 2**20, 0.5 * 2**30, 12 * 2**30, 12 * 2**40)}
    assert said == {"45.6 MiB", "0.500 GiB", "12.0 GiB", "12.0 TiB"}


def test_marks_in_a_table_are_told():
    assert tell_marks(["1.23 s", "~4 s", "5.00 s"]) == [ROUGH_MEANS]
    assert tell_marks(["0.3..40 s", "~4 s"]) == [ROUGH_MEANS, BETWEEN_MEANS]
    assert tell_marks(["1.23 s"]) == []


def test_numbers_in_names_sort_as_numbers():
    labels = [
        "a(steps=16)",
        "b",
        "a(steps=4)",
        "a(rate=0.5)",
        "a(rate=0.25)",
        "a",
        "a(steps=4, first=10)",
        "a(steps=4, first=9)",
    ]
    assert sorted(labels, key=natural) == [
        "a", "a(rate=0.25)", "a(rate=0.5)", "a(steps=4)", "a(steps=4, first=9)", "a(steps=4, first=10)", "a(steps=16)",
        "b",
    ]  # fmt: skip


@given(st.lists(st.text()))
def test_natural_key_sorts_any_texts(texts):
    assert sorted(sorted(texts, key=natural)) == sorted(texts)


def test_listed_counts_further_items():
    assert listed(range(8)) == "0, 1, 2, 3, 4, 5, 6, 7"
    assert listed(range(10)) == "0, 1, 2, 3, 4, 5, 6 and 3 more"
    assert (counted(1, "run"), counted(1200, "run")) == ("1 run", "1,200 runs")
