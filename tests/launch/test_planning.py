"""A study resolved before it runs."""

from __future__ import annotations

import pytest

from scalebench.launch.planning import ComputeEstimate, plan_study
from scalebench.study.load import load_study

VIRTUAL = {"dataset": "wine", "workers": "1,2", "strategies": ["allreduce"], "execution": "virtual"}


@pytest.mark.parametrize(
    ("keys", "measures"),
    [
        ({}, True),
        ({"execution": "native", "workers": "1"}, True),
        ({"device_step_time": 0.01}, False),
        ({"device_step_time": 0.01, "execution": "paced"}, True),
        ({"device_step_time": 0.01, "cluster": "juwels-booster"}, False),
    ],
)
def test_plan_measures_times_in_real_runs_and_calibrations(keys, measures):
    assert plan_study(load_study(None, {**VIRTUAL, **keys}, [])).measures is measures


@pytest.mark.parametrize(
    ("wall_s", "core_hours", "most", "text"),
    [
        (1.0, 0.0001, 1.0, "about 1 s and 0.000 core-hours of training compute"),
        (1.0, 0.0001, 1.2, "about 1 s and 0.000 core-hours of training compute"),
        (600.0, 0.0001, 3.0, "about 10 min to 30 min and 0.000 core-hours of training compute"),
        (600.0, 1.0, 3.0, "about 10 min to 30 min and 1.000 to 3.000 core-hours of training compute"),
    ],
)
def test_estimate_gives_a_range_where_more_runs_may_follow(wall_s, core_hours, most, text):
    assert str(ComputeEstimate(0.001, wall_s, core_hours, most)) == text
