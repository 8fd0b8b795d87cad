"""The table of cells against the intervals of single cells."""

from __future__ import annotations

import math

import numpy as np
import pytest

from scalebench.analysis import cells
from scalebench.analysis.intervals import (
    STOPPED_LATER,
    calibration_interval,
    median_time,
    time_interval,
)
from scalebench.formatting import seconds_with_interval
from tests.analysis.test_comparing import only, run

SECONDS = np.random.default_rng(3).lognormal(0, 0.1, 9).tolist()


def repeated(execution, count, workers=2):
    return [
        run("allreduce", workers, t, execution, repetition=r)
        for r, t in enumerate(SECONDS[:count])
    ]


def test_a_measured_cell_has_mean_median_quartiles_and_spread(study):
    table = cells(
        study(
            rows=[
                *repeated("native", 9),
                *repeated("native", 6, 4),
                *repeated("native", 5, 8),
            ]
        )
    )
    for workers, count in ((2, 9), (4, 6)):
        own, row = SECONDS[:count], only(table, workers=workers)
        assert (row.train_s, row.low_s, row.high_s) == pytest.approx(
            time_interval(own)[:3]
        )
        assert (row.median_s, row.median_low_s, row.median_high_s) == pytest.approx(
            median_time(own)[:3]
        )
        assert (row.q1_s, row.q3_s) == pytest.approx(
            tuple(np.quantile(own, [0.25, 0.75]))
        )
        assert row.mean_s == pytest.approx(np.mean(own))
        assert row.spread == pytest.approx(
            math.sqrt(math.exp(np.var(np.log(own), ddof=1)) - 1)
        )
    few = only(table, workers=8)
    assert math.isfinite(few.low_s)
    assert math.isnan(few.median_low_s), "five repetitions hold no median with 95 %"


def test_spread_is_the_coefficient_of_variation_of_lognormal_times(study):
    many = np.random.default_rng(1).lognormal(0, 0.3, 3000)
    rows = [run("allreduce", 2, t, "native", repetition=r) for r, t in enumerate(many)]
    assert only(cells(study(rows=rows)), workers=2).spread == pytest.approx(
        many.std() / many.mean(), rel=0.05
    )


def test_a_virtual_cell_has_a_calibration_interval_and_none_of_its_median(study):
    row = only(cells(study(rows=repeated("virtual", 9))), workers=2)
    assert (row.low_s, row.high_s) == pytest.approx(
        calibration_interval(np.log(SECONDS)).map(math.exp)[1:3]
    )
    assert row.interval == "calibration interval"
    assert math.isnan(row.median_low_s)


def test_cells_of_adaptive_studies_have_the_stopping_level(study):
    results = study(rows=repeated("native", 5))
    stopped = type(results)(
        results.folder, results.runs, results.epochs, {"until": {"ci_width": 0.05}}
    )
    row = only(cells(stopped), workers=2)
    assert (row.low_s, row.high_s) == pytest.approx(
        time_interval(SECONDS[:5], STOPPED_LATER)[1:3]
    )


def test_medians_of_adaptive_studies_keep_the_usual_level(study):
    results = study(rows=repeated("native", 6))
    stopped = type(results)(
        results.folder, results.runs, results.epochs, {"until": {"ci_width": 0.05}}
    )
    row = only(cells(stopped), workers=2)
    assert (row.median_low_s, row.median_high_s) == pytest.approx(
        median_time(SECONDS[:6])[1:3]
    )


def test_cost_of_a_cell_is_the_mean_over_its_repetitions(study):
    rows = [
        run("allreduce", 2, 1.0, repetition=r, cost_core_hours=hours)
        for r, hours in enumerate((1.0, 3.0))
    ]
    row = only(cells(study(rows=rows)), workers=2)
    assert row.cost_core_hours == 2.0
    assert math.isnan(row.cost_gpu_hours)


def test_stated_step_times_do_not_vary_and_have_no_interval(study):
    rows = [run("serial", 1, 4.52, repetition=r) for r in range(3)] + [
        run("allreduce", 2, 2.3, repetition=0)
    ]
    rows += [
        run("allreduce", 4, t, repetition=r) for r, t in enumerate((1.1, 1.2, 1.3))
    ]
    table = cells(study(rows=rows)).set_index(["label", "workers"])
    assert table["interval"].to_dict() == {
        ("serial", 1): "no interval, as nothing varies",
        ("allreduce", 2): "",
        ("allreduce", 4): "calibration interval",
    }
    serial = table.loc[("serial", 1)]
    assert (
        seconds_with_interval(serial["train_s"], serial["low_s"], serial["high_s"])
        == "4.52 s"
    )
