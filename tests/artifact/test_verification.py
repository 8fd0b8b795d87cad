"""Expectations of a rerun for a reviewer: its duration, its times and metrics."""

from __future__ import annotations

import pytest

from scalebench.analysis import load
from scalebench.artifact import PaperFile
from scalebench.artifact.anonymising import Shipment
from scalebench.artifact.description import describe
from scalebench.artifact.verification import expected_again, expected_minutes
from scalebench.records.store import Store
from scalebench.study.spec import Study
from tests.records_factory import run_row


@pytest.fixture
def timeless(tmp_path, monkeypatch):
    """A study without durations.json, on a machine where no Horovod was built."""
    monkeypatch.setattr("scalebench.artifact.verification.build_seconds", lambda: None)
    with Store(tmp_path / "mine", fsync=False) as store:
        for number in range(10):
            began = f"2026-11-21T08:{number:02d}:00.000+00:00"
            store.append(run_row(run_id=f"v{number}", repetition=number, started_utc=began))
        native = {"execution": "native", "engine": "horovod", "strategy": "horovod", "train_s": 89.0, "eval_s": 1.0}
        store.append(run_row(run_id="n", started_utc="2026-11-21T09:00:00.000+00:00", **native))
    return tmp_path / "mine"


def test_minutes_without_timings_come_from_run_starts(timeless):
    """Ten virtual runs that began a minute apart take ten minutes; one native run of 90 s takes two."""
    minutes = expected_minutes(load(timeless))
    assert (minutes.virtual, minutes.native, minutes.execution) == (10, 2, 12)
    assert {minutes.text(part) for part in ("setup", "setup_rerun", "analysis")} == {"not timed"}


def test_minutes_come_from_durations_and_step_times(timeless, tmp_path, monkeypatch):
    (timeless / "durations.json").write_text('{"run": 900.5, "plot": 61}')
    minutes = expected_minutes(load(timeless))
    assert (minutes.execution, minutes.analysis, minutes.setup) == (16, 2, None)
    monkeypatch.setattr("scalebench.artifact.verification.build_seconds", lambda: 170.0)
    minutes = expected_minutes(load(timeless))
    assert minutes.text("setup_rerun") == "not timed, but for building Horovod: 3"
    (tmp_path / "times.csv").write_text("step,seconds\ninstall,50\ndraw,200\ninstall again,2\ninstall to run,250\n")
    minutes = expected_minutes(load(timeless), tmp_path)
    assert (minutes.setup, minutes.setup_rerun, minutes.analysis) == (1, 5, 4)
    (tmp_path / "times.csv").write_text("edited by hand")
    assert expected_minutes(load(timeless), tmp_path).setup is None


@pytest.mark.parametrize("execution", ["native", "paced"])
def test_metrics_of_asynchronous_strategies_are_not_promised(execution):
    """No seed fixes which worker arrives first: two native runs of `asp` end with different weights."""
    (steady,) = expected_again({execution: ["allreduce", "bsp", "local_sgd"]}, Shipment())
    assert steady.endswith("Metrics vary with the order of sums only.")
    (mixed,) = expected_again({execution: ["asp", "allreduce", "epoch_async", "asp", "not-installed"]}, Shipment())
    assert "Metrics of asp, epoch_async, not-installed vary with the order in which workers arrive" in mixed
    assert mixed.endswith("Other metrics vary with the order of sums only.")
    (racing,) = expected_again({execution: ["asp", "asp"]}, Shipment())
    assert "Metrics of asp vary with the order in which workers arrive" in racing
    assert "sums" not in racing


def test_metrics_of_asynchronous_virtual_runs_need_their_calibration():
    (steady,) = expected_again({"virtual": ["allreduce"]}, Shipment(Study()))
    assert steady.endswith("the times of the machine that runs them. Metrics are those of the records.")
    (mixed,) = expected_again({"virtual": ["allreduce", "asp"]}, Shipment(Study()))
    assert "Metrics of asp vary with the order in which workers arrive, and thus with these times." in mixed
    assert mixed.endswith("Other metrics are those of the records.")
    (racing,) = expected_again({"virtual": ["asp"]}, Shipment(Study()))
    assert "those of the records" not in racing
    for kept in (Shipment(Study(), has_calibration=True), Shipment(Study(), is_stated=True)):
        assert "same times and metrics" in expected_again({"virtual": ["asp"]}, kept)[0]


def test_description_names_asynchronous_strategies_that_ran(tmp_path):
    with Store(tmp_path / "mine", fsync=False) as store:
        for number, name in enumerate(("allreduce", "asp")):
            store.append(run_row(run_id=f"n{number}", execution="native", engine="mpi", strategy=name))
    (said,) = describe(load(tmp_path / "mine"), [], PaperFile(), Shipment()).again
    assert "Metrics of asp vary with the order in which workers arrive" in said
