"""The fast reader of runs.csv finds the same rows as a csv reader."""

from __future__ import annotations

import csv

import pytest

from scalebench.errors import ResultsError
from scalebench.records.attempts import Attempts, latest_places
from scalebench.records.store import Store
from tests.records_factory import run_row


@pytest.fixture
def path(tmp_path):
    with Store(tmp_path, fsync=False) as store:
        for number in range(12):
            error = number * "a long reason, " if number % 3 == 0 else None
            status = "failed" if error else "completed"
            store.append(run_row(run_id=f"r{number % 9}", attempt=1 + number // 9, status=status, error=error), [])
    return tmp_path / "runs.csv"


def rows(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_rows_are_those_of_a_csv_reader(path):
    expected, found = rows(path), Attempts(path)
    assert found.run_id == [row["run_id"] for row in expected]
    assert found.attempt == [int(row["attempt"]) for row in expected]
    assert found.status == [row["status"] for row in expected]
    assert [found.row(place) for place in range(len(found))] == expected
    assert [found.newest(count) for count in (1, 5, 12, 99)] == [expected[-count:] for count in (1, 5, 12, 99)]
    assert found.latest() == latest_places(found.run_id, found.attempt) == {f"r{n % 9}": n for n in range(3, 12)}


def test_incomplete_last_row_is_ignored(path):
    expected = rows(path)
    with path.open("ab") as file:
        file.write(path.read_bytes().splitlines()[1][:100])
    assert Attempts(path).newest(99) == expected


def test_reordered_columns_are_read(path):
    expected = rows(path)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(reversed(expected[0])))
        writer.writeheader()
        writer.writerows(expected)
    found = Attempts(path)
    assert [found.row(place) for place in range(len(found))] == found.newest(99) == expected


@pytest.mark.parametrize("old", ["r4", "completed", "synthetic"])
def test_quoted_first_cells_are_read(path, old):
    path.write_text(path.read_text().replace(f",{old},", f',"{old}",'))
    expected, found = rows(path), Attempts(path)
    assert found.run_id == [row["run_id"] for row in expected]
    assert [found.row(place) for place in range(len(found))] == found.newest(99) == expected


def test_line_with_too_few_cells_is_named(path):
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:3], ",".join(lines[3].split(",")[:6]) + "\n", *lines[4:]]))
    with pytest.raises(ResultsError, match=r"runs.csv, line 4: 6 cells, expected \d+; repair or remove the line"):
        Attempts(path)
