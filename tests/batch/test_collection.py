"""Shards that become one record: each row once, whatever made it, and none of another study or version."""

from __future__ import annotations

import csv
import json
import re
import shutil
from pathlib import Path

import pytest

from scalebench.batch.collection import collect
from scalebench.batch.shards import folder_of
from scalebench.batch.submission import read_submission
from scalebench.errors import ResultsError
from tests.batch.conftest import make, scalebench, submitted
from tests.conftest import needs_mpi
from tests.facts import together

pytestmark = needs_mpi
RESULTS = Path("results/mine")


def table(name, folder=RESULTS):
    with (folder / name).open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture
def study(clients, place):
    return submitted()


def planned(study):
    return sorted(name for shard in study.shards for name in shard.run_ids)


def test_rows_of_all_shards_are_merged_once_with_their_text(study, capsys):
    make(1)
    make(2)
    before = [
        row
        for number in (1, 2)
        for row in table("runs.csv", folder_of(RESULTS, number))
    ]
    assert scalebench("collect", "results/mine") == 0
    assert together(capsys.readouterr().out, "8 of 8 runs", "results/mine/", "8 rows")
    assert table("runs.csv") == before
    assert len(table("epochs.csv")) == 8
    assert sorted(row["run_id"] for row in table("runs.csv")) == planned(study)
    assert len(list((RESULTS / "provenance").glob("*.json"))) == 2
    content = (RESULTS / "runs.csv").read_bytes()
    assert scalebench("collect", "results/mine") == 0
    assert (RESULTS / "runs.csv").read_bytes() == content, "nothing is added twice"


def test_what_is_missing_is_named_and_comes_with_a_later_collection(study, capsys):
    make(2, count=5)
    assert scalebench("collect", "results/mine") == 3
    printed = capsys.readouterr().out
    first, second = study.shards
    assert f"{first}: 2 runs left: {', '.join(first.run_ids)}" in printed
    assert f"{second}: 1 run left: {second.run_ids[-1]}" in printed
    make(1)
    shutil.rmtree(folder_of(RESULTS, 2).parent)
    make(2)
    assert scalebench("collect", "results/mine") == 0
    assert sorted({row["run_id"] for row in table("runs.csv")}) == planned(study)
    assert len(table("runs.csv")) == 8


def test_runs_that_were_not_collected_are_missed_with_the_command_that_collects(
    study, capsys
):
    make(1)
    for words in (("plot",), ("table",)):
        assert scalebench(*words, "results/mine") == 2
        assert "`scalebench collect results/mine` fills it" in capsys.readouterr().err
    # another study, so that nothing runs
    assert scalebench("run", "study.yaml", "--lr", "0.5") == 2
    assert "once scalebench collect results/mine merges" in capsys.readouterr().err


def test_failed_attempts_stay_and_have_numbers_of_their_own(study):
    make(1, status="failed")
    collect(RESULTS)
    make(1)
    collect(RESULTS)
    attempts = [(row["attempt"], row["status"]) for row in table("runs.csv")]
    assert sorted(attempts) == [("1", "failed")] * 2 + [("2", "completed")] * 2


def test_shards_of_another_cluster_are_collected_from_a_copy(study, tmp_path):
    shutil.copytree(RESULTS, "copy/mine")
    make(1)
    make(1, root=Path("copy/mine"))
    make(2, root=Path("copy/mine"), status="failed")
    shutil.rmtree(folder_of(Path("copy/mine"), 2).parent)
    make(2, root=Path("copy/mine"))
    collected = collect(RESULTS, [Path("copy/mine")])
    assert (collected.runs, collected.missing) == (8, [])
    assert sorted(row["run_id"] for row in table("runs.csv")) == planned(study), (
        "shard 1 was made twice, and counts once"
    )


