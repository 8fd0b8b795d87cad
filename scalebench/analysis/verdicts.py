"""Verdicts on B against A, cell by cell: two studies, or two strategies of one.

T_B / T_A has an interval. With a threshold h (0.05 for 5 %) the verdict on a cell's
time is

    regression    the whole interval lies above 1 + h
    improvement   the whole interval lies below 1 / (1 + h)
    unchanged     the whole interval lies between the two: a larger change is excluded
    undecided     else: more repetitions are needed, or there is no interval

The verdict on its metric, M_B - M_A with a margin m (0.01), is the one of this command,
of the answer of a study, its report, tables and `check`:

    better       the whole interval lies above m
    worse        the whole interval lies below -m
    equal        the whole interval lies between the two
    undecided    else, or there is no interval

Two studies are compared under equal conditions only. Code, packages and time of the run
may differ: they are the subject of a comparison. Everything else is a key that has to
be equal, or to be overridden by name.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import pandas as pd

from scalebench.analysis.comparing import compared_strategies
from scalebench.analysis.environment import (
    calibration_of,
    changed_packages,
    provenance_in,
)
from scalebench.analysis.intervals import median_time
from scalebench.analysis.loading import CONDITION, Results, cells_in, clusters_of
from scalebench.analysis.native_check import VirtualError
from scalebench.analysis.pairing import (
    ALPHA,
    CellComparison,
    Comparer,
    enough_runs,
    repeat_option,
)
from scalebench.analysis.rounds import MEASURED, CellRuns, runs_by_cell, spread, timed
from scalebench.errors import ResultsError, UsageError, nearest
from scalebench.formatting import counted, listed
from scalebench.measured import Measured
from scalebench.strategies.registry import is_deterministic
from scalebench.study.cell import BATCH, Cell, in_words
from scalebench.study.heterogeneity import VirtualOptions
from scalebench.study.load import load_study
from scalebench.study.spec import SIMULATED

THRESHOLD, METRIC_MARGIN = 0.05, 0.01
Verdict = Literal["regression", "improvement", "unchanged", "undecided", "not compared"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
MetricVerdict = Literal["worse", "better", "equal", "undecided", "not compared"]
METRIC_VERDICTS: tuple[MetricVerdict, ...] = get_args(MetricVerdict)
COLUMNS = [
    "execution",
    "engine_a",
    "engine_b",
    "label_a",
    "label_b",
    "workers",
    "paired",
    "left_out",
    "n_a",
    "n_b",
    "a_s",
    "a_low",
    "a_high",
    "a_median_s",
    "a_spread",
    "b_s",
    "b_low",
    "b_high",
    "b_median_s",
    "b_spread",
    "ratio",
    "ratio_low",
    "ratio_high",
    "interval",
    "verdict",
    "test",
    "p",
    "p_adjusted",
    "repetitions_needed",
    "metric_name",
    "metric_n",
    "metric_a",
    "metric_b",
    "metric_difference",
    "metric_low",
    "metric_high",
    "metric_verdict",
    "metric_repeats",
    "note",
]

_SHARED = [*CONDITION, "dataset_sha256", "n_test", "parameters", "target_metric"]
_OF_A_CELL = [*BATCH, "n_train"]
_PLACED = [
    "nodes",
    "workers_per_node",
    "launcher",
    "binding",
    "warmup_steps",
]  # of measured cells
# Keys of study.yaml without a column. Those of simulated and paced times matter only
# for such cells.
_STUDY = ["lr_warmup_epochs", "lr_decay", "lr_decay_every", "blocks", "evaluate_every"]
_SIMULATED = [
    "device_step_time",
    *(f"virtual.{name}" for name in VirtualOptions.model_fields),
]
_WHOLE = "study.yaml"
_NAMED_KEYS = 4  # keys of a refusal whose values it has, too
_NAMED = 6  # packages listed by name; the others are counted
KEYS = (
    *_SHARED,
    *_OF_A_CELL,
    *_PLACED,
    *_STUDY,
    *_SIMULATED,
    _WHOLE,
    "machine",
    "cluster",
    "calibration",
)


Pairs: TypeAlias = Collection[tuple[Cell, Cell]]  # compared cells of both studies


@dataclass(frozen=True)
class Verdicts:
    """Verdicts on B against A.

    `table` has a row per cell that both have, under COLUMNS. `missing` are cells of A
    that B lacks, `failed` cells of A that B tried and did not complete, `added` cells
    of B only. `changed` lists differences that are allowed, `overridden` those that are
    not. `virtual_errors` are the virtual-native errors of A and B, None where
    unchecked. `repeat` is the option of the repetitions that a test needs, as `check`
    advises it.
    """

    a: str
    b: str
    threshold: float
    metric_margin: float
    table: pd.DataFrame
    missing: list[Cell] = field(default_factory=list)
    failed: list[Cell] = field(default_factory=list)
    added: list[Cell] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    overridden: list[Difference] = field(default_factory=list)
    virtual_errors: tuple[VirtualError | None, ...] = (None, None)
    repeat: str = ""

    @property
    def one_study(self) -> bool:
        """Return True if A and B are strategies of one study."""
        return bool((self.table["label_a"] != self.table["label_b"]).any())

    def count(self, verdict: Verdict) -> int:
        """Number of cells with this verdict on their time."""
        return int((self.table["verdict"] == verdict).sum())

    def metrics(self, verdict: MetricVerdict) -> int:
        """Number of cells with this verdict on their metric."""
        return int((self.table["metric_verdict"] == verdict).sum())

    @property
    def repeats_worse(self) -> int:
        """Number of cells with a worse metric that does not depend on the timing of workers."""
        return int(
            (
                (self.table["metric_verdict"] == "worse")
                & self.table["metric_repeats"].astype(bool)
            ).sum()
        )

    @property
    def regressed(self) -> bool:
        """Return True if a time regressed, a metric is worse, or B failed where A did not."""
        return bool(self.count("regression") or self.metrics("worse") or self.failed)


def compare_studies(
    a: Results,
    b: Results,
    *,
    threshold: float = THRESHOLD,
    metric_margin: float = METRIC_MARGIN,
    strategies: Collection[str] = (),
    execution: str | None = None,
    ignore: Collection[str] = (),
) -> Verdicts:
    """Compare study `b` with the reference study `a`, cell by cell: same execution, engine, strategy and workers.

    `strategies` (labels or names) and `execution` select cells. Oversubscribed and
    disturbed cells have no verdict.

    Raises:
        UsageError: there is nothing in common, or a name is wrong.
        ResultsError: the studies differ in a key that they have to share and that `ignore` does not name.
    """
    first, second = (_chosen(results, strategies, execution) for results in (a, b))
    pairs = _paired(first, second)
    if not pairs:
        raise UsageError(
            f"{a.folder} and {b.folder} have no cell in common: {_apart(first, second)}"
        )
    overridden = _refuse_unless_equal(a, b, pairs, ignore)
    comparer = Comparer(a, b)
    families: dict[tuple[str, str, str], list[tuple[CellRuns, CellRuns]]] = {}
    for cell, other in pairs:  # the worker counts of a strategy are tested together
        families.setdefault(cell.series, []).append((second[other], first[cell]))
    compared = [one for family in families.values() for one in comparer.family(family)]
    rows = [_row(one, comparer, threshold, metric_margin) for one in _ordered(compared)]
    absent = [cell for cell in first if cell not in dict(pairs)]
    # B's cells at other batches were compared, too.
    compared_of_b = {other for _, other in pairs}
    # With any status: a run that failed says more than one that is missing.
    tried = set(cells_in(b.runs))
    # of a batch that A lacks
    tried |= {cell.at_any_batch for cell in tried} - {
        cell.at_any_batch for cell in second
    }
    return Verdicts(
        str(a.folder),
        str(b.folder),
        threshold,
        metric_margin,
        pd.DataFrame(rows, columns=COLUMNS),
        missing=[cell for cell in absent if not {cell, cell.at_any_batch} & tried],
        failed=[cell for cell in absent if {cell, cell.at_any_batch} & tried],
        added=[cell for cell in second if cell not in compared_of_b],
        changed=changed(a, b),
        overridden=overridden,
        virtual_errors=comparer.errors,
        repeat=repeat_option(b, max(map(enough_runs, (a, b)))),
    )


def compare_strategies(
    results: Results,
    a: str,
    b: str,
    *,
    threshold: float = THRESHOLD,
    metric_margin: float = METRIC_MARGIN,
    execution: str | None = None,
) -> Verdicts:
    """Compare strategy `b` with strategy `a` of one study, at each worker count that both have.

    Raises:
        UsageError: `a` or `b` has no completed run, or they have no cell in common.
    """
    labels = [_label(results, name) for name in (a, b)]
    # Names of a strategy and of its only variant are one cell.
    if labels[0] == labels[1]:
        raise UsageError(
            f"{labels[0]} differs in nothing from itself; name two strategies"
        )
    found = compared_strategies(results, labels[1], labels[0])
    found = _ordered([one for one in found if execution in (None, one.top.execution)])
    if not found:
        raise UsageError(
            f"{labels[0]} and {labels[1]} share no execution, worker count and global batch"
        )
    comparer = Comparer(results)
    rows = [
        _row(one, comparer, threshold, metric_margin)
        | {"note": one.why_untested(ALPHA)}
        for one in found
    ]
    return Verdicts(
        labels[0],
        labels[1],
        threshold,
        metric_margin,
        pd.DataFrame(rows, columns=COLUMNS),
        virtual_errors=comparer.errors,
        repeat=repeat_option(results, enough_runs(results)),
    )


def _chosen(
    results: Results, strategies: Collection[str], execution: str | None
) -> dict[Cell, CellRuns]:
    """Cells of a study, of these strategies and this execution."""
    every = runs_by_cell(results)
    for name in strategies:
        known = {cell.label for cell in every} | {cell.strategy for cell in every}
        if name not in known:
            raise UsageError(
                f"{results.folder} has no completed run of strategy {name!r}; {nearest(name, known)}"
            )
    return {
        cell.at: cell
        for cell in every
        if (not strategies or cell.label in strategies or cell.strategy in strategies)
        and execution in (None, cell.execution)
    }


def _paired(
    first: Collection[Cell], second: Collection[Cell]
) -> list[tuple[Cell, Cell]]:
    """Pair the cells of two studies: those of equal batches, and those that are alone at their place in both.

    The latter differ in their batch alone, which `_refuse_unless_equal` names.
    """
    counts = [Counter(cell.at_any_batch for cell in cells) for cells in (first, second)]
    alone = {
        cell.at_any_batch: cell
        for cell in second
        if all(own[cell.at_any_batch] == 1 for own in counts)
    }
    others = {
        cell: cell if cell in second else alone.get(cell.at_any_batch) for cell in first
    }
    return [(cell, other) for cell, other in others.items() if other]


def _label(results: Results, name: str) -> str:
    """The label `name`, or that of the only variant of the strategy `name`."""
    runs = results.completed
    labels = sorted(runs.loc[runs["strategy"] == name, "label"].unique())
    if name in set(runs["label"].unique()) or not labels:
        return name  # an unknown name is refused by `compared_strategies`
    if len(labels) > 1:
        raise UsageError(
            f"{name} ran with several options: name one of {', '.join(map(repr, labels))}"
        )
    return str(labels[0])


def _apart(first: Collection[Cell], second: Collection[Cell]) -> str:
    """Return the first kind of thing of which two studies share nothing, else all their cells."""
    kinds: list[tuple[str, Callable[[Cell], str | int]]] = [
        ("execution", lambda cell: cell.execution),
        ("strategy", lambda cell: cell.label),
        ("worker count", lambda cell: cell.workers),
        ("engine", lambda cell: cell.engine),
    ]
    for kind, of in kinds:
        own = [set(map(of, cells)) for cells in (first, second)]
        if own[0] and own[1] and own[0].isdisjoint(own[1]):
            one, other = (listed(sorted(values, key=str)) for values in own)
            return f"no {kind} is of both ({one} against {other})"
    return (
        f"{in_words(first) or 'none'} against {in_words(second) or 'none'}; run the same strategies at the same worker "
        "counts, with the same execution"
    )


def verdict_of_time(ratio: Measured, threshold: float) -> Verdict:
    """Verdict on T_B / T_A."""
    low = math.log(ratio.low)
    high = math.log(ratio.high)
    # On logs, so that A against B is the opposite of B against A.
    limit = math.log1p(threshold)
    if low > limit:
        return "regression"
    if high < -limit:
        return "improvement"
    return "unchanged" if -limit <= low and high <= limit else "undecided"


def verdict_of_metric(
    low: float, high: float, margin: float = METRIC_MARGIN
) -> MetricVerdict:
    """Verdict on M_B - M_A, of the interval from `low` to `high`, of a metric for which higher is better."""
    if low > margin:
        return "better"
    if high < -margin:
        return "worse"
    return "equal" if -margin <= low and high <= margin else "undecided"


def _row(
    one: CellComparison, comparer: Comparer, threshold: float, metric_margin: float
) -> dict[str, Any]:
    """The row of one cell under COLUMNS; A is the bottom of the ratio, B its top."""
    a, b = one.bottom, one.top
    unfit = a.unfit or b.unfit
    verdict: Verdict = (
        "not compared" if unfit else verdict_of_time(one.ratio.mean, threshold)
    )
    metric = verdict_of_metric(one.metric.low, one.metric.high, metric_margin)
    row = one.columns(top="b", bottom="a") | {
        "verdict": verdict,
        # Modelled runs have no metric.
        "metric_verdict": metric if one.metric.n else "not compared",
        "metric_repeats": _repeats(a, comparer) and _repeats(b, comparer),
        "note": unfit,
    }
    for side, (name, cell) in enumerate((("a", a), ("b", b))):
        times = list(cell.seconds.values())
        row |= comparer.time(cell, side).named(
            f"{name}_s", f"{name}_low", f"{name}_high"
        )
        row |= {
            f"{name}_median_s": median_time(times).value,
            f"{name}_spread": spread(np.log(times)),
        }
    return row


def _repeats(cell: CellRuns, comparer: Comparer) -> bool:
    """Return True if equal programs give `cell` equal metrics.

    Where workers merge as they arrive, native metrics vary from run to run.
    """
    # Virtual times decide the order of merges, and equal calibrations give equal times.
    alike = cell.execution not in MEASURED and comparer.same_draws
    return alike or cell.workers == 1 or is_deterministic(cell.strategy)


def _ordered(found: Collection[CellComparison]) -> list[CellComparison]:
    """Comparisons in the order of the cells of A."""
    return sorted(found, key=lambda one: one.bottom.at.sort_key)


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
    cells_a, cells_b = zip(*pairs, strict=True)
    runs = [_runs_of(a, cells_a), _runs_of(b, cells_b)]
    executions = {cell.execution for cell, _ in pairs}
    every = [*_columns(*runs), *_of_cells(runs, pairs), *_study(a, b, executions)]
    # Each key once, in their order: each execution may differ in its cluster.
    found = {difference.key: difference for difference in reversed(every)}
    found = {key: found[key] for key in dict.fromkeys(each.key for each in every)}
    # Another calibration is another machine, as far as virtual times know; of stated
    # steps there is none.
    if not executions.isdisjoint(SIMULATED) and "device_step_time" not in found:
        calibrations = [{calibration_of(results)} for results in (a, b)]
        found |= {each.key: each for each in _difference("calibration", *calibrations)}
    return list(found.values())


def _refuse_unless_equal(
    a: Results, b: Results, pairs: Pairs, ignore: Collection[str] = ()
) -> list[Difference]:
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
        flags = (
            f"--ignore {refused[0].key}"
            if len(refused) == 1
            else "--ignore KEY for each"
        )
        said = "; ".join(map(str, refused[:_NAMED_KEYS]))
        more = ", ".join(each.key for each in refused[_NAMED_KEYS:])
        raise ResultsError(
            f"{a.folder} and {b.folder} cannot be compared: {said}{f'; {more} differ, too' if more else ''}. "
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
        contents = [
            _values(runs[runs["strategy"] == name], "strategy_sha256", 12)
            for runs in (a.runs, b.runs)
        ]
        if contents[0] != contents[1]:
            found.append(f"{name} (sha256 {_text(contents[0])} → {_text(contents[1])})")
    hashes = [
        [str(value) for value in results.runs["packages_hash"].dropna().unique()]
        for results in (a, b)
    ]
    if set(hashes[0]) != set(hashes[1]):
        provenance = [*provenance_in(a.folder), *provenance_in(b.folder)]
        packages = changed_packages(provenance, [*hashes[0], *hashes[1]])
        named = [
            f"{name} {' → '.join(versions)}" for name, versions in packages.items()
        ]
        more = [f"{len(named) - _NAMED} more packages"] if len(named) > _NAMED else []
        found += named[:_NAMED] + more or ["packages (provenance/ does not say which)"]
    return found


def _commits(runs: pd.DataFrame) -> set[str]:
    """Ten digits of each commit, with `+` if the checkout had uncommitted changes."""
    known = runs[runs["git_commit"].notna()]
    changed = known["git_dirty"].fillna(False).astype(bool)
    return {
        f"{name[:10]}{'+' if more else ''}"
        for name, more in zip(known["git_commit"], changed, strict=True)
    }


def _columns(a: pd.DataFrame, b: pd.DataFrame) -> Iterator[Difference]:
    for column in _SHARED:
        yield from _difference(column, _values(a, column), _values(b, column))
    for execution in sorted(set(a["execution"]) & set(b["execution"])):
        own = [runs[runs["execution"] == execution] for runs in (a, b)]
        yield from _difference("cluster", *(set(clusters_of(runs)) for runs in own))
        if execution in MEASURED:
            yield from _difference(
                "machine", *(_values(runs, "host_hash") for runs in own)
            )


def _runs_of(results: Results, cells: Collection[Cell]) -> pd.DataFrame:
    """Runs of these cells whose times count."""
    runs = timed(results)
    return runs[[cell in cells for cell in cells_in(runs)]]


def _of_cells(runs: Sequence[pd.DataFrame], pairs: Pairs) -> Iterator[Difference]:
    """Differing keys of cells, each with the first cell that differs."""
    for column in (*_OF_A_CELL, *_PLACED):
        values = [_by_cell(own, column) for own in runs]
        for cell, other in sorted(pairs, key=lambda pair: pair[0].sort_key):
            # Where a simulation ran does not change what it found.
            if column in _PLACED and cell.execution not in MEASURED:
                continue
            of_a = values[0][cell]
            of_b = values[1][other]
            if of_a != of_b:
                where = f" ({cell.label}, {counted(cell.workers, 'worker')})"
                yield Difference(column, _text(of_a), _text(of_b) + where)
                break


def _by_cell(runs: pd.DataFrame, column: str) -> dict[Cell, set[str]]:
    """Known values of `column`, as text, in each cell."""
    found: dict[Cell, set[str]] = {}
    for cell, value, known in zip(
        cells_in(runs), runs[column], runs[column].notna(), strict=True
    ):
        found.setdefault(cell, set()).update([str(value)] if known else [])
    return found


def _study(a: Results, b: Results, executions: set[str]) -> Iterator[Difference]:
    """Differing keys of the resolved studies; keys unknown to an older version have their default."""
    if not (a.study and b.study):
        yield from _difference(
            _WHOLE, *({"there" if results.study else "missing"} for results in (a, b))
        )
        return
    own = [_resolved(results) for results in (a, b)]
    for key in _STUDY + (_SIMULATED if executions & {"paced", *SIMULATED} else []):
        if own[0][key] != own[1][key]:
            yield Difference(key, str(own[0][key]), str(own[1][key]))


def _resolved(results: Results) -> dict[str, Any]:
    """Resolved study with the options of `virtual` as keys `virtual.KEY`."""
    study = load_study(results.folder / _WHOLE, {}, []).model_dump(mode="json")
    return study | {
        f"virtual.{name}": value for name, value in study["virtual"].items()
    }


def _difference(
    key: str, a: Collection[str], b: Collection[str]
) -> Iterator[Difference]:
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
