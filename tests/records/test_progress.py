"""Progress of a study from planned.json and runs.csv."""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta

import pytest

from scalebench.analysis import load
from scalebench.errors import ResultsError
from scalebench.records.progress import Planned, keep_planned, progress_of
from scalebench.records.schema import SCHEMA_VERSION, EpochRow, RunRow, columns
from scalebench.records.store import Store
from tests.records_factory import run_row

BEGAN = datetime(2026, 11, 20, 3, 0, tzinfo=UTC)


def row(number, seconds, status="completed", attempt=1, epochs=0, **more):
    started = (BEGAN + timedelta(seconds=seconds)).isoformat(timespec="milliseconds")
    return run_row(
        run_id=f"r{number}",
        config_hash="h",
        status=status,
        attempt=attempt,
        started_utc=started,
        epochs=epochs,
        **more,
    )


@pytest.fixture
def folder(tmp_path):
    """Ten virtual and three native runs planned; eight virtual ones attempted in two nights."""
    groups = 10 * ["virtual"] + 3 * ["native mpi"]
    keep_planned(
        tmp_path,
        [Planned(f"r{number}", "h", group) for number, group in enumerate(groups)],
    )
    with Store(tmp_path) as store:
        for number, seconds in enumerate([0, 2, 4, 6, 8, 40000, 40002, 40004]):
            store.append(
                row(
                    number,
                    seconds,
                    "failed" if number in (1, 2) else "completed",
                    error="it broke",
                )
            )
        store.append(row(2, 40006, attempt=2))
        store.append(row("from another study", 40008))
    return tmp_path


def test_progress_counts_latest_attempts_of_planned_runs(folder):
    progress = progress_of(folder)
    assert (progress.planned, progress.done) == (13, 7)
    assert [
        (failure.run_id, failure.status, failure.error) for failure in progress.failures
    ] == [("r1", "failed", "it broke")]
    assert progress.remaining == {"virtual": 2, "native mpi": 3}


@pytest.mark.parametrize("epochs", [0, 2])
def test_runs_whose_epochs_were_lost_are_to_be_made_again(tmp_path, epochs):
    """`planned.json` may or may not have the number of epochs, as those of earlier versions."""
    keep_planned(
        tmp_path, [Planned(f"r{number}", "h", "virtual", epochs) for number in range(4)]
    )
    with Store(tmp_path) as store:
        for number in range(3):
            each = [
                EpochRow(run_id=f"r{number}", attempt=1, epoch=epoch, elapsed_s=1.0)
                for epoch in range(2)
            ]
            store.append(row(number, number, epochs=2), each)
    assert progress_of(tmp_path).done == 3
    table = tmp_path / "epochs.csv"
    table.write_bytes(b"".join(table.read_bytes().splitlines(keepends=True)[:-1]))
    progress = progress_of(tmp_path)
    assert (progress.done, progress.remaining, progress.without_epochs) == (
        2,
        {"virtual": 2},
        {"r2": "virtual"},
    )
    assert progress.never_made == {"virtual": 1}
    table.unlink()
    assert progress_of(tmp_path).remaining == {"virtual": 4}


def test_pace_excludes_the_pause_between_commands(folder):
    progress = progress_of(folder)
    assert progress.seconds_per_run == pytest.approx({"virtual": 2.0})
    assert progress.left_s == pytest.approx(4.0)
    assert progress.without_estimate == {"native mpi": 3}


