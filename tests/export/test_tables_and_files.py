"""Export to JSON and Parquet."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq
import pytest

from scalebench import analysis
from scalebench.errors import ResultsError, UsageError
from scalebench.export import tables, write_json, write_parquet
from scalebench.records.schema import SCHEMA_VERSION, RunRow, columns
from tests.facts import naming

PAGE = Path(__file__).parents[2] / "docs/export.md"


def refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


def test_json_is_strict_and_equals_tables(results, tmp_path):
    text = write_json(results, tmp_path / "deep" / "x.json").read_text(encoding="utf-8")
    read = json.loads(text, parse_constant=refuse)
    assert (read["format"], read["format_version"], read["schema_version"]) == (
        "scalebench-results",
        1,
        SCHEMA_VERSION,
    )
    assert read["study"] == results.study
    assert read["columns"]["runs"]["train_s"]["unit"] == "s"
    assert set(read["columns"]["runs"]) == {*columns(RunRow), "label"}
    for name, table in tables(results).items():
        assert len(read[name]) == len(table)
        for row, expected in zip(read[name], table.to_dict("records"), strict=True):
            assert list(row) == list(table.columns)
            for key, value in row.items():
                missing = pd.isna(expected[key]) or expected[key] == math.inf
                assert (value is None) == missing, (name, key)
                assert missing or value == expected[key]  # bit for bit


def test_documented_json_example_runs(results, tmp_path):
    written = json.loads(
        write_json(results, tmp_path / "x.json").read_text(encoding="utf-8")
    )
    shown = json.loads(
        PAGE.read_text(encoding="utf-8").split("```json\n")[1].split("```")[0]
    )
    assert list(shown) == list(written)
    layout = ("format", "format_version", "schema_version")
    assert [shown[key] for key in layout] == [written[key] for key in layout]
    for key in ("study", "runs", "columns"):
        one, other = (
            text[key][0] if key == "runs" else text[key] for text in (shown, written)
        )
        assert set(one) <= set(other), key
    (column,) = shown["columns"]["runs"].values()
    assert set(column) == set(written["columns"]["runs"]["train_s"])


def test_json_has_one_row_per_line(results, tmp_path):
    lines = (
        write_json(results, tmp_path / "x.json")
        .read_text(encoding="utf-8")
        .splitlines()
    )
    rows = [
        json.loads(line.rstrip(",]"))
        for line in lines
        if line.startswith('{"schema_version"')
    ]
    assert [row["run_id"] for row in rows] == results.runs["run_id"].tolist()


def test_unreached_target_differs_from_missing_target(results, tmp_path):
    cells = json.loads(
        write_json(results, tmp_path / "x.json").read_text(encoding="utf-8")
    )["cells"]
    said = {
        cell["strategy"]: (cell["target_reached"], cell["time_to_target_s"])
        for cell in cells
    }
    assert said["allreduce"] == (False, None)
    assert said["ddp"] == (None, None)
    assert said["epoch_average"] == (True, 0.1 + 0.2)


def test_parquet_round_trip(results, tmp_path):
    files = write_parquet(results, tmp_path / "parquet")
    assert [file.name for file in files] == [
        "runs.parquet",
        "epochs.parquet",
        "cells.parquet",
        "ratios.parquet",
    ]
    for file, (name, expected) in zip(files, tables(results).items(), strict=True):
        read = pd.read_parquet(file)
        # in any of pandas' text types
        texts = dict.fromkeys(expected.select_dtypes("str"), "str")
        pd.testing.assert_frame_equal(
            read.astype(texts), expected.astype(texts), check_exact=True, obj=name
        )
    schema = pq.read_schema(files[0])
    assert schema.field("train_s").metadata[b"unit"] == b"s"
    assert json.loads(schema.metadata[b"scalebench"]) == {
        "schema_version": SCHEMA_VERSION,
        "study": results.study,
    }
    assert {str(schema.field(name).type) for name in ("workers", "seed", "nodes")} == {
        "int64"
    }
    assert {
        str(schema.field(name).type) for name in ("oversubscribed", "git_dirty")
    } == {"bool"}


def test_cells_and_ratios_equal_the_analysis(results):
    found = tables(results)
    assert found["cells"]["train_s"].equals(analysis.cells(results)["train_s"])
    assert found["ratios"]["reduction"].equals(analysis.ratios(results)["reduction"])
    kinds = {str(dtype) for table in found.values() for dtype in table.dtypes}
    assert kinds <= {"str", "Int64", "int64", "float64", "boolean", "bool"}


def test_missing_pyarrow_names_the_extra(results, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(
        UsageError,
        match=naming("pyarrow", "pip install 'scalebench[parquet]'"),
    ):
        write_parquet(results, tmp_path / "parquet")
    assert not (tmp_path / "parquet").exists()


@pytest.mark.parametrize("write", [write_json, write_parquet])
def test_unwritable_output_is_refused(results, tmp_path, write):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        ResultsError,
        match=r"cannot write .*file/x.*: (Not a directory|File exists); name another place",
    ):
        write(results, tmp_path / "file" / "x")


def test_interrupted_write_keeps_the_old_file(results, tmp_path, monkeypatch):
    file = tmp_path / "x.json"
    file.write_text("old")

    def full(_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        with pytest.raises(ResultsError, match="No space left"):
            write_json(results, file)
    assert file.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["x.json"]
