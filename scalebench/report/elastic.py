"""The table of elastic runs, which stand beside the study: their times hold interruptions."""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterable
from pathlib import Path
from typing import Any

from scalebench.analysis.loading import label_of
from scalebench.formatting import EMPTY, seconds
from scalebench.records.attempts import latest_places
from scalebench.records.folder import ELASTIC
from scalebench.records.reading import read_table
from scalebench.records.schema import ElasticRow
from scalebench.tables import Column, Table
from scalebench.tables.table import COUNT, METRIC_ALONE, TIME_ALONE, fields, text

Row = dict[Hashable, Any]
_LISTS = ("rank", "epoch", "lost_s", "pause_s")
_COLUMNS: list[Column[Row]] = [
    Column("strategy", text("label"), left=True),
    Column("engine", text("engine"), left=True),
    Column(
        "workers",
        text("counts"),
        meaning="at the start, and at the end where some were lost",
    ),
    Column(
        "interruptions",
        fields("interruptions"),
        COUNT,
        "times that a worker died and the run went on",
    ),
    Column(
        "died",
        text("ranks"),
        meaning="ranks that died, by their number at the start",
        left=True,
    ),
    Column(
        "epochs begun again",
        text("epochs_again"),
        meaning="counted from 1",
        left=True,
    ),
    Column("lost", text("lost"), meaning="training since the last committed epoch"),
    Column("pause", text("pauses"), meaning="from the death until training went on"),
    Column(
        "total time",
        fields("total_s"),
        TIME_ALONE,
        "with what was lost and the pauses",
    ),
    Column("metric", fields("final_metric"), METRIC_ALONE, "at the end"),
    Column("what became of it", text("end"), left=True),
]


def elastic_table(folder: Path) -> Table:
    """Return the latest attempt at each elastic run of the study in `folder`; without rows if there is none.

    Raises:
        ResultsError: elastic.csv cannot be read, or a cell is damaged.
    """
    rows: list[Row] = []
    if (folder / ELASTIC).is_file():
        table = read_table(folder / ELASTIC, ElasticRow)
        # A run that was repeated has a row for each attempt.
        places = latest_places(table["run_id"].tolist(), table["attempt"].tolist())
        rows = [
            _row(row) for row in table.iloc[sorted(places.values())].to_dict("records")
        ]
    return Table.of(
        "Elastic runs",
        _COLUMNS,
        rows,
        [
            "Their times hold interruptions, so that they are in no figure, law or ratio."
            if rows
            else ""
        ],
        name="elastic",
    )


def _row(row: Row) -> Row:
    lists = (
        {name: json.loads(row[f"interrupted_{name}"]) for name in _LISTS}
        if row["interruptions"]
        else {}
    )
    # Data are dealt anew where fewer workers went on.
    shrunk = row["dealt_anew"] is True
    return row | {
        "label": label_of(row["strategy"], row["strategy_options"]),
        "counts": f"{row['workers']} to {row['workers_at_end']}"
        if shrunk
        else str(row["workers"]),
        "ranks": _joined(
            EMPTY if rank is None else str(rank) for rank in lists.get("rank", ())
        ),
        "epochs_again": _joined(str(epoch + 1) for epoch in lists.get("epoch", ())),
        "lost": _joined(seconds(each) for each in lists.get("lost_s", ())),
        "pauses": _joined(seconds(each) for each in lists.get("pause_s", ())),
        "end": row["status"]
        if row["status"] == "completed"
        else f"{row['status']}: {row['error']}",
    }


def _joined(texts: Iterable[str]) -> str:
    return ", ".join(texts) or EMPTY
