"""Least squares on logs with coefficients >= 0, against exact data and scipy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import least_squares

from scalebench.analysis.laws.fitting import fit, nonnegative
from scalebench.analysis.laws.forms import amdahl, gustafson, universal
from tests.law_factory import COUNTS, TRUTHS, following, law_named, workload

NAMES = ["amdahl", "gustafson", "usl", "weak-usl", "mechanistic-log", "mechanistic-linear"]
SIZES = {"amdahl": 2, "gustafson": 2}
N = np.array(COUNTS, dtype=float)


@given(st.sampled_from(NAMES), st.lists(st.floats(0.01, 1), min_size=3, max_size=3), st.floats(1e-3, 1e3))
def test_fit_recovers_coefficients(name, parts, unit):
    law = law_named(name, workload())
    columns = law.columns(N)
    # Each column makes up `part` of the time (or rate) where it is largest.
    x = unit * np.array(parts[: SIZES.get(name, 3)]) / columns.max(axis=0)
    found = fit(law, following(law, x, repetitions=1))
    np.testing.assert_allclose(found.seconds(N), np.exp(law.log_seconds(N, x)), rtol=1e-7)
    np.testing.assert_allclose(found.coefficients, x, rtol=1e-4)
    assert found.misfit < 1e-7


@given(st.sampled_from(NAMES), st.integers(0, 10_000), st.sampled_from([0.01, 0.1, 0.5]))
def test_fit_is_a_minimum(name, seed, noise):
    law = law_named(name, workload())
    random = np.random.default_rng(seed)
    x = random.uniform(0.01, 1, SIZES.get(name, 3)) / law.columns(N).max(axis=0)
    series = following(law, x, noise=noise, random=random)
    found = fit(law, series)
    logs = np.log(series.seconds)

    def residuals(logarithms):  # scipy's trust region on the logs of the coefficients, from the truth
        return logs - law.log_seconds(series.at, np.exp(logarithms))

    reference = least_squares(residuals, np.log(x), xtol=1e-12, ftol=1e-12, gtol=1e-12)
    assert found.squares <= 2 * reference.cost * (1 + 1e-6)


@given(st.floats(1e-6, 1e6), st.integers(0, 100))
def test_the_unit_of_time_does_not_matter(factor, seed):
    random = np.random.default_rng(seed)
    series = following(universal(weak=False), (1.0, 0.05, 0.002), noise=0.1, random=random)
    other = following(universal(weak=False), (1.0, 0.05, 0.002), seconds=factor * series.seconds)
    one, scaled = fit(universal(weak=False), series), fit(universal(weak=False), other)
    np.testing.assert_allclose(scaled.seconds(N), factor * one.seconds(N), rtol=1e-5)
    assert scaled.squares == pytest.approx(one.squares, rel=1e-6)


def test_counts_are_weighted_by_their_runs():
    at = np.array([1.0, 2.0, 4.0, 8.0, 8.0, 8.0])
    series = following(amdahl(), (1.0, 0.1), at=at, seconds=at**-1.1, repetition=np.zeros(6, dtype=int))
    found = fit(amdahl(), series)
    assert found.counts.tolist() == [1, 2, 4, 8]
    assert found.weights.tolist() == [1, 1, 1, 3]
    assert found.runs == 6
    assert found.coefficients[1] == 0  # better than linear: no serial share
    assert found.freedom == 3  # a coefficient at zero uses no worker count up
    # What is left is a weighted mean of log(N T): 3 of 6 runs at 8 workers.
    logs = np.average(np.log(at * series.seconds))
    assert found.coefficients[0] == pytest.approx(np.exp(logs))


def test_left_out_count_has_no_influence():
    series = following(amdahl(), (1.0, 0.1))
    wrong = following(amdahl(), (1.0, 0.1), seconds=np.where(series.at == 64, 99.0, series.seconds))
    np.testing.assert_allclose(fit(amdahl(), wrong, leave_out=64.0).coefficients, (1.0, 0.1), rtol=1e-6)


def test_squares_within_and_between_counts_add_up():
    random = np.random.default_rng(5)
    series = following(gustafson(), (1.0, 0.3), noise=0.1, random=random)
    found = fit(gustafson(), series)
    direct = np.log(series.seconds) - gustafson().log_seconds(series.at, found.coefficients)
    assert found.squares == pytest.approx(np.sum(direct**2))
    assert 0 < found.between < found.squares


@pytest.mark.parametrize("truth", TRUTHS)
def test_fit_starts_where_a_column_vanishes(truth):
    # The slowest at the largest count: the best coefficients of 1/N may be none at all.
    name, _, every = TRUTHS[truth]
    law = law_named(name, workload(every=every))
    x = nonnegative(law.columns(N), np.log(N**2), np.ones(7))
    assert np.isfinite(law.log_seconds(N, x)).all()
