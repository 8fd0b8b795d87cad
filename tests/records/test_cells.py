"""Cells convert back to the same values."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalebench.records.append_only import from_line, to_cell, to_lines, to_text

LINE_TEXT = st.text(st.characters(exclude_categories=("Cs", "Cc", "Zl", "Zp"))).map(
    str.strip
)


@given(LINE_TEXT)
def test_text_survives_a_round_trip(text):
    assert to_text(from_line(to_lines([[text, "end"]]))[0]) == text


@given(LINE_TEXT)
def test_text_cells_never_start_like_a_formula(text):
    assert not to_cell(text).startswith(("=", "+", "-", "@"))


@given(st.floats(allow_nan=False) | st.integers())
def test_numbers_survive_a_round_trip(number):
    cell = to_cell(number)
    assert type(number)(cell) == number
    assert not cell.startswith("'")


@given(st.text())
def test_any_text_stays_on_one_line(text):
    assert to_lines([[text, 1.0]]).count(b"\n") == 1


@pytest.mark.parametrize(
    ("value", "cell"),
    [(None, ""), (True, "true"), (False, "false"), (-1.5, "-1.5"), (3, "3")],
)
def test_cell_of_a_value(value, cell):
    assert to_cell(value) == cell


def test_nan_differs_from_a_missing_value():
    assert math.isnan(float(to_cell(math.nan)))
    assert to_cell(None) == ""
