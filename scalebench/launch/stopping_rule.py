"""Which runs a study consists of: so many of each point, or blocks of them until every time is known well enough.

A block is one run of each of its cells, in a drawn order. With `until`, the first `at_least` blocks hold every cell.
Block b after them holds the cells that are open, which means that the interval of their first b times is still wider
than asked; and with each open cell the per-batch strategies at its worker count and the serial run, of its execution.
These are what it is compared with, and ratios are paired by block: a block without the baseline would not count. The
serial run brings nothing along, so that a cell that was left never comes back.

What is decided follows from the rows alone. A command that goes on with a study decides as the interrupted one would.
A cell with a failed run is left as it is until that run has been made again.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import NamedTuple

from scalebench.records.progress import group_of
from scalebench.study.spec import Run, Until

_BASELINES = ("allreduce", "horovod", "ddp")  # at the same worker count; and serial, which has only one


class Cell(NamedTuple):
    """What the runs of one point have in common."""

    execution: str
    engine: str
    strategy: str
    workers: int

    @classmethod
    def of(cls, run: Run) -> Cell:
        return cls(run.execution, run.engine, str(run.strategy), run.workers)

    def __str__(self) -> str:
        return together([self])


def together(cells: Iterable[Cell]) -> str:
    """Every one of `cells`, in few words: `ddp, horovod at 2, 4 (virtual); ddp at 2 (native gloo)`."""
    at: dict[tuple[str, str], list[int]] = {}
    for cell in cells:
        at.setdefault((group_of(cell.execution, cell.engine), cell.strategy), []).append(cell.workers)
    alike: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    for (group, strategy), counts in at.items():
        alike.setdefault((group, tuple(sorted(counts))), []).append(strategy)
    return "; ".join(
        f"{', '.join(strategies)} at {', '.join(map(str, counts))} ({group})"
        for (group, counts), strategies in alike.items()
    )


class StoppingRule:
    """The runs of a study as they become known: `planned` so far, of them `left`, and more with each block.

    `runs` are certain, `further` possible; both in their order. `seconds` are the training times of the runs that have
    been completed, by run_id.
    """

    def __init__(
        self, runs: Sequence[Run], further: Sequence[Run], until: Until | None, seconds: Mapping[str, float | None]
    ) -> None:
        self._runs, self._until = list(runs), until
        self._blocks: dict[int, dict[Cell, Run]] = {}
        self._seconds: dict[Cell, dict[int, float]] = {Cell.of(run): {} for run in runs}  # by repetition
        self._ended: set[str] = set()
        for run in (*runs, *further):
            if run.run_id in seconds:
                self.ended(run, seconds[run.run_id])
        for run in further:
            self._blocks.setdefault(run.repetition, {})[Cell.of(run)] = run
        self._baselines = {cell: self._compared_with(cell) for cell in self._seconds}

    def ended(self, run: Run, seconds: float | None) -> None:
        """`run` came to its end, with a training time if it was completed; it is not planned again."""
        self._ended.add(run.run_id)
        if seconds is not None and seconds > 0:
            self._seconds[Cell.of(run)][run.repetition] = seconds

    @property
    def grows(self) -> bool:
        """Whether runs may follow that are not planned yet."""
        return self._until is not None

    def of(self, run_ids: Container[str]) -> StoppingRule:
        """These runs alone, planned or possible, as far as they are not done; and none after them."""
        runs = [*self._runs, *(run for block in self._blocks.values() for run in block.values())]
        return StoppingRule(
            [run for run in runs if run.run_id in run_ids and run.run_id not in self._ended], [], None, {}
        )

    def planned(self) -> list[Run]:
        """All runs that are certain by now, in their order."""
        further = [run for block in self._due() for run in block]
        return sorted(self._runs + further, key=lambda run: run.run_order) if further else self._runs

    def left(self) -> list[Run]:
        """Those of them that have not come to an end."""
        return [run for run in self.planned() if run.run_id not in self._ended]

    def wide(self) -> list[Cell]:
        """The cells whose interval is not, or not yet known to be, as narrow as asked."""
        until = self._until
        if until is None:
            return []
        return [
            cell
            for cell, seconds in self._seconds.items()
            if len(seconds) < until.at_least or relative_width(list(seconds.values()), until) > until.ci_width
        ]

    def most_to_come(self) -> int:
        """How many runs may follow the planned ones."""
        return sum(map(len, self._blocks.values())) + len(self._runs) - len(self.planned()) if self.left() else 0

    def _due(self) -> list[list[Run]]:
        """The runs of each block after the first ones, as far as the times of the blocks before tell."""
        due = []
        for repetition, block in sorted(self._blocks.items()):
            members = set()
            for cell in block:
                if self._is_open(cell, repetition):
                    members |= {cell, *self._baselines[cell]}
            if not members:
                break
            due.append([run for cell, run in block.items() if cell in members])
        return due

    def _is_open(self, cell: Cell, runs: int) -> bool:
        """Whether the first `runs` runs of `cell` are all there, and their interval is wider than asked."""
        assert self._until is not None
        seconds = self._seconds[cell]
        if any(repetition not in seconds for repetition in range(runs)):
            return False
        return relative_width([seconds[repetition] for repetition in range(runs)], self._until) > self._until.ci_width

    def _compared_with(self, cell: Cell) -> list[Cell]:
        def is_baseline(name: str, workers: int) -> bool:
            return name == "serial" or (name in _BASELINES and workers == cell.workers)

        names = {Cell.of(run): run.strategy.name for run in self._runs}
        if names[cell] == "serial":  # it is in every block; what it brought along would come back after a gap
            return []
        return [
            other
            for other, name in names.items()
            if other.execution == cell.execution and is_baseline(name, other.workers)
        ]


def relative_width(seconds: Sequence[float], until: Until) -> float:
    """(high - low) / centre of the interval of these times, at the level for so many runs of a study with `until`."""
    from scalebench.analysis import intervals

    level = intervals.level_when_stopped(len(seconds), until.at_least, until.at_most)
    return float(intervals.relative_width([math.log(second) for second in seconds], level))
