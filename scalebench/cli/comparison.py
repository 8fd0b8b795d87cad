"""A comparison of two studies as a table for a terminal, as notes below it, and as values for JSON."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import asdict
from typing import Any

import pandas as pd
from rich.text import Text

from scalebench.analysis.grouping import PLACE, place
from scalebench.analysis.intervals import NOTHING_VARIES
from scalebench.analysis.native_check import VirtualError
from scalebench.analysis.verdicts import VERDICTS, CellName, Verdicts
from scalebench.cli.terminal_table import TableColumn, TerminalTable
from scalebench.formatting import EMPTY, counted, deviation, digits, is_equal, is_interval, percent, seconds

JSON_SCHEMA = 1  # of `--json`; raised when a key changes its meaning or goes
_COLORS = {"regression": "red", "improvement": "green", "undecided": "yellow", "unchanged": "", "not compared": "dim"}
_PARTICIPLES = {verdict: verdict for verdict in _COLORS} | {"regression": "regressed", "improvement": "improved"}


def comparison_table(found: Verdicts) -> TerminalTable:
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
    if not math.isfinite(row["metric_difference"]):
        return EMPTY
    if is_equal(row["metric_difference"], row["metric_low"], row["metric_high"]):
        return "equal"
    text = f"{row['metric_difference']:+.3f}"
    if math.isfinite(row["metric_low"]):
        text += f" [{row['metric_low']:+.3f}, {row['metric_high']:+.3f}]"
    return text


def comparison_notes(found: Verdicts) -> list[str]:
    """Notes below the table; the last line counts the verdicts."""
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
    counts = [f"{found.count(verdict)} {_PARTICIPLES[verdict]}" for verdict in VERDICTS if found.count(verdict)]
    metrics = [f"{found.metrics(verdict)} {_PARTICIPLES[verdict]}" for verdict in VERDICTS if found.metrics(verdict)]
    notes.append(
        f"time: {', '.join(counts)} (threshold {100 * found.threshold:g} %); "
        f"metric: {', '.join(metrics)} (margin {found.metric_margin:g})"
    )
    return notes


def _simulation(errors: Sequence[VirtualError | None]) -> str:
    """The known error of virtual times in words."""
    checked = {name: error for name, error in zip("AB", errors, strict=True) if error}
    if not checked:
        return "virtual times: no native point checks them: verdicts on them are on the simulation"
    known = {name: f"{deviation(e.rms)} in {name} ({e.checks} checks)" for name, e in checked.items() if e.known}
    if not known:
        return "virtual times: their virtual-native error is known from 1 check only, so that they have no interval"
    alone = "; it stands for the other study too, which has fewer native points to check" if len(known) == 1 else ""
    errors_text = known["A"].replace(" in A", "") if errors[0] == errors[1] else ", ".join(known.values())
    return f"virtual times: the virtual-native error inside their intervals is {errors_text}{alone}"


def _cells(names: list[CellName]) -> str:
    return place(pd.DataFrame(names, columns=PLACE))


def _place(rows: pd.DataFrame) -> str:
    return place(rows.rename(columns={"engine_b": "engine", "label_b": "label"}))


def comparison_facts(found: Verdicts) -> dict[str, Any]:
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
