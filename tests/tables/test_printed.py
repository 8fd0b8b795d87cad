"""Tables in print and in files: digits that intervals support, one unit a column, and what programs read."""

from __future__ import annotations

import csv
import io
import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalebench import tables
from scalebench.measured import Measured
from scalebench.tables import FORMATS, Column, Table, render
from scalebench.tables.latex import in_latex, to_latex
from scalebench.tables.printed import Print, Rounded, round_to_interval
from scalebench.tables.table import COUNT, SAVED, TIME, fields, text

ROWS = [
    {"name": "a|b", "n": 1, "s": 0.25, "low": 0.2, "high": 0.3, "saved": 0.5},
    {
        "name": "a|b",
        "n": 64,
        "s": math.inf,
        "low": math.nan,
        "high": math.nan,
        "saved": math.nan,
    },
    {"name": "=c", "n": 64, "s": 2.5, "low": 0.1, "high": 60.0, "saved": -0.03},
]
COLUMNS = [
    Column("strategy", text("name"), shared=True),
    Column("workers", fields("n"), COUNT),
    Column("time", fields("s low high"), TIME),
    Column("saved", fields("saved"), SAVED),
]
TABLE = Table.of("Times of two", COLUMNS, ROWS, ["a note"])


@pytest.mark.parametrize(
    ("value", "half", "shown"),
    [
        (
            0.827,
            0.119,
            "0.83 [0.71, 0.95]",
        ),  # the examples of the Review of Particle Physics
        (0.827, 0.367, "0.8 [0.5, 1.2]"),
        (0.67512, 0.0142, "0.675 [0.661, 0.689]"),
        (12345.0, 678.0, "12300 [11700, 13000]"),
        (5.0, 0.0, "5.00 [, ]"),
        (1234.4, math.nan, "1234 [, ]"),
        (math.nan, 1.0, "– [, ]"),
        (math.inf, 1.0, "never [, ]"),
    ],
)
def test_interval_decides_on_the_digits(value, half, shown):
    number = round_to_interval(value, value - half, value + half)
    assert f"{number.value} [{number.low}, {number.high}]" == shown


def test_a_wide_interval_does_not_round_its_number_to_zero():
    assert round_to_interval(1.98, 0.04, 108.0) == Rounded("2", "0", "108")
    assert round_to_interval(95.8, -980.0, 99.4) == Rounded("96", "-980", "99")
    assert round_to_interval(-0.3, -50.0, 40.0) == Rounded("0", "-50", "40")


@given(st.floats(1e-6, 1e6), st.floats(1e-4, 0.9), st.floats(1e-4, 0.9))
def test_rounding_moves_no_bound_by_more_than_a_seventh_of_the_interval(
    value, below, above
):
    """Two digits of a half-width move a number by at most 1/20 of it, one digit from 355 on by at most 1/7."""
    low, high = value * (1 - below), value * (1 + above)
    number = round_to_interval(value, low, high)
    for shown, exact in ((number.value, value), (number.low, low), (number.high, high)):
        assert abs(float(shown) - exact) <= (high - low) / 2 / 7 * (1 + 1e-9)


@pytest.mark.parametrize(
    ("number", "shown"),
    [
        (Rounded("0.92", "0.90", "0.94"), r"$0.92 \pm 0.02$"),
        (Rounded("0.92", "0.90", "0.95"), r"$0.92 \pm 0.03$"),
        (Rounded("0.92", "0.90", "0.99"), "$0.92^{+0.07}_{-0.02}$"),
        (Rounded("-3.1"), "$-3.1$"),
        (Rounded("–"), "--"),
    ],
)
def test_latex_shows_both_sides_of_an_uneven_interval(number, shown):
    assert in_latex(number) == shown


def test_bounds_that_rounding_alone_tells_apart_are_not_printed():
    row = Measured(1.350007, 1.350006, 1.350008)
    steady = Table.of("", [Column("time", lambda row: row, TIME)], [row])
    assert Print.of(steady).cells == ((Rounded("1.35"),),)


