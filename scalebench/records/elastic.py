"""The table of elastic runs: what interrupted each, and that it went on. Nothing but `report` reads it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from scalebench.errors import ResultsError
from scalebench.records.append_only import AppendOnlyTable
from scalebench.records.folder import ELASTIC
from scalebench.records.reading import read_table
from scalebench.records.schema import ElasticRow
from scalebench.study.spec import Component, Run
from scalebench.training.outcome import Outcome


@dataclass(frozen=True)
class RankDeath:
    """The death of a rank after which a run went on: it lost `lost_s` of training in `epoch`, and `pause_s`."""

    utc: str
    rank: int | None  # None: the launcher did not name it
    host: str
    epoch: int
    lost_s: float
    pause_s: float


@dataclass(frozen=True)
class ElasticOutcome:
    """What came of an elastic run; its time and the workers at its end are None where it did not begin."""

    outcome: Outcome
    deaths: Sequence[RankDeath] = ()
    workers_at_end: int | None = None
    total_s: float | None = None


class ElasticTable:
    """Append-only table of elastic runs in `folder`; one process writes a folder at a time.

    `completed` are run_id and config_hash of the completed ones.

    Raises:
        ResultsError: the folder cannot be written, or the table has other columns or a damaged cell.
    """

    def __init__(self, folder: Path) -> None:
        self._table = AppendOnlyTable(folder / ELASTIC, ElasticRow)
        try:
            rows = read_table(folder / ELASTIC, ElasticRow)
        except ResultsError:
            self._table.close()
            raise
        completed = rows[rows["status"] == "completed"]
        self.completed = set(
            zip(completed["run_id"], completed["config_hash"], strict=True)
        )
        self._attempts = {
            str(run_id): int(latest)
            for run_id, latest in rows.groupby("run_id")["attempt"].max().items()
        }

    def append(self, row: ElasticRow) -> None:
        """Write the row of a run that ended."""
        self._table.append([row])
        self._attempts[row.run_id] = row.attempt

    def next_attempt(self, run_id: str) -> int:
        """Return 1 for a new run, else one more than its latest attempt."""
        return self._attempts.get(run_id, 0) + 1

    def __enter__(self) -> ElasticTable:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._table.close()


def elastic_row(run: Run, ended: ElasticOutcome, **others: Any) -> ElasticRow:
    """Return the row of `run`; `others` are columns that neither it nor its outcome have."""
    outcome, deaths = ended.outcome, ended.deaths
    values = {
        name: value
        for name, value in vars(run).items()
        if name in ElasticRow.model_fields
    }
    values |= {
        name: str(value)
        for name, value in values.items()
        if isinstance(value, Component)
    }
    values |= {
        "status": outcome.status,
        "error": outcome.error or None,
        "strategy": run.strategy.name,
        "strategy_options": run.strategy.options,
        "workers_at_end": ended.workers_at_end,
        "dealt_anew": ended.workers_at_end is not None
        and ended.workers_at_end < run.workers,
        "interruptions": len(deaths),
        "total_s": ended.total_s,
        "metric_name": outcome.facts.metric_name,
        "final_metric": outcome.evaluations[-1].metric if outcome.evaluations else None,
    }
    if deaths:
        # a list in a cell for each: deaths are few, and a row is one run
        names = ("utc", "rank", "host", "epoch", "lost_s", "pause_s")
        values |= {
            f"interrupted_{name}": [vars(death)[name] for death in deaths]
            for name in names
        }
    return ElasticRow(**(values | others))
