"""Laws as text: units that suit their numbers."""

from __future__ import annotations

import math

import pytest

from scalebench.analysis.laws import Estimated
from scalebench.analysis.laws.forms import Parameter
from scalebench.analysis.laws.telling import parameter


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (2.5e9, "B 2.50 GB/s [1.25, 5.00]"),
        (9.75e6, "B 9.75 MB/s [4.88, 19.5]"),
        (43e3, "B 43.0 kB/s [21.5, 86.0]"),
        (0.5, "B 0.500 B/s [0.250, 1.00]"),
    ],
)
def test_a_bandwidth_has_the_unit_of_its_size(value, text):
    kind = Parameter("B", "bandwidth", "B/s", lambda x: float(x[0]))
    assert parameter(Estimated(kind, value, value / 2, value * 2)) == text


def test_a_bandwidth_that_is_not_seen_is_bounded_from_below():
    kind = Parameter("B", "bandwidth", "B/s", lambda x: float(x[0]))
    assert parameter(Estimated(kind, math.inf, 872e6, math.inf)) == "B not seen, above 872 MB/s"
