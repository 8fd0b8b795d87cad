"""Reading of records, and errors for damaged ones."""

from __future__ import annotations

import csv
import math
import re

import numpy as np
import pandas as pd
import pytest

from scalebench.analysis import cells, check, load
from scalebench.analysis.loading import label_of
from scalebench.analysis.rounds import runs_by_cell, spread
from scalebench.errors import ResultsError
from scalebench.records.schema import RunRow, columns
from scalebench.records.store import Store
from tests.records_factory import epoch_row, run_row


def test_runs_with_lost_epochs_are_noted_and_in_no_epochs(tmp_path):
    with Store(tmp_path) as store:
        for repetition, run_id in enumerate(("a", "b", "c")):
            run = run_row(run_id=run_id, repetition=repetition, epochs=2)
            store.append(
                run, [epoch_row(run_id=run_id, epoch=epoch) for epoch in (0, 1)]
            )
    lines = (tmp_path / "epochs.csv").read_text().splitlines(keepends=True)
    (tmp_path / "epochs.csv").write_text("".join(lines[:4]))
    results = load(tmp_path)
    assert results.epochs["run_id"].tolist() == ["a", "a"]
    assert results.without_epochs == ["b", "c"]
    assert re.search(r"epochs\.csv .*\b2 .*\(b, c\)", results.notes[0])
    assert check(tmp_path).count("error") == 0
    (finding,) = [
        found for found in check(tmp_path).findings if found.rule == "missing-epochs"
    ]
    assert re.search(r"\b2 .*missing \(b, c\); 2 rows", finding.what)
    (tmp_path / "epochs.csv").unlink()
    assert load(tmp_path).epochs.empty
    (finding,) = [
        found for found in check(tmp_path).findings if found.rule == "missing-epochs"
    ]
    assert re.search(r"\b3 .*missing", finding.what)


def test_rows_come_back_with_their_types(study):
    results = study(
        rows=[
            run_row(
                run_id="a",
                train_s=1.25,
                comm_s=None,
                strategy_options={"every": 2},
                strategy="epoch_average",
            ),
            run_row(run_id="b", train_s=2.5, comm_s=0.5, strategy="=cmd()", error="-x"),
        ]
    )
    runs = results.runs
    assert runs["train_s"].tolist() == [1.25, 2.5]
    assert runs["comm_s"].isna().tolist() == [True, False]
    assert runs["strategy"].tolist() == ["epoch_average", "=cmd()"]
    assert runs["error"].iloc[1] == "-x"
    assert runs["label"].tolist() == ["epoch_average(every=2)", "=cmd()"]
    assert runs["workers"].dtype == "Int64"
    assert list(results.epochs.columns)[:3] == ["run_id", "attempt", "epoch"]


def test_the_latest_attempt_counts(study):
    rows = [
        run_row(attempt=1, train_s=9.0),
        run_row(attempt=2, train_s=2.0),
        run_row(run_id="other", status="failed"),
    ]
    results = study(rows=rows)
    assert results.completed["train_s"].tolist() == [2.0]
    assert results.failed["run_id"].tolist() == ["other"]


def test_warm_up_runs_are_left_out(study):
    rows = [run_row(train_s=2.0), run_row(run_id="warmup0-a", warmup=True, train_s=9.0)]
    results = study(rows=rows)
    assert results.completed["train_s"].tolist() == [2.0]
    assert results.failed.empty
    assert len(results.runs) == 2


def test_empty_options_are_no_options(study):
    results = study(rows=[run_row()])
    path = results.folder / "runs.csv"
    path.write_text(path.read_text().replace(",{},", ",,"))
    assert load(results.folder).runs["label"].tolist() == ["allreduce"]


def test_epochs_of_older_attempts_and_of_uncommitted_runs_do_not_count(tmp_path):
    with Store(tmp_path) as store:
        store.append(
            run_row(attempt=1, status="timeout"),
            [epoch_row(attempt=1, test_metric=0.1)],
        )
        store.append(
            run_row(attempt=2, epochs=1), [epoch_row(attempt=2, test_metric=0.9)]
        )
    with (tmp_path / "epochs.csv").open("a") as file:
        file.write("lost,1,0" + 14 * "," + "\n")
    assert load(tmp_path).epochs["test_metric"].tolist() == [0.9]


def test_paced_runs_that_cannot_keep_the_pace_are_oversubscribed(study):
    rows = [
        run_row(
            run_id=str(share),
            repetition=n,
            execution="paced",
            engine="mpi",
            paced_overrun=share,
        )
        for n, share in enumerate((0.0, 0.01, 0.02))
    ]
    assert study(rows=rows).runs["oversubscribed"].tolist() == [False, False, True]


