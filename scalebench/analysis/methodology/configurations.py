"""Rules about what runs of one study must have in common. Hoefler and Belli 2015, rule 9."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd

from scalebench.analysis.cell_names import listed, place
from scalebench.analysis.findings import Finding
from scalebench.analysis.loading import CONDITION
from scalebench.analysis.methodology.base import RULES, Evidence, Rule
from scalebench.formatting import counted


@RULES.add
class MixedBatchPolicies(Rule):
    """At a fixed batch per worker the optimizer steps fall with the worker count, at a fixed global batch not."""

    name = "mixed-batch-policies"
    summary = "all runs keep the same batch fixed, per worker or global"

    def findings(self, evidence: Evidence) -> Iterator[Finding]:
        counts = evidence.rows["batch_policy"].value_counts()
        if len(counts) > 1:
            yield self.finding(
                "error",
                f"two scaling questions in one folder: batch_policy is {_shares(evidence.rows['batch_policy'])}",
                place(_rarest(evidence.rows, "batch_policy")),
                "give each batch policy a study of its own (--name, --batch-per-worker or --batch-global)",
            )


@RULES.add
class MixedConfigurations(Rule):
    """Whatever else runs of one study share: model, data, learning rate, epochs, precision ..."""

    name = "mixed-configurations"
    summary = "all runs share model, data, optimizer, learning rate, epochs and precision"

    def findings(self, evidence: Evidence) -> Iterator[Finding]:
        rows = evidence.rows
        shared = [
            *(name for name in CONDITION if name != "batch_policy"),
            "dataset_sha256",
            "n_test",
            "parameters",
            "target_metric",
        ]
        if (rows["scaling"] == "strong").all():
            shared.append("n_train")
        for column in shared:
            if rows[column].nunique() > 1:
                yield self.finding(
                    "error",
                    f"{column} is {_shares(rows[column])}; statistics use the latest runs' only, or mix them",
                    place(_rarest(rows, column)),
                    "give each configuration a study of its own (--name)",
                )


@RULES.add
class DuplicateRuns(Rule):
    """One repetition of a cell that two rows claim, under one name or two: folders that were joined by hand."""

    name = "duplicate-runs"
    summary = "no two rows are the same repetition of the same cell"

    def findings(self, evidence: Evidence) -> Iterator[Finding]:
        twice = evidence.results.repeated
        if len(twice):
            yield self.finding(
                "error",
                f"{counted(len(twice), 'row')} {'gives' if len(twice) == 1 else 'give'} a repetition of a cell that "
                "another row gives too: of such only the last counts",
                place(twice),
                "keep one study per folder; remove the rows that came from elsewhere",
            )


@RULES.add
class MixedExecutions(Rule):
    """Measured and simulated times are two kinds of number: never joined by a line, never divided."""

    name = "mixed-executions"
    summary = "each row says how its time was obtained, and no claim joins two ways"

    def findings(self, evidence: Evidence) -> Iterator[Finding]:
        runs = evidence.runs
        counts = runs.groupby(["label", "execution"])["workers"].nunique().groupby("label").max()
        torn = counts.index[counts < runs.groupby("label")["workers"].nunique()]
        if len(torn):
            yield self.finding(
                "warning",
                f"no one execution covers all worker counts of {listed(torn)}: a curve over them joins two",
                place(runs[runs["label"].isin(torn)]),
                "run one execution at all worker counts, as --execution auto does with virtual",
            )
        kinds = {str(kind): own["workers"].unique() for kind, own in runs.groupby("execution")}
        if len(kinds) > 1:
            spans = ", ".join(f"{kind} at {listed(sorted(at))} workers" for kind, at in kinds.items())
            yield self.finding(
                "note",
                f"times of {len(kinds)} kinds: {spans}",
                "all cells",
                "say which kind each number is; join no two kinds by a line or a ratio",
            )


def _shares(values: pd.Series[Any]) -> str:
    """`0.1 (126 runs), 0.5 (63 runs)`."""
    counts = values.value_counts(dropna=False)
    return listed((f"{_known(value)} ({counted(int(count), 'run')})" for value, count in counts.items()), 4)


def _known(value: object) -> str:
    return "empty" if pd.isna(value) else str(value)  # type: ignore[call-overload]


def _rarest(rows: pd.DataFrame, column: str) -> pd.DataFrame:
    """The rows that do not have the most frequent value."""
    usual = rows[column].value_counts().index[0]
    return rows[[pd.isna(value) or value != usual for value in rows[column]]]
