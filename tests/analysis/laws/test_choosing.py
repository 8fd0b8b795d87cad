"""Ranking of laws by AICc, and the leave-out error."""

from __future__ import annotations

import math

import numpy as np
import pytest

from scalebench.analysis.laws.fitting import aicc, candidates
from scalebench.analysis.laws.forms import amdahl, laws_for, universal
from tests.law_factory import COUNTS, TRUTHS, following, law_named, workload


def test_aicc_is_minus_two_log_likelihood_with_its_penalty():
    # Gaussian log-likelihood at its maximum: -n/2 (log(2 pi s2) + 1); AICc drops n (log(2 pi) + 1), equal for all laws.
    residuals = np.array([0.1, -0.2, 0.05, 0.15, -0.1, 0.02, -0.03, 0.12])
    n, coefficients, squares = len(residuals), 2, float(np.sum(residuals**2))
    variance = squares / n
    likelihood = float(np.sum(-0.5 * np.log(2 * math.pi * variance) - residuals**2 / (2 * variance)))
    k = coefficients + 1
    expected = -2 * likelihood + 2 * k + 2 * k * (k + 1) / (n - k - 1) - n * (math.log(2 * math.pi) + 1)
    assert aicc(squares, n, coefficients, n) == pytest.approx(expected)


def test_more_draws_do_not_change_the_weights():
    """Draws of a count are equal, so 30 give the weights of 3, except for the size of the noise."""
    random = np.random.default_rng(4)
    bent = universal(weak=False), (1.0, 0.05, 0.001)
    cached = following(*bent, repetitions=1, noise=0.03, random=random).seconds
    weights = {}
    for execution in ("virtual", "native"):
        for draws in (3, 30):
            series = following(*bent, repetitions=draws, seconds=np.tile(cached, draws), execution=execution)
            found, _ = candidates([amdahl(), universal(weak=False)], series)
            amdahls = next(one for one in found if one.fit.law.name == "amdahl")
            other = next(one for one in found if one.fit.law.name == "usl")
            k = 2 * 4 * 5 / (7 * draws - 5) - 2 * 3 * 4 / (7 * draws - 4) + 2  # what USL's further coefficient costs
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
        series = following(law, coefficients, counts, repetitions=40, load=load, noise=0.02, random=random)
        found, notes = candidates(laws_for(series)[0], series)
        chosen.append(found[0].fit.law.name)
        assert notes == []
        assert sum(one.weight for one in found) == pytest.approx(1)
        assert found[0].weight == max(one.weight for one in found)
    assert chosen.count(name) >= 8  # AICc prefers a law with one coefficient more in a few of a hundred


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
    doubled = following(law, (0.95, 0.05), seconds=np.where(exact.at == 64, 2, 1) * exact.seconds)
    found, _ = candidates([law], doubled)
    assert found[0].leave_out_error == pytest.approx(-0.5)  # predicts half of what was measured


def test_laws_need_enough_counts_and_runs():
    few = following(amdahl(), (0.9, 0.1), (1, 2, 4), repetitions=2)
    found, notes = candidates([amdahl(), universal(weak=False)], few)
    assert [one.fit.law.name for one in found] == ["amdahl"]
    assert notes == ["usl not fitted: 3 parameters want 4 worker counts"]
    cached = following(amdahl(), (0.9, 0.1), (1, 2, 4, 8), repetitions=1)
    found, notes = candidates([amdahl(), universal(weak=False)], cached)
    assert found == []
    assert notes[0] == "amdahl not fitted: AICc of 2 parameters wants 5 runs, there are 4"


def test_times_without_noise_can_be_chosen_from():
    found, _ = candidates([universal(weak=False), amdahl()], following(amdahl(), (0.9, 0.1)))
    assert found[0].fit.law.name == "amdahl"
    assert math.isfinite(found[0].aicc)


def test_law_without_time_at_one_worker_is_no_candidate():
    # Slower and slower from 2 workers on, one never measured: what explains it best has no compute at all.
    counts = (2, 3, 4, 5, 6)
    load = workload(counts, every="batch")
    series = following(amdahl(), (1.0, 0.1), counts, load=load, seconds=np.tile([1.0, 1.0, 1.0, 1.0, 3.0], 3))
    found, notes = candidates(laws_for(series)[0], series)
    assert any("has one worker take none" in note for note in notes)
    for one in found:
        assert one.fit.seconds(np.ones(1))[0] > 0


def test_shared_noise_does_not_hide_the_law():
    """A third between repetitions leaves the weight of Amdahl's law unchanged."""
    bent = universal(weak=False)
    steady = following(bent, (1.0, 0.05, 0.001), repetitions=5, noise=0.01, random=np.random.default_rng(4))
    slow = np.exp(0.3 * np.array([-1.0, 0.5, 1.0, -1.0, 0.5]))[steady.repetition]
    drifting = following(bent, (1.0, 0.05, 0.001), repetitions=5, seconds=steady.seconds * slow)
    apart = []
    for series in (steady, drifting):
        best, other = candidates([amdahl(), bent], series)[0]
        assert best.fit.law.name == "usl"
        apart.append(other.aicc - best.aicc)
    assert apart[0] > 100
    assert apart[1] == pytest.approx(apart[0], rel=0.1)
