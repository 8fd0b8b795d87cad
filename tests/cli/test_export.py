"""`scalebench export`: files written and messages."""

from __future__ import annotations

import fcntl
import json
import os
import stat
import sys

import pytest

from scalebench.cli.main import main
from scalebench.records.store import Store
from tests.records_factory import study_rows


@pytest.fixture
def export(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with Store(tmp_path / "results" / "synthetic", fsync=False) as store:
        for run, epochs in study_rows(workers=(1, 2), native_workers=(), repetitions=2):
            store.append(run, epochs)

    def call(*words, code=0):
        with pytest.raises(SystemExit) as end:
            main.main(["export", *words], prog_name="scalebench")
        out, err = capsys.readouterr()
        assert int(end.value.code or 0) == code, err
        return out + err

    return call


def test_written_files_are_listed(export, tmp_path):
    said = export(
        "--parquet", "out", "--json", "out/all.json", "--mlflow-dir", "mlruns"
    ).splitlines()
    names = [
        "runs.parquet",
        "epochs.parquet",
        "cells.parquet",
        "ratios.parquet",
        "all.json",
    ]
    assert said[:-1] == [f"out/{name}" for name in names]
    assert (tmp_path / said[-1] / "meta.yaml").is_file()
    assert all((tmp_path / path).exists() for path in said)


def test_json_can_go_to_standard_output(export, tmp_path):
    assert json.loads(export("--json", "-"))["format"] == "scalebench-results"
    os.mkfifo(pipe := tmp_path / "pipe")
    reading = os.open(pipe, os.O_RDWR)  # with whom no end of it waits for the other
    os.set_blocking(reading, False)
    fcntl.fcntl(reading, fcntl.F_SETPIPE_SZ, 1 << 20)
    export("--json", str(pipe))
    assert os.read(reading, 1 << 20).startswith(b"{")
    os.close(reading)
    assert stat.S_ISFIFO(pipe.stat().st_mode), (
        "a device or a pipe is never replaced by a file"
    )


def test_linked_file_stays_a_link(export, tmp_path):
    (tmp_path / "link.json").symlink_to(tmp_path / "target.json")
    export("--json", "link.json")
    assert (tmp_path / "link.json").is_symlink()
    assert (
        json.loads((tmp_path / "target.json").read_text())["format"]
        == "scalebench-results"
    )


def test_json_is_written_without_an_option(export, tmp_path):
    assert export().splitlines()[0] == "synthetic.json", (
        "named after the folder of the study"
    )
    written = json.loads((tmp_path / "synthetic.json").read_text())
    assert written["format"] == "scalebench-results"
    assert written["runs"]


def test_missing_study_is_one_line(export, monkeypatch):
    assert "holds no runs.csv" in export("nowhere", "--json", "x.json", code=2)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    said = export("--parquet", "out", code=2)
    assert said.count("\n") == 1
    assert "pip install 'scalebench[parquet]'" in said
