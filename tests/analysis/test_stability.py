"""Two groups in a cell, and drift over the run order."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from scalebench.analysis.rounds import runs_by_cell
from scalebench.analysis.significance import explained_by_a_cut, time_trend, two_groups_p
from tests.analysis.test_comparing import run


@given(st.lists(st.floats(-5, 5), min_size=5, max_size=12))
def test_the_best_cut_is_found(values):
    ordered = sorted(values)
    total = np.var(ordered)
    least = max(2, math.ceil(len(values) / 4))
    shares = [
        1 - (k * np.var(ordered[:k]) + (len(values) - k) * np.var(ordered[k:])) / len(values) / total
        for k in range(least, len(values) - least + 1)
        if total > 1e-12
    ]
    if shares:
        assert float(explained_by_a_cut(values)) == pytest.approx(max(shares), abs=1e-6)


def test_p_is_the_share_of_simulated_samples_that_look_as_clear():
    random = np.random.default_rng(5)
    seconds = np.exp(random.normal(0, 0.1, 8))
    simulated = explained_by_a_cut(np.random.default_rng(99).random((20_000, 8)))
    share = np.mean(simulated >= explained_by_a_cut(np.log(seconds)))
    assert two_groups_p(seconds.tolist()) == pytest.approx(share, abs=0.015)  # three standard errors of both


def test_two_tight_groups_are_clear_and_equal_times_are_not():
    assert two_groups_p([1.0, 1.001, 1.002, 1.3, 1.301, 1.302, 1.303]) < 0.001
    assert two_groups_p([1.0] * 6) == 1.0
    assert math.isnan(two_groups_p([1.0, 1.0, 2.0, 2.0]))


def cells(study, growth, noise=0.0, blocks=4, seed=0):
    random = np.random.default_rng(seed)
    rows, order = [], 0
    for block in range(blocks):
        for place in random.permutation(5):
            seconds = (1.0 + place) * math.exp(growth * order + noise * random.normal())
            rows.append(run("allreduce", int(2**place), seconds, "native", repetition=block, run_order=order))
            order += 1
    return runs_by_cell(study(rows=rows))


def test_drift_is_that_of_least_squares_with_a_level_for_every_cell(study):
    found = cells(study, 0.004, 0.02)
    order = np.array([at for cell in found for at in cell.order.values()], dtype=float)
    logs = np.array([math.log(t) for cell in found for t in cell.seconds.values()])
    levels = np.repeat(np.eye(len(found)), [len(cell.seconds) for cell in found], axis=0)
    design = np.column_stack([order, levels])
    beta, squares, *_ = np.linalg.lstsq(design, logs, rcond=None)
    freedom = len(logs) - len(found) - 1
    error = math.sqrt(squares[0] / freedom * np.linalg.inv(design.T @ design)[0, 0])
    factor, p = time_trend(found)
    assert factor == pytest.approx(math.exp(beta[0] * (order.max() - order.min())), rel=1e-9)
    assert p == pytest.approx(2 * stats.t.sf(abs(beta[0]) / error, freedom), rel=1e-6)


def test_known_drift_is_recovered(study):
    factor, p = time_trend(cells(study, 0.01, 0.001))
    assert factor == pytest.approx(math.exp(0.19), rel=0.01)
    assert p < 1e-6


def test_few_runs_show_no_drift(study):
    assert time_trend(cells(study, 0.01, blocks=2)) is None
