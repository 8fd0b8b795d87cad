"""Rules about equal conditions: configuration, executions, batches and steps, machine, code and packages.

Hoefler and Belli 2015, rule 9.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd

from scalebench.analysis import environment
from scalebench.analysis.loading import conditions
from scalebench.analysis.methodology import Evidence, Finding, finding, rule
from scalebench.analysis.tuning_trials import tuned_cells
from scalebench.formatting import counted, listed
from scalebench.study.choices import PER_BATCH
from scalebench.study.spec import SIMULATED


@rule("all runs share model, data, optimizer, learning rate, epochs and precision")
def mixed_configurations(evidence: Evidence) -> Iterator[Finding]:
    """Runs of one study share model, data, learning rate, epochs, precision and other conditions."""
    # All rows: statistics have left out other configurations already.
    rows = evidence.rows
    shared = [
        *conditions(rows),
        "dataset_sha256",
        "n_test",
        "parameters",
        "target_metric",
    ]
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
    counts = (
        runs.groupby(["label", "execution"])["workers"].nunique().groupby("label").max()
    )
    torn = counts.index[counts < runs.groupby("label")["workers"].nunique()]
    if len(torn):
        yield finding(
            "warning",
            f"no one execution covers all worker counts of {listed(torn)}: a curve over them joins two",
            runs[runs["label"].isin(torn)],
            "run one execution at all worker counts, as --execution auto does with virtual",
        )
    kinds = {
        str(kind): workers.unique()
        for kind, workers in runs.groupby("execution")["workers"]
    }
    if len(kinds) > 1:
        spans = ", ".join(
            f"{kind} at {listed(sorted(at))} worker{'s' * (set(at) != {1})}"
            for kind, at in kinds.items()
        )
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
    column = (
        "batch_per_worker"
        if (runs["batch_policy"] == "per_worker").all()
        else "batch_global"
    )
    if runs[column].nunique() > 1:
        # Only shards that are too small change a batch, and these make it smaller.
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
    usual = (
        runs[runs["strategy"].isin(PER_BATCH)]
        .groupby(["execution", "workers"])["steps_per_epoch"]
        .max()
    )
    fallback = runs.groupby(["execution", "workers"])["steps_per_epoch"].max()
    expected = (
        usual.reindex(fallback.index).fillna(fallback).rename("expected").reset_index()
    )
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
    least = runs["workers"].min()
    most = runs["workers"].max()
    first, last = (
        runs[runs["workers"] == count]["steps_per_epoch"].median()
        for count in (least, most)
    )
    # A rest of samples makes a step more or less, without meaning.
    if last < 0.9 * first:
        yield finding(
            "note",
            f"steps per epoch fall from {first:.0f} at {counted(int(least), 'worker')} to {last:.0f} at {most}: "
            "equal epochs are not equal training",
            "all strategies",
            "state the steps in the caption, and show the metric or the time to a target beside each time",
        )


@rule(
    "a strategy that synchronises seldom has at least 8 steps between synchronisations"
)
def few_steps(evidence: Evidence, least: int = 8) -> Iterator[Finding]:
    """Averaging every H steps can hide at most 1 - 1/H of the communication of averaging every step."""
    runs = evidence.runs
    by_epochs = ~runs["strategy"].isin(PER_BATCH) & (runs["sync_unit"] == "epoch")
    rare = runs[by_epochs & (runs["workers"] > 1)]
    rare = rare[(rare["syncs"] > 0) & (rare["optimizer_steps"] > 0)]
    between = (rare["optimizer_steps"] / rare["syncs"]).astype(float)
    few = rare[between < least]
    if len(few):
        lowest = between.min()
        steps = "step" if lowest == 1 else "steps"
        yield finding(
            "warning",
            f"as few as {lowest:.3g} {steps} between synchronisations: at most {100 * max(0, 1 - 1 / lowest):.0f} % of "
            "the communication can be saved there",
            few,
            "take fewer workers, a smaller batch or a larger data set, or state this ceiling",
        )


def _shares(values: pd.Series[Any]) -> str:
    """`0.1 (126 runs), 0.5 (63 runs)`."""
    counts = values.value_counts(dropna=False)
    return listed(
        (f"{value} ({counted(int(count), 'run')})" for value, count in counts.items()),
        4,
    )


def _rarest(rows: pd.DataFrame, column: str) -> pd.DataFrame:
    """Rows without the most frequent value."""
    usual = rows[column].mode().iloc[0]
    return rows[rows[column].ne(usual).fillna(True).astype(bool)]


@rule("every strategy has its own learning rate, found by equally many trials")
def untuned(evidence: Evidence) -> Iterator[Finding]:
    """Strategies that share one learning rate are compared at the one that suits some of them best."""
    runs = evidence.runs[evidence.runs["final_metric"].notna()]
    # With a single strategy no order is at stake.
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


@rule("all runs were made by one commit of scalebench")
def mixed_commits(evidence: Evidence) -> Iterator[Finding]:
    """Runs of two versions of the code are two experiments."""
    commits = evidence.runs["git_commit"]
    # Rows without a commit are of code that nobody can name: beside others, of other
    # code.
    if commits.nunique() > 1 or (commits.isna().any() and commits.notna().any()):
        counts = commits.fillna("no commit").str[:10].value_counts()
        yield finding(
            "error",
            f"runs of {len(counts)} commits: "
            + listed(
                (
                    f"{commit} ({counted(int(count), 'run')})"
                    for commit, count in counts.items()
                ),
                4,
            ),
            evidence.runs[commits != commits.mode().iloc[0]],
            "run the whole study at one commit, or one study for each",
        )


@rule("the checkout that ran had no changes beside its commit")
def dirty_commit(evidence: Evidence) -> Iterator[Finding]:
    """A commit does not identify the code of a checkout with uncommitted changes."""
    dirty = evidence.runs[evidence.runs["git_dirty"].fillna(False).astype(bool)]
    if len(dirty):
        yield finding(
            "warning",
            f"{counted(len(dirty), 'run')} of a checkout with uncommitted changes: no commit says what ran",
            dirty,
            "commit, then run the study anew (--new)",
        )


@rule("all measured runs of a study were made on one machine, or on equal ones")
def mixed_machines(evidence: Evidence) -> Iterator[Finding]:
    """Times of different machines are not comparable; virtual times do not depend on the machine."""
    runs = evidence.measured
    machines = environment.machines_of(runs, evidence.provenance)
    kinds = {
        host: environment.hardware(facts) if facts else None
        for host, facts in machines.items()
    }
    alike = None not in kinds.values() and len(set(kinds.values())) == 1
    several = runs["host_hash"].nunique() > 1
    if len(kinds) > 1 and (several or not alike):  # equal nodes of one job are fine
        what = "machines of one kind" if alike else "machines"
        yield finding(
            "warning" if alike else "error",
            f"measured on {len(kinds)} {what}: "
            + listed(
                (f"{host} ({kind or 'not described'})" for host, kind in kinds.items()),
                4,
            ),
            runs[runs["host_hash"] != runs["host_hash"].mode().iloc[0]]
            if several
            else runs,
            "measure the whole study on one machine, or say that the nodes are equal and how that was checked",
        )


@rule("all runs used the same package versions")
def mixed_packages(evidence: Evidence) -> Iterator[Finding]:
    """Versions of libraries affect times and metrics."""
    runs = evidence.runs
    hashes = list(runs["packages_hash"].dropna().unique())
    if len(hashes) < 2:
        return
    changed = environment.changed_packages(evidence.provenance, hashes)
    decisive = [name for name in changed if name in environment.DECISIVE]
    what = [f"{name} {' / '.join(versions)}" for name, versions in changed.items()]
    yield finding(
        "error" if decisive else "warning",
        f"{len(hashes)} sets of packages: "
        + (listed(what, 6) if what else "provenance/ does not say which differ"),
        runs[runs["packages_hash"] != runs["packages_hash"].mode().iloc[0]],
        "run the whole study in one environment (constraints.txt pins it)",
    )


@rule(
    "the resolved study, the machine and packages of every run and the calibration are on record"
)
def no_provenance(evidence: Evidence) -> Iterator[Finding]:
    """Study, machine, packages and calibration are needed to repeat a study."""
    if not evidence.results.study:
        yield finding(
            "warning",
            "study.yaml is missing: what was run is known only as far as the rows tell",
            str(evidence.results.folder),
            "keep the whole folder that `scalebench run` wrote",
        )
    runs = evidence.runs
    unknown = runs[
        ~runs["provenance"].isin({facts["provenance"] for facts in evidence.provenance})
    ]
    if len(unknown):
        yield finding(
            "warning",
            f"nothing in provenance/ describes the machine and packages of {counted(len(unknown), 'run')}",
            unknown,
            "keep the whole folder that `scalebench run` wrote",
        )
    charged = runs[
        runs["execution"].isin(SIMULATED) & (runs["cluster"] == "this-machine")
    ]
    if len(charged) and environment.calibration_in(evidence.results.folder) is None:
        yield finding(
            "warning",
            f"no calibration.json that can be read: nothing says what {counted(len(charged), 'virtual run')} cost, nor "
            "gives the same times again",
            charged,
            "keep the whole folder that `scalebench run` wrote",
        )


@rule("measured runs had processors at a fixed clock rate, as far as the machine says")
def frequency_scaling(evidence: Evidence) -> Iterator[Finding]:
    """With a governor other than `performance` the clock rate follows the load, and times depend on earlier load."""
    governors = {
        str(facts["cpu"]["governor"])
        for facts in environment.machines_of(
            evidence.measured, evidence.provenance
        ).values()
        if facts and (facts.get("cpu") or {}).get("governor")
    } - {"performance"}
    if governors:
        yield finding(
            "warning",
            f"the processors' governor is {listed(sorted(governors))}: clock rates follow the load",
            evidence.measured,
            "cpupower frequency-set -g performance, or state the governor",
        )


@rule("no worker of a dask scheduler gave the memory of each step back to the kernel")
def trimmed_memory(evidence: Evidence) -> Iterator[Finding]:
    """dask sets a variable with which torch asks the kernel for the memory of every step anew."""
    slowed = evidence.runs[evidence.runs["malloc_trim_bytes"].notna()]
    if len(slowed):
        variable = f"MALLOC_TRIM_THRESHOLD_={slowed['malloc_trim_bytes'].min():.0f}"
        yield finding(
            "warning",
            f"{counted(len(slowed), 'run')} by dask workers with {variable}, which slows torch",
            slowed,
            "leave it out of distributed.nanny.pre-spawn-environ where the scheduler's workers are started",
        )


@rule("every block of tasks was trained once")
def retrained_blocks(evidence: Evidence) -> Iterator[Finding]:
    """The time of a run holds what a worker that died had done of its block."""
    again = evidence.runs[evidence.runs["blocks_retrained"].fillna(0) > 0]
    if len(again):
        blocks = counted(int(again["blocks_retrained"].sum()), "block")
        yield finding(
            "warning",
            f"{counted(len(again), 'run')} with {blocks} that were trained again, as a worker died: times hold both",
            again,
            "run them again (scalebench run --new), or leave them out of comparisons",
        )
