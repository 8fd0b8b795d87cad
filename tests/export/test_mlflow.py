"""MLflow's file store, read by the rules of mlflow.store.tracking.file_store and mlflow.utils.validation."""

from __future__ import annotations

import re
from pathlib import Path

import pandas as pd
import yaml

from scalebench.export import _MEASURED, _TAGS, write_mlflow
from scalebench.records.schema import RunRow, kinds

RUN_ID = re.compile(r"^[a-zA-Z0-9][\w\-]{0,255}$")
EXPERIMENT_ID = re.compile(r"^[a-zA-Z0-9][\w\-]{0,63}$")
NAME = re.compile(r"^[/\w.\- ]*$")
STATUS = {"completed": 3, "failed": 4}


def read(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {
        path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8")
        for path in files
    }


def history(lines: str) -> list[tuple[int, float, int]]:
    """Each line is "timestamp value step"."""
    parts = [line.split(" ") for line in lines.splitlines()]
    return [(int(stamp), float(value), int(step)) for stamp, value, step in parts]


def test_runs_have_params_metrics_and_tags(results, tmp_path):
    experiment = write_mlflow(results, tmp_path / "mlruns")
    facts = yaml.safe_load((experiment / "meta.yaml").read_text())
    assert (facts["name"], facts["experiment_id"], facts["lifecycle_stage"]) == (
        "synthetic",
        experiment.name,
        "active",
    )
    assert EXPERIMENT_ID.match(experiment.name)
    folders = [
        path for path in experiment.iterdir() if path.is_dir() and path.name != "tags"
    ]
    runs = results.runs.set_index("run_id")
    assert len(folders) == len(runs)
    for folder in folders:
        about = yaml.safe_load((folder / "meta.yaml").read_text())
        run = runs.loc[about["run_name"]]
        assert RUN_ID.match(folder.name)
        assert folder.name == about["run_id"] == about["run_uuid"]
        assert about["status"] == STATUS[run["status"]]
        assert about["artifact_uri"] == (folder / "artifacts").as_uri()
        assert (folder / "artifacts").is_dir()
        params, tags, metrics = (
            read(folder / kind) for kind in ("params", "tags", "metrics")
        )
        assert all(NAME.match(name) for name in (*params, *tags, *metrics))
        assert (params["workers"], params["strategy"], float(params["lr"])) == (
            str(run["workers"]),
            run["strategy"],
            run["lr"],
        )
        assert tags["mlflow.runName"] == about["run_name"]
        assert tags["scalebench.status"] == run["status"]
        if run["status"] == "completed":
            assert history(metrics["train_s"]) == [
                (about["end_time"], run["train_s"], 0)
            ]
            assert about["end_time"] - about["start_time"] == round(
                1000 * run["train_s"]
            )
        else:
            assert "train_s" not in metrics
            assert "ünïcode" in tags["scalebench.error"]


def test_epoch_metrics_have_increasing_timestamps(results, tmp_path):
    experiment = write_mlflow(results, tmp_path / "mlruns")
    seen = 0
    for folder in (path.parent for path in experiment.glob("*/params")):
        name = yaml.safe_load((folder / "meta.yaml").read_text())["run_name"]
        epochs = results.epochs[results.epochs["run_id"] == name]
        for key in ("train_loss", "test_metric", "epoch/compute_s"):
            expected = epochs[["epoch", key.removeprefix("epoch/")]].dropna()
            if expected.empty:
                assert not (folder / "metrics" / key).exists()
                continue
            lines = history((folder / "metrics" / key).read_text())
            assert [(step, value) for _, value, step in lines] == list(
                expected.itertuples(index=False, name=None)
            )
            assert [stamp for stamp, _, _ in lines] == sorted(
                stamp for stamp, _, _ in lines
            )
            seen += 1
    assert seen > 60


def test_repeated_export_replaces_own_experiment_only(results, tmp_path):
    other = tmp_path / "mlruns" / "0"
    other.mkdir(parents=True)
    (other / "meta.yaml").write_text("name: Default\n")
    first = read(write_mlflow(results, tmp_path / "mlruns"))
    assert read(write_mlflow(results, tmp_path / "mlruns")) == first
    assert (other / "meta.yaml").read_text() == "name: Default\n"


def test_every_column_is_param_metric_or_tag():
    """A new column must be assigned explicitly."""
    kind_of = kinds(RunRow)
    assert {*_MEASURED, *_TAGS} <= set(kind_of)
    assert {name for name, kind in kind_of.items() if kind == "number"} - {
        *_MEASURED
    } == {
        "lr",
        "target_metric",
        "chance_metric",
    }


def test_missing_start_and_values_are_left_out(results, tmp_path):
    bare = results.runs.assign(started_utc=None, git_dirty=pd.NA)
    experiment = write_mlflow(
        type(results)(results.folder, bare, results.epochs, {}), tmp_path / "mlruns"
    )
    facts = yaml.safe_load((experiment / "meta.yaml").read_text())
    assert facts["creation_time"] == 0
