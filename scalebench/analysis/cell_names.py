"""Cells and counts in few words, for a line of text."""

from __future__ import annotations

from collections.abc import Iterable

import pandas as pd

from scalebench.formatting import natural
from scalebench.records.progress import group_of

PLACE = ["execution", "engine", "label", "workers"]
_SHOWN = 4  # groups of cells in one place


def place(runs: pd.DataFrame) -> str:
    """The cells of `runs` in few words: `ddp, horovod at 2, 4 workers (virtual); ddp at 2 workers (native gloo)`."""
    at: dict[tuple[str, str], list[int]] = {}
    cells = runs[PLACE].drop_duplicates()
    for execution, engine, label, workers in cells.itertuples(index=False):
        at.setdefault((group_of(execution, engine), label), []).append(int(workers))
    together: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    for (kind, label), counts in at.items():
        together.setdefault((kind, tuple(sorted(counts))), []).append(label)
    for labels in together.values():
        labels.sort(key=natural)
    places = [f"{listed(labels)} at {_workers(counts)} ({kind})" for (kind, counts), labels in together.items()]
    more = [f"and {len(places) - _SHOWN} more"] if len(places) > _SHOWN + 1 else []
    return "; ".join(places[: _SHOWN if more else None] + more)


def listed(items: Iterable[object], most: int = 8) -> str:
    """`a, b, c`; of a long list the first and how many more."""
    texts = [str(item) for item in items]
    if len(texts) <= most:
        return ", ".join(texts)
    return f"{', '.join(texts[: most - 1])} and {len(texts) - most + 1} more"


def crowding(marked: pd.DataFrame) -> str:
    """Why runs or cells are `marked` as oversubscribed: for their number, or, paced ones, for the pace they missed."""
    paced = marked["execution"].eq("paced") if "execution" in marked else pd.Series(False, marked.index)
    why = ["more workers than the machine can feed"] * (not paced.all())
    return " or ".join(why + ["steps slower than the stated pace"] * bool(paced.any()))


def _workers(counts: tuple[int, ...]) -> str:
    return f"{listed(counts)} worker{'' if counts == (1,) else 's'}"
