"""`scalebench table [RESULTS]`: a study's numbers as a table for a paper, a page or a program."""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rich_click as click

from scalebench import errors, formatting
from scalebench.cli import options
from scalebench.study.cell import BATCH, columns_without
from scalebench.tables import FORMATS, Column, Entry, Table, latex, render
from scalebench.tables.printed import Print

if TYPE_CHECKING:
    import pandas as pd

    from scalebench.analysis import Results

_VERDICT = "Metric against allreduce: better or worse by more than 0.01, equal within that, or undecided"
_ALL = "all"  # as a value of --columns
# shown where they are asked for by name
_LEFT_OUT = (
    "median",
    "bootstrap",
    "spread",
    "efficiency",
    "vs-serial",
    "target-vs-serial",
    "target-vs-horovod",
    "target-vs-ddp",
    "runs",
)
# columns that a table keeps longest as it is cut to a page; then those on the left
_MOST_TELLING = (
    "time",
    "vs allreduce",
    "accuracy",
    "R²",
    "speedup",
    "time to target",
)
_PRINTED = ("latex", "markdown")  # pages, of which a table has to fit one
_FILES = ("csv", "json")
_FLAGS = ("oversubscribed", "disturbed")
_MOST_ROWS = 50  # of a page


@click.command()
@options.results_argument
@click.option(
    # --style was its name
    "--format",
    "--style",
    "style",
    type=click.Choice(list(FORMATS)),
    default="markdown",
    show_default=True,
)
@click.option(
    "--columns",
    metavar="NAMES",
    default="",
    help="Such as time,speedup,vs-allreduce,metric, or all that is known.  [default: what fits a column of a page; of "
    "csv and json: all]",
)
@options.selection_options
@click.option("--output", type=options.FILE, help="A file instead of the terminal.")
def table(
    results: Path | None, style: str, columns: str, output: Path | None, **selected: Any
) -> None:
    """Print the times, speedups, reductions and metrics of the study in RESULTS (of several the newest).

    Each number is rounded to the digits that its interval supports; json has them
    unrounded, in SI units. LaTeX needs the package booktabs and stands in a float with
    caption and label. Columns: time, median, bootstrap (a trimmed mean), speedup,
    efficiency, vs-serial, vs-allreduce, vs-horovod, vs-ddp (time reductions), target
    and epochs (time and epochs to the target), target-vs-serial and so on, metric,
    runs.

    \b
    scalebench table --format latex --strategy allreduce --strategy epoch_average --output table.tex
    scalebench table results/mine --columns time,metric --workers 8,64
    """
    from scalebench.analysis import cells, load

    study = load(options.completed_study(results))
    for note in study.notes:
        click.echo(note, err=True)
    selection = options.selection_of(selected)
    selection.require(study)
    shown = selection.of(cells(study))
    names = [name.strip() for name in columns.split(",") if name.strip()]
    found = table_of(
        study, shown, [] if names == [_ALL] else names, flags=style in _FILES
    )
    longer = ""
    # columns that were asked for are never left out
    if not names and style in _PRINTED:
        found, longer = _fitted(found)
    # the first sentence of the caption is the table's title
    title, _, notes = f"{_caption(study, shown, found)}{longer}".partition(". ")
    text = render(
        replace(found, title=title, notes=[notes]), style, label=study.folder.name
    )
    # nothing else is on standard output: the table can be piped
    if output is None:
        click.echo(text, nl=False)
    else:
        _write(output, text)
    if style == "latex" and len(found.rows) > _MOST_ROWS:
        click.echo(
            f"{len(found.rows)} rows do not fit a page: choose with --strategy and --workers",
            err=True,
        )


def table_of(
    study: Results,
    shown: pd.DataFrame,
    names: Sequence[str] = (),
    *,
    flags: bool = False,
) -> Table:
    """Return the `shown` cells with the columns `names`; default: all but LEFT_OUT that have a number.

    Marks stand behind worker counts, or as `flags` in columns of their own.

    Raises:
        UsageError: an unknown column, or one against a baseline that was not run.
    """
    from scalebench.analysis import quantities as quantity
    from scalebench.tables.table import text

    known = quantity.quantities(shown["metric_name"].dropna().unique())
    _require_columns(names, known, set(study.completed["strategy"].unique()))
    wanted = names or quantity.quantities_without(_LEFT_OUT)
    rows = quantity.with_ratios(study, shown, wanted)
    # a column that is the same in every row is said by the caption
    several = {
        "execution": rows["execution"].nunique() > 1,
        "engine": rows.duplicated(columns_without("engine", *BATCH)).any(),
    }
    keys: list[Column[Any]] = [
        replace(quantity.STRATEGY, shared=True),
        *(
            Column(name, text(name), left=True)
            for name, shows in several.items()
            if shows
        ),
        quantity.WORKERS if flags else quantity.WORKERS_MARKED,
    ]
    if flags:
        marked = (Column(name, partial(_flag, name)) for name in _FLAGS)
        # programs look columns up by name
        keys = [replace(key, title=key.name) for key in (*keys, *marked)]
    found = Table.of(
        "",
        [*keys, *(known[name] for name in wanted)],
        rows.to_dict("records"),
    )
    if names:
        return found
    kept = [
        place
        for place in range(len(found.columns))
        if place < len(keys) or _is_known(found, place)
    ]
    cells = [[row[place] for place in kept] for row in found.rows]
    return replace(found, columns=[found.columns[place] for place in kept], rows=cells)


