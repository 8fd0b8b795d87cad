"""Formatting of durations and natural sorting."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalebench.formatting import natural, roughly


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