def test_a_column_has_one_unit_in_print_and_each_number_its_own_on_a_screen():
    assert [str(row[2].text) for row in TABLE.rows] == [
        "250 ms [200, 300]",
        "never",
        "0.1..60 s",
    ]
    found = Print.of(TABLE)
    assert found.heads == ("Strategy", "Workers", "Time (s)", "Saved (%)")
    assert [row[2].in_brackets() for row in found.cells] == [
        "0.25 [0.20, 0.30]",
        "never",
        "0.1..60",
    ]
    assert [row[3].in_brackets() for row in found.cells] == ["50.0", "–", "-3.0"]


def test_markdown_has_title_and_notes_below():
    assert render(TABLE, "markdown").splitlines() == [
        "| Strategy | Workers | Time (s) | Saved (%) |",
        "| --- | ---: | ---: | ---: |",
        "| a\\|b | 1 | 0.25 [0.20, 0.30] | 50.0 |",
        "| a\\|b | 64 | never | – |",
        "| =c | 64 | 0.1..60 | -3.0 |",
        "",
        "Times of two. a note.",
    ]


def test_csv_has_bounds_in_columns_and_no_formulas():
    rows = list(csv.DictReader(io.StringIO(render(TABLE, "csv"))))
    assert [row["Strategy"] for row in rows] == ["a|b", "a|b", "'=c"]
    assert [row["Time (s)"] for row in rows] == ["0.25", "never", ""]
    assert [row["Time (s) low"] for row in rows] == ["0.2", "", "0.1"]


def test_csv_is_unrounded_in_the_unit_of_its_heading():
    row = Measured(0.0123456789, 0.0081234567, 0.0212345678)
    (found,) = csv.DictReader(
        io.StringIO(
            render(Table.of("", [Column("step", lambda row: row, TIME)], [row]), "csv")
        )
    )
    assert found == {
        "Step (ms)": "12.3456789",
        "Step (ms) low": "8.1234567",
        "Step (ms) high": "21.2345678",
    }


def test_json_is_unrounded_in_si_units():
    found = json.loads(render(TABLE, "json"))
    assert (found["title"], found["notes"]) == ("Times of two", ["a note"])
    first, second, third = found["rows"]
    assert first == {
        "strategy": "a|b",
        "workers": 1,
        "time": 0.25,
        "time low": 0.2,
        "time high": 0.3,
        "saved": 0.5,
    }
    assert (second["time"], second["saved"]) == ("never", None)
    assert third["time"] == 2.5, (
        "a program gets the number beside its bounds, whatever they leave of it"
    )


def test_latex_names_a_group_once():
    rows = [
        line.strip()
        for line in render(TABLE, "latex", "two").splitlines()
        if line.endswith(r"\\")
    ]
    assert rows[1].startswith(r"a\textbar{}b & 1 &")
    assert rows[2].startswith("& 64 & never &")
    assert r"\label{tab:two}" in render(TABLE, "latex", "two")
    assert r"\label" not in render(TABLE, "latex")


@pytest.mark.parametrize("form", FORMATS)
def test_a_table_without_rows_is_written_too(form):
    assert render(Table.of("none", COLUMNS, []), form)


def test_a_mark_stands_behind_a_number_and_in_place_of_infinity():
    rows = {"*": 1.0, "1 of 3": math.inf}
    columns = [
        Column("time", lambda mark: Measured(rows[mark]), TIME, mark=lambda mark: mark)
    ]
    table = Table.of("", columns, rows)
    assert [str(row[0].text) for row in table.rows] == ["1.00 s*", "1 of 3"]
    assert [row[0].in_brackets() for row in Print.of(table).cells] == [
        "1.00*",
        "1 of 3",
    ]


def test_every_character_of_our_texts_has_a_form_in_latex():
    """Box drawing is of terminals; the module of LaTeX names what it translates."""
    package = Path(tables.__file__).parents[1]
    ours = {
        each
        for file in package.rglob("*.py")
        if file.name != "latex.py"
        for each in file.read_text("utf-8")
    }
    unknown = {each for each in ours - {"─"} if "U+" in to_latex(each)}
    assert {"†", "µ", "×"} < ours
    assert not unknown
