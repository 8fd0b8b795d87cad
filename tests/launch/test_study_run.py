"""What a command looks at before it runs a study."""

from __future__ import annotations

import pytest

from scalebench.launch.planning import plan_study
from scalebench.launch.study_run import measures
from scalebench.study.load import load_study

VIRTUAL = {"dataset": "wine", "workers": "1,2", "strategies": ["allreduce"], "execution": "virtual"}


@pytest.mark.parametrize(
    ("said", "measured"),
    [
        ({}, True),
        ({"execution": "native", "workers": "1"}, True),
        ({"device_step_time": 0.01}, False),
        ({"device_step_time": 0.01, "execution": "paced"}, True),
        ({"device_step_time": 0.01, "cluster": "juwels-booster"}, False),
    ],
)
def test_other_programs_matter_where_something_is_measured(said, measured):
    assert measures(plan_study(load_study(None, {**VIRTUAL, **said}, []))) is measured
