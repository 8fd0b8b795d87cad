"""The fast reader of runs.csv finds the same rows as a csv reader."""

from __future__ import annotations

import csv

import pytest

from scalebench.errors import ResultsError
from scalebench.records.attempts import Attempts, latest_places
from scalebench.records.schema import EpochRow
from scalebench.records.store import Store
from tests.records_factory import run_row


@pytest.fixture
def path(tmp_path):
    with Store(tmp_path, fsync=False) as store:
        for number in range(12):
            error = number * "a long reason, " if number % 3 == 0 else None
            status = "failed" if error else "completed"
            store.append(
                run_row(
                    run_id=f"r{number % 9}",
                    attempt=1 + number // 9,
                    status=status,
                    error=error,
                ),
                [],
            )
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
    assert [found.newest(count) for count in (1, 5, 12, 99)] == [
        expected[-count:] for count in (1, 5, 12, 99)
    ]
    assert (
        found.latest()
        == latest_places(found.run_id, found.attempt)
        == {f"r{n % 9}": n for n in range(3, 12)}
    )


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
    assert (
        [found.row(place) for place in range(len(found))]
        == found.newest(99)
        == expected
    )


@pytest.mark.parametrize("old", ["r4", "completed", "synthetic"])
def test_quoted_first_cells_are_read(path, old):
    path.write_text(path.read_text().replace(f",{old},", f',"{old}",'))
    expected, found = rows(path), Attempts(path)
    assert found.run_id == [row["run_id"] for row in expected]
    assert (
        [found.row(place) for place in range(len(found))]
        == found.newest(99)
        == expected
    )


def test_line_with_too_few_cells_is_named(path):
    lines = path.read_text().splitlines(keepends=True)
    path.write_text(
        "".join([*lines[:3], ",".join(lines[3].split(",")[:6]) + "\n", *lines[4:]])
    )
    with pytest.raises(
        ResultsError,
        match=r"runs.csv, line 4: 6 cells, expected \d+; repair or remove the line",
    ):
        Attempts(path)


@pytest.fixture
def with_epochs(tmp_path):
    """Runs of three epochs: r0 failed with one of them, then was completed."""
    attempts = [
        ("r0", 1, "failed", 1),
        ("r1", 1, "completed", 3),
        ("r0", 2, "completed", 3),
        ("r2", 1, "completed", 3),
    ]
    with Store(tmp_path, fsync=False) as store:
        for run_id, attempt, status, count in attempts:
            key = {"run_id": run_id, "attempt": attempt}
            epochs = [
                EpochRow(**key, epoch=epoch, elapsed_s=epoch + 1.0)
                for epoch in range(count)
            ]
            store.append(run_row(**key, status=status, epochs=3), epochs)
    return tmp_path


def lacking(folder):
    found = Attempts(folder / "runs.csv")
    places = found.without_epochs(folder / "epochs.csv")
    assert found.without_epochs(folder / "epochs.csv", {"r1": 3, "r2": 3}) == places
    return [found.run_id[place] for place in places]


@pytest.mark.parametrize("place", range(1, 11))
def test_run_that_lost_any_of_its_epochs_is_found(with_epochs, place):
    table = with_epochs / "epochs.csv"
    assert lacking(with_epochs) == []
    lines = table.read_bytes().splitlines(keepends=True)
    lost = lines.pop(place)
    table.write_bytes(b"".join(lines))
    expected = [] if lost.startswith(b"r0,1,") else [lost[:2].decode()]
    assert lacking(with_epochs) == expected
    # another epoch twice does not make up for it
    table.write_bytes(b"".join([*lines, lines[3]]))
    assert lacking(with_epochs) == expected


@pytest.mark.parametrize(
    "change", ["reversed rows", "reversed columns", "quoted cells", "rows twice"]
)
def test_epochs_are_counted_in_any_order(with_epochs, change):
    table = with_epochs / "epochs.csv"
    header, *lines = [line.split(",") for line in table.read_text().splitlines()]
    if change == "reversed rows":
        lines.reverse()
    elif change == "reversed columns":
        header, lines = header[::-1], [line[::-1] for line in lines]
    elif change == "quoted cells":
        lines = [[f'"{cell}"' for cell in line] for line in lines]
    else:
        lines *= 2
    table.write_text("".join(",".join(line) + "\n" for line in (header, *lines)))
    assert lacking(with_epochs) == []
    table.write_text(
        "".join(",".join(line) + "\n" for line in (header, *lines[:3], *lines[4:7]))
    )
    assert lacking(with_epochs) != []


@pytest.mark.parametrize("content", [None, b"", b"run_id,att"])
def test_without_a_table_all_completed_runs_lack_epochs(with_epochs, content):
    table = with_epochs / "epochs.csv"
    table.unlink()
    if content is not None:
        table.write_bytes(content)
    assert lacking(with_epochs) == ["r1", "r0", "r2"]


def test_columns_of_later_versions_are_read_as_empty(path):
    expected = rows(path)
    kept = [name for name in expected[0] if name not in ("bubble_s", "tuned")]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, kept, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(expected)
    found = Attempts(path)
    assert found.newest(99) == [row | {"bubble_s": "", "tuned": ""} for row in expected]
