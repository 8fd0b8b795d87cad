"""Tables for print: one row per cell, each number rounded to the digits that its interval supports."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from scalebench.analysis.comparing import against, ratios
from scalebench.analysis.grouping import CELL, PER_BATCH, PLACE
from scalebench.analysis.loading import Results
from scalebench.analysis.target_ratios import target_ratios
from scalebench.analysis.time_to_target import censor_mark
from scalebench.analysis.verdicts import verdict_of_metric
from scalebench.errors import UsageError, nearest
from scalebench.formatting import (
    EMPTY,
    NOT_SHOWN,
    is_interval,
    is_reduction_supported,
    is_supported,
    marks,
    metric_word,
)
from scalebench.study.choices import BASELINES

_AGAINST = ("serial", *BASELINES)
_TIMES = ((1.0, 1e3, "ms"), (1e4, 1.0, "s"), (math.inf, 1 / 3600, "h"))  # limit of the longest time (s), factor, unit
_PLAIN_DIGITS = 3  # of a number without an interval
_NARROWEST = 1e-4  # interval worth its digits, of the number: simulated times can differ by rounding alone
_TWO_DIGITS_UP_TO = 354  # of the three leading digits of a half-width
DEFAULT = (
    "time",
    "speedup",
    "vs-allreduce",
    "vs-horovod",
    "vs-ddp",
    "target",
    "epochs",
    "target-vs-allreduce",
    "metric",
    "metric-vs-allreduce",
)


@dataclass(frozen=True)
class Column:
    """A column of numbers: columns of the table of cells with value and bounds, and the factor to the unit shown."""

    header: str
    keys: tuple[str, str, str]
    unit: str = ""
    factor: float = 1.0
    decimals: int | None = None  # without an interval; None: three significant digits

    @property
    def title(self) -> str:
        """Header with its unit, as in `Time (s)`."""
        return f"{self.header} ({self.unit})" if self.unit else self.header


_COLUMNS = {
    "time": Column("Time", ("train_s", "low_s", "high_s")),
    "median": Column("Median time", ("median_s", "median_low_s", "median_high_s")),
    "target": Column("Time to target", ("time_to_target_s", "target_low_s", "target_high_s")),
    "epochs": Column("Epochs to target", ("epochs_to_target", "", ""), decimals=1),
    "speedup": Column("Speedup", ("speedup", "speedup_low", "speedup_high")),
    "efficiency": Column("Efficiency", ("efficiency", "efficiency_low", "efficiency_high")),
    **{
        f"{of}vs-{name}": Column(
            f"{words}vs {name}", (f"{of}{name}", f"{of}{name}_low", f"{of}{name}_high"), "%", 100.0, 1
        )
        for of, words in (("", ""), ("target-", "To target "))
        for name in _AGAINST
    },
    "metric": Column("", ("metric", "metric_low", "metric_high"), decimals=3),
    "metric-vs-allreduce": Column(" vs allreduce", ("metric_verdict", "", "")),
    "runs": Column("Runs", ("n", "", ""), decimals=0),
}
NAMES = tuple(_COLUMNS)
_TO_TARGET = ("time_to_target_s", "epochs_to_target")


@dataclass(frozen=True)
class Rounded:
    """A number and its bounds as text with equally many decimals; the bounds are empty without an interval.

    `mark` stands behind a time to target that some runs did not reach; see `time_to_target.CENSORED`.
    """

    value: str
    low: str = ""
    high: str = ""
    mark: str = ""

    @property
    def is_number(self) -> bool:
        """Return False for words in place of a number, such as `never` or `1 of 3`, or a dash."""
        return " of " not in self.value and any(character.isdigit() for character in self.value)

    def sides(self) -> tuple[str, str]:
        """Distances from the value down to the lower and up to the upper bound."""
        decimals = len(self.value.partition(".")[2])
        value, low, high = (float(text) for text in (self.value, self.low, self.high))
        return f"{value - low:.{decimals}f}", f"{high - value:.{decimals}f}"


@dataclass(frozen=True)
class Table:
    """Rows of a study: `keys` has strategy, workers and, where these do not tell cells apart, execution and engine."""

    columns: tuple[Column, ...]
    keys: pd.DataFrame
    oversubscribed: tuple[bool, ...]
    disturbed: tuple[bool, ...]
    rows: tuple[tuple[Rounded, ...], ...]


def round_to_interval(value: float, low: float, high: float, decimals: int | None = None) -> Rounded:
    """Round a number to two digits of its interval's half-width, one if that begins with 355 or more.

    Rule of the Particle Data Group, Review of Particle Physics, section 5.3. The distance to the nearer bound keeps one
    digit at least: 1.98 between 0.04 and 108 is 2, not 0. Without an interval: `decimals`, or three significant digits.
    """
    if not math.isfinite(value):
        return Rounded("never" if value == math.inf else EMPTY)
    if not is_interval(low, high):
        places = max(0, _places(value, _PLAIN_DIGITS)) if decimals is None else decimals
        return Rounded(_fixed(value, places))
    half = (high - low) / 2
    leading = round(half / 10 ** (math.floor(math.log10(half)) - 2))
    places = _places(half, 2 if leading <= _TWO_DIGITS_UP_TO or leading >= 950 else 1)
    if (nearer := min(value - low, high - value)) > 0:
        places = max(places, _places(nearer, 1))
    return Rounded(*(_fixed(number, places) for number in (value, low, high)))


def tabulate(results: Results, shown: pd.DataFrame, names: Sequence[str] = ()) -> Table:
    """Return the `shown` cells with the columns `names`; default: those of DEFAULT that have a number.

    Raises:
        UsageError: an unknown column, or one against a baseline that was not run.
    """
    for name in names:
        if name not in _COLUMNS:
            raise UsageError(f"--columns: unknown column {name!r}; {nearest(name, NAMES)}")
        baseline = name.partition("vs-")[2]
        if baseline and baseline not in set(results.completed["strategy"].unique()):
            raise UsageError(f"--columns: {name} needs a completed run of {baseline}, and the study has none")
    table = _with_ratios(results, shown)
    chosen = [_COLUMNS[name] for name in names] or [
        _COLUMNS[name] for name in DEFAULT if table[_COLUMNS[name].keys[0]].notna().any()
    ]
    columns = tuple(_with_unit(column, table) for column in chosen)
    keys = table[["label", "workers"]].rename(columns={"label": "Strategy", "workers": "Workers"})
    several = {
        "Execution": table["execution"].nunique() > 1,
        "Engine": table.duplicated(["execution", "label", "workers"]).any(),
    }
    for name in [name for name, shows in several.items() if shows]:
        keys.insert(len(keys.columns) - 1, name, table[name.lower()])
    rows = tuple(tuple(_number(cell, column) for column in columns) for cell in table.to_dict("records"))
    oversubscribed, disturbed = (tuple(table[name].astype(bool)) for name in ("oversubscribed", "disturbed"))
    return Table(columns, keys, oversubscribed, disturbed, rows)


def _number(cell: dict[Hashable, Any], column: Column) -> Rounded:
    if column.keys[0] == "metric_verdict":
        return Rounded(EMPTY if pd.isna(cell["metric_verdict"]) else str(cell["metric_verdict"]))
    value, low, high = (float(cell.get(key, math.nan)) for key in column.keys)
    supported = is_reduction_supported if column.unit == "%" else is_supported
    if column.keys[0] != "metric" and not supported(value, low, high):
        if not (column.keys[0] == "train_s" and marks(cell)):
            return Rounded(NOT_SHOWN)
        low = high = math.nan
    value, low, high = (column.factor * number for number in (value, low, high))
    if high - low < _NARROWEST * (100 if column.unit == "%" else abs(value)):
        low = high = math.nan
    rounded = round_to_interval(value, low, high, column.decimals)
    if column.keys[0] not in _TO_TARGET or not (mark := censor_mark(cell)):
        return rounded
    return replace(rounded, mark=mark) if math.isfinite(value) else Rounded(mark)


def _with_ratios(results: Results, shown: pd.DataFrame) -> pd.DataFrame:
    """Return `shown` beside speedup and efficiency, and the reductions against each baseline under its name.

    Those of the time to the target are named `target-<baseline>`. `metric_verdict` is that of `compare` on the metric
    against allreduce.
    """
    for of, compared in (("", ratios(results)), ("target-", target_ratios(results))):
        for name in _AGAINST:
            own = compared[compared["baseline"] == name]
            kept = {f"reduction{end}": f"{of}{name}{end}" for end in ("", "_low", "_high")}
            scaling = [f"{what}{end}" for what in ("speedup", "efficiency") for end in ("", "_low", "_high")]
            extra = scaling if name == "serial" and not of else []
            shown = shown.merge(own[[*CELL, *kept, *extra]].rename(columns=kept), on=CELL, how="left")
    judged = against(results).rename(columns={"label_a": "label", "engine_a": "engine"})
    bounds = zip(judged["metric_low"], judged["metric_high"], strict=True)
    judged["metric_verdict"] = [verdict_of_metric(low, high) for low, high in bounds]
    judged = judged[(judged["metric_n"] > 0) & ~judged["label"].isin(PER_BATCH)].drop_duplicates(PLACE)
    return shown.merge(judged[[*PLACE, "metric_verdict"]], on=PLACE, how="left")


def _with_unit(column: Column, table: pd.DataFrame) -> Column:
    """Return `column` with the unit of its times, or with the name of its metric."""
    if column.keys[0] in ("metric", "metric_verdict"):
        names = table["metric_name"].dropna().unique()
        name = metric_word(str(names[0])) if len(names) == 1 else "metric"
        return replace(column, header=f"{name[:1].upper()}{name[1:]}{column.header}")
    if not column.keys[0].endswith("_s"):
        return column
    longest = float(table[column.keys[0]].where(table[column.keys[0]] < math.inf).max())
    factor, unit = next((factor, unit) for limit, factor, unit in _TIMES if not longest >= limit)
    return Column(column.header, column.keys, unit, factor)


def _places(number: float, significant: int) -> int:
    """Return the decimals that show `significant` digits of a number; negative: to tens, hundreds."""
    return significant - 1 - math.floor(math.log10(abs(float(f"{number:.{significant - 1}e}")))) if number else 0


def _fixed(number: float, places: int) -> str:
    return f"{round(number, places) + 0.0:.{max(0, places)}f}"
