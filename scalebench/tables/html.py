"""Tables as HTML, which the report's style and script know, and which any page can take."""

from __future__ import annotations

from collections.abc import Iterator

from markupsafe import Markup, escape

from scalebench.tables.table import Column, Entry, Table


def as_html(table: Table, label: str = "") -> str:
    """Return title, rows, notes and the meaning of the columns; a `label` names the parts, to link to them.

    Cells have what a script sorts them by as `data-key`.
    """
    return "\n".join([*_lines(table, label), ""])


def _lines(table: Table, label: str) -> Iterator[str]:
    # Without a label two tables of a page would have parts of one name.
    named = Markup(' id="{}-{}"').format if label else _unnamed
    by_title = Markup(' aria-labelledby="title-{}"').format(label) if label else ""
    yield f'<div class="table"{named("table", label)}>'
    if table.title:
        yield f"<h3{named('title', label)}>{escape(table.title)}</h3>"
    yield f'<div class="scroll" role="region" tabindex="0"{by_title}>'
    yield f'<table class="sortable"{by_title}>'
    yield "<thead><tr>"
    yield from map(_head, table.columns)
    yield "</tr></thead>"
    yield "<tbody>"
    for row in table.rows:
        cells = map(_cell, row, table.columns)
        yield f"<tr>{''.join(cells)}</tr>"
    yield "</tbody>"
    yield "</table>"
    yield "</div>"
    yield from _notes(table)
    yield from _meanings(table)
    yield "</div>"


def _unnamed(*_: str) -> str:
    return ""


def _head(column: Column[object]) -> str:
    meaning = Markup(' title="{}"').format(column.meaning) if column.meaning else ""
    name = f"{column.over} {column.name}".strip()
    return f'<th scope="col"{_kind(column)}{meaning}>{escape(name)}</th>'


def _cell(entry: Entry, column: Column[object]) -> str:
    text = escape(str(entry.text))
    return f'<td{_kind(column)} data-key="{escape(entry.key)}">{text}</td>'


def _kind(column: Column[object]) -> str:
    return "" if column.is_text else ' class="number"'


def _notes(table: Table) -> Iterator[str]:
    """Yield a paragraph, or a list of several notes."""
    if len(table.notes) == 1:
        yield f'<p class="remark">{escape(table.notes[0])}</p>'
    elif table.notes:
        yield '<ul class="remark">'
        yield from (f"<li>{escape(note)}</li>" for note in table.notes)
        yield "</ul>"


def _meanings(table: Table) -> Iterator[str]:
    known = [column for column in table.columns if column.meaning]
    if not known:
        return
    yield '<details class="meanings"><summary>What the columns mean</summary>'
    yield '<dl class="facts">'
    for column in known:
        name, meaning = escape(column.name), escape(column.meaning)
        yield f"<div><dt>{name}</dt><dd>{meaning}</dd></div>"
    yield "</dl>"
    yield "</details>"
