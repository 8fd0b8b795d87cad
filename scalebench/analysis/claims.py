"""What the data cannot carry: too few runs, wide spread, two modes, drift, a simulation that nothing checked.

Each rule looks at all cells of an execution and makes one finding at most, so that a large study does not drown its
reader. Virtual times are not judged for spread, modes or drift: their repetitions resample a calibration.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pandas as pd

from scalebench.analysis.findings import SEVERITIES, Finding
from scalebench.analysis.formatting import percent
from scalebench.analysis.grouping import cells
from scalebench.analysis.reading import Results
from scalebench.analysis.testing import MEASURED

ENOUGH_RUNS = 5
SPREAD_LIMIT = 0.10

Rule = Callable[[Results, pd.DataFrame], Iterator[Finding]]


def findings(results: Results) -> list[Finding]:
    """Every reason to doubt what the completed runs seem to say, the gravest first."""
    table = cells(results)
    found = [finding for rule in RULES for finding in rule(results, table)] if len(table) else []
    return sorted(found, key=lambda finding: SEVERITIES.index(finding.severity))


def too_few_runs(results: Results, table: pd.DataFrame) -> Iterator[Finding]:
    """One run has no interval; below ENOUGH_RUNS an interval of measured times is wide and no test is within reach."""
    for execution in dict.fromkeys(table["execution"]):
        own = table[table["execution"] == execution]
        single, few = own[own["n"] == 1], own[(own["n"] > 1) & (own["n"] < ENOUGH_RUNS)]
        if len(single):
            yield Finding(
                "warning",
                "few-runs",
                f"{_cells(len(single))} of {execution} times rest on one run: nothing says how far it would repeat",
                _where(single),
                f"repeat them: --repetitions {ENOUGH_RUNS}",
            )
        if len(few) and execution in MEASURED:
            yield Finding(
                "note",
                "few-runs",
                f"{_cells(len(few))} of {execution} times rest on {_range(few['n'])} runs: their intervals are wide, "
                f"and no test of a difference is within reach",
                _where(few),
                f"--repetitions {ENOUGH_RUNS} for useful intervals; see `repetitions_needed` for a test",
            )


def wide_spread(results: Results, table: pd.DataFrame) -> Iterator[Finding]:
    """Cells whose repetitions vary by more than SPREAD_LIMIT (coefficient of variation)."""
    for execution, own in _measured(table):
        wide = own[own["spread"] > SPREAD_LIMIT]
        if len(wide):
            widest = percent(float(wide["spread"].max())).lstrip("+")
            yield Finding(
                "warning",
                "spread",
                f"{_cells(len(wide))} of {len(own)} {execution} ones vary by more than "
                f"{100 * SPREAD_LIMIT:.0f} % between repetitions, the widest by {widest}",
                _where(wide.sort_values("spread", ascending=False, kind="stable")),
                "look for other work on the machine, bind the processes, or take more repetitions and read the medians",
            )


RULES: tuple[Rule, ...] = (too_few_runs, wide_spread)


def _measured(table: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    for execution in MEASURED:
        own = table[(table["execution"] == execution) & (table["n"] > 1)]
        if len(own):
            yield execution, own


def _cells(count: int) -> str:
    return f"{count} cell{'s' if count > 1 else ''}"


def _range(numbers: pd.Series[int]) -> str:
    low, high = int(numbers.min()), int(numbers.max())
    return f"{low}" if low == high else f"{low} to {high}"


def _where(own: pd.DataFrame, shown: int = 3) -> str:
    """The first cells by name, and how many more there are."""
    names = [f"{cell['label']} at {cell['workers']} ({cell['engine']})" for cell in own.head(shown).to_dict("records")]
    return ", ".join(names) + (f" and {len(own) - shown} more" if len(own) > shown else "")