def test_latest_configuration_counts_with_a_note(study):
    rows = [
        run_row(run_id="old", lr=0.2),
        run_row(run_id="old2", lr=0.3),
        run_row(run_id="new"),
    ]
    results = study(rows=rows)
    assert results.runs["run_id"].tolist() == ["new"]
    (note,) = results.notes
    assert re.fullmatch(
        r"left out 2 runs with lr = 0\.2, 0\.3: .* 0\.1; .*study name.*", note
    )


def test_the_cluster_may_differ_between_executions_but_not_within_one(study):
    rows = [
        run_row(run_id="n", execution="native", engine="mpi", cluster="this-machine"),
        run_row(run_id="v1", cluster="juwels-booster"),
        run_row(run_id="v2", cluster="ethernet-10g"),
    ]
    results = study(rows=rows)
    assert results.runs["run_id"].tolist() == ["n", "v2"]
    assert re.match(
        r"left out 1 run .*cluster = juwels-booster: .* ethernet-10g", results.notes[0]
    )


def test_two_contents_of_a_cluster_file_are_two_clusters(study):
    ours = {"cluster": "ours.yaml", "cluster_sha256": "a" * 64}
    rows = [
        run_row(run_id="v1", **ours),
        run_row(run_id="v2", workers=2, **(ours | {"cluster_sha256": "b" * 64})),
        run_row(run_id="n", execution="native", engine="mpi", cluster="this-machine"),
    ]
    results = study(rows=rows)
    assert set(results.runs["run_id"]) == {"n", "v2"}
    assert re.match(
        r"left out 1 run .*ours\.yaml \(sha256 a{12}\): .*\(sha256 b{12}\)",
        results.notes[0],
    )


@pytest.mark.parametrize(
    ("column", "cell", "message"),
    [
        ("train_s", "1,5", "train_s is '1,5', expected a number"),
        ("train_s", "1.2.3", "train_s is '1.2.3', expected a number"),
        ("workers", "four", "workers is 'four', expected a whole number"),
        ("workers", "2.5", "workers is '2.5', expected a whole number"),
        ("workers", "0", "workers is '0', expected a number from 1 up"),
        (
            "oversubscribed",
            "perhaps",
            "oversubscribed is 'perhaps', expected true or false",
        ),
        ("status", "fine", "status is 'fine', expected one of completed, failed"),
        ("strategy", "", "strategy is empty, expected a value"),
        ("epochs", "", "epochs is empty, expected a number from 1 up"),
        ("train_s", "inf", "train_s is 'inf', expected 1e-09 to 1e+09 s"),
        ("train_s", "1e300", "train_s is '1e+300', expected 1e-09 to 1e+09 s"),
        ("train_s", "1e-320", "train_s is '1e-320', expected 1e-09 to 1e+09 s"),
        ("comm_s", "-inf", "comm_s is '-inf', expected at most 1e+09 s"),
        (
            "final_metric",
            "7.5",
            "final_metric is '7.5', expected an accuracy from 0 to 1",
        ),
        (
            "best_metric",
            "-0.5",
            "best_metric is '-0.5', expected an accuracy from 0 to 1",
        ),
        (
            "time_to_target_s",
            "99999",
            "time_to_target_s is '99999.0', expected at most train_s, which is 1",
        ),
        (
            "time_to_target_s",
            "1.00001",
            "time_to_target_s is '1.00001', expected at most train_s, which is 1",
        ),
        (
            "compute_s",
            "99999",
            "compute_s is '99999.0', expected at most train_s, which is 1",
        ),
        ("comm_s", "1.5", "comm_s is '1.5', expected at most train_s, which is 1"),
        ("wait_s", "2", "wait_s is '2.0', expected at most train_s, which is 1"),
        ("data_s", "2", "data_s is '2.0', expected at most train_s, which is 1"),
        ("other_s", "2", "other_s is '2.0', expected at most train_s, which is 1"),
        (
            "epochs_to_target",
            "7",
            "epochs_to_target is '7', expected at most epochs, which is 6",
        ),
        *(
            (
                "started_utc",
                moment,
                f"started_utc is '{moment}', expected ISO 8601 (2026-11-20T12:00:00+00:00)",
            )
            for moment in (
                "22.11.2026 03:00",
                "11/22/2026 3:00",
                "2026/11/22 03:00",
                "46348.125",
                "20261122",
                "now",
            )
        ),
        (
            "bytes_sent_per_worker",
            "inf",
            "bytes_sent_per_worker is 'inf', expected a number of at most 1e+150",
        ),
        (
            "workers",
            20 * "9",
            f"workers is '{20 * '9'}', expected a whole number of at most 9007199254740992",
        ),
        (
            "repetition",
            f"-{20 * '9'}",
            f"repetition is '-{20 * '9'}', expected a whole number of at most",
        ),
        (
            "seed",
            "9223372036854775808",
            "seed is '9223372036854775808', expected a whole number of at most",
        ),
    ],
)
def test_a_damaged_cell_is_named(study, column, cell, message):
    folder = study(rows=[run_row(run_id="a"), run_row(run_id="b")]).folder
    with (folder / "runs.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    rows[1][column] = cell
    with (folder / "runs.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, columns(RunRow), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    with pytest.raises(ResultsError) as caught:
        load(folder)
    assert str(caught.value).startswith(f"{folder}/runs.csv, line 3: {message}")


@pytest.mark.parametrize(
    "changes",
    [
        {
            "time_to_target_s": 1.0,
            "epochs_to_target": 6,
            "compute_s": 1.0 + 1e-9,
            "comm_s": 0.0,
        },  # the end is the target
        {"train_s": 0.0, "compute_s": 0.4},  # of no statistic, and named by `check`
        {"status": "timeout", "train_s": 0.5, "time_to_target_s": 0.6},
        *(
            {"started_utc": moment}
            for moment in (
                None,
                "2026-11-20T12:00:00Z",
                "2026-11-20T12:00:00.123+00:00",
            )
        ),
        {"started_utc": "2026-11-20 12:00"},
    ],
)
def test_parts_of_a_whole_and_moments_of_iso_8601_are_read(study, changes):
    rows = [run_row(run_id="a"), run_row(run_id="b", repetition=1, **changes)]
    assert len(study(rows=rows).runs) == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty"),
        ("a,b\n1,2\n", "its header lacks schema_version"),
        (",".join(columns(RunRow)) + "\n", "holds no runs yet"),
        (
            ",".join(columns(RunRow)) + "\n" + 199 * "x," + "\n",
            f"has 200 cells, expected {len(columns(RunRow))}",
        ),
    ],
)
def test_other_files_are_refused(tmp_path, content, message):
    (tmp_path / "runs.csv").write_text(content)
    with pytest.raises(ResultsError, match=message):
        load(tmp_path)


