"""Rules about runs that are missing in the figures (Hoefler and Belli 2015, rule 2)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import numpy as np
import pandas as pd

from scalebench.analysis.intervals import level_of, relative_width
from scalebench.analysis.methodology import Evidence, Finding, finding, rule
from scalebench.analysis.rounds import timed
from scalebench.formatting import counted, listed
from scalebench.study.cell import CELL


@rule("no run failed, diverged or timed out; where some did, this is stated")
def failed_runs(evidence: Evidence) -> Iterator[Finding]:
    """Failed and diverged runs are not in the figures: the rest is a biased selection."""
    failed = evidence.results.failed
    completed = evidence.runs.groupby(CELL, dropna=False).size().rename("completed").reset_index()
    failed = failed.merge(completed, on=CELL, how="left")
    lost, thinned = failed[failed["completed"].isna()], failed[failed["completed"].notna()]
    parts = []
    if len(lost):
        cells = counted(len(lost[CELL].drop_duplicates()), "cell")
        parts.append(f"no run of {cells} was completed ({_statuses(lost)}): the curves go on without them")
    if len(thinned):
        parts.append(f"{counted(len(thinned), 'run')} of other cells in no statistic ({_statuses(thinned)})")
    if parts:
        again = f"scalebench run {evidence.results.folder} --retry"
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
        before = _statuses(earlier) if len(earlier) else "without a row of what came"
        yield finding(
            "note" if len(earlier) and "diverged" not in set(earlier["status"]) else "warning",
            f"{counted(len(again), 'run')} completed at a later attempt ({before} before)",
            again,
            "state how many runs were repeated and why; one that diverges at times does so as part of its result",
        )


@rule("every planned run has come to an end")
def unfinished(evidence: Evidence) -> Iterator[Finding]:
    """Planned runs that were not made."""
    remaining = evidence.progress.never_made
    if remaining:
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in remaining.items())
        yield finding(
            "error",
            f"{counted(remaining.total(), 'run')} of {evidence.progress.planned:,} planned never made",
            kinds,
            "the command that began the study goes on with it; a smaller study is one of its own",
        )


@rule("epochs.csv holds every epoch of each completed run")
def missing_epochs(evidence: Evidence) -> Iterator[Finding]:
    """Epochs that were lost after the run was completed: figures over epochs are drawn without these runs."""
    rows = len(evidence.results.epochs)
    lacking = evidence.results.without_epochs
    if lacking:
        yield finding(
            "warning",
            f"epochs of {counted(len(lacking), 'completed run')} are missing ({listed(lacking, 5)}); {rows:,} rows of "
            "others are there",
            evidence.results.runs[evidence.results.runs["run_id"].isin(lacking)],
            "put epochs.csv back, or run the study again, which makes these runs again",
        )


@rule("with `until`, every interval is as narrow as asked")
def still_wide(evidence: Evidence) -> Iterator[Finding]:
    """`until` ends at `at_most` runs, even if an interval is wider than requested."""
    until = evidence.results.study.get("until")
    if not isinstance(until, Mapping) or not isinstance(until.get("ci_width"), int | float):
        return
    asked, level = float(until["ci_width"]), partial(level_of, evidence.results.study)
    logs = {
        place: np.log(own["train_s"].to_numpy(dtype=float))
        for place, own in timed(evidence.results).groupby(CELL, dropna=False)
        if len(own) > 1
    }
    widths = {place: float(relative_width(own, level(len(own)))) for place, own in logs.items()}
    wide = [place for place, width in widths.items() if width > asked]
    if wide:
        yield finding(
            "note",
            f"intervals of {len(wide)} of {counted(len(widths), 'point')} are wider than the {100 * asked:.3g} % of "
            f"the time that was asked for, up to {100 * max(widths.values()):.2g} %",
            pd.DataFrame(wide, columns=CELL),
            "raise at_most and run the study again, which goes on, or state the widths that were reached",
        )


def _statuses(runs: pd.DataFrame) -> str:
    counts = runs["status"].value_counts().sort_index()
    return ", ".join(f"{count} {status}" for status, count in counts.items())
