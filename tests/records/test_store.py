"""Committed rows survive failures of the process, the disk and the file."""

from __future__ import annotations

import csv
import os
import resource
import shutil
from contextlib import contextmanager
from pathlib import Path

import pytest

from scalebench.analysis import load
from scalebench.errors import ResultsError
from scalebench.records.append_only import AppendOnlyTable
from scalebench.records.attempts import Attempts
from scalebench.records.schema import SCHEMA_VERSION, EpochRow, RunRow, columns
from scalebench.records.store import Store
from tests.records_factory import epoch_row, run_row


def attempt(run_id, number=1, status="completed", epochs=3):
    run = run_row(
        run_id=run_id,
        config_hash=f"hash-{run_id}",
        attempt=number,
        status=status,
        epochs=max(1, epochs),
    )
    return run, [
        epoch_row(run_id=run_id, attempt=number, epoch=epoch) for epoch in range(epochs)
    ]


def rows(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture
def folder(tmp_path):
    with Store(tmp_path / "study") as store:
        store.append(*attempt("a"))
        store.append(*attempt("b"))
    return tmp_path / "study"


def test_each_table_has_one_header(folder):
    with Store(folder) as store:
        store.append(*attempt("c"))
    for name, row_type, count in (("runs.csv", RunRow, 3), ("epochs.csv", EpochRow, 9)):
        assert (folder / name).read_text().splitlines()[0].split(",") == columns(
            row_type
        )
        assert len(rows(folder / name)) == count


def test_missing_values_are_empty_cells(folder):
    row = rows(folder / "runs.csv")[0]
    assert row["comm_s"] == row["energy_j"] == row["error"] == ""
    assert row["oversubscribed"] == "false"
    assert row["schema_version"] == str(SCHEMA_VERSION)


def test_reopening_finds_completed_runs_and_attempts(folder):
    with Store(folder) as store:
        store.append(*attempt("c", status="failed"))
    with Store(folder) as store:
        assert set(store.completed) == {("a", "hash-a"), ("b", "hash-b")}
        assert [store.next_attempt(name) for name in ("a", "c", "new")] == [2, 2, 1]
        store.append(*attempt("c", 2))
        assert ("c", "hash-c") in store.completed
        assert store.next_attempt("c") == 3


def test_truncation_at_any_byte_of_the_last_run_loses_only_that_run(folder, tmp_path):
    whole = (folder / "runs.csv").read_bytes()
    last_row = len(whole.splitlines(keepends=True)[-1])
    assert b",hash-b," in whole[-last_row:]
    for missing in range(1, last_row + 1):
        cut = tmp_path / "cut"
        shutil.copytree(folder, cut)
        (cut / "runs.csv").write_bytes(whole[:-missing])
        with Store(cut, fsync=False) as store:
            assert set(store.completed) == {("a", "hash-a")}
            assert store.next_attempt("b") == 1
            store.append(*attempt("b"))
        assert (cut / "runs.csv").read_bytes() == whole
        assert [row["run_id"] for row in rows(cut / "epochs.csv")] == ["a"] * 3 + [
            "b"
        ] * 3
        set_aside = (cut / "epochs.csv.partial").read_text()
        assert set_aside.count("\n") == 3
        if missing < last_row:
            assert (cut / "runs.csv.partial").read_bytes() == whole[
                -last_row:-missing
            ] + b"\n"
        shutil.rmtree(cut)


def test_truncated_epochs_of_an_uncommitted_run_are_removed(folder, tmp_path):
    committed = (folder / "epochs.csv").read_bytes()
    with Store(folder) as store:
        store.append(*attempt("c"))
    whole = (folder / "epochs.csv").read_bytes()
    runs = (folder / "runs.csv").read_bytes().splitlines(keepends=True)
    (folder / "runs.csv").write_bytes(b"".join(runs[:-1]))
    assert whole.removeprefix(committed).count(b"\n") == 3
    for length in range(len(committed), len(whole) + 1):
        (folder / "epochs.csv").write_bytes(whole[:length])
        Store(folder, fsync=False).close()
        assert (folder / "epochs.csv").read_bytes() == committed


def test_incomplete_header_is_replaced(tmp_path):
    (tmp_path / "runs.csv").write_text("schema_version,stu")
    Store(tmp_path).close()
    assert rows(tmp_path / "runs.csv") == []
    assert (tmp_path / "runs.csv.partial").read_text() == "schema_version,stu\n"


def test_many_uncommitted_epochs_are_set_aside(folder):
    committed = (folder / "epochs.csv").read_bytes()
    line = committed.splitlines()[-1].replace(b"b,", b"lost,", 1) + b"\n"
    (folder / "epochs.csv").write_bytes(committed + 9000 * line)
    Store(folder).close()
    assert (folder / "epochs.csv").read_bytes() == committed
    assert (folder / "epochs.csv.partial").read_bytes() == 9000 * line


@contextmanager
def file_size_limit(size):
    """Simulate a full disk: no file may grow beyond `size` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


class Disk:
    """File contents and names that would survive a power loss: those that were synced."""

    def __init__(self, monkeypatch):
        self._real, self.files, self.names, self.order = os.fsync, {}, set(), []
        monkeypatch.setattr(os, "fsync", self.fsync)

    def fsync(self, descriptor):
        self._real(descriptor)
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        self.order.append(path.name)
        if path.is_dir():
            self.names |= set(path.iterdir())
        else:
            self.files[path] = path.read_bytes()

    def holds(self, path):
        found = path in self.names and path.parent in self.names
        return self.files.get(path, b"") if found else b""


def test_append_syncs_epochs_then_the_run(tmp_path, monkeypatch):
    disk = Disk(monkeypatch)
    runs, epochs = (tmp_path / "study" / name for name in ("runs.csv", "epochs.csv"))
    with Store(tmp_path / "study") as store:
        assert disk.holds(runs) == runs.read_bytes()
        for name in ("a", "b"):
            disk.order.clear()
            store.append(*attempt(name))
            assert disk.order == ["epochs.csv", "runs.csv"]
            assert disk.holds(runs) == runs.read_bytes()
            assert disk.holds(epochs) == epochs.read_bytes()


def test_run_is_written_after_its_epochs_are_synced(folder, monkeypatch):
    written, disk = [], Disk(monkeypatch)
    write = AppendOnlyTable._write

    def watched(table, data):
        if table.path.name == "runs.csv":
            written.append(
                disk.files.get(folder / "epochs.csv")
                == (folder / "epochs.csv").read_bytes()
            )
        return write(table, data)

    monkeypatch.setattr(AppendOnlyTable, "_write", watched)
    with Store(folder) as store:
        store.append(*attempt("c"))
        store.append(*attempt("d"))
    assert written == [True, True]


def test_incomplete_rows_are_synced_before_truncation(folder, monkeypatch):
    with (folder / "runs.csv").open("ab") as file:
        file.write(b"4,torn")
    disk = Disk(monkeypatch)
    Store(folder).close()
    assert disk.files[folder / "runs.csv.partial"] == b"4,torn\n"
    assert folder / "runs.csv.partial" in disk.names


def test_replaced_file_is_synced_with_its_folder(folder, monkeypatch):
    disk = Disk(monkeypatch)
    with Store(folder) as store:
        path = folder / "provenance" / f"{store.keep_provenance({'cpu': 'x'})}.json"
    assert disk.order[-2:] == [f"{path.name}.new", "provenance"]
    assert path in disk.names
    assert disk.files[path.with_name(f"{path.name}.new")] == path.read_bytes()


@pytest.mark.parametrize("table", ["runs.csv", "epochs.csv"])
def test_full_disk_leaves_no_incomplete_row(folder, table):
    before = {name: (folder / name).read_bytes() for name in ("runs.csv", "epochs.csv")}
    epochs = 40 if table == "epochs.csv" else 0
    with Store(folder) as store:
        with (
            file_size_limit(len(before[table]) + 50),
            pytest.raises(ResultsError, match=rf"cannot write .*{table}: "),
        ):
            store.append(*attempt("c", epochs=epochs))
        assert {name: (folder / name).read_bytes() for name in before} == before
        assert store.next_attempt("c") == 1
        store.append(*attempt("c"))
    assert len(rows(folder / "runs.csv")) == 3


def test_failed_run_row_removes_its_epochs(folder):
    runs, epochs = ((folder / name).read_bytes() for name in ("runs.csv", "epochs.csv"))
    with Store(folder) as store:
        with (
            file_size_limit(len(runs) + 50),
            pytest.raises(ResultsError, match="cannot write"),
        ):
            store.append(*attempt("c", epochs=1))
        assert (folder / "epochs.csv").read_bytes() == epochs


@pytest.mark.parametrize("place", ["/proc/scalebench", "file/study"])
def test_unwritable_folder_is_a_one_line_error(tmp_path, place):
    (tmp_path / "file").touch()
    with pytest.raises(
        ResultsError, match=r"cannot open .*runs\.csv: .*--output"
    ) as caught:
        Store(tmp_path / place)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("deleted", ["runs.csv", "epochs.csv", ""])
def test_deleted_tables_are_written_again_with_all_rows(folder, deleted):
    tables = ("runs.csv", "epochs.csv")
    with Store(folder) as store:
        assert store.write_deleted() == []
        before = {name: (folder / name).read_bytes() for name in tables}
        if deleted:
            (folder / deleted).unlink()
        else:
            shutil.rmtree(folder)
        assert {path.name for path in store.write_deleted()} == (
            {deleted} if deleted else set(tables)
        )
        assert {name: (folder / name).read_bytes() for name in tables} == before
        store.append(*attempt("c"))
        store.append(*attempt("d"))
    assert [row["run_id"] for row in rows(folder / "runs.csv")] == ["a", "b", "c", "d"]


@pytest.mark.parametrize("kept", [0, 1, 2, 4])
def test_completed_run_whose_epochs_were_lost_is_made_again(folder, kept):
    """Of three epochs each of a and b, the first `kept` rows are there; without any the file is gone."""
    lines = (folder / "epochs.csv").read_bytes().splitlines(keepends=True)
    (folder / "epochs.csv").write_bytes(b"".join(lines[: 1 + kept]))
    if not kept:
        (folder / "epochs.csv").unlink()
    lost = ["a", "b"] if kept < 3 else ["b"]
    with Store(folder) as store:
        assert store.without_epochs == lost
        assert {run_id for run_id, _ in store.completed} == {"a", "b"} - set(lost)
        for run_id in lost:
            store.append(*attempt(run_id, number=store.next_attempt(run_id)))
    with Store(folder) as store:
        assert store.without_epochs == []
        assert {run_id for run_id, _ in store.completed} == {"a", "b"}


def test_table_replaced_by_another_file_is_a_one_line_error(folder):
    with Store(folder) as store:
        (folder / "runs.csv").rename(folder / "earlier.csv")
        shutil.copy(folder / "earlier.csv", folder / "runs.csv")
        with pytest.raises(
            ResultsError,
            match=r"runs\.csv was replaced by another file during the study",
        ):
            store.write_deleted()


def test_unwritable_provenance_is_a_one_line_error(folder):
    (folder / "provenance").touch()  # an unwritable folder, also for root
    with (
        Store(folder) as store,
        pytest.raises(
            ResultsError, match=r"cannot write .*provenance.*json: .*--output"
        ),
    ):
        store.keep_provenance({"cpu": "x"})


def test_set_aside_lists_the_partial_files(folder):
    with Store(folder) as store:
        assert store.set_aside == []
    with (folder / "runs.csv").open("ab") as file:
        file.write(b"4,torn")
    with (folder / "epochs.csv").open("ab") as file:
        file.write(b"c,1,0,1.0")
    with Store(folder) as store:
        assert [path.name for path in store.set_aside] == [
            "runs.csv.partial",
            "epochs.csv.partial",
        ]


def test_other_schema_version_is_refused(folder):
    text = (folder / "runs.csv").read_text().replace(f"\n{SCHEMA_VERSION},", "\n99,")
    (folder / "runs.csv").write_text(text)
    with pytest.raises(
        ResultsError, match=rf"schema version 99, .* version {SCHEMA_VERSION};"
    ):
        Store(folder)


def test_header_with_an_unknown_column_is_refused_by_every_reader(folder):
    first, *others = (folder / "runs.csv").read_text().splitlines()
    (folder / "runs.csv").write_text(
        "\n".join([f"{first},colour", *(f"{row},red" for row in others)]) + "\n"
    )
    for read in (Store, load, lambda folder: Attempts(folder / "runs.csv")):
        with pytest.raises(
            ResultsError,
            match=rf"unknown 'colour': not schema version {SCHEMA_VERSION}",
        ):
            read(folder)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("comm_s,", "", "lacks comm_s"),
        ("comm_s,", "comm_s,colour,", "has the unknown 'colour'"),
        ("comm_s,", "comm_s,comm_s,", "repeats a column"),
        (",", ";", "not separated by commas"),
    ],
)
def test_other_columns_are_named_in_the_error(folder, old, new, message):
    (folder / "epochs.csv").write_text(
        (folder / "epochs.csv").read_text().replace(old, new)
    )
    with pytest.raises(ResultsError, match=message):
        Store(folder)


def test_append_keeps_the_column_order_of_the_file(folder):
    old = rows(folder / "runs.csv")
    header = sorted(columns(RunRow))
    with (folder / "runs.csv").open("w", newline="", encoding="utf-8-sig") as file:
        writer = csv.DictWriter(file, header)
        writer.writeheader()
        writer.writerows(old)
    with Store(folder) as store:
        assert len(store.completed) == 2
        store.append(*attempt("c"))
    with (folder / "runs.csv").open(newline="", encoding="utf-8-sig") as file:
        new = list(csv.DictReader(file))
    assert [row["run_id"] for row in new] == ["a", "b", "c"]
    assert {**new[2], "run_id": "a", "config_hash": "hash-a"} == old[0]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"1,2,3\n", rf"line 4: 3 cells, expected {len(columns(RunRow))}"),
        (b"\x00\xff\n", r"line 4: 1 cells"),
    ],
)
def test_damaged_row_is_named_by_its_line(folder, line, message):
    with (folder / "runs.csv").open("ab") as file:
        file.write(line)
    with pytest.raises(ResultsError, match=message):
        Store(folder)


@pytest.mark.parametrize("train_s", [float("inf"), 1e300, 1e-320])
def test_time_out_of_range_is_refused_at_opening(folder, train_s):
    with Store(folder) as store:
        store.append(run_row(run_id="x", train_s=train_s))
    with pytest.raises(
        ResultsError, match=r"line 4: train_s is .*, expected 1e-09 to 1e\+09 s"
    ):
        Store(folder)


def test_formulas_are_escaped(folder):
    with Store(folder) as store:
        store.append(
            run_row(run_id="x", strategy="=cmd()", error="- no\nway", train_s=-1.5), []
        )
    row = rows(folder / "runs.csv")[-1]
    assert (row["strategy"], row["error"], row["train_s"]) == (
        "'=cmd()",
        "'- no way",
        "-1.5",
    )


def test_epoch_rows_of_another_run_raise_value_error(folder):
    with (
        Store(folder) as store,
        pytest.raises(ValueError, match="epoch rows of 'b' given with run 'a'"),
    ):
        store.append(attempt("a")[0], attempt("b")[1])


def test_provenance_is_written_once(folder):
    with Store(folder) as store:
        first, again = (
            store.keep_provenance({"cpu": "x"}),
            store.keep_provenance({"cpu": "x"}),
        )
    assert first == again
    assert [file.name for file in (folder / "provenance").iterdir()] == [
        f"{first}.json"
    ]
