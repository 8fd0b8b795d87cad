"""The table at the end of a study, as text."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import pandas as pd

from scalebench.analysis.comparing import NO_RUN, SPLIT_BASELINES, ratios
from scalebench.analysis.grouping import CELL, DISTURBED_BY, cells, chosen_strategies, crowding, place
from scalebench.analysis.intervals import NOTHING_VARIES
from scalebench.analysis.loading import Results
from scalebench.analysis.methodology import Evidence, check
from scalebench.analysis.methodology.quality import findings
from scalebench.analysis.native_check import agreement, checked, virtual_error
from scalebench.analysis.pairing import NO_BASELINE
from scalebench.analysis.rounds import timed, trained
from scalebench.analysis.time_to_target import censor_mark
from scalebench.analysis.tuning import tuning_in_words
from scalebench.formatting import (
    DISTURBED,
    EMPTY,
    NOT_SHOWN,
    OVERSUBSCRIBED,
    as_known,
    counted,
    digits,
    marks,
    percent,
    percent_with_interval,
    seconds,
    time_of_cell,
)
from scalebench.study.spec import SIMULATED

_AGAINST = ("allreduce", *SPLIT_BASELINES)
_REDUCTION = ("reduction", "reduction_low", "reduction_high")
_SPEEDUP = ("speedup", "speedup_low", "speedup_high")


def summary_header(results: Results) -> tuple[str, ...]:
    """Column names of `summary_rows`; `to target` if the study states one, and the baselines that it ran."""
    aims = ("to target",) if _aims(results) else ()
    against = (f"vs {name}" for name in _baselines(cells(results)))
    time = ("strategy", "workers", "time [interval]", *aims, "median", "spread", "speedup")
    return (*time, *against, "metric", "execution")


def summary_rows(results: Results) -> list[tuple[str, ...]]:
    """Rows of the table of `scalebench run --full`, one per cell, as text."""
    table, compared = cells(results), ratios(results)
    if table.empty:
        return []
    baselines = _baselines(table)
    for baseline in ("serial", *baselines):
        columns = list(_SPEEDUP if baseline == "serial" else _REDUCTION)
        against = compared.loc[compared["baseline"] == baseline, [*CELL, *columns]]
        named = {name: f"{name} {baseline}" for name in _REDUCTION}
        table = table.merge(against.rename(columns=named), on=CELL, how="left")
    several = table["metric_name"].nunique() > 1
    return [_texts(cell, several, _aims(results), baselines) for cell in table.to_dict("records")]


def summary_table(results: Results) -> pd.DataFrame:
    """Table of `scalebench run --full`, as text."""
    return pd.DataFrame(summary_rows(results), columns=list(summary_header(results)))


def summary_notes(results: Results, *, brief: bool = False) -> list[str]:
    """Remarks beside the table: error of virtual times, warnings, missing baselines, failed runs.

    Warnings are counted as `scalebench check` counts them; unless `brief`, those on times are here in full.
    """
    table, notes = cells(results), []
    if len(marked := results.completed[results.completed["oversubscribed"].astype(bool)]):
        notes.append(f"{OVERSUBSCRIBED} {crowding(marked)}: shown, never a baseline")
    if table["disturbed"].any():
        notes.append(f"{DISTURBED} disturbed, as {DISTURBED_BY}: shown, never a baseline")
    if left_out := len(trained(results)) - len(timed(results)):
        notes.append(f"{counted(left_out, 'disturbed run')} left out of times beside others of the same point")
    if (virtual := table[table["execution"].isin(SIMULATED)])["interval"].eq(NOTHING_VARIES).any():
        which = "virtual times" if virtual["interval"].eq(NOTHING_VARIES).all() else "some virtual times"
        notes.append(f"{which} have {NOTHING_VARIES}: their step times are stated")
    if tuning := tuning_in_words(results):
        notes.append(tuning)
    notes += _agreement_note(results)
    notes += [] if brief else _warnings(results)
    notes += _counted_findings(results)
    notes += _missing_baselines(ratios(results), chosen_strategies(results))
    notes += results.notes
    failed = results.failed
    if len(failed):
        kinds = ", ".join(f"{count} {status}" for status, count in failed["status"].value_counts().sort_index().items())
        first = failed.iloc[0]
        why = f": {first['error']}" if isinstance(first["error"], str) else ""
        notes.append(f"{kinds} of {counted(len(results.runs), 'run')}, not in the table; first {first['run_id']}{why}")
    return notes


def _warnings(results: Results) -> list[str]:
    return [f"{finding.what}; in {finding.where}" for finding in findings(results) if finding.severity != "note"]


def _counted_findings(results: Results) -> list[str]:
    """Count the errors and warnings that `scalebench check` shows, all of them."""
    report = check(Evidence(results))
    found = [counted(count, severity) for severity in ("error", "warning") if (count := report.count(severity))]
    return [f"{' and '.join(found)} on these numbers: scalebench check {results.folder}"] if found else []


def _baselines(table: pd.DataFrame) -> list[str]:
    """`allreduce`, and the other baselines among the strategies of `table`."""
    ran = set(table["strategy"]) if len(table) else set()
    return [name for name in _AGAINST if name == _AGAINST[0] or name in ran]


def _aims(results: Results) -> bool:
    return bool(results.completed["target_metric"].notna().any())


def _texts(cell: dict[Hashable, Any], several_metrics: bool, aims: bool, baselines: Sequence[str]) -> tuple[str, ...]:
    metric = f"{cell['metric']:.3f}" if math.isfinite(cell["metric"]) else EMPTY
    where = cell["execution"] if cell["execution"] == cell["engine"] else f"{cell['execution']} {cell['engine']}"
    return (
        cell["label"],
        str(cell["workers"]),
        time_of_cell(cell),
        *([time_and_epochs(cell)] if aims else []),
        seconds(cell["median_s"]),
        percent(cell["spread"]).lstrip("+"),
        _speedup(*(cell[name] for name in _SPEEDUP)),
        *(percent_with_interval(*(cell[f"{name} {baseline}"] for name in _REDUCTION)) for baseline in baselines),
        f"{metric} {cell['metric_name']}" if several_metrics else metric,
        where + marks(cell),
    )


def _speedup(value: float, low: float, high: float) -> str:
    return EMPTY if not math.isfinite(value) else as_known(lambda *of: f"{digits(*of)}x", value, low, high)


def time_and_epochs(cell: Mapping[Hashable, Any]) -> str:
    """Time and epochs to the target, `410 ms/3`; with a star where some runs, `never` where most did not reach it."""
    time = as_known(seconds, *(cell[name] for name in ("time_to_target_s", "target_low_s", "target_high_s")))
    if time == NOT_SHOWN:
        return time
    epochs = cell["epochs_to_target"]
    mark = censor_mark(cell)
    if not math.isfinite(cell["time_to_target_s"]):
        return mark or time
    return f"{time}{f'/{epochs:g}' if math.isfinite(epochs) else ''}{mark}"


def _agreement_note(results: Results) -> list[str]:
    error = virtual_error(results)
    if error is None:
        return []
    fair = checked(agreement(results))
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
    headline = compared[compared["baseline"].isin({"serial", "allreduce"} & chosen)]
    lacking = headline[headline["note"].str.startswith(NO_RUN)]
    others = sorted({note for note in headline["note"].drop(lacking.index) if note and NO_BASELINE not in note})
    engine = lacking["baseline_engine"].where(lacking["baseline_engine"] != "", lacking["execution"])  # of serial: any
    places = lacking.assign(label=lacking["baseline"], workers=lacking["baseline_workers"], engine=engine)
    return [f"{NO_RUN} {place(of_one)}" for _, of_one in places.groupby("baseline")] + others
