"""Colours, markers and lines: colour and marker encode the strategy, the fill of the marker the execution."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pandas as pd
from matplotlib import rcParams
from matplotlib.lines import Line2D

from scalebench.analysis.grouping import PER_BATCH, strategy_rank
from scalebench.analysis.native_check import PREFERRED_ENGINES

# Okabe and Ito's palette, distinct for colour-blind readers.
_FIXED = {
    "serial": ("#000000", "P"),
    "allreduce": ("#0072B2", "s"),
    "horovod": ("#E69F00", "^"),
    "ddp": ("#009E73", "D"),
    "epoch_average": ("#D55E00", "o"),
    "epoch_async": ("#CC79A7", "v"),
}
# Tol's muted palette for all others: those in _PLACED by position (append only), strategies with options and own ones
# by a checksum, salted so that common values of an option differ in colour.
_OTHERS = [
    *(("#332288", "p"), ("#882255", "<"), ("#88CCEE", ">"), ("#999933", "h"), ("#AA4499", "X"), ("#117733", "d")),
    *(("#CC6677", "8"), ("#44AA99", "*"), ("#DDCC77", "H"), ("#6699CC", "s"), ("#661100", "o"), ("#888888", "^")),
]
_PLACED = (
    *("local_sgd", "post_local_sgd", "hierarchical_local_sgd", "slowmo", "bmuf", "diloco"),
    *("easgd", "gossip", "ad_psgd", "fedavg", "fedprox", "adasum"),
    *("bsp", "bsp_backup", "asp", "ssp", "dssp", "elastic_bsp"),
    *("daso-heat", "daso-fixed", "dislib-compat", "dislib-compat-async"),
    *("torch_local_sgd", "torch_hierarchical_local_sgd", "torch_post_local_sgd"),
)
_SALT = "134"
_LOOKS = len(_OTHERS) ** 2
_RESERVED = 48  # looks for _PLACED
TASKS = {
    "compute": "#4477AA",
    "communication": "#EE6677",
    "waiting": "#66CCEE",
    "data": "#CCBB44",
    "other": "#BBBBBB",
}
TASK_PATTERNS = {"communication": "/////", "waiting": ".....", "data": "xxxxx", "other": ""}
SERVING = "#AA3377"
ENGINE_ALONE, ENGINE_ALONE_PATTERN = "#228833", "+++++"  # cost of an engine at one worker
ENGINE_PART = "#9A9A9A"
MOST_SERIES, GROUP = 6, 4  # in one panel
NEUTRAL = "#444444"

FillStyle = Literal["full", "left", "none"]
FILLS: dict[str, FillStyle] = {"native": "full", "paced": "left", "virtual": "none", "modelled": "none"}
EXECUTION_WORDS = {
    "native": "native (measured)",
    "paced": "paced (measured communication)",
    "virtual": "virtual (simulated time)",
    "modelled": "modelled (priced, without training)",
}


def cross() -> dict[str, Any]:
    """Return matplotlib keywords of the cross over oversubscribed points."""
    size, edge = 1.4 * rcParams["lines.markersize"], 1.2 * rcParams["lines.markeredgewidth"]
    return {"color": NEUTRAL, "linestyle": "", "marker": "x", "markersize": size, "markeredgewidth": edge}


def plus() -> dict[str, Any]:
    """Return matplotlib keywords of the plus sign over disturbed points."""
    return cross() | {"marker": "+", "markersize": 1.9 * rcParams["lines.markersize"]}


def knee() -> dict[str, Any]:
    """Return matplotlib keywords of the knee of a scaling law."""
    size, edge = 1.3 * rcParams["lines.markersize"], 0.8 * rcParams["lines.markeredgewidth"]
    color = {"color": NEUTRAL, "markerfacecolor": "#FFD400"}
    return {**color, "linestyle": "", "marker": "D", "markersize": size, "markeredgewidth": edge}


@dataclass(frozen=True)
class Look:
    """Colour and marker of one series; `shift` separates points at equal x, in octaves."""

    color: str
    marker: str
    shift: float

    def line(self, execution: str) -> dict[str, Any]:
        """Return matplotlib keywords of a line with markers for `execution`."""
        hollow = FILLS[execution] != "full"
        return {
            "color": self.color,
            "marker": self.marker,
            "fillstyle": FILLS[execution],
            "markerfacecolor": "white" if FILLS[execution] == "none" else self.color,
            "markerfacecoloralt": "white",
            "linestyle": "--" if execution == "modelled" else "-",
            "linewidth": (0.8 if hollow else 1.3) * rcParams["lines.linewidth"],
        }

    def sample(self) -> Line2D:
        """Return the line of the legend."""
        return Line2D([], [], color=self.color, marker=self.marker, markersize=1.1 * rcParams["lines.markersize"])


def grouped(names: Sequence[str]) -> list[list[str]]:
    """Split the series of a panel into groups that stay legible, the per-batch baselines first.

    A lone baseline, such as serial, joins the first group.
    """
    if len(names) <= MOST_SERIES:
        return [list(names)]
    base = [name for name in names if name in PER_BATCH]
    others = [name for name in names if name not in base]
    number = -(-len(others) // GROUP)
    parts = [list(part) for part in np.array_split(others, number)]
    return [base + parts[0], *parts[1:]] if len(base) < 2 else [base, *parts]


def name_series(table: pd.DataFrame) -> pd.DataFrame:
    """Return `table` with a column `series`: the label, with the engine if a strategy ran natively on several.

    The first of mpi, nccl, gloo, horovod keeps the plain label, as in the comparison with virtual runs.
    """
    native = table[table["execution"].isin(("native", "paced"))]
    first = {str(label): min(group, key=PREFERRED_ENGINES.index) for label, group in native.groupby("label")["engine"]}
    return table.assign(
        series=[
            label if engine in ("virtual", first.get(label)) else f"{label} on {engine}"
            for label, engine in zip(table["label"].astype(str), table["engine"].astype(str), strict=True)
        ]
    )


def looks(series: list[str]) -> dict[str, Look]:
    """Return the look of each series, the same in every figure and study.

    If two series of one study collide, the later one in natural order gets the next free look.
    """
    ordered = sorted(set(series), key=strategy_rank)
    step = min(0.06, 0.4 / max(1, len(ordered)))
    middle = (len(ordered) - 1) / 2
    given = dict(_FIXED)
    for name in sorted(ordered, key=lambda name: (name not in _PLACED, strategy_rank(name))):
        if name not in given:
            first = _place(name)
            free = (look for look in map(_look_at, range(first, first + _LOOKS)) if look not in given.values())
            given[name] = next(free, _look_at(first))
    return {name: Look(*given[name], shift=step * (place - middle)) for place, name in enumerate(ordered)}


def _place(name: str) -> int:
    if name in _PLACED:
        return _PLACED.index(name)
    return _RESERVED + zlib.crc32(f"{_SALT}{name}".encode()) % (_LOOKS - _RESERVED)


def _look_at(place: int) -> tuple[str, str]:
    """Return look number `place`: twelve consecutive looks differ in colour, the next twelve have other markers."""
    count = len(_OTHERS)
    return _OTHERS[place % count][0], _OTHERS[(place + place // count) % count][1]
