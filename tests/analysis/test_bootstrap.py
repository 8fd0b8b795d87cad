"""Bootstrap intervals."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from scalebench.analysis import bootstrap_cells, bootstrap_interval
from scalebench.errors import UsageError
from tests.analysis.test_comparing import only, run

SECONDS = np.random.default_rng(7).lognormal(0, 0.1, 25).tolist()


def test_bootstrap_is_the_percentile_bootstrap_of_the_trimmed_mean():
    found = bootstrap_interval(SECONDS)
    theirs = stats.bootstrap(
        (np.log(SECONDS),),
        lambda logs, axis: stats.trim_mean(logs, 0.2, axis=axis),
        method="percentile",
        n_resamples=10_000,
        rng=np.random.default_rng(1),
    ).confidence_interval
    assert found.value == pytest.approx(math.exp(stats.trim_mean(np.log(SECONDS), 0.2)), rel=1e-12)
    # Both are random: a quantile of 10,000 resamples has a standard error of 2 % of the interval's width.
    assert (found.low, found.high) == pytest.approx(tuple(np.exp(theirs)), abs=0.06 * (found.high - found.low))


def test_bootstrap_is_deterministic_per_seed():
    assert bootstrap_interval(SECONDS) == bootstrap_interval(SECONDS)
    assert bootstrap_interval(SECONDS) != bootstrap_interval(SECONDS, seed=1)


def test_bootstrap_refuses_fewer_than_twenty_repetitions(study):
    with pytest.raises(UsageError, match=r"no bootstrap of 19 repetitions: it is offered from 20.*75 to 83 %"):
        bootstrap_interval(SECONDS[:19])
    rows = [run("allreduce", 2, t, "native", repetition=r) for r, t in enumerate(SECONDS[:5])]
    with pytest.raises(UsageError, match=r"the most repetitions of a native or paced time are 5"):
        bootstrap_cells(study(rows=rows))


def test_virtual_times_are_not_bootstrapped(study):
    rows = [run("allreduce", 2, t, repetition=r) for r, t in enumerate(SECONDS)]
    with pytest.raises(UsageError, match=r"native or paced time are 0"):
        bootstrap_cells(study(rows=rows))


def test_each_cell_has_an_interval_or_a_note(study):
    rows = [run("allreduce", 2, t, "native", repetition=r) for r, t in enumerate(SECONDS)]
    rows += [run("allreduce", 4, t, "native", repetition=r) for r, t in enumerate(SECONDS[:6])]
    table = bootstrap_cells(study(rows=rows))
    enough, few = only(table, workers=2), only(table, workers=4)
    assert (enough.trimmed_s, enough.low_s, enough.high_s) == bootstrap_interval(SECONDS)[:3]
    assert (enough.interval, enough.note) == ("95 % bootstrap interval", "")
    assert math.isnan(few.low_s)
    assert (few.n, few.note) == (6, "offered from 20")
