"""`scalebench table [RESULTS]`: a study's numbers as a table for a paper, a page or a program."""

from __future__ import annotations

import csv
import io
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rich_click as click

from scalebench.cli.options import FILE, completed_study, results_argument, selection_of, selection_options
from scalebench.errors import writing
from scalebench.figures.caption_files import latex_lines, to_latex
from scalebench.figures.style import printed_width
from scalebench.formatting import DISTURBED, EMPTY, NOT_SHOWN, NOT_SHOWN_MEANS, OVERSUBSCRIBED
from scalebench.records.table import to_cell

if TYPE_CHECKING:
    import pandas as pd

    from scalebench.analysis import Results
    from scalebench.export.tabulation import Rounded, Table

_VERDICT = "Metric against allreduce: better or worse by more than 0.01, equal within that, or undecided"
_ALL = "all"  # as a value of --columns
_COLUMN_PT = 241  # the narrowest column of a two-column page, ACM's
_PAGE_PT = 505  # both columns of that page
_MOST_TELLING = ("train_s", "allreduce", "metric", "speedup", "time_to_target_s")  # then in the order of the table
_FONT_PT = 8.5  # of footnotesize, with room for the wider digits of math
_SEP_PT = 3  # on each side of a column
_MOST_ROWS = 50  # of a page


@click.command()
@results_argument
@click.option("--style", type=click.Choice(["latex", "markdown", "csv"]), default="markdown", show_default=True)
@click.option(
    "--columns",
    metavar="NAMES",
    default="",
    help="Such as time,speedup,vs-allreduce,metric, or all that is known.  [default: what fits a column of a page; of "
    "csv: all]",
)
@selection_options
@click.option("--output", type=FILE, help="A file instead of the terminal.")
def table(results: Path | None, style: str, columns: str, output: Path | None, **selected: Any) -> None:
    """Print the times, speedups, reductions and metrics of the study in RESULTS (of several the newest).

    Each number is rounded to the digits that its interval supports. LaTeX needs the package booktabs and stands in a
    float with caption and label. Columns: time, median, speedup, efficiency, vs-serial, vs-allreduce, vs-horovod,
    vs-ddp (time reductions), target and epochs (time and epochs to the target), target-vs-serial and so on, metric,
    runs.

    \b
    scalebench table --style latex --strategy allreduce --strategy epoch_average --output table.tex
    scalebench table results/mine --columns time,metric --workers 8,64
    """
    from scalebench.analysis import cells, load
    from scalebench.export.tabulation import tabulate

    study = load(completed_study(results))
    for note in study.notes:
        click.echo(note, err=True)
    selection = selection_of(selected)
    selection.require(study)
    shown = selection.of(cells(study))
    names = [name.strip() for name in columns.split(",") if name.strip()]
    found = tabulate(study, shown, [] if names == [_ALL] else names)
    longer = ""
    if not names and style != "csv":
        known, found = found, fitting_columns(_with_short_names(found))
        longer = _long_names(known, found)
        if left := [column.title for column in known.columns if column not in found.columns]:
            room = "a column" if sum(_widths_pt(found, apart=_names_stand_apart(found))) <= _COLUMN_PT else "the width"
            click.echo(f"left out, to fit {room} of a page: {', '.join(left)} (--columns {_ALL})", err=True)
    caption, label = f"{_caption(study, shown, found)}{longer}", study.folder.name
    if style == "latex":
        text = as_latex(found, caption, label)
    elif style == "markdown":
        text = as_markdown(found, caption)
    else:
        text = as_csv(found)
    if output is None:
        click.echo(text, nl=False)
    else:
        _write(output, text)
    if style == "latex" and len(found.rows) > _MOST_ROWS:
        click.echo(f"{len(found.rows)} rows do not fit a page: choose with --strategy and --workers", err=True)


def as_latex(table: Table, caption: str, label: str) -> str:
    """Return a float with a table for booktabs; over two columns where one is too narrow.

    The first sentence of `caption` stands above the table, where journals set titles; the rest are notes below.
    """
    title, _, notes = caption.partition(". ")
    apart = _names_stand_apart(table)
    names = [str(name) for name in table.keys.columns][apart:]
    header, *rows = _latex_cells(table)
    kind = "table" if sum(_widths_pt(table, apart=apart)) <= _COLUMN_PT else "table*"
    stretch = 1.4 if any("^{+" in cell for row in rows for cell in row) else 1.0
    body: list[str] = []
    before = ""
    for strategy, row in zip(table.keys["Strategy"], rows, strict=True):
        first = strategy != before
        if first and before:
            body.append(r"    \addlinespace")
        if first and apart:
            body.append(rf"    \multicolumn{{{len(row) - 1}}}{{@{{}}l}}{{{row[0]}}} \\")
        cells = row[1:] if apart else [row[0] if first else "", *row[1:]]
        body.append(f"    {' & '.join(cells)} \\\\")
        before = strategy
    alignment = "".join("r" if name == "Workers" else "l" for name in names) + "r" * len(table.columns)
    return "\n".join(
        [
            r"% needs \usepackage{booktabs}",
            rf"\begin{{{kind}}}[t]",
            r"  \centering",
            rf"  \caption{{{latex_lines(title)}}}",
            rf"  \label{{tab:{label}}}",
            r"  \smallskip",
            r"  \footnotesize",
            rf"  \setlength{{\tabcolsep}}{{{_SEP_PT}pt}}",
            *([rf"  \renewcommand{{\arraystretch}}{{{stretch}}}"] if stretch > 1 else []),
            rf"  \begin{{tabular}}{{@{{}}{alignment}@{{}}}}",
            r"    \toprule",
            f"    {' & '.join(header[apart:])} \\\\",
            r"    \midrule",
            *body,
            r"    \bottomrule",
            r"  \end{tabular}",
            *([rf"  \par\smallskip\parbox{{\linewidth}}{{\scriptsize {latex_lines(notes)}}}"] if notes else []),
            rf"\end{{{kind}}}",
            "",
        ]
    )


