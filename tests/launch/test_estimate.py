"""What a study will take, in words."""

from __future__ import annotations

import pytest

from scalebench.launch.estimate import Estimate


@pytest.mark.parametrize(
    ("wall_s", "core_hours", "most", "said"),
    [
        (1.0, 0.0001, 1.0, "about 1 s and 0.000 core-hours of training compute"),
        (1.0, 0.0001, 1.2, "about 1 s and 0.000 core-hours of training compute"),
        (600.0, 0.0001, 3.0, "about 10 min to 30 min and 0.000 core-hours of training compute"),
        (600.0, 1.0, 3.0, "about 10 min to 30 min and 1.000 to 3.000 core-hours of training compute"),
    ],
)
def test_both_ends_are_told_where_they_read_differently(wall_s, core_hours, most, said):
    assert Estimate(0.001, wall_s, core_hours, most).said == said
