"""What a rule of method is, and what it looks at."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from scalebench.analysis import quality as claims
from scalebench.analysis.comparing import ratios
from scalebench.analysis.environment import provenance_in
from scalebench.analysis.findings import Finding, Severity
from scalebench.analysis.grouping import cells
from scalebench.analysis.loading import Results, load, read_runs
from scalebench.analysis.testing import MEASURED
from scalebench.errors import UsageError
from scalebench.records.progress import Progress, progress_of
from scalebench.registry import Choice, Registry

_RATIOS = [
    *("execution", "engine", "label", "strategy", "workers", "oversubscribed", "baseline", "note"),
    *("ratio", "ratio_high", "efficiency", "efficiency_low"),
]


@dataclass(frozen=True)
class Evidence:
    """What a study left behind: what statistics use of it, and what they leave out.

    `rows` is all of runs.csv, every attempt and configuration; `provenance` the files of provenance/.
    """

    results: Results
    rows: pd.DataFrame
    progress: Progress
    provenance: list[dict[str, Any]] = field(default_factory=list)

    @property
    def runs(self) -> pd.DataFrame:
        """The completed runs that statistics use."""
        return self.results.completed

    @property
    def measured(self) -> pd.DataFrame:
        """Those whose times a clock gave."""
        return self.runs[self.runs["execution"].isin(MEASURED)]

    @cached_property
    def claims(self) -> list[Finding]:
        """What the repetitions cannot carry, of `claims.findings`."""
        return claims.findings(self.results)

    @cached_property
    def cells(self) -> pd.DataFrame:
        """One row per cell, of `cells`."""
        return cells(self.results)

    @cached_property
    def ratios(self) -> pd.DataFrame:
        """One row per cell and baseline, of `ratios`; without rows it has the columns that rules ask for."""
        table = ratios(self.results)
        return table if len(table) else pd.DataFrame(columns=_RATIOS)


def evidence_in(folder: Path | str) -> Evidence:
    """Everything that the study in `folder` left behind.

    Raises:
        ResultsError: no records there, another schema version, or a damaged cell.
    """
    folder = Path(folder)
    results = load(folder)
    return Evidence(results, read_runs(folder), progress_of(folder), provenance_in(folder))


class Rule(Choice):
    """One rule; its fields are its thresholds."""

    def findings(self, evidence: Evidence) -> Iterator[Finding]:
        """What breaks the rule: one finding per matter, however many runs it concerns."""
        raise NotImplementedError

    def finding(self, severity: Severity, what: str, where: str, fix: str) -> Finding:
        """A finding of this rule."""
        return Finding(severity, self.name, what, where, fix)


RULES: Registry[Rule] = Registry("rule", UsageError, "scalebench.analysis.methodology", "scalebench.rules")
