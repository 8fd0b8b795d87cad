"""User data in a CSV file."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, NonNegativeInt

from scalebench.data.builder import DATASETS, Allocate, Arrays, DatasetBuilder
from scalebench.data.dataset import Task
from scalebench.data.files import only_file
from scalebench.data.split import hold_out, standardised
from scalebench.errors import DataError, nearest


@DATASETS.add
class Csv(DatasetBuilder):
    """Table with one sample per row: one target column, numeric features.

    `target` is a column's name or its number from 0 (-1: the last). Text or integers in it are classes (numbered in
    sorted order), other numbers are regression targets, unless `task` is set. A seeded part is held out; features and
    regression targets are standardised by the training part.
    """

    name = "csv"
    summary = "your own .csv in --data-dir: target column by name or number, the others are features"

    file: str | None = None
    target: str | int = -1
    header: bool = True
    delimiter: str = Field(",", min_length=1, max_length=1)
    task: Task | None = None
    test_fraction: float = Field(0.2, gt=0, lt=1)
    seed: NonNegativeInt = 0
    standardise: bool = True

    def files(self, data_dir: Path | None) -> list[Path]:
        return [only_file(self.name, data_dir, self.file, ".csv")]

    def build(self, files: list[Path], allocate: Allocate) -> Arrays:
        (path,) = files
        names, lines, rows = self._read(path)
        column = self._target_column(path, names)
        cells = [row.pop(column) for row in rows]
        del names[column]
        x = _numbers(path, names, lines, rows)
        task = self.task or ("classification" if _are_classes(cells) else "regression")
        labels = None
        if task == "regression":
            y, outputs = _numbers(path, ["target"], lines, [[cell] for cell in cells]), 1
        else:
            y, outputs = _class_numbers(path, cells)
            labels = y
        train, test = hold_out(len(x), self.test_fraction, self.seed, labels)
        x_parts, y_parts = (x[train], x[test]), (y[train], y[test])
        if self.standardise:
            x_parts = standardised(*x_parts)
            y_parts = standardised(*y_parts) if task == "regression" else y_parts
        x_train, x_test = (part.astype(np.float32) for part in x_parts)
        y_train, y_test = (part.astype(np.float32) if task == "regression" else part for part in y_parts)
        return Arrays(task, outputs, x_train, y_train, x_test, y_test)

    def _read(self, path: Path) -> tuple[list[str], list[int], list[list[str]]]:
        """Return column names, and line number and cells of each row."""
        lines, rows = [], []
        try:
            with path.open(newline="", encoding="utf-8-sig") as file:
                reader = csv.reader(file, delimiter=self.delimiter, strict=True)
                for row in reader:
                    if row:
                        lines.append(reader.line_num)
                        rows.append([cell.strip() for cell in row])
        except (OSError, csv.Error, UnicodeDecodeError) as error:
            raise DataError(f"{path}: not a readable CSV file ({error}); expected UTF-8 text") from None
        if len(rows) < 2 + self.header:
            raise DataError(f"{path}: lines with text: {len(rows)}; expected at least two samples")
        width = len(rows[0])
        for line, row in zip(lines, rows, strict=True):
            if len(row) != width:
                raise DataError(f"{path}, line {line}: {len(row)} cells, expected {width} as in line {lines[0]}")
        if width < 2:
            raise DataError(f"{path}: one column; expected features and a target separated by {self.delimiter!r}")
        if self.header:
            return rows[0], lines[1:], rows[1:]
        return [f"column {number}" for number in range(width)], lines, rows

    def _target_column(self, path: Path, names: list[str]) -> int:
        if isinstance(self.target, str):
            if self.target not in names:
                raise DataError(f"{path}: no column {self.target!r} for the target; {nearest(self.target, names)}")
            return names.index(self.target)
        if not -len(names) <= self.target < len(names):
            raise DataError(f"{path}: no column {self.target} for the target; it has columns 0 to {len(names) - 1}")
        return self.target % len(names)


def _numbers(path: Path, names: list[str], lines: list[int], rows: list[list[str]]) -> NDArray[Any]:
    values = np.empty((len(rows), len(names)))
    for position, (line, row) in enumerate(zip(lines, rows, strict=True)):
        try:
            values[position] = [float(cell) for cell in row]
        except ValueError:
            bad = next(number for number, cell in enumerate(row) if not _is_number(cell))
            raise DataError(
                f"{path}, line {line}, {names[bad]}: {row[bad]!r} is not a number; "
                "fill it in, code it as numbers or drop it"
            ) from None
    return values


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _are_classes(cells: list[str]) -> bool:
    return not all(_is_number(cell) for cell in cells) or all(float(cell).is_integer() for cell in cells)


def _class_numbers(path: Path, cells: list[str]) -> tuple[NDArray[Any], int]:
    if "" in cells:
        raise DataError(f"{path}: sample {cells.index('')} (counted from 0) has no target; fill it in or drop the row")
    distinct = set(cells)
    if not 2 <= len(distinct) <= max(2, len(cells) // 2):
        raise DataError(
            f"{path}: {len(distinct)} classes in {len(cells)} samples; "
            "if the target is a value to be predicted, give the option task: regression"
        )
    ordered = sorted(distinct, key=float) if all(_is_number(cell) for cell in distinct) else sorted(distinct)
    number = {label: position for position, label in enumerate(ordered)}
    return np.array([number[cell] for cell in cells], dtype=np.int64), len(ordered)
