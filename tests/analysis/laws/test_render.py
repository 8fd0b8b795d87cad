"""Laws as text: units that suit their numbers."""

from __future__ import annotations

import dataclasses
import io
import math

import numpy as np
import pytest
from rich.console import Console

from scalebench.analysis.laws import Count, scaling_of
from scalebench.analysis.laws.candidates import Parameter, amdahl
from scalebench.analysis.laws.render import (
    advice,
    as_values,
    count_text,
    parameter,
)
from scalebench.cli.laws import laws_tables
from scalebench.measured import Measured
from tests.facts import in_order, together
from tests.law_factory import following


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
    assert parameter(kind, Measured(value, value / 2, value * 2)) == text


def test_unseen_bandwidth_has_a_lower_bound():
    kind = Parameter("B", "bandwidth", "B/s", lambda x: float(x[0]))
    assert (
        parameter(kind, Measured(math.inf, 872e6, math.inf))
        == "B not seen, above 872 MB/s"
    )


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (Count(28, Measured(28.3, 23.4, 36.2), False, 64), "28 (28.3 [23.4, 36.2])"),
        (Count(10, Measured(10.6, 10.2, 11.1), False, 64), "10 (10.6 [10.2, 11.1])"),
        (Count(110, Measured(110.3, 97.0, 126.0), False, 64), "110 [97.0, 126]"),
        (Count(28, Measured(28.3, math.nan, math.nan), False, 64), "28"),
        (
            Count(46, Measured(46.3, 39.0, math.inf), False, 64),
            "46 (46.3, at least 39.0)",
        ),
        (Count(146, Measured(146.3, 79.0, math.inf), False, 64), "146 (at least 79.0)"),
        (Count(146, Measured(146.3, math.nan, math.nan), False, 64), "beyond the data"),
        (
            Count(898, Measured(898.0, 500.0, math.inf), True, 64),
            "beyond 898 (at least 500)",
        ),
        (Count(898, Measured(898.0, math.nan, math.nan), True, 64), "beyond the data"),
    ],
)
def test_count_text_names_counts_beyond_the_data_with_interval_only(count, text):
    assert count_text(count) == text


def test_counts_beyond_the_data_need_a_band():
    """Two repetitions carry a law and no band; its knee is at 19 / 1 workers, of which 8 were measured."""
    scaling = scaling_of(following(amdahl(), (0.95, 0.05), (1, 2, 4, 8), repetitions=2))
    advised = (
        "knee beyond the data, largest N at an efficiency of 50 % or more beyond the data, "
        "fastest beyond the data"
    )
    assert advice(scaling) == f"{advised} (measured up to 8)"
    assert advised in printed(scaling).splitlines()[0], "the answer stands first"
    values = as_values(scaling)
    assert values["knee"] == {
        "workers": 19,
        "at": pytest.approx(19, rel=1e-4),
        "low": None,
        "high": None,
        "search_ended_here": False,
        "beyond_the_data": True,
    }
    assert values["fastest"] == {
        "workers": 128,
        "at": 128.0,
        "search_ended_here": True,
        "beyond_the_data": True,
    }


VIRTUAL = {"execution": "virtual"}


def printed(scaling):
    console = Console(file=io.StringIO(), width=200)
    console.print(*laws_tables([scaling]))
    return console.file.getvalue()


@pytest.mark.parametrize("jitter", [0.0, 1e-14])
def test_interval_name_of_constant_times_is_misfit(jitter):
    """Stated step times without calibration; rounding of sums is no variation."""
    stated = following(amdahl(), (0.95, 0.05), **VIRTUAL)
    misfit = np.where(stated.at == 8, 1.02, 1.0)
    stated = dataclasses.replace(
        stated, seconds=stated.seconds * misfit * (1 + jitter * stated.repetition)
    )
    scaling = scaling_of(stated)
    _, first = scaling.parameters[0]
    assert first.low < first.high
    assert in_order(as_values(scaling)["interval"], "misfit", "no time varies")
    text = printed(scaling)
    assert in_order(
        text, "In brackets", "misfit", "no time varies", "as if the law held"
    )
    assert "calibration" not in text


def test_interval_name_of_draws_is_calibration():
    drawn = following(
        amdahl(), (0.95, 0.05), noise=0.01, random=np.random.default_rng(0), **VIRTUAL
    )
    assert as_values(scaling_of(drawn))["interval"] == "calibration interval"
    text = printed(scaling_of(drawn))
    assert together(text, "brackets", "calibration interval", "parameters")
    assert together(text, "At least", "lower end")