def fitting_columns(table: Table) -> Table:
    """Return `table` with those columns, the most telling first, that fit one column of a page with its keys.

    Where the keys leave no room for any there, the columns fit the width of the page; one is kept in any case.
    """
    widths, number = _widths_pt(table), len(table.keys.columns)
    keys, widths = sum(widths[:number]), widths[number:]
    if _names_stand_apart(table):
        keys = sum(_widths_pt(table, apart=True)[: number - 1])
    rank = {key: place for place, key in enumerate(_MOST_TELLING)}
    order = sorted(range(len(widths)), key=lambda n: rank.get(table.columns[n].keys[0], len(rank)))
    limit = _COLUMN_PT if keys + min(widths, default=0) <= _COLUMN_PT else _PAGE_PT
    kept: list[int] = []
    for place in order:
        if not kept or keys + sum(widths[n] for n in [*kept, place]) <= limit:
            kept.append(place)
    kept.sort()
    rows = tuple(tuple(row[n] for n in kept) for row in table.rows)
    return replace(table, columns=tuple(table.columns[n] for n in kept), rows=rows)


def _with_short_names(table: Table) -> Table:
    """Return `table` with short names of strategies: without the options that others of the same strategy have too.

    A long name that no other of the same strategy stands beside has no options.
    """
    from scalebench.figures.drawing.names import LONG, family, short_names

    known = list(dict.fromkeys(table.keys["Strategy"].astype(str)))
    families = [family(name) for name in known]
    short = short_names(known)
    for name, own in zip(known, families, strict=True):
        if len(name) > LONG and name != own and families.count(own) == 1:
            short[name] = f"{own}(…)"
    return replace(table, keys=table.keys.assign(Strategy=table.keys["Strategy"].astype(str).map(short)))


def _long_names(table: Table, shortened: Table) -> str:
    """Return a sentence with the long name of each short one."""
    pairs = dict(zip(shortened.keys["Strategy"], table.keys["Strategy"].astype(str), strict=True))
    longer = [f"{short} is {name}" for short, name in pairs.items() if short != name]
    return f" Names: {'; '.join(longer)}." if longer else ""


def _latex_cells(table: Table) -> list[list[str]]:
    """Return the header and the rows in LaTeX."""
    header = [*table.keys.columns.astype(str), *(column.title for column in table.columns)]
    rows = [[*map(to_latex, keys), *map(_in_latex, row)] for keys, row in zip(_keys(table), table.rows, strict=True)]
    return [[to_latex(name) for name in header], *rows]


def _widths_pt(table: Table, *, apart: bool = False) -> list[float]:
    """Return the widths of all columns in print, the first without and the others with their separation.

    The names of strategies, the first column, are left out if they stand `apart`.
    """
    widths = [max(map(_printed_pt, cells)) for cells in zip(*_latex_cells(table), strict=True)][apart:]
    return [width + 2 * _SEP_PT * (place > 0) for place, width in enumerate(widths)]


def _names_stand_apart(table: Table) -> bool:
    """Return True if names of strategies stand in rows of their own: beside them no column fits a column of a page."""
    widths, number = _widths_pt(table), len(table.keys.columns)
    return widths[0] <= _COLUMN_PT < sum(widths[:number]) + min(widths[number:], default=0)


def as_markdown(table: Table, caption: str) -> str:
    """Return a table with the caption below."""
    names = [str(name) for name in table.keys.columns]
    header = [*names, *(column.title for column in table.columns)]
    rules = ["---:" if name == "Workers" else "---" for name in names] + ["---:"] * len(table.columns)
    rows = [[*keys, *map(_in_brackets, row)] for keys, row in zip(_keys(table, " "), table.rows, strict=True)]
    lines = [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in (header, rules, *rows)]
    return "\n".join([*lines, "", caption, ""])