def test_parallel_runs_share_their_wall_time(tmp_path):
    keep_planned(
        tmp_path, [Planned(f"r{number}", "h", "virtual") for number in range(20)]
    )
    with Store(tmp_path) as store:
        for number in range(9):
            store.append(row(number, number // 3 * 6))
    assert progress_of(tmp_path).seconds_per_run == pytest.approx({"virtual": 2.0})
    assert progress_of(tmp_path).left_s == pytest.approx(22.0)


def test_runs_begun_at_once_took_until_the_last_row_was_written(tmp_path):
    """As the first ones of a pool, which are begun together: their starts tell nothing of how long they took."""
    keep_planned(
        tmp_path, [Planned(f"r{number}", "h", "virtual") for number in range(20)]
    )
    with Store(tmp_path) as store:
        for number in range(4):
            store.append(row(number, 0.04 * (number == 3)))
    assert progress_of(tmp_path).seconds_per_run == pytest.approx(
        {"virtual": 0.04 / 3}
    ), "a copy: its age is no time"
    ended = (BEGAN + timedelta(seconds=40)).timestamp()
    os.utime(tmp_path / "runs.csv", (ended, ended))
    assert progress_of(tmp_path).seconds_per_run == pytest.approx({"virtual": 10.0})


def test_pace_of_interleaved_engines_is_separate(tmp_path):
    turns = [("mpi", 1), ("gloo", 5), ("mpi", 1), ("mpi", 1), ("gloo", 5), ("mpi", 90)]
    keep_planned(
        tmp_path, [Planned(f"r{number}", "h", "native mpi") for number in range(20)]
    )
    with Store(tmp_path) as store:
        moment = 0
        for number, (engine, takes) in enumerate(turns):
            store.append(row(number, moment, execution="native", engine=engine))
            moment += takes
        for number in range(3):
            store.append(row(f"v{number}", moment + 2 * number))
    assert progress_of(tmp_path).seconds_per_run == pytest.approx(
        {"native mpi": 1.0, "native gloo": 5.0, "virtual": 2.0}
    )


def test_changed_configuration_remains_to_be_run(folder):
    keep_planned(folder, [Planned("r0", "another hash", "virtual")])
    assert progress_of(folder).remaining == {"virtual": 1}


def test_study_without_a_plan_consists_of_its_rows(folder):
    (folder / "planned.json").unlink()
    progress = progress_of(folder)
    assert (progress.planned, progress.done, len(progress.failures)) == (9, 8, 1)


def test_incomplete_last_row_is_ignored(folder):
    whole = (folder / "runs.csv").read_bytes()
    expected = progress_of(folder)
    with (folder / "runs.csv").open("ab") as file:
        file.write(whole.splitlines()[-1][:200])
    assert progress_of(folder) == expected


def test_progress_needs_no_epochs(folder):
    (folder / "epochs.csv").unlink()
    assert progress_of(folder).done == 7


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("runs.csv", None, "holds no runs.csv"),
        ("runs.csv", b"1,2,3\n", "lacks schema_version"),
        ("planned.json", b"{", "cannot read .*planned.json"),
        ("planned.json", b"[[1]]", "cannot read .*planned.json"),
        ("planned.json", b"\xff\xfe", "cannot read .*planned.json"),
    ],
)
def test_unreadable_study_is_a_one_line_error(folder, name, content, message):
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_bytes(content)
    with pytest.raises(ResultsError, match=message) as caught:
        progress_of(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (f"\n{SCHEMA_VERSION},".encode(), b"\n99,", "schema version 99"),
        (b",h,1,", b",h,one,", "line 2: attempt is 'one'"),
        (b",h,", b",", f"line 2: {len(columns(RunRow)) - 1} cells"),
    ],
)
def test_damaged_row_is_named_by_its_line(folder, old, new, message):
    path = folder / "runs.csv"
    path.write_bytes(path.read_bytes().replace(old, new))
    with pytest.raises(ResultsError, match=message):
        progress_of(folder)


@pytest.mark.parametrize(
    ("column", "cell", "expected"),
    [
        ("train_s", '"1,234"', "a number"),
        ("workers", "2.5", "a whole number"),
        ("oversubscribed", "maybe", "true or"),
    ],
)
def test_both_readers_report_a_damaged_number_alike(folder, column, cell, expected):
    path = folder / "runs.csv"
    lines = path.read_text().splitlines(keepends=True)
    cells = lines[3].split(",")
    cells[columns(RunRow).index(column)] = cell
    path.write_text("".join([*lines[:3], ",".join(cells), *lines[4:]]))
    for read in (progress_of, load):
        with pytest.raises(
            ResultsError,
            match=rf"line 4: {column} is '{cell.strip(chr(34))}', expected {expected}",
        ):
            read(folder)
