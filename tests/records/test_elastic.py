"""The table of elastic runs: a row for each attempt, and nothing of it among the runs that are compared."""

from __future__ import annotations

import json

import pandas as pd
import pytest

from scalebench.analysis import load
from scalebench.errors import ResultsError
from scalebench.records.folder import ELASTIC
from scalebench.records.reading import read_table
from scalebench.records.rows import ElasticOutcome, RankDeath, elastic_row
from scalebench.records.schema import ElasticRow
from scalebench.records.store import ElasticTable, Store
from scalebench.report.tables import elastic_table
from scalebench.study.spec import Component, Run
from scalebench.training.outcome import Evaluation, Outcome
from tests.records_factory import study_rows

DEATHS = [
    RankDeath(
        "2026-11-27T10:00:00.000+00:00", 2, "hash", epoch=1, lost_s=0.5, pause_s=3.0
    ),
    RankDeath(
        "2026-11-27T10:01:00.000+00:00", None, "hash", epoch=3, lost_s=0.25, pause_s=4.0
    ),
]


def run_of(run_id="one"):
    return Run(
        study="test",
        run_id=run_id,
        config_hash=f"hash of {run_id}",
        execution="native",
        engine="horovod",
        strategy=Component(name="epoch_average", options={"every": 2}),
        workers=4,
        repetition=0,
        seed=3,
    )


def row_of(run, ended, attempt=1):
    return elastic_row(
        run,
        ended,
        attempt=attempt,
        launcher="horovodrun",
        oversubscribed=False,
        max_restarts=3,
    )


def completed(run_id="one", deaths=DEATHS):
    outcome = Outcome(run_id, "completed", evaluations=[Evaluation(3, 1.0, 0.9)])
    return ElasticOutcome(outcome, deaths, 4 - len(deaths), total_s=20.0)


def failed(run_id="one"):
    return ElasticOutcome(Outcome(run_id, "failed", "rank 1 was ended by signal 9"))


def test_a_row_tells_workers_and_each_interruption(tmp_path):
    with ElasticTable(tmp_path) as table:
        table.append(row_of(run_of(), completed()))
    row = read_table(tmp_path / ELASTIC, ElasticRow).iloc[0]
    assert (
        row["workers"],
        row["workers_at_end"],
        row["dealt_anew"],
        row["interruptions"],
    ) == (4, 2, True, 2)
    assert json.loads(row["interrupted_rank"]) == [2, None]
    assert json.loads(row["interrupted_epoch"]) == [1, 3]
    assert json.loads(row["interrupted_lost_s"]) == [0.5, 0.25]
    assert json.loads(row["interrupted_pause_s"]) == [3.0, 4.0]
    assert (row["total_s"], row["final_metric"]) == (20.0, 0.9)


def test_what_was_not_measured_is_empty(tmp_path):
    with ElasticTable(tmp_path) as table:
        table.append(row_of(run_of(), failed()))
    row = read_table(tmp_path / ELASTIC, ElasticRow).iloc[0]
    assert row["interruptions"] == 0
    assert row["error"] == "rank 1 was ended by signal 9"
    for name in (
        "interrupted_rank",
        "interrupted_pause_s",
        "total_s",
        "workers_at_end",
        "final_metric",
    ):
        assert pd.isna(row[name]), name


def test_attempts_are_numbered_and_completed_runs_known_when_the_table_is_opened_again(
    tmp_path,
):
    run, other = run_of(), run_of("other")
    with ElasticTable(tmp_path) as table:
        table.append(row_of(run, failed()))
        table.append(row_of(run, completed(), attempt=table.next_attempt("one")))
        table.append(row_of(other, failed("other")))
    with ElasticTable(tmp_path) as table:
        assert table.completed == {("one", "hash of one")}
        assert [table.next_attempt(name) for name in ("one", "other", "new")] == [
            3,
            2,
            1,
        ]


def test_no_analysis_reads_elastic_runs_and_the_report_shows_the_latest_attempts(
    tmp_path,
):
    with Store(tmp_path) as store:
        for row, epochs in study_rows():
            store.append(row, epochs)
    before = load(tmp_path).runs
    assert elastic_table(tmp_path).rows == []
    with ElasticTable(tmp_path) as table:
        table.append(row_of(run_of(), failed()))
        table.append(row_of(run_of(), completed(), attempt=2))
    pd.testing.assert_frame_equal(load(tmp_path).runs, before)
    shown = elastic_table(tmp_path)
    (cells,) = ([str(entry.text) for entry in row] for row in shown.rows)
    assert dict(zip([column.name for column in shown.columns], cells, strict=True)) == {
        "strategy": "epoch_average(every=2)",
        "engine": "horovod",
        "workers": "4 to 2",
        "interruptions": "2",
        "died": "2, –",
        "epochs begun again": "2, 4",
        "lost": "500 ms, 250 ms",
        "pause": "3.00 s, 4.00 s",
        "total time": "20.0 s",
        "metric": "0.900",
        "what became of it": "completed",
    }


def test_a_damaged_cell_is_named(tmp_path):
    with ElasticTable(tmp_path) as table:
        table.append(row_of(run_of(), completed()))
    path = tmp_path / ELASTIC
    path.write_text(path.read_text().replace(",20.0,", ",long,"))
    for read in (elastic_table, ElasticTable):
        with pytest.raises(
            ResultsError, match=r"elastic.csv, line 2: total_s is 'long'"
        ):
            read(tmp_path)
