"""Tables in terminals of any width."""

from __future__ import annotations

from operator import itemgetter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from scalebench.tables import Column, Table, render
from scalebench.tables.screen import Screen, print_results
from tests.facts import together


def column(name, **options):
    """Return what makes the column at a place of rows of texts."""
    return lambda place: Column(name, itemgetter(place), **options)


COLUMNS = (
    column("strategy", shared=True),
    column("workers"),
    column("time"),
    column("median", spare=2),
    column("spread", spare=2),
    column("accuracy", spare=1),
)
ROWS = (
    ("allreduce", "1", "1.00 s", "1.01 s", "2.0 %", "0.95"),
    ("allreduce", "64", "4.00 s", "4.01 s", "3.0 %", "0.94"),
    ("epoch_average", "64", "2.00 s", "2.01 s", "4.0 %", "0.93"),
)


def lines(width, rows=ROWS, columns=COLUMNS, notes=("a note",)):
    console = Console(width=width)
    with console.capture() as capture:
        console.print(
            Screen(
                Table.of(
                    "a title",
                    [own(place) for place, own in enumerate(columns)],
                    rows,
                    notes,
                )
            )
        )
    return [line.rstrip() for line in capture.get().splitlines()]


@pytest.mark.parametrize("width", [44, 200])
def test_shared_values_are_headings(width):
    assert lines(width) == [
        "a title",
        "workers    time  median  spread  accuracy",
        "allreduce",
        "      1  1.00 s  1.01 s   2.0 %      0.95",
        "     64  4.00 s  4.01 s   3.0 %      0.94",
        "epoch_average",
        "     64  2.00 s  2.01 s   4.0 %      0.93",
        "a note",
    ]


@pytest.mark.parametrize(
    ("width", "header", "left_out"),
    [
        (40, "workers    time  accuracy", "median, spread"),
        (20, "workers    time", "median, spread, accuracy"),
    ],
)
def test_narrow_table_names_the_columns_left_out(width, header, left_out):
    found = lines(width)
    assert found[1] == header
    assert together(" ".join(found), "no room", left_out, "wider")


def test_table_without_rows_shows_its_notes():
    assert lines(80, rows=()) == ["a title", "a note"]


@settings(max_examples=60, deadline=None)
@given(
    width=st.integers(24, 140),
    spares=st.lists(st.integers(1, 4), min_size=3, max_size=3),
)
def test_no_number_is_cut_and_no_line_is_too_long(width, spares):
    columns = [
        *COLUMNS[:3],
        *(column(f"column {n}", spare=spare) for n, spare in enumerate(spares)),
    ]
    found = lines(width, columns=columns, notes=())
    page = " ".join(found)
    assert max(map(len, found)) <= width
    assert "…" not in page
    for row in ROWS:
        assert row[2] in page
        for n, cell in enumerate(row[3:]):
            assert cell in page or f"column {n}" in page[page.index("no room for") :]


def test_rendered_for_a_terminal_a_table_is_what_is_printed(capsys):
    table = Table.of("", [make(place) for place, make in enumerate(COLUMNS)], ROWS)
    print_results(table)
    printed = capsys.readouterr().out
    assert ROWS[0][2] in printed
    assert render(table, "terminal") == printed