def as_csv(table: Table) -> str:
    """Return rounded numbers, each with its bounds, and its mark, in columns of their own where any row has some."""
    bounded = [any(row[place].low for row in table.rows) for place in range(len(table.columns))]
    marked = [any(row[place].mark for row in table.rows) for place in range(len(table.columns))]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    header = [str(name).lower() for name in table.keys.columns] + ["oversubscribed", "disturbed"]
    for column, has_bounds, has_marks in zip(table.columns, bounded, marked, strict=True):
        header += [column.title, *([f"{column.title} low", f"{column.title} high"] if has_bounds else [])]
        header += [f"{column.title} mark"] if has_marks else []
    writer.writerow(header)
    flags = zip(table.oversubscribed, table.disturbed, strict=True)
    for keys, of_row, row in zip(table.keys.astype(str).to_numpy().tolist(), flags, table.rows, strict=True):
        cells = [to_cell(key) for key in keys] + [str(flag).lower() for flag in of_row]
        for number, has_bounds, has_marks in zip(row, bounded, marked, strict=True):
            value = "" if number.value in (EMPTY, NOT_SHOWN) else number.value
            cells += [value, *([number.low, number.high] if has_bounds else []), *([number.mark] if has_marks else [])]
        writer.writerow(cells)
    return text.getvalue()


def _keys(table: Table, space: str = "") -> list[list[str]]:
    """Return strategy, workers and the other keys of each row as text, with marks behind the worker count."""
    texts: list[list[str]] = table.keys.astype(str).to_numpy().tolist()
    place = list(table.keys.columns).index("Workers")
    for row, crowded, disturbed in zip(texts, table.oversubscribed, table.disturbed, strict=True):
        signs = OVERSUBSCRIBED * crowded + DISTURBED * disturbed
        row[place] += space + signs if signs else ""
    return texts


def _in_brackets(number: Rounded) -> str:
    bounds = f" [{number.low}, {number.high}]" if number.low else ""
    return f"{number.value}{number.mark}{bounds}"


def _printed_pt(latex: str) -> float:
    """Return the width of a cell in print, in points; both distances of an interval stand one above the other."""

    def width(text: str, size: float) -> float:
        plain = text.replace(r"\dots{}", "…").replace(r"\pm", "±").replace(r"\ensuremath{\times}", "×")
        return printed_width(re.sub(r"\\(?=\W)|[${}]", "", plain), size, "STIXGeneral")

    value, *sides = re.split(r"[\^_](?=\{[+-])", latex)
    return width(value, _FONT_PT) + max((width(side, 0.75 * _FONT_PT) for side in sides), default=0.0)


def _in_latex(number: Rounded) -> str:
    """Return `$1.23 \\pm 0.04$`, or both distances where they differ."""
    if not number.low:
        return f"${number.value}${number.mark}" if number.is_number else to_latex(number.value)
    down, up = number.sides()
    alike = abs(float(up) - float(down)) < 1.5 * 10.0 ** -len(up.partition(".")[2])  # apart by rounding only
    spread = f" \\pm {max(up, down, key=float)}" if alike else f"^{{+{up}}}_{{-{down}}}"
    return f"${number.value}{spread}${number.mark}"


def _caption(study: Results, shown: pd.DataFrame, table: Table) -> str:
    """Return what was run, where, and what the numbers and their intervals are."""
    from scalebench.analysis.time_to_target import CENSORED
    from scalebench.figures.drawing.caption import (
        describe_executions,
        describe_machines,
        describe_marks,
        describe_study,
    )

    titles = [column.title for column in table.columns]
    marks = " ".join(f"{number.value}{number.mark}" for row in table.rows for number in row)
    bounded = {
        column.keys[0] for row in table.rows for column, number in zip(table.columns, row, strict=True) if number.low
    }
    sentences = [
        describe_study(study, shown),
        describe_executions(study, shown, bars=False),
        describe_machines(study, shown),
        "Times are geometric means." if any(title.startswith("Time") for title in titles) else "",
        "vs a baseline: time reduction 1 - T / T(baseline) at the same worker count (serial: at one)."
        if any(title.startswith("vs ") for title in titles)
        else "",
        "The metric is the mean of the final consensus model on held-out data over seeds"
        + (", with its 95 % confidence interval." if "metric" in bounded else ".")
        if any(column.keys[0] == "metric" for column in table.columns)
        else "",
        f"Intervals of times: {'; '.join(sorted(set(shown['interval']) - {''}))}." if bounded - {"metric"} else "",
        *(f"{words[:1].upper()}{words[1:]}." for mark, words in CENSORED.items() if mark in marks),
        describe_marks(shown, OVERSUBSCRIBED, DISTURBED),
        f"{_VERDICT}." if any(column.keys[0] == "metric_verdict" for column in table.columns) else "",
        f"{NOT_SHOWN_MEANS}." if any(number.value == NOT_SHOWN for row in table.rows for number in row) else "",
    ]
    return " ".join(sentence for sentence in sentences if sentence)


def _write(output: Path, text: str) -> None:
    with writing(output, "choose another file with --output"):
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(text, encoding="utf-8")
    click.echo(str(output))