def without_columns(path, names):
    table = pd.read_csv(path, dtype=str, keep_default_na=False)
    table.drop(columns=list(names)).to_csv(path, index=False)


def test_records_without_optional_columns_are_read_and_not_extended(study):
    folder = study(rows=[run_row(run_id="a", bubble_s=None, tuned=None)]).folder
    whole = load(folder).runs
    without_columns(folder / "runs.csv", ("bubble_s", "tuned"))
    results = load(folder)
    pd.testing.assert_frame_equal(results.runs, whole)
    (note,) = [note for note in results.notes if "earlier version" in note]
    assert "bubble_s, tuned" in note or "tuned, bubble_s" in note
    # Rows that were added would lose what these columns hold.
    with pytest.raises(ResultsError, match="its header lacks"):
        Store(folder)


def test_records_without_required_columns_are_refused(study):
    folder = study(rows=[run_row(run_id="a")]).folder
    without_columns(folder / "runs.csv", ("workers", "tuned"))
    with pytest.raises(ResultsError, match="its header lacks workers:"):
        load(folder)


def test_incomplete_last_line_is_ignored(study):
    folder = study(rows=[run_row(run_id="a"), run_row(run_id="b")]).folder
    whole = (folder / "runs.csv").read_bytes()
    for missing in (1, 10, 200):
        (folder / "runs.csv").write_bytes(whole[:-missing])
        assert load(folder).runs["run_id"].tolist() == ["a"]


def test_a_large_table_is_read_in_pieces(study, monkeypatch):
    rows = [
        run_row(run_id=f"run-{number}", repetition=number, strategy="=cmd()")
        for number in range(9)
    ]
    folder = study(rows=rows).folder
    whole = load(folder).rows
    monkeypatch.setattr("scalebench.system.file_access._PIECE", 1000)  # about two rows
    pd.testing.assert_frame_equal(load(folder).rows, whole)
    lines = (folder / "runs.csv").read_text().splitlines()
    place = columns(RunRow).index("workers")
    for cell, message in (
        ("four", "workers is 'four'"),
        ("0", "workers is '0'"),
        (99 * "1,", f"has {len(columns(RunRow)) + 99} cells"),
    ):
        before, after = lines[6].split(",")[:place], lines[6].split(",")[place + 1 :]
        damaged = ",".join([*before, cell, *after])
        (folder / "runs.csv").write_text(
            "\n".join([*lines[:6], damaged, *lines[7:], ""])
        )
        with pytest.raises(ResultsError, match=rf"line 7\b.*{re.escape(message)}"):
            load(folder)


