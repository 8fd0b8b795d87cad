"""How commands print tables and sentences, their option `--format`, and how they write all columns."""

from __future__ import annotations

import csv
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

import click

from scalebench.errors import writing
from scalebench.tables import FORMATS, Table, render

format_option = click.option(
    "--format",
    "form",
    type=click.Choice(list(FORMATS)),
    default="terminal",
    show_default=True,
    help="The table for a paper, a page or a program: rounded to what intervals support; csv and json have all digits.",
)


def indented(text: str, by: str, first: str | None = None) -> str:
    """Return `text` with `by` before its lines, of which the `first` may differ; a terminal gets no broken words.

    There paragraphs that are too wide are filled anew, except those with lines of an
    indent of their own, as formulas.
    """
    start = by if first is None else first
    if not sys.stdout.isatty():
        return start + textwrap.indent(text, by).removeprefix(by)
    width, filled = shutil.get_terminal_size().columns, []
    for paragraph in text.split("\n\n"):
        lines = paragraph.splitlines()
        widest = max(map(len, lines), default=0) + max(len(by), len(start))
        if widest <= width or any(line[:1].isspace() for line in lines):
            filled.append(start + textwrap.indent(paragraph, by).removeprefix(by))
        else:
            filled.append(
                textwrap.fill(
                    " ".join(lines),
                    width,
                    initial_indent=start,
                    subsequent_indent=by,
                    break_long_words=False,
                    break_on_hyphens=False,
                )
            )
        start = by
    return "\n\n".join(filled)


def show(*parts: Table | str) -> None:
    """Print tables and sentences to a terminal."""
    # rich is there once something is printed
    from scalebench.tables.screen import print_results

    print_results(*parts)


def note(text: str) -> None:
    """Print what a user should know beside the tables, on standard error."""
    click.echo(f"note: {text}", err=True)


def show_tables(form: str, *parts: Table | str) -> None:
    """Print tables and sentences to a terminal, or the tables alone in another form."""
    # sentences are for people: a program gets tables alone
    if form == "terminal":
        show(*parts)
    else:
        tables = [render(part, form) for part in parts if isinstance(part, Table)]
        # two JSON documents behind one another are none
        several = form == "json" and len(tables) > 1
        click.echo(
            f"[\n{','.join(tables)}]\n" if several else "\n".join(tables), nl=False
        )


def write_rows(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """Write rows with equal columns as CSV; without any, the column that all modelled rows have."""
    with writing(path, ""), path.open("w", newline="") as file:
        writer = csv.DictWriter(
            file, list(rows[0]) if rows else ["execution"], lineterminator="\n"
        )
        writer.writeheader()
        writer.writerows(rows)