def test_two_clusters_that_failed_and_succeeded_at_one_run_leave_both_attempts(study):
    shutil.copytree(RESULTS, "copy/mine")
    make(1, status="failed")
    make(1, root=Path("copy/mine"))
    with (folder_of(Path("copy/mine"), 1) / "runs.csv").open() as file:
        text = file.read()
    (folder_of(Path("copy/mine"), 1) / "runs.csv").write_text(
        text.replace("T08:01", "T09:01")
    )
    collect(RESULTS, [Path("copy/mine")])
    rows = table("runs.csv")
    assert (
        sorted((row["attempt"], row["status"]) for row in rows)
        == [("1", "failed")] * 2 + [("2", "completed")] * 2
    )
    epochs = table("epochs.csv")
    assert sorted((row["run_id"], row["attempt"]) for row in rows) == sorted(
        (row["run_id"], row["attempt"]) for row in epochs
    )


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ("lr: 0.5\n", r"shard 2 in .* is of another study than study.yaml \(lr was"),
        (None, r"does not say which study it is of \(study.yaml\)"),
    ],
)
def test_shards_of_two_studies_are_refused(study, changed, said, capsys):
    make(1)
    make(2)
    begun = folder_of(RESULTS, 2) / "study.yaml"
    if changed is None:
        begun.unlink()
    else:
        begun.write_text(re.sub("(?m)^lr: .*\n", changed, begun.read_text()))
    before = (RESULTS / "runs.csv").read_bytes()
    with pytest.raises(ResultsError, match=said):
        collect(RESULTS)
    assert (RESULTS / "runs.csv").read_bytes() == before
    if changed is not None:
        assert scalebench("run", "results/mine", "--shard", "2") == 2
        assert "lr was 0.5" in capsys.readouterr().err


def test_jobs_of_a_study_that_has_more_repetitions_by_now_are_collected(study):
    make(1)
    make(2)
    path = RESULTS / "study.yaml"
    path.write_text(
        path.read_text().replace("repetitions: 2", "repetitions: 3")
        + "# written by another version\n"
    )
    assert collect(RESULTS).runs == 8


def test_a_submission_of_an_earlier_version_is_read(study):
    path = RESULTS / "jobs" / "submission.json"
    former = {"study_sha256": "0" * 64, "made_by": {"scalebench": "0.0.1"}}
    path.write_text(json.dumps(json.loads(path.read_text()) | former))
    assert read_submission(RESULTS) == study


def test_virtual_runs_of_two_calibrations_are_refused(study):
    shutil.copytree(RESULTS, "copy/mine")
    for root, text in ((RESULTS, "1"), (Path("copy/mine"), "2")):
        make(2, root=root, count=1)
        (folder_of(root, 2) / "calibration.json").write_text(text)
    with pytest.raises(ResultsError, match="shard 2 has two calibrations"):
        collect(RESULTS, [Path("copy/mine")])


def test_a_cut_off_last_line_is_left_out(study):
    make(1)
    path = folder_of(RESULTS, 1) / "runs.csv"
    path.write_text(path.read_text()[:-20])
    assert collect(RESULTS).runs == 1


def test_a_link_in_the_folder_is_not_written_through(study, tmp_path, capsys):
    make(1)
    (folder_of(RESULTS, 1) / "calibration.json").write_text("{}")
    (RESULTS / "calibration.json").symlink_to(tmp_path / "elsewhere.json")
    assert scalebench("collect", "results/mine") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "calibration.json" in line
    assert "link" in line
    assert not (tmp_path / "elsewhere.json").exists()


def test_copies_that_are_none_and_studies_without_records_are_refused(study):
    with pytest.raises(ResultsError, match="has no records of a shard yet"):
        collect(RESULTS)
    with pytest.raises(ResultsError, match="elsewhere has no folder shards"):
        collect(RESULTS, [Path("elsewhere")])
    assert read_submission(RESULTS) == study


def test_a_collection_job_submits_another_one_while_jobs_wait(study, clients, capsys):
    make(2)
    clients.answer("11|PENDING|N/A|BeginTime")
    assert scalebench("collect", "results/mine", "--again") == 0
    assert "--dependency=afterany:11 " in clients.calls("sbatch")[-1]
    clients.answer("")
    assert scalebench("collect", "results/mine", "--again") == 3, (
        "no job is left that could make them"
    )
    assert len(clients.calls("sbatch")) == 4
