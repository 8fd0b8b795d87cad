"""Applies the rules to a study."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from scalebench.analysis.findings import SEVERITIES, Finding
from scalebench.analysis.methodology.base import RULES, Evidence, evidence_in


@dataclass(frozen=True)
class Report:
    """What the rules found, the gravest first; `passed` are those that found nothing, `ignored` those not asked."""

    findings: list[Finding]
    passed: list[str]
    ignored: list[str]

    def count(self, severity: str) -> int:
        """How many findings are of that severity."""
        return sum(finding.severity == severity for finding in self.findings)


def check(study: Evidence | Path | str, ignore: Collection[str] = ()) -> Report:
    """Apply every rule but those in `ignore` to the study in a folder, or to evidence that was read before.

    Raises:
        UsageError: a name in `ignore` is no rule's.
        ResultsError: the folder cannot be read.
    """
    ignored = sorted({RULES.find(name).name for name in ignore})
    evidence = study if isinstance(study, Evidence) else evidence_in(study)
    found: list[Finding] = []
    passed: list[str] = []
    for name in RULES.names():
        if name in ignored:
            continue
        own = list(RULES.create(name, {}).findings(evidence))
        found += own
        if not own:
            passed.append(name)
    found.sort(key=lambda finding: SEVERITIES.index(finding.severity))
    return Report(found, passed, ignored)