def test_a_folder_without_records_is_refused(tmp_path):
    with pytest.raises(ResultsError, match=r"holds no runs\.csv"):
        load(tmp_path / "nowhere")


def test_columns_reordered_by_a_spreadsheet_are_read(study):
    folder = study(rows=[run_row()]).folder
    with (folder / "runs.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    with (folder / "runs.csv").open("w", newline="", encoding="utf-8-sig") as file:
        writer = csv.DictWriter(file, sorted(columns(RunRow)))
        writer.writeheader()
        writer.writerows(rows)
    assert load(folder).runs["train_s"].tolist() == [1.0]


def test_a_simulated_time_is_not_taken_for_a_measured_one(study):
    with pytest.raises(
        ResultsError, match=r"line 3: engine .*'virtual', expected a native"
    ):
        study(rows=[run_row(run_id="a"), run_row(run_id="b", execution="native")])
    with pytest.raises(ResultsError, match=r"line 2: engine .*'mpi', expected virtual"):
        study(rows=[run_row(run_id="a", engine="mpi")])


@pytest.mark.parametrize("value", ["1e308", "inf"])
def test_a_number_too_large_for_its_column_is_named(study, value):
    folder = study(rows=[run_row(run_id="a")]).folder
    header, row = (folder / "runs.csv").read_text().splitlines()
    cells = row.split(",")
    cells[header.split(",").index("workers")] = value
    (folder / "runs.csv").write_text(f"{header}\n{','.join(cells)}\n")
    with pytest.raises(
        ResultsError, match=f"line 2: .*'{value}', expected a whole number"
    ):
        load(folder)


def test_last_row_of_a_repeated_run_counts(study):
    """A repeated row with another time, and another run_id for the same repetition of a cell."""
    rows = [
        run_row(run_id="a", repetition=0, train_s=1.0),
        run_row(run_id="b", repetition=1, train_s=1.0),
        run_row(run_id="a", repetition=0, train_s=2.0),
        run_row(run_id="c", repetition=1, train_s=4.0),
    ]
    results = study(rows=rows)
    assert results.runs["train_s"].tolist() == [2.0, 4.0]
    (note,) = results.notes
    assert note.endswith(": 2 left out")
    (cell,) = runs_by_cell(results)
    assert (list(cell.seconds.values()), cells(results)["n"].item()) == ([2.0, 4.0], 2)


def test_further_attempts_are_not_repeated_rows(study):
    rows = [run_row(status="failed", train_s=None), run_row(attempt=2, train_s=2.0)]
    assert study(rows=rows).notes == []
    assert study(rows=rows).runs["train_s"].tolist() == [2.0]


@pytest.mark.parametrize(
    ("cell", "expected"),
    [("7.5", "an accuracy from 0 to 1"), ("inf", "a number of at most 1e+150")],
)
def test_impossible_metric_of_an_epoch_is_named(tmp_path, cell, expected):
    with Store(tmp_path) as store:
        store.append(
            run_row(),
            [epoch_row(test_metric=0.5), epoch_row(epoch=1, test_metric=float(cell))],
        )
    with pytest.raises(
        ResultsError,
        match=rf"epochs\.csv, line 3: test_metric .*'{cell}', .*{re.escape(expected)}",
    ):
        assert load(tmp_path).epochs is not None


def test_diverged_runs_may_have_any_number(study):
    rows = [
        run_row(run_id="a"),
        run_row(
            run_id="b", status="diverged", final_train_loss=math.inf, final_metric=None
        ),
    ]
    assert study(rows=rows).failed["run_id"].tolist() == ["b"]


def test_times_at_the_ends_of_their_range_have_a_spread():
    assert spread(np.log([1e-9, 1e9])) == math.inf
    assert spread(np.log([1.0, 1.0])) == 0.0


def test_label_writes_a_mapping_as_the_study_does():
    options = '{"groups": {"4": 2, "16": 8}, "first": 2}'
    assert (
        label_of("hierarchical_local_sgd", options)
        == "hierarchical_local_sgd(first=2, groups={4: 2, 16: 8})"
    )
