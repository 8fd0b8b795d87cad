"""Tables as HTML."""

from __future__ import annotations

import math

from scalebench.measured import Measured
from scalebench.tables import Column, Table, render
from scalebench.tables.table import COUNT, TIME, fields, text

ROWS = [
    {"name": "a<b", "n": 1, "s": 0.25, "low": 0.2, "high": 0.3},
    {"name": "c", "n": 64, "s": math.nan, "low": math.nan, "high": math.nan},
]
COLUMNS = [
    Column("strategy", text("name"), left=True),
    Column("workers", fields("n"), COUNT),
    Column("time", fields("s low high"), TIME, 'of "all"', over="virtual"),
]


def html(label="", notes=("a & b",)):
    return render(Table.of("Times", COLUMNS, ROWS, notes), "html", label)


def test_cells_have_the_text_of_a_screen_and_the_number_to_sort_by():
    written = html()
    shown = COLUMNS[2].cell(ROWS[0])
    assert shown.number == Measured(0.25, 0.2, 0.3)
    assert f'<td class="number" data-key="0.25">{shown.text}</td>' in written
    # An unknown number has no place in the order.
    assert '<td class="number" data-key="">–</td>' in written
    assert written.count("<tr>") == len(ROWS) + 1


def test_texts_are_escaped_in_cells_notes_and_meanings():
    written = html()
    assert '<td data-key="a&lt;b">a&lt;b</td>' in written
    assert '<p class="remark">a &amp; b</p>' in written
    assert 'title="of &#34;all&#34;">virtual time</th>' in written
    assert "<dd>of &#34;all&#34;</dd>" in written


def test_parts_have_names_where_there_is_a_label():
    assert " id=" not in html()
    assert "aria-labelledby" not in html()
    assert 'id="table-mine"' in html("mine")
    assert '<h3 id="title-mine">Times</h3>' in html("mine")


def test_several_notes_are_a_list():
    assert html(notes=["one", "two"]).count("<li>") == 2
    assert "remark" not in html(notes=[])


def test_texts_can_be_changed_before_they_are_written():
    table = Table.of("Times", COLUMNS, ROWS, ["a & b"]).with_texts(str.upper)
    written = render(table, "html")
    assert '<td data-key="A&lt;B">A&lt;B</td>' in written
    assert '<td data-key="C">C</td>' in written
    assert "<h3>TIMES</h3>" in written
    assert "A &amp; B" in written
