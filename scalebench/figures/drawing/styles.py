"""What stands for what: colour and marker say the strategy, the marker's fill says how a number was obtained."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any, Literal

import pandas as pd

from scalebench.analysis.grouping import strategy_rank
from scalebench.analysis.validation import PREFERRED_ENGINES

# Okabe and Ito's palette, distinct for colour-blind readers.
_FIXED = {
    "serial": ("#000000", "P"),
    "allreduce": ("#0072B2", "s"),
    "horovod": ("#E69F00", "^"),
    "ddp": ("#009E73", "D"),
    "epoch_average": ("#D55E00", "o"),
    "epoch_async": ("#CC79A7", "v"),
}
# Tol's muted palette for all others: those below by their place, which never changes (a new one goes to the end), and
# strategies with options and of one's own by a checksum, salted so that the usual steps of an option differ in colour.
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
_RESERVED = 48  # looks for those that have a place
TASKS = {
    "compute": "#4477AA",
    "communication": "#EE6677",
    "waiting": "#66CCEE",
    "data": "#CCBB44",
    "other": "#BBBBBB",
}
SERVING = "#AA3377"
ENGINE_ALONE = "#228833"  # what an engine takes at one worker, where nothing is communicated
ENGINE_PART = "#9A9A9A"
NEUTRAL = "#444444"

CROSS: dict[str, Any] = {  # over points that the machine could not feed
    "color": NEUTRAL,
    "linestyle": "",
    "marker": "x",
    "markersize": 7,
    "markeredgewidth": 1.3,
}

KNEE: dict[str, Any] = {  # where a law has its knee
    "color": NEUTRAL,
    "linestyle": "",
    "marker": "D",
    "markersize": 6.5,
    "markerfacecolor": "#FFD400",
    "markeredgewidth": 0.9,
}

FillStyle = Literal["full", "left", "none"]
FILLS: dict[str, FillStyle] = {"native": "full", "paced": "left", "virtual": "none", "modelled": "none"}
EXECUTION_WORDS = {
    "native": "native (measured)",
    "paced": "paced (measured communication)",
    "virtual": "virtual (simulated time)",
    "modelled": "modelled",
}


@dataclass(frozen=True)
class Look:
    """How one series is drawn; `shift` keeps equal x apart, in octaves."""

    color: str
    marker: str
    shift: float

    def line(self, execution: str) -> dict[str, Any]:
        """Keywords of a line with markers for a number obtained by `execution`."""
        hollow = FILLS[execution] != "full"
        return {
            "color": self.color,
            "marker": self.marker,
            "fillstyle": FILLS[execution],
            "markerfacecolor": "white" if FILLS[execution] == "none" else self.color,
            "markerfacecoloralt": "white",
            "linestyle": "--" if execution == "modelled" else "-",
            "linewidth": 1.0 if hollow else 1.7,
        }


def name_series(table: pd.DataFrame) -> pd.DataFrame:
    """`table` with a column `series`: the label, and the engine where one strategy ran on several natively.

    The first of mpi, nccl, gloo, horovod keeps the bare label, as in the comparison with virtual runs.
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
    """A look for each series; the same strategy looks the same in every figure and study.

    Where two series of one study would look alike, the later one in natural order has the next look that is free.
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
    """One of the looks: each twelve in a row have all colours, and the next twelve have them with other markers."""
    count = len(_OTHERS)
    return _OTHERS[place % count][0], _OTHERS[(place + place // count) % count][1]
