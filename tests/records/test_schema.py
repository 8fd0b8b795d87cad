"""Columns, their order and their dictionary."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from docs._generate.records import data_dictionary_markdown
from scalebench.records.schema import EpochRow, RunRow, columns, kinds
from tests.records_factory import run_row

DOCS = Path(__file__).parents[2] / "docs"


def test_run_rows_begin_with_the_version_and_keep_their_order():
    names = columns(RunRow)
    assert names[:7] == [
        "schema_version",
        "study",
        "run_id",
        "config_hash",
        "attempt",
        "status",
        "error",
    ]
    assert names[-3:] == ["packages_hash", "scheduler_job_id", "provenance"]
    assert len(names) == 116
    assert len(columns(EpochRow)) == 18


def test_records_page_is_up_to_date():
    assert (DOCS / "records.md").read_text() == data_dictionary_markdown()


def test_columns_of_seconds_have_the_unit():
    page = data_dictionary_markdown()
    for row_type in (RunRow, EpochRow):
        seconds = {
            name: kind
            for name, kind in kinds(row_type).items()
            if name.endswith("_s") or name.startswith("epoch_s_")
        }
        assert {"compute_s", "comm_s", "wait_s", "data_s"} < set(seconds)
        for name, kind in seconds.items():
            assert f"\n| `{name}` | {kind} | s |" in page


def test_options_are_sorted_json():
    assert (
        run_row(strategy_options={"merge": "half", "every": 2}).strategy_options
        == '{"every": 2, "merge": "half"}'
    )


@pytest.mark.parametrize(
    "change", [{"status": "done"}, {"execution": "simulated"}, {"unknown_column": 1}]
)
def test_values_outside_the_schema_are_refused(change):
    with pytest.raises(ValidationError):
        run_row(**change)
