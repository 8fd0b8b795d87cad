"""Verdicts on intervals."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from scalebench.analysis.intervals import unpaired_ratio
from scalebench.analysis.verdicts import verdict_of_metric, verdict_of_time
from scalebench.measured import Measured

THRESHOLDS = st.floats(0, 0.5)
BOUNDS = st.tuples(st.floats(-1, 1), st.floats(-1, 1)).map(sorted)


def ratio_of(low: float, high: float) -> Measured:
    return Measured(math.exp((low + high) / 2), math.exp(low), math.exp(high), 5)


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (1.06, 1.20, "regression"),
        (1.04, 1.20, "undecided"),
        (0.97, 1.04, "unchanged"),
        (0.94, 1.04, "undecided"),
        (0.80, 0.95, "improvement"),
        (0.80, 1.20, "undecided"),
        (math.nan, math.nan, "undecided"),
    ],
)
def test_a_ratio_of_times_against_five_per_cent(low, high, verdict):
    assert verdict_of_time(Measured(1.0, low, high, 5), 0.05) == verdict


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (-0.05, -0.02, "worse"),
        (-0.05, -0.005, "undecided"),
        (-0.214, 0.079, "undecided"),
        (-0.009, 0.009, "equal"),
        (0.0, 0.0, "equal"),
        (0.02, 0.05, "better"),
        (math.nan, math.nan, "undecided"),
    ],
)
def test_a_difference_of_metrics_against_one_hundredth(low, high, verdict):
    assert verdict_of_metric(low, high) == verdict_of_metric(low, high, 0.01) == verdict


@given(BOUNDS, THRESHOLDS)
def test_verdict_is_antisymmetric(bounds, threshold):
    low, high = bounds
    # where rounding decides
    assume(min(abs(abs(x) - math.log1p(threshold)) for x in bounds) > 1e-9)
    turned = {"regression": "improvement", "improvement": "regression"}
    verdict = verdict_of_time(ratio_of(low, high), threshold)
    assert verdict_of_time(ratio_of(-high, -low), threshold) == turned.get(
        verdict, verdict
    )


@given(BOUNDS, THRESHOLDS, THRESHOLDS)
def test_verdict_is_monotone_in_the_threshold(bounds, one, other):
    small, large = sorted((one, other))
    ratio = ratio_of(*bounds)
    if verdict_of_time(ratio, large) in ("regression", "improvement"):
        assert verdict_of_time(ratio, small) == verdict_of_time(ratio, large)
    if verdict_of_time(ratio, small) == "unchanged":
        assert verdict_of_time(ratio, large) == "unchanged"


def test_false_regressions_are_one_in_forty_at_the_threshold():
    """2.5 %: half of what a 95 % interval misses. 8,000 pairs of studies; three standard errors are 0.5 %."""
    random = np.random.default_rng(5)
    before = np.exp(0.03 * random.standard_normal((8000, 5)))
    after = 1.05 * np.exp(0.05 * random.standard_normal((8000, 5)))
    verdicts = [
        verdict_of_time(unpaired_ratio(b, a), 0.05)
        for a, b in zip(before, after, strict=True)
    ]
    assert verdicts.count("regression") / len(verdicts) == pytest.approx(
        0.025, abs=0.006
    )
