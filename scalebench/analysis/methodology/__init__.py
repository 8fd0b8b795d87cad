"""Rules of method: warnings about what a study's results cannot support.

Each rule is one function, found by its name. A new rule is one new function in this
package, or in another package through the entry point group `scalebench.rules`. `check`
applies all of them to a study's folder; `findings` applies those that need the
statistics only, for the summary of a study and for figures.

The twelve rules are those of T. Hoefler, R. Belli: Scientific Benchmarking of Parallel
Computing Systems: twelve ways to tell the masses when reporting performance results. SC
'15, doi:10.1145/2807591.2807644. Paraphrased, each with how it is kept: by a check, by
construction, or by the author.
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

    @cached_property
    def measured(self) -> pd.DataFrame:
        """Completed runs with times of a clock."""
        return self.runs[self.runs["execution"].isin(MEASURED)]

    @cached_property
    def rows(self) -> pd.DataFrame:
        """All rows of runs.csv: every attempt and configuration."""
        return (
            self.results.rows
            if len(self.results.rows)
            else read_runs(self.results.folder)
        )

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


def finding(
    severity: Severity, what: str, where: pd.DataFrame | str, fix: str
) -> Finding:
    """Return a finding about the cells of the runs `where`, or about what a text names."""
    return Finding(
        severity,
        "",
        what,
        where if isinstance(where, str) else in_words(cells_in(where)),
        fix,
    )


Find: TypeAlias = Callable[[Evidence], Iterator[Finding]]


class Rule(Choice):
    """One rule of method."""

    find: ClassVar[Find]


RULES: Registry[Rule] = Registry(
    "rule", UsageError, "scalebench.analysis.methodology", "scalebench.rules"
)


# They need the statistics only, in the order in which equally grave findings stand.
OF_REPETITIONS = (
    "few-runs",
    "spread",
    "odd-runs",
    "two-groups",
    "drift",
    "runs-apart",
    "virtual-error",
    "unsettled",
)


def rule(summary: str) -> Callable[[Callable[..., Iterator[Finding]]], Find]:
    """Register a function as a rule, `dirty_commit` as `dirty-commit`; thresholds are parameters with defaults."""

    def register(violations: Callable[..., Iterator[Finding]]) -> Find:
        name = violations.__name__.replace("_", "-")

        @wraps(violations)
        def find(evidence: Evidence) -> Iterator[Finding]:
            # A finding is made without the name of its rule, which is known here.
            return (replace(found, rule=name) for found in violations(evidence))

        facts = {
            "__module__": violations.__module__,
            "name": name,
            "summary": summary,
            "find": staticmethod(find),
        }
        # A class for each function, as registries hold classes.
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
    # which reads epochs.csv as bytes: before there is a table of it, too
    _ = evidence.progress
    found = {
        name: list(RULES.find(name).find(evidence))
        for name in RULES.names()
        if name not in ignored
    }
    passed = [name for name, own in found.items() if not own]
    return Report(
        by_severity(finding for own in found.values() for finding in own),
        passed,
        ignored,
    )


def findings(results: Results) -> list[Finding]:
    """Findings about the repetitions of completed runs, the gravest first."""
    evidence = Evidence(results)
    return by_severity(
        finding
        for name in OF_REPETITIONS
        for finding in RULES.find(name).find(evidence)
    )


def by_severity(findings: Iterator[Finding]) -> list[Finding]:
    """Sort findings, the gravest first."""
    return sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity))


@dataclass(frozen=True)
class OneOfTwelve:
    """One of the twelve rules: `checked` by rules of `scalebench check`, kept `by_construction`, or left `to_you`."""

    number: int
    rule: str
    checked: tuple[str, ...] = ()
    by_construction: str = ""
    to_you: str = ""


TWELVE = (
    OneOfTwelve(
        1,
        "Say what a speedup's base case is, and its absolute time.",
        ("speedup-base", "reduction-base", "weak-baseline", "superlinear"),
        "the base is always serial on one worker of the same execution; no ratio is printed without its baseline",
        "that the serial base is a good one: no model or library option would make it faster",
    ),
    OneOfTwelve(
        2,
        "Say why only a part of a benchmark, or of the system, was used.",
        ("failed-runs", "retried-runs", "unfinished", "missing-epochs"),
        to_you="the reason for the worker counts, strategies, data and share of the machine that you chose",
    ),
    OneOfTwelve(
        3,
        "Summarise costs by the arithmetic mean, rates by the harmonic one.",
        by_construction="no rate is summarised; of times the geometric mean (they are compared as ratios), the "
        "arithmetic mean and the median stand side by side in the table of cells",
    ),
    OneOfTwelve(
        4,
        "Do not summarise ratios; summarise the times they are made of.",
        by_construction="a ratio of cells is the ratio of the mean times shown; ratios of different cells are never "
        "averaged",
    ),
    OneOfTwelve(
        5,
        "Say whether values are deterministic; if not, give confidence intervals.",
        ("few-runs", "mixed-executions", "virtual-error", "still-wide"),
        "measured times and metrics have 95 % intervals; virtual ones are named for what their repetitions vary in",
    ),
    OneOfTwelve(
        6,
        "Do not assume a normal distribution without looking.",
        ("odd-runs", "two-groups", "drift"),
        "times are compared on a log scale, tests are exact rank tests, every interval's coverage is simulated",
    ),
    OneOfTwelve(
        7,
        "Compare nondeterministic values by sound statistics.",
        ("few-runs", "runs-apart", "unsettled"),
        "differences are paired by round, tests adjusted by Holm and offered only where they can reach their level",
    ),
    OneOfTwelve(
        8,
        "Ask whether mean or median is what matters, or another percentile.",
        ("spread", "odd-runs"),
        "median and quartiles stand beside the means",
        "whether your question is about the typical run or the slowest one",
    ),
    OneOfTwelve(
        9,
        "Document all factors, their levels and the complete set-up.",
        (
            "mixed-configurations",
            "mixed-commits",
            "dirty-commit",
            "mixed-machines",
            "mixed-packages",
            "no-provenance",
            "frequency-scaling",
            "reduced-batch",
            "falling-steps",
            "untuned",
            "tuning-edge",
        ),
        "the resolved study, machine, packages, environment and calibration are kept beside the rows",
        "what nothing in the machine knows: its cooling, the network's other traffic",
    ),
    OneOfTwelve(
        10,
        "Say how parallel time was measured, synchronised and summarised.",
        (
            "clock-resolution",
            "short-runs",
            "warm-up",
            "oversubscribed",
            "disturbed",
            "busy-machine",
            "trimmed-memory",
            "retrained-blocks",
        ),
        "a barrier before the first step, a monotonic clock on each rank, the time of the last worker to end; "
        "evaluation outside",
    ),
    OneOfTwelve(
        11,
        "Show upper bounds, so that results can be judged.",
        ("superlinear", "few-steps"),
        "ideal scaling is drawn in every scaling figure; few steps between synchronisations bound the saving",
        "the bound your machine sets: its peak, or a model of the network",
    ),
    OneOfTwelve(
        12,
        "Plot what is needed to interpret; join points only where a line means something.",
        ("mixed-executions", "metric", "time-to-target", "metric-cost", "at-chance"),
        "intervals at every point, executions drawn differently and never joined, the drawn numbers beside each figure",
        "the caption: it has to stay with the figure",
    ),
)
