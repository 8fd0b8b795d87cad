"""Laws: their forms, their fit to times, and the choice among them."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import least_squares

from scalebench.analysis.laws.candidates import (
    aicc,
    amdahl,
    candidates,
    fit,
    gustafson,
    laws_for,
    mechanistic,
    nonnegative,
    universal,
)
from scalebench.analysis.laws.series import SeriesWork
from tests.facts import in_order
from tests.law_factory import (
    BYTES,
    COUNTS,
    STEPS,
    TRUTHS,
    following,
    law_named,
    workload,
)

N = np.array([1.0, 2.0, 3.0, 10.0, 64.0, 1000.0])
SHARE = st.floats(0.0, 0.999)
POSITIVE = st.floats(1e-6, 1e3)

NAMES = [
    "amdahl",
    "gustafson",
    "usl",
    "weak-usl",
    "mechanistic-log",
    "mechanistic-linear",
]
SIZES = {"amdahl": 2, "gustafson": 2}
AT = np.array(COUNTS, dtype=float)


def named(law, coefficients) -> dict[str, float]:
    return {
        parameter.name: parameter.of(np.array(coefficients))
        for parameter in law.parameters
    }


@given(POSITIVE, SHARE)
def test_amdahl(alone, s):
    law, x = amdahl(), (alone * (1 - s), alone * s)
    np.testing.assert_allclose(
        np.exp(law.log_seconds(N, np.array(x))), alone * (s + (1 - s) / N)
    )
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
    np.testing.assert_allclose(
        alone / np.exp(universal(weak=False).log_seconds(N, x)), capacity
    )
    np.testing.assert_allclose(
        N * alone / np.exp(universal(weak=True).log_seconds(N, x)), capacity
    )
    assert named(universal(weak=True), x) == pytest.approx(
        {"T1": alone, "sigma": sigma, "kappa": kappa}
    )


@given(POSITIVE, POSITIVE, POSITIVE, st.sampled_from(["batch", "epoch"]))
def test_mechanistic_time_is_compute_and_synchronisations(c, a, bandwidth, every):
    n = np.array(COUNTS, dtype=float)
    syncs = np.where(n > 1, STEPS / n if every == "batch" else 6, 0)
    for name, hops in (("mechanistic-log", np.log2(n)), ("mechanistic-linear", n - 1)):
        law = mechanistic(workload(every=every), name)
        seconds = np.exp(law.log_seconds(n, np.array([c, a, 1 / bandwidth])))
        np.testing.assert_allclose(
            seconds, c * STEPS / n + syncs * (a * hops + BYTES / bandwidth)
        )
        assert named(law, [c, a, 1 / bandwidth]) == pytest.approx(
            {"c": c, "a": a, "B": bandwidth}
        )


@pytest.mark.parametrize("truth", TRUTHS)
def test_gradients_are_derivatives(truth):
    name, coefficients, every = TRUTHS[truth]
    law, x = law_named(name, workload(every=every)), np.array(coefficients)
    assert law.gradient(N, x).shape == (len(N), len(x))
    for index, step in enumerate(np.diag(1e-6 * x)):
        slope = (law.log_seconds(N, x + step) - law.log_seconds(N, x - step)) / (
            2 * step[index]
        )
        np.testing.assert_allclose(
            law.gradient(N, x)[:, index], slope, rtol=1e-5, atol=1e-9
        )


def test_laws_depend_on_scaling():
    strong = following(amdahl(), (1.0, 0.1), load=workload())
    weak = following(gustafson(), (1.0, 0.1), load=workload())
    mechanistic_ = ["mechanistic-log", "mechanistic-linear"]
    assert [law.name for law in laws_for(strong)[0]] == ["amdahl", "usl", *mechanistic_]
    assert [law.name for law in laws_for(weak)[0]] == [
        "gustafson",
        "usl",
        *mechanistic_,
    ]


def test_without_a_workload_there_is_no_mechanistic_law():
    laws, notes = laws_for(following(amdahl(), (1.0, 0.1), load=None))
    assert [law.name for law in laws] == ["amdahl", "usl"]
    (note,) = notes
    assert in_order(note, "mechanistic", "not fitted", "do not count", "bytes")


def test_bytes_collinear_with_compute_are_left_out():
    # Without the run on one worker, a synchronisation of every step costs as much per
    # step as the step itself.
    law = mechanistic(workload(COUNTS[1:], every="batch"), "mechanistic-log")
    assert [parameter.name for parameter in law.parameters] == ["c", "a"]
    assert "bytes/B left out" in law.notes[0]
    assert [
        p.name
        for p in mechanistic(workload(every="batch"), "mechanistic-log").parameters
    ] == ["c", "a", "B"]


def test_step_time_depends_on_samples_at_fixed_global_batch():
    n = np.array(COUNTS, dtype=float)
    syncs = np.where(n > 1, 100.0, 0.0)
    load = SeriesWork(
        n, np.full(7, 100.0), syncs, BYTES * syncs, 0.0, samples=100 * 64 / n
    )
    law = mechanistic(load, "mechanistic-log")
    x = np.array([2e-4, 1e-5, 1e-4, 1e-9])
    seconds = np.exp(law.log_seconds(n, x))
    assert seconds[0] == pytest.approx(100 * (2e-4 + 64 * 1e-5))
    assert seconds[-1] == pytest.approx(
        100 * (2e-4 + 1e-5) + 100 * (6e-4 + BYTES * 1e-9)
    )
    assert named(law, x) == pytest.approx({"c": 2e-4, "d": 1e-5, "a": 1e-4, "B": 1e9})


def test_bandwidth_without_cost_is_infinite():
    assert (
        named(mechanistic(workload(), "mechanistic-log"), [1e-3, 1e-3, 0.0])["B"]
        == math.inf
    )


@given(
    st.sampled_from(NAMES),
    st.lists(st.floats(0.01, 1), min_size=3, max_size=3),
    st.floats(1e-3, 1e3),
)
def test_fit_recovers_coefficients(name, parts, unit):
    law = law_named(name, workload())
    columns = law.columns(AT)
    # Each column makes up `part` of the time (or rate) where it is largest.
    x = unit * np.array(parts[: SIZES.get(name, 3)]) / columns.max(axis=0)
    found = fit(law, following(law, x, repetitions=1))
    np.testing.assert_allclose(
        found.seconds(AT), np.exp(law.log_seconds(AT, x)), rtol=1e-7
    )
    np.testing.assert_allclose(found.coefficients, x, rtol=1e-4)
    assert found.misfit < 1e-7


@given(
    st.sampled_from(NAMES), st.integers(0, 10_000), st.sampled_from([0.01, 0.1, 0.5])
)
def test_fit_is_a_minimum(name, seed, noise):
    law = law_named(name, workload())
    random = np.random.default_rng(seed)
    x = random.uniform(0.01, 1, SIZES.get(name, 3)) / law.columns(AT).max(axis=0)
    series = following(law, x, noise=noise, random=random)
    found = fit(law, series)
    logs = np.log(series.seconds)

    def residuals(
        logarithms,
    ):  # scipy's trust region on the logs of the coefficients, from the truth
        return logs - law.log_seconds(series.at, np.exp(logarithms))

    reference = least_squares(residuals, np.log(x), xtol=1e-12, ftol=1e-12, gtol=1e-12)
    assert found.squares <= 2 * reference.cost * (1 + 1e-6)


@given(st.floats(1e-6, 1e6), st.integers(0, 100))
def test_the_unit_of_time_does_not_matter(factor, seed):
    random = np.random.default_rng(seed)
    series = following(
        universal(weak=False), (1.0, 0.05, 0.002), noise=0.1, random=random
    )
    other = following(
        universal(weak=False), (1.0, 0.05, 0.002), seconds=factor * series.seconds
    )
    one, scaled = fit(universal(weak=False), series), fit(universal(weak=False), other)
    np.testing.assert_allclose(scaled.seconds(AT), factor * one.seconds(AT), rtol=1e-5)
    assert scaled.squares == pytest.approx(one.squares, rel=1e-6)


def test_counts_are_weighted_by_their_runs():
    at = np.array([1.0, 2.0, 4.0, 8.0, 8.0, 8.0])
    series = following(
        amdahl(), (1.0, 0.1), at=at, seconds=at**-1.1, repetition=np.zeros(6, dtype=int)
    )
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
    wrong = following(
        amdahl(), (1.0, 0.1), seconds=np.where(series.at == 64, 99.0, series.seconds)
    )
    np.testing.assert_allclose(
        fit(amdahl(), wrong, leave_out=64.0).coefficients, (1.0, 0.1), rtol=1e-6
    )


def test_squares_within_and_between_counts_add_up():
    random = np.random.default_rng(5)
    series = following(gustafson(), (1.0, 0.3), noise=0.1, random=random)
    found = fit(gustafson(), series)
    direct = np.log(series.seconds) - gustafson().log_seconds(
        series.at, found.coefficients
    )
    assert found.squares == pytest.approx(np.sum(direct**2))
    assert 0 < found.between < found.squares


@pytest.mark.parametrize("truth", TRUTHS)
def test_fit_starts_where_a_column_vanishes(truth):
    # The slowest at the largest count: the best coefficients of 1/N may be none at all.
    name, _, every = TRUTHS[truth]
    law = law_named(name, workload(every=every))
    x = nonnegative(law.columns(AT), np.log(AT**2), np.ones(7))
    assert np.isfinite(law.log_seconds(AT, x)).all()


def test_aicc_is_minus_two_log_likelihood_with_its_penalty():
    # Gaussian log-likelihood at its maximum: -n/2 (log(2 pi s2) + 1); AICc drops n
    # (log(2 pi) + 1), equal for all laws.
    residuals = np.array([0.1, -0.2, 0.05, 0.15, -0.1, 0.02, -0.03, 0.12])
    n, coefficients, squares = len(residuals), 2, float(np.sum(residuals**2))
    variance = squares / n
    likelihood = float(
        np.sum(-0.5 * np.log(2 * math.pi * variance) - residuals**2 / (2 * variance))
    )
    k = coefficients + 1
    expected = (
        -2 * likelihood
        + 2 * k
        + 2 * k * (k + 1) / (n - k - 1)
        - n * (math.log(2 * math.pi) + 1)
    )
    assert aicc(squares, n, coefficients, n) == pytest.approx(expected)


def test_more_draws_do_not_change_the_weights():
    """Draws of a count are equal, so 30 give the weights of 3, except for the size of the noise."""
    random = np.random.default_rng(4)
    bent = universal(weak=False), (1.0, 0.05, 0.001)
    cached = following(*bent, repetitions=1, noise=0.03, random=random).seconds
    weights = {}
    for execution in ("virtual", "native"):
        for draws in (3, 30):
            series = following(
                *bent,
                repetitions=draws,
                seconds=np.tile(cached, draws),
                execution=execution,
            )
            found, _ = candidates([amdahl(), universal(weak=False)], series)
            amdahls = next(one for one in found if one.fit.law.name == "amdahl")
            other = next(one for one in found if one.fit.law.name == "usl")
            # what USL's further coefficient costs
            k = 2 * 4 * 5 / (7 * draws - 5) - 2 * 3 * 4 / (7 * draws - 4) + 2
            weights[execution, draws] = other.aicc - amdahls.aicc - k
    assert weights["virtual", 30] == pytest.approx(weights["virtual", 3])
    assert weights["native", 30] == pytest.approx(10 * weights["native", 3])
    assert weights["native", 3] == pytest.approx(3 * weights["virtual", 3])
    assert abs(weights["virtual", 3]) > 0.1


@pytest.mark.parametrize("truth", TRUTHS)
def test_true_law_is_chosen_with_many_runs(truth):
    name, coefficients, every = TRUTHS[truth]
    counts = (*COUNTS, 128, 256)
    load = workload(counts, every=every)
    law = law_named(name, load)
    random = np.random.default_rng(3)
    chosen = []
    for _ in range(10):
        series = following(
            law,
            coefficients,
            counts,
            repetitions=40,
            load=load,
            noise=0.02,
            random=random,
        )
        found, notes = candidates(laws_for(series)[0], series)
        chosen.append(found[0].fit.law.name)
        assert notes == []
        assert sum(one.weight for one in found) == pytest.approx(1)
        assert found[0].weight == max(one.weight for one in found)
    # AICc prefers a law with one coefficient more in a few of a hundred
    assert chosen.count(name) >= 8


def test_gustafson_is_recognised_in_weak_scaling():
    law = law_named("gustafson", workload())
    random = np.random.default_rng(1)
    series = following(law, (0.7, 0.3), repetitions=20, noise=0.02, random=random)
    found, _ = candidates(laws_for(series)[0], series)
    assert found[0].fit.law.name == "gustafson"
    np.testing.assert_allclose(found[0].fit.coefficients, (0.7, 0.3), rtol=0.05)


def test_leave_out_error_detects_a_wrong_law():
    law = amdahl()
    exact = following(law, (0.95, 0.05))
    found, _ = candidates([law], exact)
    assert found[0].leave_out_error == pytest.approx(0, abs=1e-8)
    doubled = following(
        law, (0.95, 0.05), seconds=np.where(exact.at == 64, 2, 1) * exact.seconds
    )
    found, _ = candidates([law], doubled)
    # predicts half of what was measured
    assert found[0].leave_out_error == pytest.approx(-0.5)


def test_laws_need_enough_counts_and_runs():
    few = following(amdahl(), (0.9, 0.1), (1, 2, 4), repetitions=2)
    found, notes = candidates([amdahl(), universal(weak=False)], few)
    assert [one.fit.law.name for one in found] == ["amdahl"]
    (note,) = notes
    assert in_order(note, "usl not fitted", "3 parameters", "4 worker counts")
    cached = following(amdahl(), (0.9, 0.1), (1, 2, 4, 8), repetitions=1)
    found, notes = candidates([amdahl(), universal(weak=False)], cached)
    assert found == []
    assert in_order(
        notes[0], "amdahl not fitted", "AICc", "2 parameters", "5 runs", "4"
    )


def test_times_without_noise_can_be_chosen_from():
    found, _ = candidates(
        [universal(weak=False), amdahl()], following(amdahl(), (0.9, 0.1))
    )
    assert found[0].fit.law.name == "amdahl"
    assert math.isfinite(found[0].aicc)


def test_law_without_time_at_one_worker_is_no_candidate():
    # Slower and slower from 2 workers on, one never measured: what explains it best has
    # no compute at all.
    counts = (2, 3, 4, 5, 6)
    load = workload(counts, every="batch")
    series = following(
        amdahl(),
        (1.0, 0.1),
        counts,
        load=load,
        seconds=np.tile([1.0, 1.0, 1.0, 1.0, 3.0], 3),
    )
    found, notes = candidates(laws_for(series)[0], series)
    assert any("has one worker take none" in note for note in notes)
    for one in found:
        assert one.fit.seconds(np.ones(1))[0] > 0


def test_shared_noise_does_not_hide_the_law():
    """A third between repetitions leaves the weight of Amdahl's law unchanged."""
    bent = universal(weak=False)
    steady = following(
        bent,
        (1.0, 0.05, 0.001),
        repetitions=5,
        noise=0.01,
        random=np.random.default_rng(4),
    )
    slow = np.exp(0.3 * np.array([-1.0, 0.5, 1.0, -1.0, 0.5]))[steady.repetition]
    drifting = following(
        bent, (1.0, 0.05, 0.001), repetitions=5, seconds=steady.seconds * slow
    )
    apart = []
    for series in (steady, drifting):
        best, other = candidates([amdahl(), bent], series)[0]
        assert best.fit.law.name == "usl"
        apart.append(other.aicc - best.aicc)
    assert apart[0] > 100
    assert apart[1] == pytest.approx(apart[0], rel=0.1)
