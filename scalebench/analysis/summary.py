"""The table at the end of a study."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

from scalebench.analysis.cell_names import crowding, place
from scalebench.analysis.comparing import NO_RUN, SPLIT_BASELINES
from scalebench.analysis.evidence import Evidence
from scalebench.analysis.intervals import NOTHING_VARIES
from scalebench.analysis.loading import Results
from scalebench.analysis.quality import doubts
from scalebench.analysis.screen import Column, Screen
from scalebench.analysis.validation import agreement, median_error
from scalebench.formatting import (
    EMPTY,
    counted,
    deviation,
    digits,
    percent,
    percent_with_interval,
    seconds,
    seconds_with_interval,
)

if TYPE_CHECKING:
    import pandas as pd

OVERSUBSCRIBED = "×"
_AGAINST = ("allreduce", *SPLIT_BASELINES)
_SHARED = ("strategy", "execution")  # of the rows that stand together
_SPARE = ("speedup", "vs horovod", "vs ddp", "spread", "median")  # where a terminal is narrow, from the last
_REDUCTION = ("reduction", "reduction_low", "reduction_high")
_KEY = ["execution", "engine", "label", "workers", "batch_per_worker", "batch_global"]


def summary_header(results: Results) -> tuple[str, ...]:
    """What the columns of `summary_rows` are; `to target` if the study states one, and baselines that it ran."""
    return _header(results, _baselines(Evidence.of(results)))


def _header(results: Results, baselines: Sequence[str]) -> tuple[str, ...]:
    aims = ("to target",) if _aims(results) else ()
    against = (f"vs {name}" for name in baselines)
    time = ("strategy", "workers", "time [interval]", *aims, "median", "spread", "speedup")
    return (*time, *against, "metric", "execution")


def _baselines(evidence: Evidence) -> list[str]:
    """`allreduce`, and of the others those that the study ran beside it."""
    ran = set(evidence.table["strategy"]) if len(evidence.table) else set()
    return [name for name in _AGAINST if name == _AGAINST[0] or name in ran]


def _aims(results: Results) -> bool:
    return bool(results.completed["target_metric"].notna().any())


def summary_rows(results: Results) -> list[tuple[str, ...]]:
    """One row of text per cell, under `summary_header`."""
    return _rows(Evidence.of(results))


def _rows(evidence: Evidence) -> list[tuple[str, ...]]:
    table, compared = evidence.table, evidence.compared
    if table.empty:
        return []
    baselines = _baselines(evidence)
    for baseline in ("serial", *baselines):
        columns = ["speedup"] if baseline == "serial" else list(_REDUCTION)
        against = compared.loc[compared["baseline"] == baseline, [*_KEY, *columns]]
        named = {name: f"{name} {baseline}" for name in _REDUCTION}
        table = table.merge(against.rename(columns=named), on=_KEY, how="left")
    several = table["metric_name"].nunique() > 1
    aims = _aims(evidence.results)
    return [_texts(cell, several, aims, baselines) for cell in table.to_dict("records")]


def _texts(cell: dict[Hashable, Any], several_metrics: bool, aims: bool, baselines: Sequence[str]) -> tuple[str, ...]:
    metric = f"{cell['metric']:.3f}" if math.isfinite(cell["metric"]) else EMPTY
    oversubscribed = f" {OVERSUBSCRIBED}" if cell["oversubscribed"] else ""
    where = cell["execution"] if cell["execution"] == cell["engine"] else f"{cell['execution']} {cell['engine']}"
    return (
        cell["label"],
        str(cell["workers"]),
        seconds_with_interval(cell["train_s"], cell["low_s"], cell["high_s"]),
        *([seconds(cell["time_to_target_s"])] if aims else []),
        seconds(cell["median_s"]),
        percent(cell["spread"]).lstrip("+"),
        f"{digits(cell['speedup'])}x" if math.isfinite(cell["speedup"]) else EMPTY,
        *(percent_with_interval(*(cell[f"{name} {baseline}"] for name in _REDUCTION)) for baseline in baselines),
        f"{metric} {cell['metric_name']}" if several_metrics else metric,
        where + oversubscribed,
    )


def summary_notes(results: Results) -> list[str]:
    """What the table does not show: how far virtual and native agree, what is in doubt, failed or missing."""
    return _notes(Evidence.of(results))


def _notes(evidence: Evidence) -> list[str]:
    results, notes = evidence.results, []
    if len(marked := results.completed[results.completed["oversubscribed"].astype(bool)]):
        notes.append(f"{OVERSUBSCRIBED} {crowding(marked)}: shown, never a baseline")
    if (virtual := evidence.table[evidence.table["execution"] == "virtual"])["interval"].eq(NOTHING_VARIES).any():
        which = "virtual times" if virtual["interval"].eq(NOTHING_VARIES).all() else "some virtual times"
        notes.append(f"{which} have {NOTHING_VARIES}: their step times are stated")
    notes += _agreement_note(results)
    notes += [f"{finding.what}; in {finding.where}" for finding in doubts(evidence) if finding.severity != "note"]
    notes += _missing_baselines(evidence.compared)
    notes += results.notes
    failed = results.failed
    if len(failed):
        kinds = ", ".join(f"{count} {status}" for status, count in failed["status"].value_counts().sort_index().items())
        first = failed.iloc[0]
        why = f": {first['error']}" if isinstance(first["error"], str) else ""
        notes.append(f"{kinds} of {counted(len(results.runs), 'run')}, not in the table; first {first['run_id']}{why}")
    return notes


def summary_table(results: Results) -> Screen:
    """The summary for a terminal, with its notes."""
    from rich.text import Text

    evidence = Evidence.of(results)
    metrics = "/".join(sorted(results.completed["metric_name"].dropna().unique())) or "metric"
    repetitions = int(results.runs["repetition"].nunique())
    columns = [
        Column(
            metrics if name == "metric" else name,
            left=name in _SHARED,
            shared=name in _SHARED,
            spare=1 + _SPARE.index(name) if name in _SPARE else 0,
        )
        for name in _header(results, _baselines(evidence))
    ]
    rows = []
    for label, workers, *numbers, execution in _rows(evidence):
        mark = execution.removeprefix(plain := execution.removesuffix(f" {OVERSUBSCRIBED}"))
        rows.append([Text(cell) for cell in (label, workers + mark, *numbers, plain)])
    title = f"{results.runs['study'].iloc[-1]}: {counted(repetitions, 'repetition')}"
    return Screen(title, columns, rows, _notes(evidence))


def _agreement_note(results: Results) -> list[str]:
    table = agreement(results)
    error = median_error(table)
    if error is None:
        return []
    fair = table[~table["oversubscribed"].astype(bool)]
    logs = fair["ratio"].astype(float).map(math.log)
    place = int(logs.abs().to_numpy().argmax())
    worst = fair.iloc[place]
    return [
        f"virtual against native times: median error {deviation(error)} over {counted(len(fair), 'cell')}, "
        f"largest {deviation(logs.iloc[place])} ({worst['label']}, {counted(worst['workers'], 'worker')}: "
        f"{seconds(worst['virtual_s'])} for {seconds(worst['native_s'])})"
    ]


def _missing_baselines(compared: pd.DataFrame) -> list[str]:
    """The reasons why headline numbers are empty, each once; what did not run, at all its places in one line."""
    if compared.empty:
        return []
    headline = compared[compared["baseline"].isin(("serial", "allreduce"))]
    lacking = headline[headline["note"].str.startswith(NO_RUN)]
    others = sorted({note for note in headline["note"].drop(lacking.index) if note and "oversubscribed" not in note})
    engine = lacking["baseline_engine"].where(lacking["baseline_engine"] != "", lacking["execution"])  # of serial: any
    places = lacking.assign(label=lacking["baseline"], workers=lacking["baseline_workers"], engine=engine)
    return [f"{NO_RUN} {place(of_one)}" for _, of_one in places.groupby("baseline")] + others
