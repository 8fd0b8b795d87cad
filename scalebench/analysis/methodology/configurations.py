"""Rules about equal conditions: configuration, executions, batches and steps (Hoefler and Belli 2015, rule 9)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd

from scalebench.analysis.loading import conditions
from scalebench.analysis.methodology import Evidence, Finding, finding, rule
from scalebench.analysis.tuning import tuned_cells
from scalebench.formatting import counted, listed
from scalebench.study.choices import PER_BATCH


@rule("all runs share model, data, optimizer, learning rate, epochs and precision")
def mixed_configurations(evidence: Evidence) -> Iterator[Finding]:
    """Runs of one study share model, data, learning rate, epochs, precision and other conditions."""
    rows = evidence.rows
    shared = [*conditions(rows), "dataset_sha256", "n_test", "parameters", "target_metric"]
    if (rows["scaling"] == "strong").all():
        shared.append("n_train")
    for column in shared:
        if rows[column].nunique() > 1:
            yield finding(
                "error",
                f"{column} is {_shares(rows[column])}; statistics use the latest runs' only, or mix them",
                _rarest(rows, column),
                "give each configuration a study of its own (--name)",
            )


@rule("each row says how its time was obtained, and no claim joins two ways")
def mixed_executions(evidence: Evidence) -> Iterator[Finding]:
    """Measured and simulated times must not be joined by a line or divided."""
    runs = evidence.runs
    counts = runs.groupby(["label", "execution"])["workers"].nunique().groupby("label").max()
    torn = counts.index[counts < runs.groupby("label")["workers"].nunique()]
    if len(torn):
        yield finding(
            "warning",
            f"no one execution covers all worker counts of {listed(torn)}: a curve over them joins two",
            runs[runs["label"].isin(torn)],
            "run one execution at all worker counts, as --execution auto does with virtual",
        )
    kinds = {str(kind): own["workers"].unique() for kind, own in runs.groupby("execution")}
    if len(kinds) > 1:
        spans = ", ".join(f"{kind} at {listed(sorted(at))} workers" for kind, at in kinds.items())
        yield finding(
            "note",
            f"times of {len(kinds)} kinds: {spans}",
            "all cells",
            "say which kind each number is; join no two kinds by a line or a ratio",
        )


@rule("the batch stated as fixed is fixed at every worker count")
def reduced_batch(evidence: Evidence) -> Iterator[Finding]:
    """A shard smaller than the batch reduces the batch, which changes the problem at those worker counts."""
    runs = evidence.runs
    column = "batch_per_worker" if (runs["batch_policy"] == "per_worker").all() else "batch_global"
    if runs[column].nunique() > 1:
        usual = runs[column].max()
        changed = runs[runs[column] != usual]
        values = listed(sorted(changed[column].dropna().unique()))
        yield finding(
            "warning",
            f"{column} is {values} rather than {usual} at some worker counts: their shards hold no more",
            changed,
            "leave these worker counts out, or take a smaller batch or a larger data set",
        )


@rule("at each worker count all strategies take the same optimizer steps per epoch")
def unequal_steps(evidence: Evidence) -> Iterator[Finding]:
    """At one worker count all strategies have to take the same number of optimizer steps."""
    runs = evidence.runs[evidence.runs["steps_per_epoch"].notna()]
    usual = runs[runs["strategy"].isin(PER_BATCH)].groupby(["execution", "workers"])["steps_per_epoch"].max()
    fallback = runs.groupby(["execution", "workers"])["steps_per_epoch"].max()
    expected = usual.reindex(fallback.index).fillna(fallback).rename("expected").reset_index()
    runs = runs.merge(expected, on=["execution", "workers"])
    other = runs[runs["steps_per_epoch"] != runs["expected"]]
    if len(other):
        share = (other["steps_per_epoch"] / other["expected"]).astype(float)
        worst = other.iloc[int((share - 1).abs().to_numpy().argmax())]
        yield finding(
            "warning",
            f"steps per epoch differ between strategies: {worst['label']} takes {worst['steps_per_epoch']} at "
            f"{counted(worst['workers'], 'worker')} where the baselines take {worst['expected']}",
            other,
            "compare times at equal steps, or time to a target metric; state the steps beside each time",
        )


@rule("where optimizer steps per epoch fall with the worker count, this is stated")
def falling_steps(evidence: Evidence) -> Iterator[Finding]:
    """At a fixed batch per worker an epoch at K workers has K-fold fewer optimizer steps than at one."""
    runs = evidence.runs[evidence.runs["steps_per_epoch"].notna()]
    if (runs["scaling"] == "weak").any() or runs["workers"].nunique() < 2:
        return
    least, most = runs["workers"].min(), runs["workers"].max()
    first, last = (runs[runs["workers"] == count]["steps_per_epoch"].median() for count in (least, most))
    if last < 0.9 * first:
        yield finding(
            "note",
            f"steps per epoch fall from {first:.0f} at {counted(int(least), 'worker')} to {last:.0f} at {most}: "
            "equal epochs are not equal training",
            "all strategies",
            "state the steps in the caption, and show the metric or the time to a target beside each time",
        )


@rule("a strategy that synchronises seldom has at least 8 steps between synchronisations")
def few_steps(evidence: Evidence, least: int = 8) -> Iterator[Finding]:
    """Averaging every H steps can hide at most 1 - 1/H of the communication of averaging every step."""
    runs = evidence.runs
    rare = runs[~runs["strategy"].isin(PER_BATCH) & (runs["sync_unit"] == "epoch") & (runs["workers"] > 1)]
    rare = rare[(rare["syncs"] > 0) & (rare["optimizer_steps"] > 0)]
    between = (rare["optimizer_steps"] / rare["syncs"]).astype(float)
    few = rare[between < least]
    if len(few):
        lowest = between.min()
        yield finding(
            "warning",
            f"as few as {lowest:.3g} steps between synchronisations: at most {100 * (1 - 1 / lowest):.0f} % of the "
            "communication can be saved there",
            few,
            "take fewer workers, a smaller batch or a larger data set, or state this ceiling",
        )


def _shares(values: pd.Series[Any]) -> str:
    """`0.1 (126 runs), 0.5 (63 runs)`."""
    counts = values.value_counts(dropna=False)
    return listed((f"{value} ({counted(int(count), 'run')})" for value, count in counts.items()), 4)


def _rarest(rows: pd.DataFrame, column: str) -> pd.DataFrame:
    """Rows without the most frequent value."""
    return rows[rows[column].ne(rows[column].mode().iloc[0]).fillna(True).astype(bool)]


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
