"""Rules about what has to stand beside a number: its baseline, the metric that was reached, and runs that are missing.

Hoefler and Belli 2015, rules 1 and 2.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import partial

import numpy as np
import pandas as pd

from scalebench.analysis.comparing import against
from scalebench.analysis.grouping import chosen_strategies
from scalebench.analysis.intervals import level_of, relative_width
from scalebench.analysis.loading import is_representative
from scalebench.analysis.methodology import Evidence, Finding, Severity, finding, rule
from scalebench.analysis.pairing import NO_BASELINE
from scalebench.analysis.rounds import timed
from scalebench.analysis.verdicts import METRIC_MARGIN, verdict_of_metric
from scalebench.formatting import counted, listed, percent, seconds_with_interval
from scalebench.study.cell import BATCH, CELL, PLACE, columns_without, group_of
from scalebench.study.choices import ALLREDUCE, LIBRARY_BASELINES, PER_BATCH, SERIAL

_BEYOND_NOISE = 1.2  # efficiency that the noise of single runs does not reach


@rule("a speedup has a base, serial on one worker, whose absolute time is stated")
def speedup_base(evidence: Evidence) -> Iterator[Finding]:
    """Rule 1 of the twelve: state the base case of a speedup and its absolute time."""
    table = evidence.ratios
    against = table[(table["baseline"] == SERIAL) & (table["strategy"] != SERIAL)]
    missing = against[against["note"] != ""]
    chosen = SERIAL in chosen_strategies(evidence.results)
    severity: Severity = "warning" if chosen else "note"
    undisturbed = "without oversubscription or other programs in each repetition"
    fix = (
        f"let serial complete {undisturbed}"
        if chosen
        else f"add serial to the study's strategies, and let it complete {undisturbed}"
    )
    for note, own in missing.groupby("note", sort=False):
        yield finding(severity, f"no speedup can be given: {note}", own, fix)
    known = evidence.cells
    fair = (known["strategy"] == SERIAL) & is_representative(known)
    for base in known[fair].to_dict("records"):
        time = seconds_with_interval(base["train_s"], base["low_s"], base["high_s"])
        kind = group_of(str(base["execution"]), str(base["engine"]))
        yield finding(
            "note",
            f"{kind} speedups are over serial on one worker, {time}"
            + (f", {base['interval']}" * bool(base["interval"])),
            f"serial at 1 worker ({kind})",
            "state this time wherever a speedup is shown",
        )


@rule(
    "a reduction has a per-batch baseline of the same execution, engine, worker count and global batch"
)
def reduction_base(evidence: Evidence) -> Iterator[Finding]:
    """A reduction needs a per-batch run on the same engine, at the same worker count and global batch."""
    table = evidence.ratios
    table = table[~table["strategy"].isin(PER_BATCH) & is_representative(table)]
    # A library's baseline at the same place: some reduction can be given there.
    others = table[(table["baseline"] != SERIAL) & (table["note"] == "")][
        PLACE
    ].drop_duplicates()
    missing = table[(table["baseline"] == ALLREDUCE) & (table["note"] != "")]
    missing = missing.merge(others.assign(compared=True), on=PLACE, how="left")
    rest = missing["compared"].notna()
    matters: list[tuple[Severity, str, pd.DataFrame]] = [
        ("error", "any reduction", missing[~rest]),
        ("warning", "what synchronising less often saves", missing[rest]),
    ]
    for severity, measured, own in matters:
        if not len(own):
            continue
        # a library that ran there, and is no baseline, is nearer to one than allreduce
        ran = table.merge(own[PLACE].drop_duplicates(), on=PLACE)
        ran = ran[ran["baseline"].isin(LIBRARY_BASELINES)]
        unfit = ran[ran["note"].str.endswith(NO_BASELINE)]
        whys = [*unfit["note"].unique(), *own["note"].unique()]
        names = " or ".join(unfit["baseline"].unique())
        more = f", or {names} so that it is not marked" if names else ""
        yield finding(
            severity,
            f"nothing to measure {measured} against: {listed(whys, 3)}",
            own,
            f"run allreduce on the same engine at these worker counts (--strategy allreduce){more}",
        )


@rule("the baseline allreduce is not slower than another per-batch strategy")
def weak_baseline(evidence: Evidence) -> Iterator[Finding]:
    """A reduction against a slow baseline overstates the effect of the synchronisation frequency."""
    table = evidence.ratios
    table = table[
        (table["strategy"] == ALLREDUCE) & table["baseline"].isin(LIBRARY_BASELINES)
    ]
    # with options it is a variant, and a baseline only where it ran alone
    plain = table["label"] == ALLREDUCE
    places = [table[name] for name in columns_without("label", *BATCH)]
    alone = ~plain.groupby(places).transform("any").astype(bool)
    table = table[plain | alone]
    slower = table[
        (table["ratio_high"] < 1) & (table["workers"] > 1) & is_representative(table)
    ]
    for name, own in slower.groupby("baseline", sort=False):
        worst = own.iloc[int(own["ratio"].to_numpy(dtype=float).argmin())]
        yield finding(
            "warning",
            f"allreduce is slower than {name}, by up to {percent(1 / worst['ratio'] - 1).lstrip('+')} of {name}'s "
            f"time at {counted(worst['workers'], 'worker')}: a reduction against allreduce flatters",
            own,
            f"give the reduction against {name} as well",
        )


@rule("no efficiency lies above 1 by more than its interval, or without one above 1.2")
def superlinear(evidence: Evidence) -> Iterator[Finding]:
    """Efficiency above one needs an explanation: a slow base, less work at more workers, or caches."""
    table = evidence.ratios
    over = table[(table["baseline"] == SERIAL) & (table["workers"] > 1)]
    if len(over):
        unknown = over["efficiency_low"].isna() & (over["efficiency"] > _BEYOND_NOISE)
        over = over[(over["efficiency_low"] > 1) | unknown]
    if len(over):
        worst = over.iloc[int(over["efficiency"].to_numpy(dtype=float).argmax())]
        without = " without an interval" if pd.isna(worst["efficiency_low"]) else ""
        yield finding(
            "warning",
            f"efficiency is up to {worst['efficiency']:.2f}{without} ({worst['label']}, "
            f"{counted(worst['workers'], 'worker')}), more than ideal",
            over,
            "say why: a slow base case, fewer steps at more workers, or caches; check the base first",
        )


@rule("every reduction against allreduce has a sign: its interval does not hold zero")
def unsettled(evidence: Evidence) -> Iterator[Finding]:
    """Rule 7 of the twelve: a difference within its interval is not established."""
    table = evidence.ratios
    headline = table[
        (table["baseline"] == ALLREDUCE)
        & (table["workers"] > 1)
        & is_representative(table)
    ]
    # Without an interval both comparisons are false: other rules say that it is
    # missing.
    open_ = headline[(headline["reduction_low"] < 0) & (headline["reduction_high"] > 0)]
    for execution in dict.fromkeys(open_["execution"]):
        own = open_[open_["execution"] == execution]
        several = int((headline["execution"] == execution).sum())
        yield finding(
            "note",
            f"whether time is saved against allreduce is open in "
            f"{len(own)} of {counted(several, f'{execution} comparison')}: the interval of the reduction holds zero",
            own,
            "repeat measured times more often; calibrate virtual ones better",
        )


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


@rule(
    "no strategy's metric is worse than the baseline's, by the verdict of compare; where it is, this is stated"
)
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


@rule(
    "no cell ends at chance level, or with less than half of what it once had learned"
)
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
    samples = runs["n_test"].fillna(1).clip(lower=1).astype(float)
    # A guess reaches chance only on average.
    sampling = (chance * (1 - chance) / samples) ** 0.5
    gained = runs["final_metric"] - chance
    nothing = gained <= errors * sampling
    # Its best epoch shows that it could learn.
    lost = ~nothing & (gained < 0.5 * (runs["best_metric"] - chance))
    for which, how in (
        (nothing, "at chance level"),
        (lost, "with less than half of what they once had learned"),
    ):
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
            f"state one that the baseline reaches{_reachable(runs)}, and give both times",
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


def _reachable(runs: pd.DataFrame) -> str:
    """The option that states a target, in hundredths, which per-batch runs at the fewest workers all reached."""
    baseline = runs[runs["strategy"].isin(PER_BATCH)]
    # At the fewest workers the global batch is smallest, and the metric as a rule the
    # best.
    reached = baseline[baseline["workers"] == baseline["workers"].min()][
        "final_metric"
    ].min()
    if not math.isfinite(reached):
        return ""
    return f" (--set target_metric={math.floor(100 * reached) / 100:g} --new)"


@rule("the test set's own sampling error is below one percentage point of accuracy")
def small_test_set(evidence: Evidence, most: float = 0.01) -> Iterator[Finding]:
    """An accuracy p of n samples has a standard error of sqrt(p (1 - p) / n) at any number of seeds."""
    runs = evidence.runs
    is_share = (runs["metric_name"] == "accuracy") & runs["final_metric"].between(0, 1)
    runs = runs[is_share & (runs["n_test"] > 0)]
    if runs.empty:
        return
    # One number for the study: the error changes little with the accuracy.
    accuracy = float(runs["final_metric"].median())
    samples = int(runs["n_test"].min())
    error = math.sqrt(accuracy * (1 - accuracy) / samples)
    if error > most:
        yield finding(
            "note",
            f"accuracies are over {samples:,} test samples: a standard error of {100 * error:.1f} percentage "
            "points that more seeds do not reduce",
            "all accuracies",
            "claim no smaller difference for other data of this kind, or test on more samples",
        )


@rule("no run failed, diverged or timed out; where some did, this is stated")
def failed_runs(evidence: Evidence) -> Iterator[Finding]:
    """Failed and diverged runs are not in the figures: the rest is a biased selection."""
    failed = evidence.results.failed
    completed = (
        evidence.runs.groupby(CELL, dropna=False)
        .size()
        .rename("completed")
        .reset_index()
    )
    failed = failed.merge(completed, on=CELL, how="left")
    lost = failed[failed["completed"].isna()]
    thinned = failed[failed["completed"].notna()]
    parts = []
    if len(lost):
        cells = counted(len(lost[CELL].drop_duplicates()), "cell")
        parts.append(
            f"no run of {cells} was completed ({_statuses(lost)}): the curves go on without them"
        )
    if len(thinned):
        parts.append(
            f"{counted(len(thinned), 'run')} of other cells in no statistic ({_statuses(thinned)})"
        )
    if parts:
        again = f"scalebench run {evidence.results.folder} --retry"
        # A retry has the same seed and the same rate.
        if (failed["status"] == "diverged").all():
            again = "what diverged does so again: lower the learning rate (--new)"
        yield finding(
            "error" if len(lost) else "warning",
            "; ".join(parts),
            failed,
            f"{again}, or state what fails, how often and why",
        )


@rule(
    "every completed run was completed at its first attempt; otherwise this is stated"
)
def retried_runs(evidence: Evidence) -> Iterator[Finding]:
    """A run completed at a later attempt is a selected sample."""
    again = evidence.runs[evidence.runs["attempt"] > 1]
    if len(again):
        earlier = evidence.rows[evidence.rows["run_id"].isin(again["run_id"])]
        earlier = earlier[earlier["status"] != "completed"]
        before = _statuses(earlier) if len(earlier) else "without a row of what came"
        yield finding(
            "note"
            if len(earlier) and "diverged" not in set(earlier["status"])
            else "warning",
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
    # First: which runs lack epochs is known when they are read.
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
    if not isinstance(until, Mapping) or not isinstance(
        until.get("ci_width"), int | float
    ):
        return
    asked = float(until["ci_width"])
    level = partial(level_of, evidence.results.study)
    logs = {
        place: np.log(own["train_s"].to_numpy(dtype=float))
        for place, own in timed(evidence.results).groupby(CELL, dropna=False)
        if len(own) > 1
    }
    widths = {
        place: float(relative_width(own, level(len(own))))
        for place, own in logs.items()
    }
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
