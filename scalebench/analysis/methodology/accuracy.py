"""Rules about the metric that belongs to a time."""

from __future__ import annotations

import math
from collections.abc import Iterator

from scalebench.analysis.comparing import against
from scalebench.analysis.methodology import Evidence, Finding, finding, rule
from scalebench.analysis.verdicts import METRIC_MARGIN, verdict_of_metric
from scalebench.formatting import counted
from scalebench.study.choices import PER_BATCH


@rule("every completed run reports its accuracy, or R2")
def metric(evidence: Evidence) -> Iterator[Finding]:
    """Times are comparable only with the metric that was reached."""
    untrained = evidence.runs["execution"] == "modelled"
    if len(evidence.runs[untrained]):
        yield finding(
            "note",
            "modelled times have no metric, as nothing was trained: they do not say what the time bought",
            evidence.runs[untrained],
            "give the metric of virtual or native runs at the same number of workers",
        )
    runs = evidence.runs[~untrained]
    without = runs[runs["final_metric"].isna()]
    if len(without):
        yield finding(
            "error",
            f"{counted(len(without), 'run')} of {len(runs):,} without a metric on held-out data: nothing says what the "
            "time bought",
            without,
            "keep a test split and evaluate the consensus model; metrics may not be removed from the rows",
        )


@rule("no strategy's metric is worse than the baseline's, by the verdict of compare; where it is, this is stated")
def metric_cost(evidence: Evidence) -> Iterator[Finding]:
    """A saving of time has to be reported with the loss of accuracy."""
    table = against(evidence.results)
    if table.empty:
        return
    bounds = zip(table["metric_low"], table["metric_high"], strict=True)
    table = table.assign(verdict=[verdict_of_metric(low, high) for low, high in bounds])
    worse = table[~table["label_a"].isin(PER_BATCH) & (table["verdict"] == "worse")]
    worse = worse.rename(columns={"label_a": "label", "engine_a": "engine"})
    for name, own in worse.groupby("metric_name", sort=False):
        worst = own.iloc[int(own["metric_difference"].to_numpy(dtype=float).argmin())]
        yield finding(
            "warning",
            f"{name} is worse than that of allreduce by more than {METRIC_MARGIN:g}, by up to "
            f"{-worst['metric_difference']:.3f} ({worst['label']}, {counted(worst['workers'], 'worker')})",
            own,
            "give the metric beside every time saved, or compare times to a target metric",
        )


@rule("no cell ends at chance level, or with less than half of what it once had learned")
def at_chance(
    evidence: Evidence,
    errors: float = 2.0,  # standard errors sqrt(p (1 - p) / n) above chance
) -> Iterator[Finding]:
    """The time of a run that learned nothing is not a training time."""
    runs = evidence.runs
    runs = runs[runs["chance_metric"].notna() & runs["final_metric"].notna()]
    if runs.empty:
        return
    chance = runs["chance_metric"].astype(float)
    sampling = (chance * (1 - chance) / runs["n_test"].fillna(1).clip(lower=1).astype(float)) ** 0.5
    gained = runs["final_metric"] - chance
    nothing = gained <= errors * sampling
    lost = ~nothing & (gained < 0.5 * (runs["best_metric"] - chance))
    for which, how in ((nothing, "at chance level"), (lost, "with less than half of what they once had learned")):
        own = runs[which]
        if own.empty:
            continue
        worst = own.iloc[int(gained[which].to_numpy(dtype=float).argmin())]
        yield finding(
            "warning",
            f"{counted(len(own), 'run')} of {len(runs):,} end {how}, with {worst['metric_name']} "
            f"{worst['final_metric']:.3f} where one answer to everything reaches {worst['chance_metric']:.3f}",
            own,
            "train for more steps (--epochs) or at a lower learning rate (`scalebench explain STRATEGY` lists "
            "traps), or leave these cells out",
        )


@rule("a target metric is stated, and every run reaches it")
def time_to_target(evidence: Evidence) -> Iterator[Finding]:
    """Equal epochs are not equal training: time to a stated metric is comparable."""
    runs = evidence.runs
    aimed = runs[runs["target_metric"].notna()]
    if len(runs) and aimed.empty:
        yield finding(
            "warning",
            "no target metric is stated: there is no time to target, only time for a number of epochs",
            "the study",
            "state one that the baseline reaches (--set target_metric=0.9 --new), and give both times",
        )
    never = aimed[aimed["time_to_target_s"].isna()]
    if len(never):
        target = never["target_metric"].iloc[-1]
        yield finding(
            "note",
            f"{counted(len(never), 'run')} of {len(aimed):,} never reached {target:g}; their time to target is "
            "longer than the run",
            never,
            "give the number that reached it beside each time to target, or train for more epochs",
        )


@rule("the test set's own sampling error is below one percentage point of accuracy")
def small_test_set(evidence: Evidence, most: float = 0.01) -> Iterator[Finding]:
    """An accuracy p of n samples has a standard error of sqrt(p (1 - p) / n) at any number of seeds."""
    runs = evidence.runs
    runs = runs[(runs["metric_name"] == "accuracy") & runs["final_metric"].between(0, 1) & (runs["n_test"] > 0)]
    if runs.empty:
        return
    accuracy, samples = float(runs["final_metric"].median()), int(runs["n_test"].min())
    error = math.sqrt(accuracy * (1 - accuracy) / samples)
    if error > most:
        yield finding(
            "note",
            f"accuracies are over {samples:,} test samples: a standard error of {100 * error:.1f} percentage "
            "points that more seeds do not reduce",
            "all accuracies",
            "claim no smaller difference for other data of this kind, or test on more samples",
        )
