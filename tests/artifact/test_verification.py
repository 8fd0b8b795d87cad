"""Expectations of a rerun for a reviewer: its duration, its times and metrics."""

from __future__ import annotations

import pytest

from scalebench.analysis import load
from scalebench.artifact.anonymising import Shipment
from scalebench.artifact.verification import expected_again, expected_minutes
from scalebench.records.store import Store
from scalebench.study.spec import Study
from tests.facts import in_order
from tests.records_factory import run_row


@pytest.fixture
def timeless(tmp_path):
    """A study without durations.json."""
    with Store(tmp_path / "mine", fsync=False) as store:
        for number in range(10):
            began = f"2026-11-21T08:{number:02d}:00.000+00:00"
            store.append(
                run_row(run_id=f"v{number}", repetition=number, started_utc=began)
            )
        native = {
            "execution": "native",
            "engine": "horovod",
            "strategy": "horovod",
            "train_s": 89.0,
            "eval_s": 1.0,
        }
        store.append(
            run_row(run_id="n", started_utc="2026-11-21T09:00:00.000+00:00", **native)
        )
    return tmp_path / "mine"


def test_minutes_without_timings_come_from_run_starts(timeless):
    """Ten virtual runs that began a minute apart take ten minutes; one native run of 90 s takes two."""
    minutes = expected_minutes(load(timeless))
    assert (minutes.virtual, minutes.native, minutes.execution) == (10, 2, 12)
    assert {minutes.setup, minutes.setup_rerun, minutes.analysis} == {"not timed"}


def test_minutes_come_from_durations_and_step_times(timeless, tmp_path):
    (timeless / "durations.json").write_text('{"run": 900.5, "plot": 61}')
    minutes = expected_minutes(load(timeless))
    assert (minutes.execution, minutes.analysis, minutes.setup) == (
        16,
        "2",
        "not timed",
    )
    (tmp_path / "times.csv").write_text(
        "step,seconds\ninstall,50\ndraw,200\ninstall again,2\ninstall to run,250\n"
    )
    minutes = expected_minutes(load(timeless), tmp_path)
    assert (minutes.setup, minutes.setup_rerun, minutes.analysis) == ("1", "5", "4")
    (tmp_path / "times.csv").write_text("edited by hand")
    assert expected_minutes(load(timeless), tmp_path).setup == "not timed"


@pytest.mark.parametrize("execution", ["native", "paced"])
def test_metrics_of_asynchronous_strategies_are_not_promised(execution):
    """No seed fixes which worker arrives first: two native runs of `asp` end with different weights."""
    (told,) = expected_again([execution], Shipment())
    assert in_order(told, "asynchronous strategies", "order", "arrive")


def test_metrics_of_asynchronous_virtual_runs_need_their_calibration():
    (told,) = expected_again(["virtual"], Shipment(Study()))
    assert in_order(told, "asynchronous strategies vary", "others", "the records.")
    for kept in (
        Shipment(Study(), has_calibration=True),
        Shipment(Study(), is_stated=True),
    ):
        assert "same times and metrics" in expected_again(["virtual"], kept)[0]
