"""What a reader of results should know before believing them: one form for warnings, checks and reports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Severity = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")  # the gravest first


@dataclass(frozen=True)
class Finding:
    """One remark on results: `rule` names the check that made it, `where` the runs or cells it is about."""

    severity: Severity
    rule: str
    what: str
    where: str
    fix: str
