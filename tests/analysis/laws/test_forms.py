"""Laws against their formulas."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalebench.analysis.laws.forms import amdahl, gustafson, laws_for, mechanistic, universal
from scalebench.analysis.laws.series import SeriesWork
from tests.law_factory import BYTES, COUNTS, STEPS, TRUTHS, following, law_named, workload

N = np.array([1.0, 2.0, 3.0, 10.0, 64.0, 1000.0])
SHARE = st.floats(0.0, 0.999)
POSITIVE = st.floats(1e-6, 1e3)


def named(law, coefficients) -> dict[str, float]:
    return {parameter.name: parameter.of(np.array(coefficients)) for parameter in law.parameters}


@given(POSITIVE, SHARE)
def test_amdahl(alone, s):
    law, x = amdahl(), (alone * (1 - s), alone * s)
    np.testing.assert_allclose(np.exp(law.log_seconds(N, np.array(x))), alone * (s + (1 - s) / N))
    assert named(law, x) == pytest.approx({"T1": alone, "s": s})


@given(POSITIVE, SHARE)
def test_gustafsons_scaled_speedup(alone, s):
    law, x = gustafson(), ((1 - s) / alone, s / alone)
    seconds = np.exp(law.log_seconds(N, np.array(x)))
    np.testing.assert_allclose(N * alone / seconds, s + (1 - s) * N)
    assert named(law, x) == pytest.approx({"T1": alone, "s": s})


@given(POSITIVE, st.floats(0, 0.9), st.floats(0, 0.1))
def test_usl_throughput(alone, sigma, kappa):
    x = np.array([alone, alone * sigma, alone * kappa])
    capacity = N / (1 + sigma * (N - 1) + kappa * N * (N - 1))  # Gunther 2007, eq. 4.13
    np.testing.assert_allclose(alone / np.exp(universal(weak=False).log_seconds(N, x)), capacity)
    np.testing.assert_allclose(N * alone / np.exp(universal(weak=True).log_seconds(N, x)), capacity)
    assert named(universal(weak=True), x) == pytest.approx({"T1": alone, "sigma": sigma, "kappa": kappa})


@given(POSITIVE, POSITIVE, POSITIVE, st.sampled_from(["batch", "epoch"]))
def test_mechanistic_time_is_compute_and_synchronisations(c, a, bandwidth, every):
    n = np.array(COUNTS, dtype=float)
    syncs = np.where(n > 1, STEPS / n if every == "batch" else 6, 0)
    for name, hops in (("mechanistic-log", np.log2(n)), ("mechanistic-linear", n - 1)):
        law = mechanistic(workload(every=every), name)
        seconds = np.exp(law.log_seconds(n, np.array([c, a, 1 / bandwidth])))
        np.testing.assert_allclose(seconds, c * STEPS / n + syncs * (a * hops + BYTES / bandwidth))
        assert named(law, [c, a, 1 / bandwidth]) == pytest.approx({"c": c, "a": a, "B": bandwidth})


@pytest.mark.parametrize("truth", TRUTHS)
def test_gradients_are_derivatives(truth):
    name, coefficients, every = TRUTHS[truth]
    law, x = law_named(name, workload(every=every)), np.array(coefficients)
    assert law.gradient(N, x).shape == (len(N), len(x))
    for index, step in enumerate(np.diag(1e-6 * x)):
        slope = (law.log_seconds(N, x + step) - law.log_seconds(N, x - step)) / (2 * step[index])
        np.testing.assert_allclose(law.gradient(N, x)[:, index], slope, rtol=1e-5, atol=1e-9)


def test_laws_depend_on_scaling():
    strong = following(amdahl(), (1.0, 0.1), load=workload())
    weak = following(gustafson(), (1.0, 0.1), load=workload())
    mechanistic_ = ["mechanistic-log", "mechanistic-linear"]
    assert [law.name for law in laws_for(strong)[0]] == ["amdahl", "usl", *mechanistic_]
    assert [law.name for law in laws_for(weak)[0]] == ["gustafson", "usl", *mechanistic_]


def test_without_a_workload_there_is_no_mechanistic_law():
    laws, notes = laws_for(following(amdahl(), (1.0, 0.1), load=None))
    assert [law.name for law in laws] == ["amdahl", "usl"]
    assert notes == ["mechanistic law not fitted: the rows do not count steps, synchronisations and bytes"]


def test_bytes_collinear_with_compute_are_left_out():
    # Without the run on one worker, a synchronisation of every step costs as much per step as the step itself.
    law = mechanistic(workload(COUNTS[1:], every="batch"), "mechanistic-log")
    assert [parameter.name for parameter in law.parameters] == ["c", "a"]
    assert "bytes/B left out" in law.notes[0]
    assert [p.name for p in mechanistic(workload(every="batch"), "mechanistic-log").parameters] == ["c", "a", "B"]


def test_step_time_depends_on_samples_at_fixed_global_batch():
    n = np.array(COUNTS, dtype=float)
    syncs = np.where(n > 1, 100.0, 0.0)
    load = SeriesWork(n, np.full(7, 100.0), syncs, BYTES * syncs, 0.0, samples=100 * 64 / n)
    law = mechanistic(load, "mechanistic-log")
    x = np.array([2e-4, 1e-5, 1e-4, 1e-9])
    seconds = np.exp(law.log_seconds(n, x))
    assert seconds[0] == pytest.approx(100 * (2e-4 + 64 * 1e-5))
    assert seconds[-1] == pytest.approx(100 * (2e-4 + 1e-5) + 100 * (6e-4 + BYTES * 1e-9))
    assert named(law, x) == pytest.approx({"c": 2e-4, "d": 1e-5, "a": 1e-4, "B": 1e9})


def test_bandwidth_without_cost_is_infinite():
    assert named(mechanistic(workload(), "mechanistic-log"), [1e-3, 1e-3, 0.0])["B"] == math.inf
