"""What a rule of method is, what it looks at, and how it names the place of what it found."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from scalebench.analysis import claims
from scalebench.analysis.comparing import ratios
from scalebench.analysis.findings import Finding, Severity
from scalebench.analysis.grouping import cells
from scalebench.analysis.reading import Results, load, read_runs
from scalebench.analysis.surroundings import provenance_in
from scalebench.analysis.testing import MEASURED
from scalebench.errors import UsageError
from scalebench.records.progress import Progress, group_of, progress_of
from scalebench.registry import Choice, Registry

_RATIOS = [
    *("execution", "engine", "label", "strategy", "workers", "oversubscribed", "baseline", "note"),
    *("ratio", "ratio_high", "efficiency", "efficiency_low"),
]
_SHOWN = 4  # groups of cells in one place


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


def place(runs: pd.DataFrame) -> str:
    """The cells of `runs` in few words: `ddp, horovod at 2, 4 workers (virtual); ddp at 2 workers (native gloo)`."""
    at: dict[tuple[str, str], list[int]] = {}
    cells = runs[["execution", "engine", "label", "workers"]].drop_duplicates()
    for execution, engine, label, workers in cells.itertuples(index=False):
        at.setdefault((group_of(execution, engine), label), []).append(int(workers))
    together: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    for (kind, label), counts in at.items():
        together.setdefault((kind, tuple(sorted(counts))), []).append(label)
    places = [f"{listed(sorted(labels))} at {_workers(counts)} ({kind})" for (kind, counts), labels in together.items()]
    more = [f"and {len(places) - _SHOWN} more"] if len(places) > _SHOWN + 1 else []
    return "; ".join(places[: _SHOWN if more else None] + more)


def listed(items: Iterable[object], most: int = 8) -> str:
    """`a, b, c`; of a long list the first and how many more."""
    texts = [str(item) for item in items]
    if len(texts) <= most:
        return ", ".join(texts)
    return f"{', '.join(texts[: most - 1])} and {len(texts) - most + 1} more"


def counted(number: int, noun: str) -> str:
    """`1 run`, `3 runs`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _workers(counts: tuple[int, ...]) -> str:
    return f"{listed(counts)} worker{'' if counts == (1,) else 's'}"
