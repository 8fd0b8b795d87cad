"""What is true of a study without a comparison that answers its question.

The order of the strategies by time and their speedups over `serial` need no per-batch
baseline: where that is missing, oversubscribed or disturbed, they are stated with the
reason why no saving is.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import pandas as pd

from scalebench import formatting
from scalebench.analysis import Results, cells, loading, ratios
from scalebench.analysis.grouping import DISTURBED_BY, crowding
from scalebench.formatting import DISTURBED, OVERSUBSCRIBED, counted
from scalebench.records.progress import progress_of
from scalebench.report.comparison import EXECUTIONS_IN_WORDS, Phrase, Sentence
from scalebench.study.cell import EXECUTIONS
from scalebench.study.choices import BASELINES, PER_BATCH, SERIAL

_MOST_COUNTS = 3  # of workers, of each execution; the tables have all

Row = dict[Hashable, Any]


def fastest(
    results: Results, executions: Sequence[str] = EXECUTIONS
) -> Iterator[Sentence]:
    """State the strategy of the least time at the largest counts of several workers, with its speedup over serial.

    Strategies are ordered within one execution, worker count and global batch, over all
    engines; marked times keep their mark.
    """
    if results.completed.empty:
        return
    table = cells(results)
    table = table[table["workers"] > 1]
    for execution in executions:
        own = table[table["execution"] == execution]
        for workers in sorted(own["workers"].unique(), reverse=True)[:_MOST_COUNTS]:
            at_count = own[own["workers"] == workers]
            # another batch is another optimisation problem
            for _, alike in at_count.groupby("batch_global", dropna=False):
                yield _least_time(results, alike.sort_values("train_s"))


def _least_time(results: Results, ordered: pd.DataFrame) -> Sentence:
    first, *others = ordered.to_dict("records")
    if others:
        message = f"{first['label']} took the least time"
        then = f", then {others[0]['label']} with {_time(others[0])}"
        facts = [f"{_time(first)}{then}"]
    else:
        message, facts = f"{first['label']} took {_time(first)}", []
    facts += [*_against_serial(results, first), EXECUTIONS_IN_WORDS[first["execution"]]]
    return (
        Phrase(f"At {counted(first['workers'], 'worker')}, "),
        Phrase(message, "strong"),
        Phrase(f" ({'; '.join(facts)})", "detail"),
        Phrase("."),
    )


def _time(cell: Row) -> str:
    return f"{formatting.time_of_cell_alone(cell)}{formatting.marks(cell)}"


def _against_serial(results: Results, cell: Row) -> Iterator[str]:
    """Return the speedup over serial with its interval; where serial is no baseline, its time."""
    table = ratios(results)
    own = table[table["baseline"] == SERIAL]
    place = loading.cells_in(pd.DataFrame([cell]))[0]
    known = [at == place for at in loading.cells_in(own)]
    for row in own[known].to_dict("records"):
        if pd.notna(row["speedup"]):
            low, high = row["speedup_low"], row["speedup_high"]
            interval = (
                f", {formatting.digits(low)} to {formatting.digits(high)}"
                if formatting.is_interval(low, high)
                else ""
            )
            yield f"speedup {formatting.digits(row['speedup'])} over serial{interval}"
            return
    of_serial = cells(results)
    of_serial = of_serial[
        (of_serial["strategy"] == SERIAL)
        & (of_serial["execution"] == cell["execution"])
    ]
    for row in of_serial.to_dict("records")[:1]:
        yield f"serial took {_time(row)} with one worker"


def why_no_saving(results: Results) -> str:
    """Return the reason why no comparison answers the question of the study, and the runs that would."""
    runs = results.completed
    # runs that are planned anyway may answer it, and come before further ones
    if not runs.empty and (left := progress_of(results.folder).remaining.total()):
        verb = "is" if left == 1 else "are"
        return f"{counted(left, 'run')} {verb} left, which the same command makes"
    if runs.empty:
        return f"no run was completed; `scalebench status {results.folder}` says why"
    if runs["strategy"].isin(PER_BATCH).all():
        return "no strategy here synchronises less often than every batch; add one, as --strategy epoch_average"
    if not runs["strategy"].isin(BASELINES).any():
        return "there is no completed run of a per-batch baseline; add --strategy allreduce"
    several = runs[runs["workers"] > 1]
    if several.empty:
        return "all runs have one worker; add more, as --workers 1..8"
    per_batch = several["strategy"].isin(BASELINES)
    for own in (several, several[per_batch], several[~per_batch]):
        if len(own) and not loading.is_representative(own).any():
            names = "" if own is several else f" of {_names(own)}"
            return f"every run{names} of several workers is {_unfit(own)}"
    return "no strategy ran beside its baseline on the same engine, at the same worker count and global batch"


def _names(runs: pd.DataFrame) -> str:
    return " and ".join(sorted(runs["strategy"].unique()))


def marks_in_words(runs: pd.DataFrame) -> str:
    """Return why none of `runs` may be compared with: `disturbed (†: other programs took ...)`."""
    words = []
    crowded = runs[runs["oversubscribed"].astype(bool)]
    if len(crowded):
        late = float(crowded["paced_overrun"].max())
        is_paced = crowded["execution"].eq("paced").any()
        much = f", up to {formatting.share(late)} of them" if is_paced else ""
        words.append(f"oversubscribed ({OVERSUBSCRIBED}: {crowding(crowded)}{much})")
    if runs["disturbed"].any():
        words.append(f"disturbed ({DISTURBED}: {DISTURBED_BY})")
    return " or ".join(words)


def _unfit(runs: pd.DataFrame) -> str:
    """Return why none of `runs` may be compared with, and how to make some that may."""
    paced = runs.loc[runs["oversubscribed"].astype(bool), "execution"].eq("paced")
    steps = []
    if paced.any():
        steps.append("state a longer device_step_time (--new)")
    if not paced.all():
        steps.append("run them on more cores, or as --execution virtual")
    if runs["disturbed"].any():
        steps.append("run them again (--new) when other programs have ended")
    return f"{marks_in_words(runs)}, and so no baseline; {'; '.join(steps)}"
