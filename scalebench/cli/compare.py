"""`scalebench compare A B`: changes of times and metrics between two studies, with verdicts."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rich_click as click

from scalebench.cli.options import completed_study, share_option

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    import pandas as pd
    from rich.text import Text

    from scalebench.analysis.validation import VirtualError
    from scalebench.analysis.verdicts import CellName, Verdicts
    from scalebench.cli.terminal_table import TerminalTable

JSON_SCHEMA = 1  # of `--json`; raised when a key changes its meaning or goes
_COLORS = {"regression": "red", "improvement": "green", "undecided": "yellow", "unchanged": "", "not compared": "dim"}
_SAID = {verdict: verdict for verdict in _COLORS} | {"regression": "regressed", "improvement": "improved"}
_FAIL_ON = ("regression", "metric", "repeatable-metric", "failed", "undecided", "missing")


@click.command()
@click.argument("a", metavar="A", type=click.Path(path_type=Path))
@click.argument("b", metavar="[B]", required=False, type=click.Path(path_type=Path))
@click.option(
    "--strategy",
    "strategies",
    multiple=True,
    metavar="NAME",
    help="Compare this one only; repeatable. With A alone, twice: the reference first.",
)
@click.option("--execution", type=click.Choice(["native", "paced", "virtual"]), help="Compare these runs only.")
@click.option(
    "--threshold",
    callback=share_option,
    metavar="SHARE",
    default="5%",
    show_default=True,
    help="A change of time that matters.",
)
@click.option(
    "--metric-margin",
    callback=share_option,
    metavar="SHARE",
    default="0.01",
    show_default=True,
    help="A change of the metric that matters.",
)
@click.option("--fail-on", multiple=True, type=click.Choice(_FAIL_ON), help="Leave with 1 if there is one; repeatable.")
@click.option("--ignore", multiple=True, metavar="KEY", help="Compare although this key differs; repeatable.")
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def compare(
    a: Path,
    b: Path | None,
    strategies: tuple[str, ...],
    execution: str | None,
    threshold: float,
    metric_margin: float,
    fail_on: tuple[str, ...],
    ignore: tuple[str, ...],
    as_json: bool,
) -> int:
    """Compare the study in folder B with the one in A, or two strategies of the study in A (of several the newest).

    Each worker count gets a verdict on T_B / T_A: a regression, if its whole interval lies above 1 + threshold; an
    improvement, if below 1 / (1 + threshold); unchanged, if between; else undecided. Studies that differ in more than
    code, packages and machine state are refused; the key that differs is named.

    \b
    scalebench compare results/before results/after --threshold 5% --fail-on regression
    scalebench compare results/mine --strategy allreduce --strategy epoch_average
    """
    from scalebench.analysis import load
    from scalebench.analysis.verdicts import compare_strategies, compare_studies

    limits: dict[str, Any] = {"threshold": threshold, "metric_margin": metric_margin, "execution": execution}
    if b is None:
        if len(strategies) != 2:
            raise click.UsageError("name a second folder, or two strategies of the first (--strategy NAME, twice)")
        if ignore:
            raise click.UsageError("--ignore overrides a difference of two studies; strategies of one have none")
        found = compare_strategies(load(completed_study(a)), *strategies, **limits)
    else:
        found = compare_studies(
            *(load(completed_study(x)) for x in (a, b)), strategies=strategies, ignore=ignore, **limits
        )
    if as_json:
        click.echo(json.dumps(_facts(found), indent=2, allow_nan=False))
    else:
        _show(found)
    bad = {
        "regression": found.regressed,
        "metric": found.metrics("regression") > 0,
        "repeatable-metric": found.repeats_worse > 0,
        "failed": bool(found.failed),
        "undecided": found.count("undecided") > 0,
        "missing": bool(found.missing or found.failed),
    }
    return 1 if any(bad[what] for what in fail_on) else 0


def _show(found: Verdicts) -> None:
    from scalebench.cli.run_common import results_console

    console = results_console()
    console.print(_table(found))
    for line in _notes(found):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _table(found: Verdicts) -> TerminalTable:
    from scalebench.cli.terminal_table import TableColumn, TerminalTable

    rows = found.table.to_dict("records")
    one_pair = len({(row["label_a"], row["label_b"]) for row in rows}) == 1  # then the title names it
    metrics = {row["metric_name"] for row in rows} - {""}
    columns = {
        "strategy": TableColumn("strategy", left=True, shared=True),
        "workers": TableColumn("workers"),
        **{
            name: TableColumn(name, spare=spare)
            for x in "AB"
            for name, spare in ((x, 1), (f"{x} median", 5), (f"{x} spread", 4))
        },
        "ratio": TableColumn("B / A [interval]"),
        "p": TableColumn("p (Holm)", spare=3),
        "metric": TableColumn(f"{metrics.pop() if len(metrics) == 1 else 'metric'} B - A", spare=2),
        "execution": TableColumn("execution", left=True, shared=True),
        "verdict": TableColumn("verdict", left=True),
    }
    if one_pair:
        del columns["strategy"]
    if not any(row["test"] for row in rows):
        del columns["p"]
    texts = [_texts(row) for row in rows]
    return TerminalTable(
        _title(found, rows[0]), list(columns.values()), [[text[name] for name in columns] for text in texts]
    )


def _texts(row: dict[Hashable, Any]) -> dict[str, Text]:
    """The texts of the columns of one cell."""
    from rich.text import Text

    from scalebench.formatting import EMPTY, digits, is_interval, percent, seconds

    kind = row["execution"] + ("" if row["execution"] == row["engine_a"] else f" {row['engine_a']}")
    kind += "" if row["engine_a"] == row["engine_b"] else f" → {row['engine_b']}"
    ratio = digits(row["ratio"])
    if is_interval(row["ratio_low"], row["ratio_high"]):
        ratio += f" [{digits(row['ratio_low'])}, {digits(row['ratio_high'])}]"
    cells = {
        "strategy": row["label_a"],
        "workers": str(row["workers"]),
        "A": seconds(row["a_s"]),
        "A median": seconds(row["a_median_s"]),
        "A spread": percent(row["a_spread"]).lstrip("+"),
        "B": seconds(row["b_s"]),
        "B median": seconds(row["b_median_s"]),
        "B spread": percent(row["b_spread"]).lstrip("+"),
        "ratio": ratio,
        "p": f"{row['p_adjusted']:.2g}" if row["test"] else EMPTY,
        "metric": _difference(row),
        "execution": kind,
    }
    verdict = Text(row["verdict"], style=_COLORS[row["verdict"]])
    if row["note"] == "oversubscribed":
        verdict.append(", oversubscribed")
    if row["metric_verdict"] in ("regression", "improvement"):
        verdict.append(f", {row['metric_name']} {row['metric_verdict']}", style=_COLORS[row["metric_verdict"]])
    return {name: Text(text) for name, text in cells.items()} | {"verdict": verdict}


def _title(found: Verdicts, first: dict[Hashable, Any]) -> str:
    pair = f" ({first['label_a']})" if first["label_a"] == first["label_b"] else ""
    return f"A: {found.a}   B: {found.b}" + (pair if found.table["label_a"].nunique() == 1 else "")


def _difference(row: dict[Hashable, Any]) -> str:
    from scalebench.formatting import EMPTY, is_equal

    if not math.isfinite(row["metric_difference"]):
        return EMPTY
    if is_equal(row["metric_difference"], row["metric_low"], row["metric_high"]):
        return "equal"
    text = f"{row['metric_difference']:+.3f}"
    if math.isfinite(row["metric_low"]):
        text += f" [{row['metric_low']:+.3f}, {row['metric_high']:+.3f}]"
    return text


def _notes(found: Verdicts) -> list[str]:
    """Notes below the table; the last line counts the verdicts."""
    from scalebench.analysis.intervals import NOTHING_VARIES
    from scalebench.analysis.verdicts import VERDICTS
    from scalebench.formatting import counted

    notes = []
    if found.changed:
        notes.append(f"what changed: {', '.join(found.changed)}")
    notes += [f"differs and was ignored: {difference}" for difference in found.overridden]
    kinds = sorted(set(found.table["interval"]) - {""})
    if kinds:
        notes.append(f"intervals: {'; '.join(kinds)}; of the metric 95 % over seeds")
    virtual = found.table[found.table["execution"] == "virtual"]
    if len(virtual) and (virtual["ratio"] == 1).all() and (virtual["interval"] == NOTHING_VARIES).all():
        draws = "every draw" if virtual["n_a"].max() > 1 else "the one draw there is"
        notes.append(f"virtual times: equal in {draws}, so that the simulation's error cancels")
    elif len(virtual):
        notes.append(_simulation(found.virtual_errors))
    tests = sorted(set(found.table["test"]) - {""})
    if tests:
        notes.append(f"p: {', '.join(tests)} test, adjusted by Holm over the worker counts of a strategy")
    elif (found.table["repetitions_needed"] > 0).any():
        needed = int(found.table["repetitions_needed"].max())
        notes.append(f"no test: it needs {needed} repetitions of each to reach its level")
    measured = found.table[found.table["execution"] != "virtual"]
    torn = measured[measured["left_out"] > 0]
    if len(torn):
        what = counted(int(torn["left_out"].sum()), "pair")
        notes.append(f"left out, as the runs were not made side by side: {what} ({_place(torn)})")
    several = measured[measured[["n_a", "n_b"]].min(axis=1) > 1]
    if found.one_study and len(alone := several[~several["paired"].astype(bool)]):
        notes.append(f"independent samples, as the runs were not made side by side: {_place(alone)}")
    if found.failed:
        notes.append(f"completed in A, failed in B: {_cells(found.failed)}")
    if found.missing:
        notes.append(f"in A only: {_cells(found.missing)}")
    if found.added:
        notes.append(f"in B only: {_cells(found.added)}")
    racing = found.table[~found.table["metric_repeats"].astype(bool)]
    if len(racing) and not found.one_study:
        notes.append(f"metric varies from run to run, as workers merge when they arrive: {_place(racing)}")
    unsure = found.table[found.table["metric_verdict"] == "undecided"]
    if 0 < len(unsure) < len(found.table):
        notes.append(f"metric undecided: {_place(unsure)}")
    counts = [f"{found.count(verdict)} {_SAID[verdict]}" for verdict in VERDICTS if found.count(verdict)]
    metrics = [f"{found.metrics(verdict)} {_SAID[verdict]}" for verdict in VERDICTS if found.metrics(verdict)]
    notes.append(
        f"time: {', '.join(counts)} (threshold {100 * found.threshold:g} %); "
        f"metric: {', '.join(metrics)} (margin {found.metric_margin:g})"
    )
    return notes


def _simulation(errors: Sequence[VirtualError | None]) -> str:
    """The known error of virtual times in words."""
    from scalebench.formatting import deviation

    checked = {name: error for name, error in zip("AB", errors, strict=True) if error}
    if not checked:
        return "virtual times: no native point checks them: verdicts on them are on the simulation"
    known = {name: f"{deviation(e.rms)} in {name} ({e.checks} checks)" for name, e in checked.items() if e.known}
    if not known:
        return "virtual times: their virtual-native error is known from 1 check only, so that they have no interval"
    alone = "; it stands for the other study too, which has fewer native points to check" if len(known) == 1 else ""
    said = known["A"].replace(" in A", "") if errors[0] == errors[1] else ", ".join(known.values())
    return f"virtual times: the virtual-native error inside their intervals is {said}{alone}"


def _cells(names: list[CellName]) -> str:
    import pandas as pd

    from scalebench.analysis.grouping import PLACE, place

    return place(pd.DataFrame(names, columns=PLACE))


def _place(rows: pd.DataFrame) -> str:
    from scalebench.analysis.grouping import place

    return place(rows.rename(columns={"engine_b": "engine", "label_b": "label"}))


def _facts(found: Verdicts) -> dict[str, Any]:
    from scalebench.analysis.grouping import PLACE
    from scalebench.analysis.verdicts import VERDICTS

    return {
        "schema": JSON_SCHEMA,
        "a": found.a,
        "b": found.b,
        "threshold": found.threshold,
        "metric_margin": found.metric_margin,
        "regressed": found.regressed,
        "time": {verdict: found.count(verdict) for verdict in VERDICTS},
        "metric": {verdict: found.metrics(verdict) for verdict in VERDICTS},
        "failed": [dict(zip(PLACE, cell, strict=True)) for cell in found.failed],
        "missing": [dict(zip(PLACE, cell, strict=True)) for cell in found.missing],
        "added": [dict(zip(PLACE, cell, strict=True)) for cell in found.added],
        "changed": found.changed,
        "virtual_error": {
            name: None if error is None else asdict(error)
            for name, error in zip("ab", found.virtual_errors, strict=True)
        },
        "overridden": [asdict(difference) for difference in found.overridden],
        "cells": [{key: _plain(value) for key, value in row.items()} for row in found.table.to_dict("records")],
    }


def _plain(value: Any) -> Any:
    """Replace a number that is not finite by None, for JSON."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
