"""The table at the end of a study, as text."""

from __future__ import annotations

import math
from dataclasses import replace

import pandas as pd

from scalebench.analysis.comparing import NO_RUN, ratios
from scalebench.analysis.grouping import DISTURBED_BY, cells, chosen_strategies, crowding
from scalebench.analysis.intervals import NOTHING_VARIES
from scalebench.analysis.loading import Results, cells_in
from scalebench.analysis.methodology import Evidence, check
from scalebench.analysis.methodology.times import findings
from scalebench.analysis.native_check import agreement, checked, virtual_error
from scalebench.analysis.pairing import NO_BASELINE
from scalebench.analysis.quantities import STRATEGY, WORKERS_MARKED, Row, quantities, with_ratios
from scalebench.analysis.rounds import timed, trained
from scalebench.analysis.target import censor_mark
from scalebench.analysis.tuning_trials import tuning_in_words
from scalebench.formatting import BETWEEN, DISTURBED, OVERSUBSCRIBED, counted, seconds, seconds_as_known
from scalebench.study.cell import group_of, in_words
from scalebench.study.choices import BASELINES
from scalebench.study.spec import SIMULATED
from scalebench.tables.table import METRIC_ALONE, Column, Table


def summary(results: Results) -> Table:
    """Return the table of `scalebench run --full`: a row for each cell, with its marks behind the worker count."""
    table = cells(results)
    ran = set(table["strategy"])
    baselines = [name for name in BASELINES if name == BASELINES[0] or name in ran]
    of_baselines = [f"vs-{name}" for name in baselines]
    known = quantities(table["metric_name"].dropna().unique())
    aims = bool(results.completed["target_metric"].notna().any())
    target = Column[Row]("to target", time_and_epochs)
    columns = [
        replace(STRATEGY, shared=True),
        WORKERS_MARKED,
        *(known["time"], *([target] if aims else []), known["median"], known["spread"], known["speedup"]),
        *(known[name] for name in of_baselines),
        replace(known["metric"], form=METRIC_ALONE),
        Column("execution", lambda row: group_of(row["execution"], row["engine"]), shared=True),
    ]
    rows = with_ratios(results, table, ["speedup", *of_baselines]).to_dict("records") if len(table) else []
    found = Table.of(title_of(results), columns, rows)
    return replace(found, notes=found.told() + summary_notes(results))


def summary_table(results: Results) -> pd.DataFrame:
    """Return the texts of `summary`, with the marks of a cell behind its worker count."""
    table = summary(results)
    rows = [[str(cell.text) for cell in row] for row in table.rows]
    return pd.DataFrame(rows, columns=[column.name for column in table.columns])


def title_of(results: Results) -> str:
    return f"{results.runs['study'].iloc[-1]}: {counted(int(results.runs['repetition'].nunique()), 'repetition')}"


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
        if failed["status"].eq("diverged").all():
            notes[-1] += f"; a lower --lr than {failed['lr'].min():g} may train them (with --new)"
    return notes


def _warnings(results: Results) -> list[str]:
    return [f"{finding.what}; in {finding.where}" for finding in findings(results) if finding.severity != "note"]


def _counted_findings(results: Results) -> list[str]:
    """Count the errors and warnings that `scalebench check` shows, all of them."""
    report = check(Evidence(results))
    found = [counted(count, severity) for severity in ("error", "warning") if (count := report.count(severity))]
    return [f"{' and '.join(found)} on these numbers: scalebench check {results.folder}"] if found else []


def time_and_epochs(cell: Row) -> str:
    """Time and epochs to the target, `410 ms/3`; with a star where some runs, `never` where most did not reach it."""
    time = seconds_as_known(*(cell[name] for name in ("time_to_target_s", "target_low_s", "target_high_s")))
    if BETWEEN in time:
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
    return [f"{NO_RUN} {in_words(cells_in(of_one))}" for _, of_one in places.groupby("baseline")] + others
