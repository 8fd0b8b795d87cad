"""Rules about runs that are missing in the figures (Hoefler and Belli 2015, rule 2)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import numpy as np
import pandas as pd

from scalebench.analysis.grouping import CELL, listed
from scalebench.analysis.intervals import level_of, relative_width
from scalebench.analysis.methodology import Evidence, Finding, finding, rule
from scalebench.analysis.rounds import timed
from scalebench.formatting import counted


@rule("no run failed, diverged or timed out; where some did, this is stated")
def failed_runs(evidence: Evidence) -> Iterator[Finding]:
    """Failed and diverged runs are not in the figures: the rest is a biased selection."""
    failed = evidence.results.failed
    completed = evidence.runs.groupby(CELL, dropna=False).size().rename("completed").reset_index()
    failed = failed.merge(completed, on=CELL, how="left")
    lost, thinned = failed[failed["completed"].isna()], failed[failed["completed"].notna()]
    parts = []
    if len(lost):
        parts.append(
            f"no run of {counted(len(lost[CELL].drop_duplicates()), 'cell')} was completed "
            f"({_statuses(lost)}): the curves go on without them"
        )
    if len(thinned):
        runs = counted(len(thinned), "run") + (" of other cells" if len(lost) else "")
        parts.append(
            f"{runs} ended otherwise than completed ({_statuses(thinned)}) and "
            f"{'are' if len(thinned) > 1 else 'is'} in no statistic"
        )
    if parts:
        again = f"scalebench retry {evidence.results.folder}"
        if (failed["status"] == "diverged").all():
            again = "what diverged does so again: lower the learning rate (--new)"
        yield finding(
            "error" if len(lost) else "warning",
            "; ".join(parts),
            failed,
            f"{again}, or state what fails, how often and why",
        )


@rule("every completed run was completed at its first attempt; otherwise this is stated")
def retried_runs(evidence: Evidence) -> Iterator[Finding]:
    """A run completed at a later attempt is a selected sample."""
    again = evidence.runs[evidence.runs["attempt"] > 1]
    if len(again):
        earlier = evidence.rows[evidence.rows["run_id"].isin(again["run_id"])]
        earlier = earlier[earlier["status"] != "completed"]
        hidden = again[~again["run_id"].isin(earlier["run_id"])]
        before = [f"{_statuses(earlier)} before"] if len(earlier) else []
        before += [f"{len(hidden)} without a row of what came before"] if len(hidden) else []
        chosen = "diverged" in set(earlier["status"]) or len(hidden) > 0
        yield finding(
            "warning" if chosen else "note",
            f"{counted(len(again), 'run')} completed at a later attempt ({'; '.join(before)})",
            again,
            "state how many runs were repeated and why"
            + ("; one that diverges at times does so as part of its result" if chosen else "")
            + ("; rows of failed attempts may not be removed" if len(hidden) else ""),
        )


@rule("every planned run has come to an end")
def unfinished(evidence: Evidence) -> Iterator[Finding]:
    """Planned runs that were not made."""
    remaining = evidence.progress.remaining
    if remaining:
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in remaining.items())
        yield finding(
            "error",
            f"{counted(remaining.total(), 'run')} of {evidence.progress.planned:,} planned "
            f"{'was' if remaining.total() == 1 else 'were'} never made",
            kinds,
            "the command that began the study goes on with it; a smaller study is one of its own",
        )


@rule("every cell of an execution has as many runs as the others")
def uneven_repetitions(evidence: Evidence) -> Iterator[Finding]:
    """Cells with fewer runs than others, of any status: rows were removed or added."""
    if evidence.results.study.get("until"):  # cells have different numbers of runs by design
        return
    runs = evidence.results.runs
    table = runs[~runs["warmup"].astype(bool)].groupby(CELL, dropna=False).size().rename("made").reset_index()
    for execution, own in table.groupby("execution"):
        fewer = own[own["made"] < own["made"].max()]
        if len(fewer):
            yield finding(
                "warning",
                f"{counted(len(fewer), 'cell')} of {_runs(fewer['made'])} where others "
                f"({execution}) have {own['made'].max()}",
                fewer,
                "run the study to its end, or state the number of runs of each cell",
            )


@rule("every completed run has its epochs in epochs.csv")
def epochs_missing(evidence: Evidence) -> Iterator[Finding]:
    """Convergence and the speed of single epochs are in epochs.csv."""
    keys = ["run_id", "attempt"]
    epochs = pd.MultiIndex.from_frame(evidence.results.epochs[keys].drop_duplicates())
    without = evidence.runs[~pd.MultiIndex.from_frame(evidence.runs[keys]).isin(epochs)]
    if len(without):
        found = f"lacks {counted(len(without), 'completed run')} of {len(evidence.runs):,}"
        if not (evidence.results.folder / "epochs.csv").is_file():
            found = "is missing"
        yield finding(
            "warning",
            f"epochs.csv {found}: convergence, and the first epoch against later ones, cannot be checked",
            without,
            "keep the whole folder that `scalebench run` wrote",
        )


@rule("with `until`, every interval is as narrow as asked")
def still_wide(evidence: Evidence) -> Iterator[Finding]:
    """`until` ends at `at_most` runs, even if an interval is wider than requested."""
    until = evidence.results.study.get("until")
    if not isinstance(until, Mapping) or not isinstance(until.get("ci_width"), int | float):
        return
    asked, level = float(until["ci_width"]), partial(level_of, evidence.results.study)
    widths, rows = [], []
    for _, own in timed(evidence.results).groupby(CELL, dropna=False):
        if len(own) > 1:
            logs = np.log(own["train_s"].to_numpy(dtype=float))
            widths.append(float(relative_width(logs, level(len(own)))))
            rows.append(own.tail(1))
    wide = [row for row, width in zip(rows, widths, strict=True) if width > asked]
    if wide:
        yield finding(
            "note",
            f"{counted(len(wide), 'point')} of {len(rows):,} {'is' if len(wide) == 1 else 'are'} wider than the "
            f"{100 * asked:.3g} % of the time that was asked for, up to {100 * max(widths):.2g} %",
            pd.concat(wide),
            "raise at_most and run the study again, which goes on, or state the widths that were reached",
        )


def _statuses(runs: pd.DataFrame) -> str:
    counts = runs["status"].value_counts().sort_index()
    return ", ".join(f"{count} {status}" for status, count in counts.items())


def _runs(numbers: pd.Series[int]) -> str:
    several = sorted(set(numbers))
    return f"{listed(several)} run{'' if several == [1] else 's'}"
