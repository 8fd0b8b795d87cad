"""What runs.csv holds, read piece by piece, is what a reader of the whole file finds."""

from __future__ import annotations

import csv

import pytest

from scalebench.errors import ResultsError
from scalebench.records import attempts
from scalebench.records.attempts import Attempts, counting
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


@pytest.mark.parametrize(("piece", "line", "beginning"), [(7, 1, 9), (500, 60, 40), (1 << 20, 1 << 10, 200)])
def test_pieces_of_any_size_hold_the_same_rows(path, piece, line, beginning, monkeypatch):
    monkeypatch.setattr(attempts, "_PIECE", piece)
    monkeypatch.setattr(attempts, "_LINE", line)
    monkeypatch.setattr(attempts, "_BEGINNING", beginning)
    expected, found = rows(path), Attempts(path)
    assert found.run_id == [row["run_id"] for row in expected]
    assert found.attempt == [int(row["attempt"]) for row in expected]
    assert found.status == [row["status"] for row in expected]
    assert [found.row(place) for place in range(len(found))] == expected
    assert [found.newest(count) for count in (1, 5, 12, 99)] == [expected[-count:] for count in (1, 5, 12, 99)]
    assert found.latest() == counting(found.run_id, found.attempt) == {f"r{n % 9}": n for n in range(3, 12)}


def test_a_row_that_is_being_written_is_none_wherever_a_piece_ends(path, monkeypatch):
    expected = rows(path)
    with path.open("ab") as file:
        file.write(path.read_bytes().splitlines()[1][:100])
    for piece in (64, 1 << 20):
        monkeypatch.setattr(attempts, "_PIECE", piece)
        assert Attempts(path).newest(99) == expected


def test_columns_that_were_moved_are_read_in_order(path):
    expected = rows(path)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(reversed(expected[0])))
        writer.writeheader()
        writer.writerows(expected)
    found = Attempts(path)
    assert [found.row(place) for place in range(len(found))] == found.newest(99) == expected


@pytest.mark.parametrize("old", ["r4", "completed", "synthetic"])
def test_first_cells_in_quotes_are_refused(path, old):
    path.write_text(path.read_text().replace(f",{old},", f',"{old}",'))
    with pytest.raises(ResultsError, match=r"runs.csv: its first cells are in quotes; save it without them"):
        Attempts(path)


def test_a_line_of_too_few_cells_is_named(path):
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:3], ",".join(lines[3].split(",")[:6]) + "\n", *lines[4:]]))
    with pytest.raises(ResultsError, match=r"runs.csv, line 4: 6 cells, expected \d+; repair or remove the line"):
        Attempts(path)
