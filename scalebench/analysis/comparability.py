"""Refuses to compare studies under different conditions.

Code, packages and time of the run may differ: they are the subject of a comparison. Everything else is a key that has
to be equal, or to be overridden by name.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import pandas as pd

from scalebench.analysis.environment import calibration_of, changed_packages, provenance_in
from scalebench.analysis.loading import CONDITION, Results, cells_in, clusters_of
from scalebench.analysis.rounds import MEASURED, timed
from scalebench.errors import ResultsError, UsageError, nearest
from scalebench.formatting import counted
from scalebench.study.cell import Cell
from scalebench.study.heterogeneity import VirtualOptions
from scalebench.study.load import load_study
from scalebench.study.spec import SIMULATED

_SHARED = [*CONDITION, "dataset_sha256", "n_test", "parameters", "target_metric"]
_OF_A_CELL = ["batch_per_worker", "batch_global", "n_train"]
_PLACED = ["nodes", "workers_per_node", "launcher", "binding", "warmup_steps"]  # of measured cells
# Keys of study.yaml without a column. Those of simulated and paced times matter only for such cells.
_STUDY = ["lr_warmup_epochs", "lr_decay", "lr_decay_every", "blocks", "evaluate_every"]
_SIMULATED = ["device_step_time", *(f"virtual.{name}" for name in VirtualOptions.model_fields)]
_WHOLE = "study.yaml"
_NAMED = 6  # packages listed by name; the others are counted
KEYS = (*_SHARED, *_OF_A_CELL, *_PLACED, *_STUDY, *_SIMULATED, _WHOLE, "machine", "cluster", "calibration")


Pairs: TypeAlias = Collection[tuple[Cell, Cell]]  # compared cells of both studies


@dataclass(frozen=True)
class Difference:
    """A key in which two studies differ."""

    key: str
    a: str
    b: str

    def __str__(self) -> str:
        return f"{self.key} is {self.a} and {self.b}"


def differing(a: Results, b: Results, pairs: Pairs) -> list[Difference]:
    """Keys in which `a` and `b` differ, for the compared cells."""
    runs = [_runs_of(results, cells) for results, cells in zip((a, b), zip(*pairs, strict=True), strict=True)]
    executions = {cell.execution for cell, _ in pairs}
    found = list(dict.fromkeys([*_columns(*runs), *_of_cells(runs, pairs), *_study(a, b, executions)]))
    if not executions.isdisjoint(SIMULATED):
        found += _difference("calibration", *({calibration_of(results)} for results in (a, b)))
    return found


def refuse_unless_equal(a: Results, b: Results, pairs: Pairs, ignore: Collection[str] = ()) -> list[Difference]:
    """Return the differences of the studies, in cells of `a` and `b`, if `ignore` overrides all of them.

    Raises:
        UsageError: a name in `ignore` is not a key.
        ResultsError: the studies differ in a key that is not in `ignore`; all are named.
        StudyError: a study.yaml has keys unknown to this version.
    """
    for key in ignore:
        if key not in KEYS:
            raise UsageError(f"--ignore {key}: no such key; {nearest(key, KEYS)}")
    found = differing(a, b, pairs)
    refused = [difference for difference in found if difference.key not in ignore]
    if refused:
        flags = " ".join(f"--ignore {key}" for key in dict.fromkeys(difference.key for difference in refused))
        raise ResultsError(
            f"{a.folder} and {b.folder} cannot be compared: {'; '.join(str(difference) for difference in refused)}. "
            f"{_advice(refused)}or override with {flags}"
        )
    return found


def changed(a: Results, b: Results) -> list[str]:
    """Differences that are allowed: commit (`+` with uncommitted changes), files of own strategies, packages."""
    found = []
    commits = [_commits(results.runs) for results in (a, b)]
    if commits[0] != commits[1]:
        found.append(f"commit {_text(commits[0])} → {_text(commits[1])}")
    for name in sorted(set(a.runs["strategy"]) & set(b.runs["strategy"])):
        contents = [_values(runs[runs["strategy"] == name], "strategy_sha256", 12) for runs in (a.runs, b.runs)]
        if contents[0] != contents[1]:
            found.append(f"{name} (sha256 {_text(contents[0])} → {_text(contents[1])})")
    hashes = [[str(value) for value in results.runs["packages_hash"].dropna().unique()] for results in (a, b)]
    if set(hashes[0]) != set(hashes[1]):
        provenance = [*provenance_in(a.folder), *provenance_in(b.folder)]
        packages = changed_packages(provenance, [*hashes[0], *hashes[1]])
        named = [f"{name} {' → '.join(versions)}" for name, versions in packages.items()]
        more = [f"{len(named) - _NAMED} more packages"] if len(named) > _NAMED else []
        found += named[:_NAMED] + more or ["packages (provenance/ does not say which)"]
    return found


def _commits(runs: pd.DataFrame) -> set[str]:
    """Ten digits of each commit, with `+` if the checkout had uncommitted changes."""
    known = runs[runs["git_commit"].notna()]
    changed = known["git_dirty"].fillna(False).astype(bool)
    return {f"{name[:10]}{'+' if more else ''}" for name, more in zip(known["git_commit"], changed, strict=True)}


def _columns(a: pd.DataFrame, b: pd.DataFrame) -> Iterator[Difference]:
    for column in _SHARED:
        yield from _difference(column, _values(a, column), _values(b, column))
    for execution in sorted(set(a["execution"]) & set(b["execution"])):
        own = [runs[runs["execution"] == execution] for runs in (a, b)]
        yield from _difference("cluster", *(set(clusters_of(runs)) for runs in own))
        if execution in MEASURED:
            yield from _difference("machine", *(_values(runs, "host_hash") for runs in own))


def _runs_of(results: Results, cells: Collection[Cell]) -> pd.DataFrame:
    """Runs of these cells whose times count."""
    runs = timed(results)
    return runs[[cell in cells for cell in cells_in(runs)]]


def _of_cells(runs: Sequence[pd.DataFrame], pairs: Pairs) -> Iterator[Difference]:
    """Differing keys of cells, each with the first cell that differs."""
    for column in (*_OF_A_CELL, *_PLACED):
        values = [_by_cell(own, column) for own in runs]
        for cell, other in sorted(pairs, key=lambda pair: pair[0].sort_key):
            if column in _PLACED and cell.execution not in MEASURED:
                continue
            of_a, of_b = values[0][cell], values[1][other]
            if of_a != of_b:
                where = f" ({cell.label}, {counted(cell.workers, 'worker')})"
                yield Difference(column, _text(of_a), _text(of_b) + where)
                break


def _by_cell(runs: pd.DataFrame, column: str) -> dict[Cell, set[str]]:
    """Known values of `column`, as text, in each cell."""
    found: dict[Cell, set[str]] = {}
    for cell, value, known in zip(cells_in(runs), runs[column], runs[column].notna(), strict=True):
        found.setdefault(cell, set()).update([str(value)] if known else [])
    return found


def _study(a: Results, b: Results, executions: set[str]) -> Iterator[Difference]:
    """Differing keys of the resolved studies; keys unknown to an older version have their default."""
    if not (a.study and b.study):
        yield from _difference(_WHOLE, *({"there" if results.study else "missing"} for results in (a, b)))
        return
    own = [_resolved(results) for results in (a, b)]
    for key in _STUDY + (_SIMULATED if executions & {"paced", *SIMULATED} else []):
        if own[0][key] != own[1][key]:
            yield Difference(key, str(own[0][key]), str(own[1][key]))


def _resolved(results: Results) -> dict[str, Any]:
    """Resolved study with the options of `virtual` as keys `virtual.KEY`."""
    study = load_study(results.folder / _WHOLE, {}, []).model_dump(mode="json")
    return study | {f"virtual.{name}": value for name, value in study["virtual"].items()}


def _difference(key: str, a: Collection[str], b: Collection[str]) -> Iterator[Difference]:
    if set(a) != set(b):
        yield Difference(key, _text(a), _text(b))


def _values(runs: pd.DataFrame, column: str, short: int | None = None) -> set[str]:
    return {str(value)[:short] for value in runs[column].dropna().unique()}


def _text(values: Collection[str]) -> str:
    return "/".join(sorted(values)) or "empty"


def _advice(refused: list[Difference]) -> str:
    keys: set[str] = {difference.key for difference in refused}
    if keys == {"calibration"}:
        return "Run the second with --calibration FIRST/calibration.json, compare --execution native only, "
    if keys == {"machine"}:
        return "Run both on one machine, compare --execution virtual only, "
    return "Make them equal, "
