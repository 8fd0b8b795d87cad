"""User data in a CSV file."""

from __future__ import annotations

import csv
import math
import re
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, NonNegativeInt, model_validator

from scalebench.data import builder
from scalebench.data.dataset import Task
from scalebench.data.files import only_file, require_fits
from scalebench.errors import DataError, nearest

_DELIMITERS = {
    ";": "';'",
    "\t": r'"\t"',
    "|": "'|'",
    " ": "' '",
    ",": "','",
}  # and how YAML writes them
# in lower case, beside numbers
_MISSING = frozenset({"", "na", "n/a", "nan", "null", "none", "?", "-"})
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")
_LARGEST = float(np.finfo(np.float32).max)
# of memory for a byte of the file: cells of eight characters as texts
_BYTES_PER_BYTE = 12


@dataclass(frozen=True)
class _Table:
    """Cells as text: column names, and the rows with the number of the line where each begins."""

    path: Path
    names: list[str]
    lines: list[int]
    rows: list[list[str]]


@builder.DATASETS.add
class Csv(builder.DatasetBuilder):
    """Table with one sample per row: one target column, numeric features.

    `target` is a column's name or its number from 0 (-1: the last). Text or whole
    numbers in it are classes (numbered in sorted order; 1 and 1.0 are one class), other
    numbers are regression targets, unless `task` is set. `header` is looked for in the
    first line unless it is set. Columns without a name, as pandas writes its index, are
    left out. A seeded part is held out; features and regression targets are
    standardised by the training part.
    """

    name = "csv"
    summary = "your own .csv in --data-dir: target column by name or number, the others are features"

    file: str | None = None
    target: str | int = -1
    header: bool | None = None
    delimiter: str = Field(",", min_length=1, max_length=1)
    decimal: Literal[".", ","] = "."
    task: Task | None = None
    test_fraction: float = Field(0.2, gt=0, lt=1)
    seed: NonNegativeInt = 0
    standardise: bool = True

    @model_validator(mode="after")
    def _marks_differ(self) -> Csv:
        if self.delimiter == self.decimal:
            raise ValueError(
                f"decimal and delimiter are both {self.decimal!r}; give another delimiter, such as ';'"
            )
        return self

    def files(self, data_dir: Path | None) -> list[Path]:
        return [only_file(self.name, data_dir, self.file, ".csv")]

    def build(self, files: list[Path], allocate: builder.Allocate) -> builder.Arrays:
        (path,) = files
        table = self._read(path)
        column = self._target_column(table)
        unnamed = [
            number for number, name in enumerate(table.names) if _is_unnamed(name)
        ]
        features = [
            number
            for number in range(len(table.names))
            if number not in (column, *unnamed)
        ]
        if not features:
            raise DataError(
                f"{path}: no column of features beside the target and columns without a name"
            )
        x = self._numbers(table, features)
        task = self.task or self._task_of(table, column)
        labels = None
        if task == "regression":
            y, outputs = self._numbers(table, [column]), 1
        else:
            y, outputs = self._class_numbers(table, column)
            labels = y
        train, test = builder.hold_out(len(x), self.test_fraction, self.seed, labels)
        # Split before it is standardised: the test part must not show in the scale.
        x_parts, y_parts = (x[train], x[test]), (y[train], y[test])
        if self.standardise:
            x_parts = builder.standardised(*x_parts)
            y_parts = (
                builder.standardised(*y_parts) if task == "regression" else y_parts
            )
        x_train, x_test = (part.astype(np.float32) for part in x_parts)
        y_train, y_test = (
            part.astype(np.float32) if task == "regression" else part
            for part in y_parts
        )
        notes = _on_unnamed(table, unnamed)
        made = builder.Arrays(task, outputs, x_train, y_train, x_test, y_test)
        return replace(made, notes=(*notes, *builder.notes_on(made)))

    def _read(self, path: Path) -> _Table:
        require_fits(path, path.stat().st_size * _BYTES_PER_BYTE)
        lines, rows = [], []
        before = 0
        try:
            # The module csv asks for `newline`; Excel begins UTF-8 with a mark, `-sig`.
            with path.open(newline="", encoding="utf-8-sig") as file:
                # Strict: a quote that is not closed would be a cell to the end of the
                # file.
                reader = csv.reader(file, delimiter=self.delimiter, strict=True)
                for row in reader:
                    if row:
                        lines.append(before + 1)
                        rows.append([cell.strip() for cell in row])
                    # the last line of a quoted cell that has several
                    before = reader.line_num
        except (OSError, csv.Error, UnicodeDecodeError) as error:
            raise DataError(
                f"{path}, line {before + 1}: not readable as CSV ({error}); expected UTF-8 text"
            ) from None
        if len(rows) < 2:
            raise DataError(
                f"{path}: lines with text: {len(rows)}; expected at least two samples"
            )
        width = len(rows[0])
        if width < 2:
            hint = self._hint(rows[0][0])
            raise DataError(
                f"{path}, line {lines[0]}: one column; expected features and a target separated by "
                f"{self.delimiter!r}{hint}"
            )
        for line, row in zip(lines, rows, strict=True):
            if len(row) != width:
                hint = self._hint(self.delimiter.join(row))
                raise DataError(
                    f"{path}, line {line}: {len(row)} cells, expected {width} as in line {lines[0]}{hint}"
                )
        if not self._has_header(path, lines[0], rows[0]):
            return _Table(
                path, [f"column {number}" for number in range(width)], lines, rows
            )
        names = rows[0]
        twice = [
            name
            for name, times in Counter(names).items()
            if times > 1 and not _is_unnamed(name)
        ]
        if twice:
            places = [
                str(number) for number, name in enumerate(names) if name == twice[0]
            ]
            raise DataError(
                f"{path}, line {lines[0]}: {twice[0]!r} names the columns {' and '.join(places)} (counted from 0); "
                "give each column a name of its own"
            )
        if len(rows) < 3:
            raise DataError(
                f"{path}: lines with text: {len(rows)}; expected a header and at least two samples"
            )
        return _Table(path, names, lines[1:], rows[1:])

    def _has_header(self, path: Path, line: int, first: list[str]) -> bool:
        """Return True if the `first` row has names: text, or 0, 1, 2 ... as pandas numbers columns."""
        if self.header is not None:
            return self.header
        # pandas writes such a header for a table without names.
        numbered = [str(number) for number in range(len(first))]
        if all(self._is_number(cell) for cell in first) and first != numbered:
            raise DataError(
                f"{path}, line {line}: numbers only, so no header; give the option header: false "
                "(--set dataset.header=false), or header: true if they are names"
            )
        return True

    def _target_column(self, table: _Table) -> int:
        path, names = table.path, table.names
        if isinstance(self.target, str):
            if self.target not in names:
                raise DataError(
                    f"{path}: no column {self.target!r} for the target; {nearest(self.target, names)}"
                )
            return names.index(self.target)
        if not -len(names) <= self.target < len(names):
            raise DataError(
                f"{path}: no column {self.target} for the target; it has columns 0 to {len(names) - 1}"
            )
        # Counted from the end where it is negative.
        column = self.target % len(names)
        if _is_unnamed(names[column]):
            raise DataError(
                f"{path}: column {column}, the target, has no name, as an index or the end of lines that end in "
                f"{self.delimiter!r}; name the target with the option target: NAME"
            )
        return column

    def _numbers(self, table: _Table, columns: list[int]) -> NDArray[Any]:
        """Return the `columns` of the table, (rows, columns) in float64."""
        values = np.empty((len(table.rows), len(columns)))
        for position, row in enumerate(table.rows):
            for place, column in enumerate(columns):
                values[position, place] = self._value(row[column])
        bad = ~(np.abs(values) <= _LARGEST)  # NaN too
        if bad.any():
            position, place = (int(index) for index in np.argwhere(bad)[0])
            self._refuse(
                table,
                position,
                columns[place],
                "fill it in, code it as numbers or drop it",
            )
        return values

    def _refuse(self, table: _Table, position: int, column: int, remedy: str) -> None:
        """Raise DataError for a cell that is not a number."""
        cell = table.rows[position][column]
        hint = self._hint(cell)
        if self.decimal == "." and self._is_number(cell.replace(",", ".", 1)):
            hint = "; if commas are decimal marks, give the option decimal: ','"
        raise DataError(
            f"{table.path}, line {table.lines[position]}, {table.names[column]}: {cell!r} is not a number that "
            f"float32 holds; {remedy}{hint}"
        )

    def _task_of(self, table: _Table, column: int) -> Task:
        """Return the task that the target means; missing values among numbers are refused, as they are no class."""
        cells = [row[column] for row in table.rows]
        others = [
            place for place, cell in enumerate(cells) if not self._is_number(cell)
        ]
        missing = [place for place in others if cells[place].lower() in _MISSING]
        # Among other texts `none` or `-` may be a class; among numbers it is a gap.
        if missing and (len(missing) == len(others) or not cells[missing[0]]):
            self._refuse_target(table, missing[0], column)
        if others:
            return "classification"
        return (
            "classification"
            if all(self._value(cell).is_integer() for cell in cells)
            else "regression"
        )

    def _refuse_target(self, table: _Table, position: int, column: int) -> None:
        cell = table.rows[position][column]
        raise DataError(
            f"{table.path}, line {table.lines[position]}, {table.names[column]}: {cell!r} is no target; "
            "fill it in or drop the row"
        )

    def _class_numbers(self, table: _Table, column: int) -> tuple[NDArray[Any], int]:
        """Return the number of each row's class, and the number of classes; equal numbers are one class."""
        cells = [row[column] for row in table.rows]
        # An empty cell would be a class of its own.
        if "" in cells:
            self._refuse_target(table, cells.index(""), column)
        if all(self._is_number(cell) for cell in cells):
            ordered, numbers = np.unique(
                [self._value(cell) for cell in cells], return_inverse=True
            )
        else:
            self._refuse_two_spellings(table, column, cells)
            ordered, numbers = np.unique(cells, return_inverse=True)
        # Of more classes some have a single sample: they are values, or names.
        if not 2 <= len(ordered) <= max(2, len(cells) // 2):
            raise DataError(
                f"{table.path}: {len(ordered)} classes in {len(cells)} samples; "
                "if the target is a value to be predicted, give the option task: regression"
            )
        return numbers.astype(np.int64), len(ordered)

    def _refuse_two_spellings(
        self, table: _Table, column: int, cells: list[str]
    ) -> None:
        """Refuse text labels of which two are the same number, such as 1 and 1.0."""
        spelt: dict[float, str] = {}
        for position, cell in enumerate(cells):
            if (
                self._is_number(cell)
                and spelt.setdefault(self._value(cell), cell) != cell
            ):
                raise DataError(
                    f"{table.path}, line {table.lines[position]}, {table.names[column]}: the label {cell!r} is "
                    f"{spelt[self._value(cell)]!r} in other rows; spell each class in one way"
                )

    def _is_number(self, cell: str) -> bool:
        return math.isfinite(self._value(cell))

    def _value(self, cell: str) -> float:
        """Return the number in `cell`; NaN if there is none."""
        if self.decimal == ",":
            # A point may separate thousands there: not guessed.
            if "." in cell:
                return math.nan
            cell = cell.replace(",", ".")
        return float(cell) if _NUMBER.fullmatch(cell) else math.nan

    def _hint(self, text: str) -> str:
        """Return the option that fits a `text` which another delimiter divides; empty if there is none."""
        for delimiter, written in _DELIMITERS.items():
            if delimiter != self.delimiter and delimiter in text.strip():
                return f"; if that is what separates cells, give the option delimiter: {written}"
        return ""


def _is_unnamed(name: str) -> bool:
    """Return True for what pandas writes, and reads, as the name of its index."""
    return re.fullmatch(r"(Unnamed: \d+)?", name) is not None


def _on_unnamed(table: _Table, unnamed: list[int]) -> list[str]:
    if not unnamed:
        return []
    numbers = ", ".join(map(str, unnamed))
    return [
        f"{table.path.name}: column {numbers} (counted from 0) has no name, as pandas writes its index: it is no "
        "feature; name it if it is one"
    ]
