"""`scalebench laws [RESULTS]`: scaling laws of the strategies, and the worker counts worth running."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING

import rich_click as click

from scalebench.cli import formats, options
from scalebench.tables import Column, Table

if TYPE_CHECKING:
    from scalebench.analysis.laws import Scaling


@click.command()
@options.results_argument
@options.strategies_option("Only these.", among_results=True)
@click.option(
    "--efficiency",
    callback=options.parsed_by("parse_share"),
    metavar="SHARE",
    default="50%",
    show_default=True,
    help="Least speedup per worker at which a worker count is worth running.",
)
@formats.format_option
@options.json_option
@click.option(
    "--extrap",
    type=options.FILE,
    metavar="FILE.jsonl",
    help="Write the times for Extra-P as JSON Lines.",
)
def laws(
    results: Path | None,
    strategies: tuple[str, ...],
    efficiency: float,
    form: str,
    as_json: bool,
    extrap: Path | None,
) -> int:
    """Fit scaling laws to the times of the study in RESULTS (of several the newest; default: results/).

    Amdahl's law (Gustafson's in weak scaling), the Universal Scalability Law, and compute + synchronisations x (latency
    + bytes / bandwidth) are fitted to each strategy on each engine of each execution, and chosen by AICc.
    Oversubscribed runs are left out; below four worker counts no law is fitted. The exit code is 1 where none could be
    fitted at all.
    """
    from scalebench.analysis import load
    from scalebench.analysis.laws import scaling_laws, write_extrap
    from scalebench.analysis.laws.render import as_values

    study = load(options.completed_study(results))
    found = scaling_laws(study, strategies=strategies, efficiency=efficiency)
    if as_json:
        click.echo(
            json.dumps(
                {
                    "folder": str(study.folder),
                    "laws": [as_values(one) for one in found],
                },
                indent=2,
            )
        )
    else:
        formats.show_tables(form, *laws_tables(found))
        for note in study.notes:
            click.echo(note, err=True)
    if extrap is not None:
        # every series: Extra-P fits laws of its own
        for file in write_extrap([one.series for one in found], extrap):
            click.echo(f"for Extra-P: {file}", err=True)
    return 1 if all(one.refusal for one in found) else 0


def laws_tables(found: Sequence[Scaling]) -> Iterator[Table | str]:
    """How many workers each series is worth, then a table of laws and notes; a reason for no law is named once."""
    from scalebench.analysis.laws import band_name, no_band, render

    columns = [
        Column[Sequence[str]](
            name, itemgetter(place), left=name in ("law", "parameters")
        )
        for place, name in enumerate(render.LAWS)
    ]
    fitted = [one for one in found if not one.refusal]
    yield from (f"{render.name_of(one)}: {render.advice(one)}" for one in fitted)
    for one in fitted:
        yield Table.of(
            render.title(one),
            columns,
            render.law_rows(one),
            [f"T(N) = {one.best.fit.law.formula}", *one.notes, ""],
        )
    if intervals := {
        band_name(one.series) for one in fitted if not no_band(one.series)
    }:
        yield f"In brackets: {' or '.join(sorted(intervals))}, of parameters as if the law held. {render.AT_LEAST}"
    refused: dict[str, list[str]] = {}
    for one in found:
        if one.refusal:
            refused.setdefault(one.refusal, []).append(render.name_of(one))
    yield from (f"No law of {'; '.join(own)}: {why}" for why, own in refused.items())
