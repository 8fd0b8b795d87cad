"""Pareto fronts of metric and cost."""

from __future__ import annotations

import math

import numpy as np
import pytest

from scalebench.analysis.grouping import metric_by_cost, non_dominated
from tests.analysis.test_comparing import only, run


def test_front_holds_what_no_point_beats():
    cost, metric = [1, 2, 2, 3, 4, 5], [0.5, 0.7, 0.6, 0.7, 0.9, 0.8]
    assert non_dominated(cost, metric).tolist() == [
        True,
        True,
        False,
        False,
        True,
        False,
    ]


def test_equal_points_are_on_the_front_together_and_unknown_ones_are_not():
    assert non_dominated([1, 1, math.nan, 0.5], [0.5, 0.5, 0.9, math.nan]).tolist() == [
        True,
        True,
        False,
        False,
    ]


def test_every_point_is_on_the_front_or_dominated_by_one_that_is():
    cost, metric = np.random.default_rng(1).integers(0, 9, (2, 60))
    on = non_dominated(cost, metric)
    assert 0 < on.sum() < len(on) == 60
    for x, y, kept in zip(cost, metric, on, strict=True):
        beaten = (
            (cost[on] <= x) & (metric[on] >= y) & ((cost[on] < x) | (metric[on] > y))
        )
        assert kept == (not beaten.any())


def timed(strategy, workers, train_s, metric, **changes):
    hours = train_s * workers / 3600
    return run(
        strategy,
        workers,
        train_s,
        final_metric=metric,
        cost_core_hours=hours,
        **changes,
    )


def test_fronts_stay_within_an_execution_and_engine(study):
    table = metric_by_cost(
        study(
            rows=[
                timed("serial", 1, 8.0, 0.95),
                timed("allreduce", 4, 4.0, 0.95),
                timed("epoch_average", 4, 3.0, 0.90),
                timed(
                    "epoch_average",
                    4,
                    2.0,
                    0.99,
                    execution="native",
                    oversubscribed=True,
                ),
                timed("allreduce", 2, 6.0, 0.80, execution="native"),
                run(
                    "allreduce",
                    8,
                    1.0,
                    "modelled",
                    "virtual",
                    final_metric=None,
                    metric_name=None,
                ),
            ]
        )
    )
    assert set(table["execution"]) == {"virtual", "native"}, (
        "modelled runs have no metric"
    )
    serial, slow = (
        only(table, label="serial"),
        only(table, label="allreduce", execution="virtual"),
    )
    assert not serial["train_s_front"], "allreduce is as good in less time"
    assert serial["core_hours_front"], "it takes fewer core-hours than allreduce"
    assert not slow["core_hours_front"]
    assert slow["train_s_front"]
    assert only(table, label="epoch_average", execution="virtual")["train_s_front"]
    assert only(table, label="allreduce", execution="native")["train_s_front"], (
        "alone but for an oversubscribed point"
    )
    assert not only(table, label="epoch_average", execution="native")["train_s_front"]


def test_core_hours_have_the_interval_of_the_time(study):
    rows = [
        timed("allreduce", 4, seconds, 0.9, repetition=at, seed=at)
        for at, seconds in enumerate((3.0, 4.0, 5.0))
    ]
    (cell,) = metric_by_cost(study(rows=rows)).to_dict("records")
    assert cell["core_hours"] == pytest.approx(4 * (3 * 4 * 5) ** (1 / 3) / 3600)
    assert cell["core_hours_high"] / cell["core_hours"] == pytest.approx(
        cell["high_s"] / cell["train_s"]
    )
