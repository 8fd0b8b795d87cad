"""Rules about tuning: a comparison at values that one strategy likes best says little about the others."""

from __future__ import annotations

from collections.abc import Iterator

from scalebench.analysis.grouping import listed, place
from scalebench.analysis.methodology import RULES, Evidence, Finding, Rule
from scalebench.analysis.tuning import tuned_cells
from scalebench.formatting import counted


@RULES.add
class Untuned(Rule):
    """Strategies that share one learning rate are compared at the one that suits some of them best."""

    name = "untuned"
    summary = "every strategy has its own learning rate, found by equally many trials"

    def findings(self, evidence: Evidence) -> Iterator[Finding]:
        runs = evidence.runs[evidence.runs["final_metric"].notna()]
        if runs["label"].nunique() < 2 or runs["tuned"].notna().any():
            return
        rates = listed(f"{rate:g}" for rate in sorted(runs["lr"].unique()))
        yield self.finding(
            "note",
            f"all strategies share lr {rates} at every worker count: none was tuned, and another value may order them "
            "differently",
            place(runs),
            "say so, or tune all with equal trials: tune: {over: {lr: [low, high]}} in the study (docs/tuning.md)",
        )


@RULES.add
class TuningEdge(Rule):
    """A best value at the end of its range may have a better one beyond."""

    name = "tuning-edge"
    summary = "no tuned value is the least or the largest that was tried"

    def findings(self, evidence: Evidence) -> Iterator[Finding]:
        if not len(evidence.results.trials):
            return
        table = tuned_cells(evidence.results)
        for key in sorted({key for keys in table["edges"] for key in keys}):
            own = table[[key in keys for keys in table["edges"]]]
            values = listed(sorted({values[key] for values in own["tuned"]}))
            yield self.finding(
                "warning",
                f"the best {key} is the least or the largest that was tried ({values}) in "
                f"{len(own)} of {counted(len(table), 'point')}",
                place(own),
                f"widen the range of {key} (tune.over), and give the study another name",
            )


@RULES.add
class TargetInTrials(Rule):
    """Where no trial reached the target, trials were chosen by their final metric instead."""

    name = "target-in-trials"
    summary = "where trials are chosen by time to the target, one of each point reached it"

    def findings(self, evidence: Evidence) -> Iterator[Finding]:
        trials = evidence.results.trials
        if not len(trials) or not trials["target_metric"].notna().any():
            return
        table = tuned_cells(evidence.results)
        never = table[table["reached"] == 0]
        if len(never):
            yield self.finding(
                "warning",
                f"no trial reached the target in {len(never)} of {counted(len(table), 'point')}: the best final metric "
                "chose there",
                place(never),
                "widen tune.over, train for more epochs or lower target_metric, under another name",
            )
