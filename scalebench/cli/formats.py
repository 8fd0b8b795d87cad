"""The option `--format` of commands that end with a table, and how they print it."""

from __future__ import annotations

import click

from scalebench.tables import FORMATS, Table, render

format_option = click.option(
    "--format",
    "form",
    type=click.Choice(["terminal", *FORMATS]),
    default="terminal",
    show_default=True,
    help="The table for a paper, a page or a program; numbers rounded to what their intervals support, in json exact.",
)


def show_tables(form: str, *parts: Table | str) -> None:
    """Print tables and sentences to a terminal, or the tables alone in another form."""
    if form == "terminal":
        from scalebench.tables.screen import print_results

        print_results(*parts)
    else:
        tables = [render(part, form) for part in parts if isinstance(part, Table)]
        several = form == "json" and len(tables) > 1
        click.echo(f"[\n{','.join(tables)}]\n" if several else "\n".join(tables), nl=False)
