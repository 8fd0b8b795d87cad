"""A study resolved before it runs."""

from __future__ import annotations

import pytest

from scalebench.launch.planning import plan_study
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
