"""The identity of a point of a study, by which runs, rows and comparisons are matched, and cells in words."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple, get_args

from scalebench.formatting import listed, natural
from scalebench.study.choices import ALLREDUCE, PER_BATCH, SERIAL, Execution

if TYPE_CHECKING:
    from scalebench.study.spec import Run

EXECUTIONS: tuple[str, ...] = get_args(Execution)
_SHOWN = 4  # groups of cells in words


class SeriesKey(NamedTuple):
    """What the points of a curve over worker counts share."""

    execution: str
    engine: str
    label: str


class Cell(NamedTuple):
    """A point of a study; its runs differ in their repetition only.

    `label` is the strategy with its options, except tuned ones. The batch belongs to
    the identity, as it may be reduced to a small shard; None where it is unknown, or
    does not matter. What slows workers does not: a study states one `virtual.slowdown`,
    and studies that differ in it are not compared, so that it tells no cells apart.
    """

    execution: str
    engine: str
    label: str
    workers: int
    batch_per_worker: int | None = None
    batch_global: int | None = None

    @classmethod
    def of(cls, run: Run) -> Cell:
        """Return the cell of a planned run, at any batch."""
        return cls(run.execution, run.engine, str(run.strategy), run.workers)

    @property
    def at_any_batch(self) -> Cell:
        """The cell without its batch."""
        return self._replace(batch_per_worker=None, batch_global=None)

    @property
    def series(self) -> SeriesKey:
        """The curve over worker counts on which this point lies."""
        return SeriesKey(self.execution, self.engine, self.label)

    def baseline(self, name: str) -> Cell:
        """Return the place of a baseline of this cell; an engine of "" is any, at any batch."""
        # What synchronising less often saves is asked on one engine.
        engine = self.engine if name == ALLREDUCE else ""
        workers = 1 if name == SERIAL else self.workers
        return Cell(self.execution, engine, name, workers)

    @property
    def sort_key(self) -> tuple[object, ...]:
        """The order of tables: by execution, strategy, engine, worker count and batch."""
        order = EXECUTIONS.index(self.execution), strategy_rank(self.label)
        return (*order, self.engine, self.workers, self.batch_per_worker or 0)


CELL = list(Cell._fields)  # columns of tables with a row for each cell
BATCH = ["batch_per_worker", "batch_global"]


def columns_without(*fields: str) -> list[str]:
    """Return the columns of cells but `fields`: those of a group of cells that differ in these alone."""
    assert set(fields) <= set(CELL), fields
    return [name for name in CELL if name not in fields]


PLACE = columns_without(*BATCH)
SERIES = list(SeriesKey._fields)


def batch_in_words(policy: str, size: object) -> str:
    """Return `batch 16 per worker` or `global batch 64`, by the policy that keeps it."""
    return (
        f"batch {size} per worker" if policy == "per_worker" else f"global batch {size}"
    )


def strategy_rank(label: str) -> tuple[int, tuple[tuple[str, float], ...]]:
    """Sort key of labels: baselines first, then the other strategies by name and number."""
    return (
        PER_BATCH.index(label) if label in PER_BATCH else len(PER_BATCH),
        natural(label),
    )


def group_of(execution: str, engine: str) -> str:
    """Return the group of runs with about the same wall time: `native mpi`, `virtual`."""
    return execution if engine in ("virtual", execution) else f"{execution} {engine}"


def in_words(cells: Iterable[Cell]) -> str:
    """Name cells in few words: `ddp, horovod at 2, 4 workers (virtual); ddp at 2 workers (native gloo)`."""
    at: dict[tuple[str, str], list[int]] = {}
    for cell in dict.fromkeys(cell.at_any_batch for cell in cells):
        at.setdefault((group_of(cell.execution, cell.engine), cell.label), []).append(
            cell.workers
        )
    together: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    for (kind, label), counts in at.items():
        together.setdefault((kind, tuple(sorted(counts))), []).append(label)
    for labels in together.values():
        labels.sort(key=natural)
    places = [
        f"{listed(labels)} at {_workers(counts)} ({kind})"
        for (kind, counts), labels in together.items()
    ]
    more = [f"and {len(places) - _SHOWN} more"] if len(places) > _SHOWN + 1 else []
    return "; ".join(places[: _SHOWN if more else None] + more)


def _workers(counts: tuple[int, ...]) -> str:
    return f"{listed(counts)} worker{'' if counts == (1,) else 's'}"
