"""The tables at the end of a study: one that fits a screen, and the whole, with notes on both.

The small one has strategies as rows, in a study at several batches each with its batch,
and worker counts as columns. Its first section has the time of all epochs, a second one
time and epochs to the target or, if the study states none, the metric. Below each time
is the reduction against a baseline.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pandas as pd
from rich.text import Text

from scalebench.analysis import native_check
from scalebench.analysis.comparing import NO_RUN, ratios
from scalebench.analysis.grouping import (
    DISTURBED_BY,
    cells,
    chosen_strategies,
    crowding,
)
from scalebench.analysis.intervals import NOTHING_VARIES
from scalebench.analysis.loading import Results, cells_in
from scalebench.analysis.methodology import Evidence, check, findings
from scalebench.analysis.pairing import NO_BASELINE
from scalebench.analysis.quantities import (
    SAVINGS,
    STRATEGY,
    TO_TARGET,
    WORKERS_MARKED,
    Row,
    quantities,
    quantities_without,
    with_ratios,
)
from scalebench.analysis.rounds import timed, trained
from scalebench.analysis.target import CENSORED, censor_mark, target_ratios
from scalebench.analysis.tuning_trials import tuning_in_words
from scalebench.errors import UsageError
from scalebench.formatting import (
    BETWEEN,
    DISTURBED,
    OVERSUBSCRIBED,
    counted,
    is_equal,
    is_reduction_supported,
    marks,
    metric_with_interval,
    metric_word,
    percent,
    reduction_bounds_alone,
    seconds,
    seconds_as_known,
    time_of_cell_alone,
)
from scalebench.study.cell import (
    BATCH,
    CELL,
    EXECUTIONS,
    batch_in_words,
    columns_without,
    group_of,
    in_words,
)
from scalebench.study.choices import ALLREDUCE, BASELINES, SERIAL
from scalebench.study.spec import SIMULATED
from scalebench.tables.table import METRIC_ALONE, Column, Table

_MARKS = {
    "(": "( ): the interval of the reduction holds zero, or there is none",
    **CENSORED,
}
Place = tuple[str, int]  # execution and workers of a column
Line = tuple[str, str, dict[Place, Text]]  # heading, label and cells of a row


def answer_table(results: Results, against: Sequence[str] = ()) -> Table:
    """Return the table that fits a screen, with reductions against the baselines `against`, or the first that ran.

    Raises:
        UsageError: a baseline has no completed run.
    """
    table = _by_line(_one_engine(cells(results)))
    ran = set(results.completed["strategy"])
    if missing := [name for name in against if name not in ran]:
        raise UsageError(
            f"--against {missing[0]}: the study has no completed run of {missing[0]}"
        )
    baselines = (
        # One line of reductions: the table has to fit a screen.
        list(against) or [name for name in (*BASELINES, SERIAL) if name in ran][:1]
    )
    epochs = (
        counted(int(results.completed["epochs"].max()), "epoch")
        if ran
        else "all epochs"
    )
    sections = {f"time of {epochs}": _section(table, ratios(results), baselines, _time)}
    metrics = [
        metric_word(str(name)) for name in table["metric_name"].dropna().unique()
    ]
    if table["target_metric"].notna().any():
        metric = metrics[-1]
        aim = f"time/epochs to {metric} {table['target_metric'].dropna().iloc[-1]:g}"
        sections[aim] = _section(table, target_ratios(results), baselines, _target)
    elif metrics:
        sections[f"test {'/'.join(metrics)}"] = _section(
            table, ratios(results), (), _metric
        )
    found = {
        (str(kind), int(n))
        for kind, n in table[["execution", "workers"]].itertuples(index=False)
    }
    places = sorted(found, key=lambda at: (EXECUTIONS.index(at[0]), at[1]))
    lines = [
        (heading, label, texts)
        for heading, own in sections.items()
        for label, texts in own
    ]
    columns = [
        Column[Line]("", lambda line: line[0], shared=True),
        Column[Line]("workers", lambda line: line[1], left=True),
        *(
            Column[Line](
                str(at[1]), partial(_cell, at), spare=_spare(at, places), over=at[0]
            )
            for at in places
        ),
    ]
    shown = Table.of(_title_of(results), columns, lines)
    texts = [str(text) for *_, own in lines for text in own.values()]
    notes = [
        text for mark, text in _MARKS.items() if any(mark in cell for cell in texts)
    ] + shown.told()
    return replace(shown, notes=[*notes, *summary_notes(results, brief=True)])


def _cell(at: Place, line: Line) -> Text | str:
    return line[2].get(at, "")


def _one_engine(table: pd.DataFrame) -> pd.DataFrame:
    """The cells of the preferred engine, where a strategy ran on several."""
    order = ["virtual", *native_check.PREFERRED_ENGINES]
    first = table.assign(rank=table["engine"].map(order.index)).sort_values(
        "rank", kind="stable"
    )
    # By index, so that the rows keep their order.
    kept = first.drop_duplicates(columns_without("engine")).index
    return table[table.index.isin(kept)]


def _by_line(table: pd.DataFrame) -> pd.DataFrame:
    """The cells with the label of their `line`: the strategy, and its batch where it ran at several at one point."""
    again = table.duplicated(columns_without("engine", *BATCH))
    several = table["label"].isin(table.loc[again, "label"])
    sizes = table["batch_per_worker"].where(
        table["batch_policy"] == "per_worker", table["batch_global"]
    )
    batches = map(batch_in_words, table["batch_policy"], sizes)
    lines = zip(table["label"], batches, several, strict=True)
    return table.assign(
        line=[f"{label}, {batch}" if many else label for label, batch, many in lines]
    )


def _spare(place: Place, places: Sequence[Place]) -> int:
    """Return how early a column may be left out: every second count first, then the others, never the largest."""
    counts = [n for kind, n in places if kind == place[0]]
    at = counts.index(place[1])
    if at == len(counts) - 1:
        return 0  # the largest count stays longest, then the smallest
    return 1 if at == 0 else 2 + at % 2  # of those between, every second one goes first


def _section(
    table: pd.DataFrame,
    compared: pd.DataFrame,
    baselines: Sequence[str],
    text: Callable[[dict[Hashable, Any]], Text],
) -> Iterator[tuple[str, dict[Place, Text]]]:
    """A line of times for each strategy, and one of reductions against each baseline that it is compared with."""
    for line, own in table.groupby("line", sort=False):
        yield (
            str(line),
            {
                (cell["execution"], cell["workers"]): text(cell)
                for cell in own.to_dict("records")
            },
        )
        found = compared.merge(own[CELL], on=CELL)
        for baseline in baselines:
            saved = found[(found["baseline"] == baseline) & found["reduction"].notna()]
            if len(saved):
                reductions = {
                    (one["execution"], one["workers"]): _saved(one)
                    for one in saved.to_dict("records")
                }
                yield f" vs {baseline}", reductions


def _time(cell: dict[Hashable, Any]) -> Text:
    signs = marks(cell)
    text = time_of_cell_alone(cell)
    return Text(f"{text}{signs}", style="dim" if BETWEEN in text or signs else "")


def _target(cell: dict[Hashable, Any]) -> Text:
    style = "dim" if marks(cell) else ""
    if math.isinf(cell["time_to_target_s"]):
        style = "yellow"
    return Text(_time_and_epochs(cell), style=style)


def _metric(cell: dict[Hashable, Any]) -> Text:
    return Text(metric_with_interval(cell["metric"], math.nan, math.nan))


def _saved(one: dict[Hashable, Any]) -> Text:
    low = one["reduction_low"]
    high = one["reduction_high"]
    if not is_reduction_supported(one["reduction"], low, high):
        return Text(reduction_bounds_alone(low, high), style="dim")
    if is_equal(one["reduction"], low, high):
        return Text("equal", style="dim")
    text = percent(one["reduction"])
    if low > 0 or high < 0:
        return Text(text, style="green" if one["reduction"] > 0 else "red")
    # At stated step times nothing varies, and the sign is known.
    exact = low == high == one["reduction"]
    return Text(text if exact else f"({text})", style="dim")


def summary(results: Results) -> Table:
    """Return the table of `scalebench run --full`: a row for each cell, with its marks behind the worker count."""
    table = cells(results)
    ran = set(table["strategy"])
    baselines = [name for name in BASELINES if name == BASELINES[0] or name in ran]
    of_baselines = [f"vs-{name}" for name in baselines]
    # time to target and epochs share a column here
    others = {"time", *TO_TARGET, *SAVINGS} - set(of_baselines)
    left_out = {"bootstrap", "efficiency", "metric-vs-allreduce", "runs"}
    shown = quantities_without(others | left_out)
    known = quantities(table["metric_name"].dropna().unique())
    known["metric"] = replace(known["metric"], form=METRIC_ALONE)
    aims = bool(results.completed["target_metric"].notna().any())
    target = Column[Row]("to target", _time_and_epochs)
    columns = [
        replace(STRATEGY, shared=True),
        WORKERS_MARKED,
        known["time"],
        *([target] if aims else []),
        *(known[name] for name in shown),
        Column(
            "execution",
            lambda row: group_of(row["execution"], row["engine"]),
            shared=True,
        ),
    ]
    rows = with_ratios(results, table, shown).to_dict("records") if len(table) else []
    found = Table.of(_title_of(results), columns, rows)
    return replace(found, notes=found.told() + summary_notes(results))


def summary_table(results: Results) -> pd.DataFrame:
    """Return the texts of `summary`, with the marks of a cell behind its worker count."""
    table = summary(results)
    rows = [[str(cell.text) for cell in row] for row in table.rows]
    return pd.DataFrame(rows, columns=[column.name for column in table.columns])


def _title_of(results: Results) -> str:
    return f"{results.runs['study'].iloc[-1]}: {counted(int(results.runs['repetition'].nunique()), 'repetition')}"


def summary_notes(results: Results, *, brief: bool = False) -> list[str]:
    """Remarks beside the table: error of virtual times, warnings, missing baselines, failed runs.

    Warnings are counted as `scalebench check` counts them; unless `brief`, those on
    times are here in full.
    """
    table, notes = cells(results), []
    marked = results.completed[results.completed["oversubscribed"].astype(bool)]
    if len(marked):
        notes.append(f"{OVERSUBSCRIBED} {crowding(marked)}: shown, never a baseline")
    if table["disturbed"].any():
        notes.append(
            f"{DISTURBED} disturbed, as {DISTURBED_BY}: shown, never a baseline"
        )
    if left_out := len(trained(results)) - len(timed(results)):
        notes.append(
            f"{counted(left_out, 'disturbed run')} left out of times beside others of the same point"
        )
    if (
        (virtual := table[table["execution"].isin(SIMULATED)])["interval"]
        .eq(NOTHING_VARIES)
        .any()
    ):
        which = (
            "virtual times"
            if virtual["interval"].eq(NOTHING_VARIES).all()
            else "some virtual times"
        )
        notes.append(f"{which} have {NOTHING_VARIES}: their step times are stated")
    if tuning := tuning_in_words(results):
        notes.append(tuning)
    # First what all numbers rest on, then warnings, last what is missing.
    notes += _agreement_note(results)
    notes += [] if brief else _warnings(results)
    notes += _counted_findings(results)
    notes += _missing_baselines(ratios(results), chosen_strategies(results))
    notes += results.notes
    failed = results.failed
    if len(failed):
        kinds = ", ".join(
            f"{count} {status}"
            for status, count in failed["status"].value_counts().sort_index().items()
        )
        first = failed.iloc[0]
        why = f": {first['error']}" if isinstance(first["error"], str) else ""
        notes.append(
            f"{kinds} of {counted(len(results.runs), 'run')}, not in the table; first {first['run_id']}{why}"
        )
        if failed["status"].eq("diverged").all():
            notes[-1] += (
                f"; a lower --lr than {failed['lr'].min():g} may train them (with --new)"
            )
    return notes


def _warnings(results: Results) -> list[str]:
    return [
        f"{finding.what}; in {finding.where}"
        for finding in findings(results)
        if finding.severity != "note"
    ]


def _counted_findings(results: Results) -> list[str]:
    """Count the errors and warnings that `scalebench check` shows, all of them."""
    # All rules, as `scalebench check` counts them: two commands must not give two
    # numbers.
    report = check(Evidence(results))
    counts = {severity: report.count(severity) for severity in ("error", "warning")}
    found = [counted(count, severity) for severity, count in counts.items() if count]
    return (
        [f"{' and '.join(found)} on these numbers: scalebench check {results.folder}"]
        if found
        else []
    )


def _time_and_epochs(cell: Row) -> str:
    """Time and epochs to the target, `410 ms/3`; with a star where some runs, `never` where most did not reach it."""
    time = seconds_as_known(
        *(cell[name] for name in ("time_to_target_s", "target_low_s", "target_high_s"))
    )
    # Bounds alone: epochs and stars belong to a number.
    if BETWEEN in time:
        return time
    epochs = cell["epochs_to_target"]
    mark = censor_mark(cell)
    if not math.isfinite(cell["time_to_target_s"]):
        return mark or time
    return f"{time}{f'/{epochs:g}' if math.isfinite(epochs) else ''}{mark}"


def _agreement_note(results: Results) -> list[str]:
    error = native_check.virtual_error(results)
    if error is None:
        return []
    fair = native_check.checked(native_check.agreement(results))
    # The farthest in either direction.
    logs = fair["ratio"].astype(float).map(math.log)
    worst = fair.iloc[int(logs.abs().to_numpy().argmax())]
    return [
        f"virtual times are off native ones by {error.words}, most those of {worst['label']} at "
        f"{counted(worst['workers'], 'worker')} ({seconds(worst['virtual_s'])} for {seconds(worst['native_s'])})"
    ]


def _missing_baselines(compared: pd.DataFrame, chosen: set[str]) -> list[str]:
    """Reasons for missing speedups and reductions, each once; one line per chosen baseline that did not run."""
    if compared.empty:
        return []
    headline = compared[compared["baseline"].isin({SERIAL, ALLREDUCE} & chosen)]
    lacking = headline[headline["note"].str.startswith(NO_RUN)]
    others = sorted(
        {
            note
            for note in headline["note"].drop(lacking.index)
            if note and NO_BASELINE not in note
        }
    )
    # of serial: any
    engine = lacking["baseline_engine"].where(
        lacking["baseline_engine"] != "", lacking["execution"]
    )
    places = lacking.assign(
        label=lacking["baseline"], workers=lacking["baseline_workers"], engine=engine
    )
    return [
        f"{NO_RUN} {in_words(cells_in(of_one))}"
        for _, of_one in places.groupby("baseline")
    ] + others
