"""What stands for what: colour and marker say the strategy, the marker's fill says how a number was obtained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import pandas as pd

from scalebench.analysis.grouping import strategy_rank
from scalebench.analysis.validation import PREFERRED_ENGINES

# Okabe and Ito's palette, distinct for colour-blind readers; the first of each strategy is fixed for ever.
_FIXED = {
    "serial": ("#000000", "P"),
    "allreduce": ("#0072B2", "s"),
    "horovod": ("#E69F00", "^"),
    "ddp": ("#009E73", "D"),
    "epoch_average": ("#D55E00", "o"),
    "epoch_async": ("#CC79A7", "v"),
}
# Tol's muted palette for all others, in the order of their names.
_OTHERS = [
    *(("#332288", "p"), ("#882255", "<"), ("#88CCEE", ">"), ("#999933", "h"), ("#AA4499", "X"), ("#117733", "d")),
    *(("#CC6677", "8"), ("#44AA99", "*"), ("#DDCC77", "H"), ("#6699CC", "s"), ("#661100", "o"), ("#888888", "^")),
]
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
    """A look for each series; the same strategy looks the same in every figure and study."""
    ordered = sorted(set(series), key=strategy_rank)
    spare = iter(_OTHERS * (len(ordered) // len(_OTHERS) + 1))
    step = min(0.06, 0.4 / max(1, len(ordered)))
    middle = (len(ordered) - 1) / 2
    return {
        name: Look(*(_FIXED[name] if name in _FIXED else next(spare)), shift=step * (place - middle))
        for place, name in enumerate(ordered)
    }