def _require_columns(
    names: Sequence[str], known: Collection[str], strategies: Collection[str]
) -> None:
    """Raise UsageError on a name that is not `known`, or a ratio to a strategy that is not among `strategies`."""
    for name in names:
        if name not in known:
            raise errors.UsageError(
                f"--columns: unknown column {name!r}; {errors.nearest(name, list(known))}"
            )
        baseline = name.partition("vs-")[2]
        if baseline and baseline not in strategies:
            raise errors.UsageError(
                f"--columns: {name} needs a completed run of {baseline}, and the study has none"
            )


def _fitted(table: Table) -> tuple[Table, str]:
    """Return `table` as it fits a page, and a sentence with the long names; say which columns are left out."""

    short, longer = _short_names(table)
    found = latex.fitting(short, _MOST_TELLING)
    shown = Print.of(found).heads
    # said on standard error: the table itself may go into a paper as it is
    if left := [head for head in Print.of(table).heads if head not in shown]:
        room = (
            "a column"
            if sum(latex.widths_pt(found, apart=latex.names_stand_apart(found)))
            <= latex.COLUMN_PT
            else "the width"
        )
        click.echo(
            f"left out, to fit {room} of a page: {', '.join(left)} (--columns {_ALL})",
            err=True,
        )
    return found, longer


def _flag(name: str, row: Mapping[Hashable, Any]) -> str:
    return str(bool(row[name])).lower()


def _is_known(table: Table, place: int) -> bool:
    """Return True if a cell of a column has a number, or words in place of an empty one."""
    for row in table.rows:
        cell = row[place]
        known = (
            cell.text != formatting.EMPTY
            if cell.number is None
            else not math.isnan(cell.number.value)
        )
        if known:
            return True
    return False


def _short_names(table: Table) -> tuple[Table, str]:
    """Return `table` with short names of strategies, and a sentence with the long ones.

    Short names lack the options that others of the same strategy have too, and all of
    them where no other of the same strategy stands beside a long name.
    """
    from scalebench.figures.drawing.series_style import LONG, family, short_names

    known = list(dict.fromkeys(str(row[0].text) for row in table.rows))
    families = [family(name) for name in known]
    short = short_names(known)
    for name, own in zip(known, families, strict=True):
        # a lone strategy of its family needs no options to be told apart
        if len(name) > LONG and name != own and families.count(own) == 1:
            short[name] = f"{own}(…)"
    rows = [[Entry(short[str(row[0].text)]), *row[1:]] for row in table.rows]
    longer = [f"{short[name]} is {name}" for name in known if short[name] != name]
    return replace(table, rows=rows), f" Names: {'; '.join(longer)}." if longer else ""


def _caption(study: Results, shown: pd.DataFrame, table: Table) -> str:
    """Return what was run, where, and what the numbers and their intervals are."""
    from scalebench.analysis.quantities import metric_head
    from scalebench.analysis.target import CENSORED
    from scalebench.figures.drawing import caption

    names = [column.name for column in table.columns]
    printed = [cell for row in Print.of(table).cells for cell in row]
    by_column = zip(
        table.columns, zip(*Print.of(table).cells, strict=True), strict=True
    )
    bounded = {
        column.name for column, cells in by_column if any(cell.low for cell in cells)
    }
    metric = metric_head(shown["metric_name"].dropna().unique())
    # marks are explained only where one is printed
    signs = " ".join(f"{cell.value}{cell.mark}" for cell in printed)
    sentences = [
        caption.describe_study(study, shown),
        caption.describe_executions(study, shown, bars=False),
        caption.describe_machines(study, shown),
        "Times are geometric means."
        if any(name.startswith("time") for name in names)
        else "",
        "vs a baseline: time reduction 1 - T / T(baseline) at the same worker count (serial: at one)."
        if any(name.startswith("vs ") for name in names)
        else "",
        "The metric is the mean of the final consensus model on held-out data over seeds"
        + (", with its 95 % confidence interval." if metric in bounded else ".")
        if metric in names
        else "",
        f"Intervals of times: {'; '.join(sorted(set(shown['interval']) - {''}))}."
        if bounded - {metric}
        else "",
        *(
            f"{words[:1].upper()}{words[1:]}."
            for mark, words in CENSORED.items()
            if mark in signs
        ),
        caption.describe_marks(shown, formatting.OVERSUBSCRIBED, formatting.DISTURBED),
        f"{_VERDICT}." if f"{metric} vs allreduce" in names else "",
        f"{formatting.BETWEEN_MEANS}." if formatting.BETWEEN in signs else "",
    ]
    return " ".join(sentence for sentence in sentences if sentence)


def _write(output: Path, text: str) -> None:
    with errors.writing(output, "choose another file with --output"):
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(text, encoding="utf-8")
    click.echo(str(output))
