"""Rules about how much work an epoch is: steps and batches that differ where they should not."""

from __future__ import annotations

from collections.abc import Iterator

from scalebench.analysis.cell_names import listed, place
from scalebench.analysis.findings import Finding
from scalebench.analysis.grouping import PER_BATCH
from scalebench.analysis.methodology.base import RULES, Evidence, Rule
from scalebench.formatting import counted


@RULES.add
class ReducedBatch(Rule):
    """A shard smaller than the batch makes the batch smaller: another problem at those worker counts."""

    name = "reduced-batch"
    summary = "the batch that is said to stay the same does so at every worker count"

    def findings(self, evidence: Evidence) -> Iterator[Finding]:
        runs = evidence.runs
        column = "batch_per_worker" if (runs["batch_policy"] == "per_worker").all() else "batch_global"
        if runs[column].nunique() > 1:
            usual = runs[column].max()
            changed = runs[runs[column] != usual]
            values = listed(sorted(changed[column].dropna().unique()))
            yield self.finding(
                "warning",
                f"{column} is {values} rather than {usual} at some worker counts: their shards hold no more",
                place(changed),
                "leave these worker counts out, or take a smaller batch or a larger data set",
            )


@RULES.add
class UnequalSteps(Rule):
    """At one worker count all strategies have to take the same optimizer steps, or the one with fewer does less."""

    name = "unequal-steps"
    summary = "at each worker count all strategies take the same optimizer steps per epoch"

    def findings(self, evidence: Evidence) -> Iterator[Finding]:
        runs = evidence.runs[evidence.runs["steps_per_epoch"].notna()]
        usual = runs[runs["strategy"].isin(PER_BATCH)].groupby(["execution", "workers"])["steps_per_epoch"].max()
        fallback = runs.groupby(["execution", "workers"])["steps_per_epoch"].max()
        expected = usual.reindex(fallback.index).fillna(fallback).rename("expected").reset_index()
        runs = runs.merge(expected, on=["execution", "workers"])
        other = runs[runs["steps_per_epoch"] != runs["expected"]]
        if len(other):
            share = (other["steps_per_epoch"] / other["expected"]).astype(float)
            worst = other.iloc[int((share - 1).abs().to_numpy().argmax())]
            yield self.finding(
                "warning",
                f"steps per epoch differ between strategies: {worst['label']} takes {worst['steps_per_epoch']} at "
                f"{counted(worst['workers'], 'worker')} where the baselines take {worst['expected']}",
                place(other),
                "compare times at equal steps, or time to a target metric; state the steps beside each time",
            )


@RULES.add
class FallingSteps(Rule):
    """At a fixed batch per worker an epoch at K workers has K-fold fewer optimizer steps than at one."""

    name = "falling-steps"
    summary = "where optimizer steps per epoch fall with the worker count, that is said"

    def findings(self, evidence: Evidence) -> Iterator[Finding]:
        runs = evidence.runs[evidence.runs["steps_per_epoch"].notna()]
        if (runs["scaling"] == "weak").any() or runs["workers"].nunique() < 2:
            return
        least, most = runs["workers"].min(), runs["workers"].max()
        first, last = (runs[runs["workers"] == count]["steps_per_epoch"].median() for count in (least, most))
        if last < 0.9 * first:
            yield self.finding(
                "note",
                f"steps per epoch fall from {first:.0f} at {counted(int(least), 'worker')} to {last:.0f} at {most}: "
                "equal epochs are not equal training",
                "all strategies",
                "state the steps in the caption, and show the metric or the time to a target beside each time",
            )


@RULES.add
class FewSteps(Rule):
    """Averaging every H steps can hide at most 1 - 1/H of the communication of averaging every step."""

    name = "few-steps"
    summary = "a strategy that synchronises seldom has at least 8 steps between synchronisations"
    least: int = 8

    def findings(self, evidence: Evidence) -> Iterator[Finding]:
        runs = evidence.runs
        rare = runs[~runs["strategy"].isin(PER_BATCH) & (runs["sync_unit"] == "epoch") & (runs["workers"] > 1)]
        rare = rare[(rare["syncs"] > 0) & (rare["optimizer_steps"] > 0)]
        between = (rare["optimizer_steps"] / rare["syncs"]).astype(float)
        few = rare[between < self.least]
        if len(few):
            least = between.min()
            steps = f"{least:.3g} step{'' if least == 1 else 's'}"
            yield self.finding(
                "warning",
                f"as few as {steps} between synchronisations: at most {100 * (1 - 1 / least):.0f} % of the "
                "communication can be saved there",
                place(few),
                "take fewer workers, a smaller batch or a larger data set, or state this ceiling",
            )
