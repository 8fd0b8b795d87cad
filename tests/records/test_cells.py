"""Values survive the way into a cell and back."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalebench.records.cells import from_line, to_cell, to_lines, to_text

LINE_TEXT = st.text(st.characters(exclude_categories=("Cs", "Cc", "Zl", "Zp"))).map(str.strip)


@given(LINE_TEXT)
def test_text_on_one_line_comes_back_unchanged(text):
    assert to_text(from_line(to_lines([[text, "end"]]))[0]) == text


@given(LINE_TEXT)
def test_no_text_cell_starts_like_a_formula(text):
    assert not to_cell(text).startswith(("=", "+", "-", "@"))


@given(st.floats(allow_nan=False) | st.integers())
def test_numbers_are_exact_and_never_quoted(number):
    cell = to_cell(number)
    assert type(number)(cell) == number
    assert not cell.startswith("'")


@given(st.text())
def test_a_row_is_one_line_whatever_the_text(text):
    assert to_lines([[text, 1.0]]).count(b"\n") == 1


@pytest.mark.parametrize(("value", "cell"), [(None, ""), (True, "true"), (False, "false"), (-1.5, "-1.5"), (3, "3")])
def test_cells_are_written_as(value, cell):
    assert to_cell(value) == cell


def test_not_a_number_is_told_from_not_measured():
    assert math.isnan(float(to_cell(math.nan)))
    assert to_cell(None) == ""
