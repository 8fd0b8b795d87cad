"""A study to which no rule objects, to be doctored."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from scalebench.records.progress import Planned, keep_planned
from scalebench.records.provenance import name_of
from scalebench.records.schema import EpochRow, RunRow
from scalebench.records.store import Store
from scalebench.study.cell import group_of
from tests.records_factory import in_proportion, keep_study, study_rows

HOST, PACKAGES = "cafe", "beef"


def described(
    host: str = HOST, packages: str = PACKAGES, **facts: Any
) -> dict[str, Any]:
    """A file of provenance/."""
    cpu = {"model": "Model 1", "usable_cores": 4, "governor": "performance"}
    return {
        "host_hash": host,
        "packages_hash": packages,
        "cpu": cpu,
        "packages": {"torch": "2.13.0"},
        **facts,
    }


@dataclass
class Doctored:
    """The files of a study before they are written."""

    rows: list[RunRow]
    epochs: dict[str, list[EpochRow]]
    provenance: list[dict[str, Any]] = field(default_factory=lambda: [described()])
    study: dict[str, Any] = field(default_factory=lambda: {"name": "synthetic"})
    calibration: Any = field(
        default_factory=lambda: {"key": "of this machine", "tables": [], "engines": {}}
    )
    unmade: list[Planned] = field(default_factory=list)

    def change(
        self, where: Callable[[RunRow], bool] = lambda row: True, **changes: Any
    ) -> None:
        """Other values in the rows that meet a condition; a function is called with the row."""
        self.rows = [
            row.model_copy(
                update={
                    name: new(row) if callable(new) else new
                    for name, new in changes.items()
                }
            )
            if where(row)
            else row
            for row in self.rows
        ]

    def drop(self, where: Callable[[RunRow], bool]) -> None:
        self.rows = [row for row in self.rows if not where(row)]

    def repeat(self, where: Callable[[RunRow], bool], seconds: list[float]) -> None:
        """As many repetitions of the cell that meets a condition, with these times."""
        first = next(row for row in self.rows if where(row))
        self.drop(where)
        self.rows += [
            first.model_copy(
                update={
                    "run_id": f"again-{n}",
                    "repetition": n,
                    "seed": n,
                    "run_order": n,
                    "train_s": s,
                }
            )
            for n, s in enumerate(seconds)
        ]

    def write(self, folder: Path) -> Path:
        with Store(folder, fsync=False) as store:
            for row in self.rows:
                epochs = self.epochs.get(row.run_id, [])
                store.append(
                    in_proportion(row),
                    [
                        epoch.model_copy(update={"attempt": row.attempt})
                        for epoch in epochs
                    ],
                )
            for facts in self.provenance:
                store.keep_provenance(facts)
            if self.study:
                keep_study(store.folder, self.study)
        if self.calibration is not None:
            (folder / "calibration.json").write_text(json.dumps(self.calibration))
        planned = {
            row.run_id: Planned(
                row.run_id, row.config_hash, group_of(row.execution, row.engine)
            )
            for row in self.rows
        }
        keep_planned(folder, [*planned.values(), *self.unmade])
        return folder


@cache
def _made() -> list[tuple[RunRow, list[EpochRow]]]:
    return study_rows(
        strategies=("serial", "allreduce", "epoch_average"),
        workers=(1, 2, 4),
        native_workers=(1, 2, 4),
        cores=4,
        repetitions=5,
        scaling="weak",
        noise=0.01,
    )


def make_sound() -> Doctored:
    """Serial, allreduce and epoch averaging on 1, 2 and 4 workers of a machine of 4 cores; weak scaling."""
    sound = Doctored(
        [row for row, _ in _made()], {row.run_id: epochs for row, epochs in _made()}
    )
    sound.change(
        train_s=lambda row: (
            row.train_s / (1.1 if row.execution == "native" else 1)
        ),  # as far as the factory has them
        n_test=10_000,
        final_metric=lambda row: 0.97 + 0.001 * row.repetition,
        target_metric=0.9,
        time_to_target_s=lambda row: row.train_s / 2,
        syncs=lambda row: (
            row.epochs if row.strategy == "epoch_average" else row.optimizer_steps
        ),
        warmup_steps=10,
        workers_per_node=lambda row: row.workers,
        threads_per_worker=1,
        host_hash=HOST,
        packages_hash=PACKAGES,
        provenance=name_of(described()),
        git_commit="0" * 40,
        git_dirty=False,
    )
    return sound
