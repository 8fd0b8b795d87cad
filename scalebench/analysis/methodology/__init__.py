"""Rules of method: warnings about what a study's results cannot support.

Each rule is one class, found by name. A new rule is one new class in this package, or in another package through the
entry point group `scalebench.rules`. `check` applies all of them to a study's folder; `quality.findings` applies those
that need the statistics only, for the summary of a study and for figures.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

import pandas as pd

from scalebench.analysis.comparing import ratios
from scalebench.analysis.environment import provenance_in
from scalebench.analysis.grouping import cells
from scalebench.analysis.loading import Results, load, read_runs
from scalebench.analysis.rounds import MEASURED
from scalebench.errors import UsageError
from scalebench.records.progress import Progress, progress_of
from scalebench.registry import Choice, Registry

Severity = Literal["error", "warning", "note"]  # the gravest first
SEVERITIES: tuple[Severity, ...] = get_args(Severity)


@dataclass(frozen=True)
class Finding:
    """One remark on results: `rule` is the name of its rule, `where` the runs or cells concerned."""

    severity: Severity
    rule: str
    what: str
    where: str
    fix: str


@dataclass(frozen=True)
class Evidence:
    """The records and statistics of one study, each read or computed when a rule asks for it."""

    results: Results

    @property
    def runs(self) -> pd.DataFrame:
        """Completed runs that enter statistics."""
        return self.results.completed

    @property
    def measured(self) -> pd.DataFrame:
        """Completed runs with times of a clock."""
        return self.runs[self.runs["execution"].isin(MEASURED)]

    @cached_property
    def rows(self) -> pd.DataFrame:
        """All rows of runs.csv: every attempt and configuration."""
        return read_runs(self.results.folder)

    @cached_property
    def progress(self) -> Progress:
        """Planned, completed and remaining runs."""
        return progress_of(self.results.folder)

    @cached_property
    def provenance(self) -> list[dict[str, Any]]:
        """Files of provenance/."""
        return provenance_in(self.results.folder)

    @cached_property
    def cells(self) -> pd.DataFrame:
        """The table `cells`."""
        return cells(self.results)

    @cached_property
    def ratios(self) -> pd.DataFrame:
        """The table `ratios`."""
        return ratios(self.results)


class Rule(Choice):
    """One rule; its fields are its thresholds."""

    def findings(self, evidence: Evidence) -> Iterator[Finding]:
        """Violations of the rule, one finding per matter."""
        raise NotImplementedError

    def finding(self, severity: Severity, what: str, where: str, fix: str) -> Finding:
        """A finding of this rule."""
        return Finding(severity, self.name, what, where, fix)


RULES: Registry[Rule] = Registry("rule", UsageError, "scalebench.analysis.methodology", "scalebench.rules")


@dataclass(frozen=True)
class Report:
    """Findings, the gravest first, and the names of rules that `passed` or were `ignored`."""

    findings: list[Finding]
    passed: list[str]
    ignored: list[str]

    def count(self, severity: str) -> int:
        """Number of findings of `severity`."""
        return sum(finding.severity == severity for finding in self.findings)


def evidence_in(folder: Path | str) -> Evidence:
    """The evidence of the study in `folder`.

    Raises:
        ResultsError: no records there, another schema version, or a damaged cell.
    """
    return Evidence(load(folder))


def check(study: Evidence | Path | str, ignore: Collection[str] = ()) -> Report:
    """Apply every rule except those in `ignore` to the study in a folder, or to its evidence.

    Raises:
        UsageError: a name in `ignore` is not that of a rule.
        ResultsError: the folder cannot be read.
    """
    ignored = sorted({RULES.find(name).name for name in ignore})
    evidence = study if isinstance(study, Evidence) else evidence_in(study)
    found = {name: list(RULES.create(name, {}).findings(evidence)) for name in RULES.names() if name not in ignored}
    passed = [name for name, own in found.items() if not own]
    return Report(by_severity(finding for own in found.values() for finding in own), passed, ignored)


def by_severity(findings: Iterator[Finding]) -> list[Finding]:
    """Sort findings, the gravest first."""
    return sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity))
