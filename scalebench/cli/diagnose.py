"""`scalebench diagnose [RESULTS]`: what is wrong with machine and set-up, as far as the rows of a study show it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import rich_click as click

from scalebench.cli import formats, options
from scalebench.formatting import counted, listed
from scalebench.tables import Column, Table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from scalebench.analysis.diagnosis import Symptom

_SHOWN_RUNS = 3  # on a screen; other forms have all


@click.command()
@options.results_argument
@formats.format_option
def diagnose(results: Path | None, form: str) -> int:
    """Diagnose the machine by the rows of the study in RESULTS (of several the newest; default: results/).

    Slow workers and nodes, throttled cores, oversubscription, missing binding, a
    network below its calibration, and clocks that are apart, each with the runs that
    show it. Leaves with 1 if something was found.
    """
    from scalebench.analysis import load
    from scalebench.analysis.diagnosis import diagnose as symptoms_in

    study = load(options.completed_study(results))
    found = symptoms_in(study)
    runs = counted(len(study.completed), "run")
    # programs get an empty table, where a person gets a sentence
    if form != "terminal":
        formats.show_tables(
            form,
            symptom_table(
                f"{study.folder}: {counted(len(found), 'symptom')} in {runs}", found
            ),
        )
    elif found:
        formats.show_tables(
            form,
            symptoms_on_screen(
                f"{study.folder}: {counted(len(found), 'symptom')} in {runs}", found
            ),
        )
    else:
        click.echo(f"{study.folder}: nothing found in {runs}")
    # for a job script that stops on a sick node
    return 1 if found else 0


def symptom_table(title: str, found: Sequence[Symptom]) -> Table:
    """The table of the symptoms `found`, with all that is known of each."""
    columns: list[Column[Symptom]] = [
        Column("what", lambda each: each.what, left=True),
        Column("where", lambda each: each.where, left=True),
        Column("measured", lambda each: each.measured, left=True),
        Column("consequence", lambda each: each.consequence, left=True),
        Column("remedy", lambda each: each.remedy, left=True),
        Column("runs", lambda each: ", ".join(each.rows), left=True),
    ]
    return Table.of(title, columns, found)


def symptoms_on_screen(title: str, found: Sequence[Symptom]) -> Table:
    """The same with some of the runs, and with consequences and remedies in a line below for each kind of symptom."""

    columns: list[Column[Symptom]] = [
        Column("what", lambda each: each.what, left=True, shared=True),
        Column("where", lambda each: each.where, left=True),
        Column("measured", lambda each: each.measured, left=True),
        Column("runs", lambda each: listed(each.rows, _SHOWN_RUNS), left=True, spare=1),
    ]
    # once for each kind: twenty slow nodes share a remedy
    below = dict.fromkeys(
        f"{each.what}: {each.consequence}. To do: {each.remedy}." for each in found
    )
    return Table.of(title, columns, found, ["", *below])
