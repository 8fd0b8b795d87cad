"""How much a strategy sends, as a formula that is both printed and evaluated, so that the two cannot differ.

A formula is an arithmetic expression over the symbols below, the strategy's options by their names, and what the
strategy counts itself (`Strategy.quantities`). What strategies send is exact; of the rows that a shuffle moves, which
are drawn, there is a mean, and where K does not divide B an estimate (`MOVED_BY`, `MOVED_HOW`).
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

SYMBOLS = {
    "S": "steps of an epoch",
    "e": "the epoch, from 0",
    "E": "epochs",
    "last": "1 in the last epoch, else 0",
    "K": "workers",
    "G": "workers of a full node",
    "M": "nodes",
    "m": "nodes of more than one worker",
    "n": "bytes of the parameters",
    "P": "number of parameters",
    "n_b": "bytes of the floating-point buffers",
    "n_a": "bytes of all buffers, counters too",
    "n_o": "bytes of what the optimizer remembers",
    "f": "f(rank) are the bytes of PowerSGD's factors and of what it leaves as it is",
    "r": "bytes of a row, its label or target included",
    "N": "training samples",
    "B": "ds-tensor blocks",
    "syncs": "synchronisations of the epoch, as worker 0 counts them",
}
_TO_OTHERS = "(e > 0) * r * N / K * (1 - 1 / K)"
MOVED_BY = {
    "rotate_blocks": _TO_OTHERS,
    "global": _TO_OTHERS,
    "pairwise": f"{_TO_OTHERS} * floor(B / 2) / (B - 1)",  # of two blocks half changes places; an odd one stays alone
}  # shuffle: bytes of the rows that it makes a worker hand over in an epoch
MOVED_HOW = """\
What moves is drawn. The formula is its mean where K divides B and B divides N, and an estimate elsewhere; a table of
numbers has what the study's seed draws."""
_FUNCTIONS: dict[str, Any] = {"ceil": math.ceil, "floor": math.floor, "log2": math.log2, "max": max, "min": min}
_WORD = re.compile(r"[A-Za-z_]\w*")
_NO_SYMBOL = {"if", "else", "and", "or", "not", *_FUNCTIONS}


@dataclass(frozen=True)
class Setting:
    """What a formula's symbols stand for in one run; bytes are of a worker, `shapes` those of its parameters."""

    epochs: int
    steps: int
    workers: int
    shapes: tuple[tuple[int, ...], ...] = ()
    element_bytes: int = 4
    workers_per_node: int = 1
    buffer_bytes: int = 0
    optimizer_bytes: int = 0
    all_buffer_bytes: int = 0

    @property
    def parameters(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes)

    def symbols(self) -> dict[str, Any]:
        """Symbol -> value, but for those that change with the epoch."""
        from scalebench.strategies.compression import numbers_sent

        members = min(self.workers, self.workers_per_node)
        full, rest = divmod(self.workers, members)
        return {
            "S": self.steps,
            "E": self.epochs,
            "K": self.workers,
            "G": members,
            "M": full + (rest > 0),
            "m": (members > 1) * full + (rest > 1),
            "n": self.parameters * self.element_bytes,
            "P": self.parameters,
            "n_b": self.buffer_bytes,
            "n_a": self.all_buffer_bytes,
            "n_o": self.optimizer_bytes,
            "f": lambda rank: self.element_bytes * sum(numbers_sent(shape, rank) for shape in self.shapes),
        }


def evaluate(formula: str, values: dict[str, Any]) -> float:
    """The value of `formula`, which is written in the source of a strategy and never comes from outside."""
    return float(eval(formula, {"__builtins__": {}}, {**_FUNCTIONS, **values}))  # noqa: S307


def symbols_of(formula: str) -> list[str]:
    """The names in `formula`, in their order."""
    return list(dict.fromkeys(word for word in _WORD.findall(formula) if word not in _NO_SYMBOL))


def readable(formula: str) -> str:
    """`formula` as it is printed: a space for a product."""
    return formula.replace(" * ", " ").replace(" % ", " mod ").replace(" == ", " = ")


def every(period: str, first: str = "", *, partial: bool = True) -> str:
    """How many of the steps `first`, `first` + `period` ... of a training (default: `period`, 2 `period` ...) lie in
    an epoch; with `partial`, its very last step is one too."""
    shift = f" + {period} - {first}" if first else ""

    def until(taken: str) -> str:
        counted = f"floor(({taken}{shift}) / {period})" if shift else f"floor({taken} / {period})"
        return f"max(0, {counted})" if first else counted

    whole = f"{until('(e + 1) * S')} - {until('e * S')}"
    if not partial:
        return whole
    cut = f"(E * S{shift}) % {period} > 0" if shift else f"E * S % {period} > 0"
    if first:
        cut = f"({cut} or E * S < {first})"
    return f"{whole} + last * ({cut})"


def every_epochs(period: str, partial: bool) -> str:
    """1 for every `period`-th epoch, and for the last one where a `partial` interval counts, else 0."""
    return f"1 if (e + 1) % {period} == 0{' or last' if partial else ''} else 0"
