"""Jitter factors of single steps: their law and their keys."""

import numpy as np
import pytest
from pydantic import ValidationError
from scipy import stats

from scalebench.errors import StudyError
from scalebench.study.heterogeneity import Heterogeneity, VirtualOptions, jitter_source


@pytest.mark.parametrize("kind", ["measured", "normal", "lognormal", "exponential"])
def test_jitter_has_mean_one_and_is_keyed_by_seed_worker_and_step(kind):
    source = jitter_source(kind, 0.1, measured=[0.9, 1.0, 1.1], seed=3, worker=1)
    values = np.array([source(step) for step in range(5000)])
    assert values.mean() == pytest.approx(1.0, abs=0.01)
    assert values.std() > 0.05
    again = jitter_source(kind, 0.1, measured=[0.9, 1.0, 1.1], seed=3, worker=1)
    assert [again(step) for step in (4000, 7, 4000)] == [
        values[4000],
        values[7],
        values[4000],
    ]
    other = jitter_source(kind, 0.1, measured=[0.9, 1.0, 1.1], seed=3, worker=2)
    assert [other(step) for step in range(50)] != values[:50].tolist()


SIGMAS = {
    "normal": (0.05, 0.3),
    "lognormal": (0.05, 0.5, 2.0),
    "exponential": (0.05, 0.5, 1.0),
}
WIDTHS = [(kind, sigma) for kind, sigmas in SIGMAS.items() for sigma in sigmas]


@pytest.mark.parametrize(("kind", "sigma"), WIDTHS)
def test_all_laws_have_mean_one_and_deviation_sigma(kind, sigma):
    """400,000 draws: within 4.5 standard errors of the mean and, by the fourth moment of the law, of the variance."""
    s2 = np.log1p(sigma**2)
    kurtosis = {
        "normal": stats.truncnorm(-3, 3).stats("k") + 3,
        "lognormal": np.exp(4 * s2) + 2 * np.exp(3 * s2) + 3 * np.exp(2 * s2) - 3,
        "exponential": 9.0,
    }[kind]
    n = 400_000
    source = jitter_source(kind, sigma, seed=5, worker=0)
    values = np.array([source(step) for step in range(n)])
    assert values.min() > 0 or sigma == 1.0  # whose steps begin at zero
    assert values.min() >= 0
    assert values.mean() == pytest.approx(1.0, abs=4.5 * sigma / np.sqrt(n))
    assert values.var() == pytest.approx(
        sigma**2, rel=4.5 * np.sqrt((kurtosis - 1) / n)
    )


@pytest.mark.parametrize(("kind", "sigma"), [("normal", 0.31), ("exponential", 1.01)])
def test_sigma_with_negative_factors_is_refused(kind, sigma):
    with pytest.raises(
        ValidationError,
        match=f"jitter {kind} takes a jitter_sigma of at most .*; use lognormal",
    ):
        VirtualOptions(jitter=kind, jitter_sigma=sigma)
    VirtualOptions(jitter="lognormal", jitter_sigma=sigma)
    with pytest.raises(StudyError, match=f"virtual: jitter {kind} takes"):
        VirtualOptions(jitter_sigma=sigma).with_defaults(
            Heterogeneity(jitter=kind, jitter_sigma=0.1)
        )


def test_no_jitter_has_factor_one():
    assert jitter_source("none", 0.1, seed=0, worker=0)(5) == 1.0
    assert jitter_source("measured", 0.1, seed=0, worker=0)(5) == 1.0


@pytest.mark.parametrize("said", [{}, {"jitter": "measured"}, {"jitter": "none"}])
def test_sigma_without_a_stated_jitter_is_refused(said):
    kind = said.get("jitter", "measured")
    with pytest.raises(
        StudyError,
        match=f"^virtual: jitter_sigma 0.2 has no effect with jitter: {kind}; write jitter: n",
    ):
        VirtualOptions(jitter_sigma=0.2, **said).with_defaults(Heterogeneity())
    assert (
        VirtualOptions(jitter_sigma=0.05, **said).with_defaults(Heterogeneity()).jitter
        == kind
    )
    assert (
        VirtualOptions(**said).with_defaults(Heterogeneity(jitter_sigma=0.2)).jitter
        == kind
    )


def test_sigma_applies_to_the_jitter_of_the_cluster():
    merged = VirtualOptions(jitter_sigma=0.2).with_defaults(
        Heterogeneity(jitter="lognormal")
    )
    assert (merged.jitter, merged.jitter_sigma) == ("lognormal", 0.2)
    with pytest.raises(StudyError, match="has no effect with jitter: none"):
        VirtualOptions(jitter="none", jitter_sigma=0.2).with_defaults(
            Heterogeneity(jitter="lognormal")
        )
