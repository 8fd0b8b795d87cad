"""Rules about tuning: a comparison at values that one strategy likes best says little about the others."""

from __future__ import annotations

from collections.abc import Iterator

from scalebench.analysis.grouping import listed
from scalebench.analysis.methodology import Evidence, Finding, finding, rule
from scalebench.analysis.tuning import metric_of, tuned_cells
from scalebench.formatting import counted


@rule("every strategy has its own learning rate, found by equally many trials")
def untuned(evidence: Evidence) -> Iterator[Finding]:
    """Strategies that share one learning rate are compared at the one that suits some of them best."""
    runs = evidence.runs[evidence.runs["final_metric"].notna()]
    if runs["label"].nunique() < 2 or runs["tuned"].notna().any():
        return
    rates = listed(f"{rate:g}" for rate in sorted(runs["lr"].unique()))
    yield finding(
        "note",
        f"all strategies share lr {rates} at every worker count: none was tuned, and another value may order them "
        "differently",
        runs,
        "say so, or tune all with equal trials: tune: {over: {lr: [low, high]}} in the study (docs/tuning.md)",
    )


@rule("no tuned value is the least or the largest that was tried")
def tuning_edge(evidence: Evidence) -> Iterator[Finding]:
    """A best value at the end of its range may have a better one beyond."""
    if not len(evidence.results.trials):
        return
    table = tuned_cells(evidence.results)
    for key in sorted({key for keys in table["edges"] for key in keys}):
        own = table[[key in keys for keys in table["edges"]]]
        values = listed(sorted({values[key] for values in own["tuned"]}))
        yield finding(
            "warning",
            f"the best {key} is the least or the largest that was tried ({values}) at "
            f"{len(own)} of {counted(len(table), 'point')}",
            own,
            f"widen the range of {key} (tune.over), and give the study another name",
        )


@rule("where trials are chosen by time to the target, one at each point reached it")
def target_in_trials(evidence: Evidence) -> Iterator[Finding]:
    """Where no trial reached the target, trials were chosen by their final metric instead."""
    trials = evidence.results.trials
    if not len(trials) or metric_of(evidence.results) != "time_to_target":
        return
    table = tuned_cells(evidence.results)
    never = table[table["reached"] == 0]
    if len(never):
        yield finding(
            "warning",
            f"no trial reached the target at {len(never)} of {counted(len(table), 'point')}: the best final metric "
            "chose there",
            never,
            "widen tune.over, train for more epochs or lower target_metric, under another name",
        )
