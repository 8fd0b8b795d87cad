"""Reader of `published.csv`: the numbers of a paper, each with the place where it was read."""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass
from pathlib import Path

from scalebench.errors import ResultsError

COLUMNS = ("quantity", "strategy", "workers", "value", "unit", "figure", "study", "source", "digitised", "note")
NEVER = "never"


@dataclass(frozen=True)
class Published:
    """One number of a paper: `quantity` of `strategy` at `workers`, and the study that obtains ours.

    `value` is infinite for an accuracy that was never reached. `digitised`: read off a drawn curve.
    """

    quantity: str
    strategy: str
    workers: int | None
    value: float
    unit: str
    figure: str
    study: str
    source: str
    digitised: bool
    note: str


def read_published(path: Path) -> list[Published]:
    """Read `published.csv`.

    Raises:
        ResultsError: unreadable, other columns, a value that is no number, or a row without a source.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = csv.DictReader(file)
            if tuple(rows.fieldnames or ()) != COLUMNS:
                raise ResultsError(f"{path}: expected the columns {', '.join(COLUMNS)}")
            return [_row(row, f"{path}, line {number}") for number, row in enumerate(rows, start=2)]
    except (OSError, UnicodeDecodeError) as error:
        raise ResultsError(f"cannot read {path}: {getattr(error, 'strerror', None) or 'not text in UTF-8'}") from None


def _row(row: dict[str, str], where: str) -> Published:
    for column in ("quantity", "value", "unit", "figure", "source"):
        if not (row[column] or "").strip():
            raise ResultsError(
                f"{where}: {column} is missing; a published number says what it is and where it was read"
            )
    if row["digitised"] not in ("yes", "no"):
        raise ResultsError(f"{where}: digitised is {row['digitised']!r}; expected yes or no")
    try:
        value = math.inf if row["value"] == NEVER else float(row["value"])
        workers = int(row["workers"]) if row["workers"] else None
    except ValueError:
        raise ResultsError(f"{where}: expected numbers in workers and value, or {NEVER}") from None
    texts = {name: row[name] for name in ("quantity", "strategy", "unit", "figure", "study", "source", "note")}
    return Published(workers=workers, value=value, digitised=row["digitised"] == "yes", **texts)
