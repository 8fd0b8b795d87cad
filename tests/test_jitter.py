"""The factors on single steps: their law and what they are keyed by."""

import numpy as np
import pytest

from scalebench.jitter import jitter_source


@pytest.mark.parametrize("kind", ["measured", "normal", "lognormal", "exponential"])
def test_jitter_has_mean_one_and_is_keyed_by_seed_worker_and_step(kind):
    source = jitter_source(kind, 0.1, measured=[0.9, 1.0, 1.1], seed=3, worker=1)
    values = np.array([source(step) for step in range(5000)])
    assert values.mean() == pytest.approx(1.0, abs=0.01)
    assert values.std() > 0.05
    again = jitter_source(kind, 0.1, measured=[0.9, 1.0, 1.1], seed=3, worker=1)
    assert [again(step) for step in (4000, 7, 4000)] == [values[4000], values[7], values[4000]]
    other = jitter_source(kind, 0.1, measured=[0.9, 1.0, 1.1], seed=3, worker=2)
    assert [other(step) for step in range(50)] != values[:50].tolist()


def test_without_jitter_every_step_is_alike():
    assert jitter_source("none", 0.1, seed=0, worker=0)(5) == 1.0
    assert jitter_source("measured", 0.1, seed=0, worker=0)(5) == 1.0
