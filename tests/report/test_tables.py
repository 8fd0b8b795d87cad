"""The tables of the report hold every cell of the analysis once, with its sort key."""

from __future__ import annotations

import math

import pytest

from scalebench.analysis import agreement, cells, quantities, ratios, summary
from scalebench.analysis.laws import scaling_laws
from scalebench.cli.table import table_of
from scalebench.formatting import seconds_with_interval
from scalebench.report.comparison import comparisons
from scalebench.report.tables import tables
from scalebench.tables import FORMATS, Column, render
from scalebench.tables.table import COUNT, fields
from tests.records_factory import run_row, study_rows


@pytest.fixture(scope="module")
def made(results):
    return {table.name: table for table in tables(results, comparisons(results))}


def column(table, name):
    place = [head.name for head in table.columns].index(name)
    return [row[place] for row in table.rows]


def keys(table, name):
    return [
        float(entry.key) if entry.key else math.nan for entry in column(table, name)
    ]


def test_cells_table_has_numbers_of_the_analysis(made, results):
    table, known = made["cells"], cells(results)
    assert [entry.text for entry in column(table, "strategy")] == list(known["label"])
    assert keys(table, "workers") == list(known["workers"])
    assert keys(table, "time") == list(known["train_s"])
    assert keys(table, "accuracy") == list(known["metric"])
    assert keys(table, "spread") == pytest.approx(list(known["spread"]))
    first = known.iloc[0]
    assert column(table, "time")[0].text == seconds_with_interval(
        first["train_s"], first["low_s"], first["high_s"]
    )


def test_a_new_quantity_is_in_every_table_of_cells(results, monkeypatch):
    own = Column("new quantity", fields("n_train"), COUNT)
    monkeypatch.setitem(quantities._TIMES, "new", own)
    (of_report,) = (table for table in tables(results, []) if table.name == "cells")
    found = [of_report, summary(results), table_of(results, cells(results))]
    for table in found:
        assert own in table.columns
        for form in FORMATS:
            assert "new quantity" in render(table, form).lower(), form


def test_saved_table_equals_ratios(made, results):
    table = made["saved"]
    known = ratios(results)
    known = known[
        (known["baseline"] == "allreduce")
        & known["label"].isin(("epoch_average", "epoch_async"))
    ]
    expected = {
        (row.label, row.execution, row.workers): row.reduction
        for row in known.itertuples()
    }
    for label, where, workers, saved in zip(
        *(
            column(table, name)
            for name in ("strategy", "execution", "workers", "time saved")
        ),
        strict=True,
    ):
        value = expected.pop((label.text, where.text.split()[0], float(workers.key)))
        assert (float(saved.key) if saved.key else math.nan) == pytest.approx(
            value, nan_ok=True
        )
    assert not expected


def test_split_parts_add_up_without_serial(made):
    table = made["split"]
    total = [
        a + b
        for a, b in zip(
            keys(table, "by the engine"), keys(table, "by the frequency"), strict=True
        )
    ]
    assert total == pytest.approx(keys(table, "time saved"))
    assert "serial" not in {entry.text for entry in column(table, "strategy")}


def test_rows_mark_execution_and_oversubscription(made):
    crossed = [
        (entry.text, workers)
        for entry, workers in zip(
            column(made["cells"], "execution"),
            keys(made["cells"], "workers"),
            strict=True,
        )
        if "×" in entry.text
    ]
    assert {workers for _, workers in crossed} == {4}
    assert all(text.startswith("native ") for text, _ in crossed)


def test_failed_runs_have_their_reason(made, results):
    table = made["failed"]
    assert len(table.rows) == len(results.failed) == 1
    assert column(table, "why")[0].text == "rank 3 died: SIGKILL"
    assert "in no other number" in table.notes[0]


def test_agreement_table_equals_analysis(made, results):
    assert keys(made["agreement"], "virtual / native") == list(
        agreement(results)["ratio"]
    )


def test_laws_table_equals_analysis_and_names_refusals(made, results):
    found = [one for one in scaling_laws(results) if not one.refusal]
    shown = [entry.text.partition(":")[0] for entry in column(made["laws"], "law")]
    assert shown == [one.best.fit.law.name for one in found]
    assert keys(made["laws"], "knee") == [one.advice.knee.workers for one in found]
    assert any("no law: 2 worker counts" in note for note in made["laws"].notes)


def test_columns_without_values_are_dropped(keep):
    some = tables(results := keep(study_rows(repetitions=1)), comparisons(results))
    by_name = {table.name: table for table in some}
    assert "p" not in {head.name for head in by_name["saved"].columns}
    assert "to target" not in {head.name for head in by_name["cells"].columns}
    assert by_name["cells"].notes == ["One run each: no intervals."]
    assert "failed" not in by_name


def test_p_values_only_for_tested_executions(keep):
    rows = study_rows(
        strategies=("allreduce", "epoch_average"),
        workers=(2,),
        native_workers=(2,),
        repetitions=8,
    )
    results = keep(rows)
    table = next(
        table
        for table in tables(results, comparisons(results))
        if table.name == "saved"
    )
    native = dict(
        zip(
            (entry.text for entry in column(table, "execution")),
            column(table, "p"),
            strict=True,
        )
    )
    assert float(native["native mpi"].key) <= 0.05
    assert native["virtual"].key == ""


def test_unreached_target_sorts_as_infinite(keep):
    rows = [
        (
            run_row(
                run_id=f"r{n}",
                repetition=n,
                seed=n,
                target_metric=0.9,
                time_to_target_s=time,
            ),
            [],
        )
        for n, time in enumerate((0.5, None, None))
    ]
    results = keep(rows)
    (table,) = [table for table in tables(results, []) if table.name == "target"]
    never = column(table, "time to target")[0]
    assert (never.text, never.key) == ("1 of 3", "inf")
    assert column(table, "reached")[0].text == "1 of 3"
    assert "at most half of the runs" in table.notes[0]


def test_long_list_of_failures_is_cut(keep):
    rows = [
        (run_row(run_id=f"r{n}", status="failed", train_s=None, error="x"), [])
        for n in range(230)
    ]
    (table,) = tables(keep([*rows, (run_row(), [])]), [])[1:]
    assert len(table.rows) == 200
    assert "30 more are in runs.csv" in table.notes[0]
