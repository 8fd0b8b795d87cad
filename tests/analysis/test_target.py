"""Time and epochs to the target, with runs that never reach it."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import CensoredData, ecdf

from scalebench.analysis import ratios
from scalebench.analysis.target import (
    SURVIVAL,
    simulated_interval,
    survival_median,
    target_ratios,
    times_to_target,
)
from tests.analysis.test_comparing import only, run
from tests.facts import together

AIM = {"target_metric": 0.9, "epochs": 6}


def cell(strategy, workers, times, execution="virtual", train_s=4.0, **changes):
    """Runs of one cell with these times to the target; None: never reached."""
    return [
        run(
            strategy,
            workers,
            train_s,
            execution,
            repetition=r,
            seed=r,
            run_order=10 * r + len(strategy),
            time_to_target_s=time,
            epochs_to_target=None if time is None else math.ceil(6 * time / train_s),
            **AIM | changes,
        )
        for r, time in enumerate(times)
    ]


@pytest.mark.filterwarnings("ignore:The confidence interval is undefined")
def test_curve_and_its_bounds_are_those_of_scipy():
    random = np.random.default_rng(3)
    for _ in range(20):
        times, ends = random.exponential(1, 15), random.exponential(1.5, 15)
        seen, reached = np.minimum(times, ends), times <= ends
        curve = ecdf(CensoredData(uncensored=seen[reached], right=seen[~reached])).sf
        bounds = curve.confidence_interval(method="log-log")
        expected = [_first(bounds.low), _first(bounds.high)]
        found = survival_median(seen[reached].tolist(), seen[~reached].tolist())
        assert [found.low, found.high] == pytest.approx(expected)
        assert found.n == 15
        if not np.any(np.isclose(curve.probabilities, 0.5)):
            assert found.value == pytest.approx(_first(curve))


def _first(curve) -> float:
    return next(
        (
            float(x)
            for x, y in zip(curve.quantiles, curve.probabilities, strict=True)
            if y <= 0.5 + 1e-12
        ),
        math.inf,
    )


@pytest.mark.parametrize(
    ("reached", "censored", "median"),
    [
        ([1.0, 2.0, 3.0], [], 2.0),
        ([1.0, 2.0], [], 1.5),
        ([1.0, 3.0], [4.0], 3.0),
        ([1.0], [4.0], math.inf),
        ([1.0, 2.0, 3.0], [1.5], 2.0),  # after 1.5 s one of four is unknown
        ([], [4.0], math.inf),
    ],
)
def test_median_counts_censored_runs(reached, censored, median):
    assert survival_median(reached, censored).value == pytest.approx(median)


def test_interval_of_a_torn_cell_begins_at_six_runs():
    assert math.isnan(survival_median([1, 2, 3, 4], [5]).low)
    found = survival_median([1, 2, 3, 4], [5, 6])
    assert found.low < found.value < found.high == math.inf


def test_cell_that_always_reaches_it_has_the_interval_of_a_time(study):
    times = (1.0, 1.1, 1.21)
    row = only(
        times_to_target(study(rows=cell("serial", 1, times, "native"))),
        strategy="serial",
    )
    assert row["time_to_target_s"] == pytest.approx(1.1)
    assert row["target_low_s"] < 1.1 < row["target_high_s"]
    assert row["target_interval"] == "95 % confidence interval"
    assert (row["n_reached"], row["n_aimed"], row["epochs_to_target"]) == (3, 3, 2)


def test_cell_with_unreached_runs_has_counts(study):
    rows = cell("serial", 1, (1.0, None, 3.0)) + cell("allreduce", 2, (1.0, None, None))
    table = times_to_target(study(rows=rows))
    serial, allreduce = (
        only(table, strategy="serial"),
        only(table, strategy="allreduce"),
    )
    assert (
        serial["time_to_target_s"],
        serial["epochs_to_target"],
        serial["n_reached"],
    ) == (3.0, 5, 2)
    assert (
        allreduce["time_to_target_s"],
        allreduce["n_reached"],
        allreduce["n_aimed"],
    ) == (math.inf, 1, 3)
    assert serial["target_interval"] == ""
    many = times_to_target(
        study(rows=cell("serial", 1, (1.0, 1.2, None, 3.0, 2.0, 2.5, 2.2)))
    ).iloc[0]
    assert many["target_interval"] == SURVIVAL


def test_study_without_target_has_no_rows(study):
    results = study(rows=[run("serial", 1, 4.0)])
    assert times_to_target(results).empty
    assert target_ratios(results).empty


def test_times_to_the_target_have_the_same_baselines_as_times(study):
    names = ("serial", "allreduce", "horovod", "ddp", "epoch_average")
    results = study(rows=[row for name in names for row in cell(name, 1, (1.0, 1.1))])
    pairs = [
        set(zip(table["label"], table["baseline"], strict=True))
        for table in (ratios(results), target_ratios(results))
    ]
    assert pairs[0] == pairs[1]
    assert len(pairs[0]) == 1 + 3 + 1 + 1 + 4


def test_reduction_is_paired_where_all_reach_it(study):
    times = (1.0, 1.1, 0.9, 1.05)
    rows = cell("allreduce", 4, times) + cell(
        "epoch_average", 4, [time / 2 for time in times]
    )
    row = only(
        target_ratios(study(rows=rows)), strategy="epoch_average", baseline="allreduce"
    )
    assert row["reduction"] == pytest.approx(0.5)
    assert row["n"] == 4
    assert row["reduction_low"] == pytest.approx(0.5)


def test_reduction_with_unreached_runs_is_that_of_medians_without_interval(study):
    rows = cell("allreduce", 4, (2.0, 2.0, None)) + cell(
        "epoch_average", 4, (1.0, 1.5, 1.5)
    )
    row = only(
        target_ratios(study(rows=rows)), strategy="epoch_average", baseline="allreduce"
    )
    geometric = (1.0 * 1.5 * 1.5) ** (1 / 3)
    assert row["reduction"] == pytest.approx(1 - geometric / 2)
    assert math.isnan(row["reduction_low"])
    assert (row["n"], row["note"]) == (0, "")


def test_infinite_median_has_no_reduction(study):
    rows = cell("allreduce", 4, (2.0, 2.0, 2.0)) + cell(
        "epoch_average", 4, (None, None, 1.5)
    )
    row = only(
        target_ratios(study(rows=rows)), strategy="epoch_average", baseline="allreduce"
    )
    assert math.isnan(row["reduction"])
    assert together(row["note"], "half", "epoch_average", "target")


def test_runs_of_a_cell_are_censored_at_the_end_of_the_longest(study):
    rows = (
        cell("serial", 1, (None, None), train_s=3.9)
        + cell("serial", 1, (None, None, 4.0))[2:]
    )
    row = only(times_to_target(study(rows=rows)), strategy="serial")
    assert row["time_to_target_s"] == math.inf, (
        "one of three reached it, although the others ended earlier"
    )


def test_simulated_interval_counts_draws_once_more_and_seeds_as_a_sample():
    steady, varying = [1.0, 1.0, 1.0], [0.9, 1.0, 1.1]
    over_seeds, over_draws = (
        simulated_interval(steady, varying, None),
        simulated_interval(varying, steady, None),
    )
    assert over_seeds.value == pytest.approx(over_draws.value)
    logs = np.log(varying)
    t = 4.302652729911275
    assert math.log(over_seeds.high / over_seeds.value) == pytest.approx(
        t * logs.std(ddof=1) / math.sqrt(3)
    )
    assert math.log(over_draws.high / over_draws.value) == pytest.approx(
        t * logs.std(ddof=1) * math.sqrt(4 / 3)
    )


def test_name_of_a_simulated_interval_has_seeds_where_they_vary(study):
    table = times_to_target(
        study(
            rows=cell("serial", 1, (1.0, 2.0, 2.0))
            + cell("allreduce", 2, (1.0, 1.0, 1.0))
        )
    )
    assert (
        only(table, strategy="serial")["target_interval"]
        == "calibration interval, and over seeds"
    )
    assert "seeds" not in only(table, strategy="allreduce")["target_interval"]


@pytest.mark.parametrize(("draws", "seeds"), [(0.02, 0.3), (0.1, 0.1), (0.2, 0.02)])
def test_simulated_interval_covers_what_it_says(draws, seeds):
    random, hit = np.random.default_rng(1), 0
    for _ in range(800):
        # its distance from the machine is that of one more draw
        calibrated = random.normal(0, draws)
        times, shares = random.normal(calibrated, draws, 5), random.normal(0, seeds, 5)
        found = simulated_interval(
            np.exp(times).tolist(), np.exp(shares).tolist(), None
        )
        hit += found.low <= 1 <= found.high
    # 3 standard deviations of a binomial share are 0.023
    assert 0.93 <= hit / 800 <= 0.97


def test_interval_of_a_torn_cell_covers_at_least_what_it_says():
    random, hit, torn = np.random.default_rng(2), 0, 0
    for _ in range(1500):
        times = random.lognormal(0, 0.3, 10)
        reached = times[times <= 1.3]
        if len(reached) < 10:
            torn += 1
            found = survival_median(reached.tolist(), [1.3] * (10 - len(reached)))
            hit += found.low <= 1 <= found.high
    assert torn > 1000
    assert hit / torn >= 0.93
