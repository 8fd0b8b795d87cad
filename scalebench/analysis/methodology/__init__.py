"""Rules of method: warnings about what a study's results cannot support.

Each rule is one function, found by its name. A new rule is one new function in this package, or in another package
through the entry point group `scalebench.rules`. `check` applies all of them to a study's folder; `times.findings`
applies those that need the statistics only, for the summary of a study and for figures.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, wraps
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeAlias, get_args

import pandas as pd

from scalebench.analysis.comparing import ratios
from scalebench.analysis.environment import provenance_in
from scalebench.analysis.grouping import cells
from scalebench.analysis.loading import Results, cells_in, load, read_runs
from scalebench.analysis.rounds import MEASURED
from scalebench.errors import UsageError
from scalebench.records.progress import Progress, progress_of
from scalebench.registry import Choice, Registry
from scalebench.study.cell import in_words

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
        return self.results.rows if len(self.results.rows) else read_runs(self.results.folder)

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


def finding(severity: Severity, what: str, where: pd.DataFrame | str, fix: str) -> Finding:
    """Return a finding about the cells of the runs `where`, or about what a text names."""
    return Finding(severity, "", what, where if isinstance(where, str) else in_words(cells_in(where)), fix)


Find: TypeAlias = Callable[[Evidence], Iterator[Finding]]


class Rule(Choice):
    """One rule of method."""

    find: ClassVar[Find]


RULES: Registry[Rule] = Registry("rule", UsageError, "scalebench.analysis.methodology", "scalebench.rules")


def rule(summary: str) -> Callable[[Callable[..., Iterator[Finding]]], Find]:
    """Register a function as a rule, `dirty_commit` as `dirty-commit`; thresholds are parameters with defaults."""

    def register(violations: Callable[..., Iterator[Finding]]) -> Find:
        name = violations.__name__.replace("_", "-")

        @wraps(violations)
        def find(evidence: Evidence) -> Iterator[Finding]:
            return (replace(found, rule=name) for found in violations(evidence))

        facts = {"__module__": violations.__module__, "name": name, "summary": summary, "find": staticmethod(find)}
        RULES.add(type(name, (Rule,), facts))
        return find

    return register


@dataclass(frozen=True)
class Report:
    """Findings, the gravest first, and the names of rules that `passed` or were `ignored`."""

    findings: list[Finding]
    passed: list[str]
    ignored: list[str]

    def count(self, severity: str) -> int:
        """Number of findings of `severity`."""
        return sum(finding.severity == severity for finding in self.findings)


def check(study: Evidence | Path | str, ignore: Collection[str] = ()) -> Report:
    """Apply every rule except those in `ignore` to the study in a folder, or to its evidence.

    Raises:
        UsageError: a name in `ignore` is not that of a rule.
        ResultsError: the folder cannot be read.
    """
    ignored = sorted({RULES.find(name).name for name in ignore})
    evidence = study if isinstance(study, Evidence) else Evidence(load(study))
    _ = evidence.progress  # which reads epochs.csv as bytes: before there is a table of it, too
    found = {name: list(RULES.find(name).find(evidence)) for name in RULES.names() if name not in ignored}
    passed = [name for name, own in found.items() if not own]
    return Report(by_severity(finding for own in found.values() for finding in own), passed, ignored)


def by_severity(findings: Iterator[Finding]) -> list[Finding]:
    """Sort findings, the gravest first."""
    return sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity))
