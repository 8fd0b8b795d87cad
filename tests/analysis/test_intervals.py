"""Intervals: textbook values, other implementations, and properties. Coverage is in test_coverage.py."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from scalebench.analysis import bootstrap_cells, bootstrap_interval
from scalebench.analysis.intervals import (
    LEVEL,
    MEDIAN_FROM,
    RATIO_WHEN_STOPPED,
    STOPPED_AT_MOST,
    STOPPED_AT_ONCE,
    STOPPED_LATER,
    Part,
    calibration_interval,
    difference_interval,
    equally_many,
    half_width,
    level_of,
    level_of_ratios,
    mean_interval,
    median_interval,
    median_ratio,
    median_time,
    metric_difference,
    metric_interval,
    paired_ratio,
    relative_width,
    time_interval,
    unpaired_metric,
    unpaired_ratio,
)
from scalebench.errors import UsageError
from tests.analysis.test_comparing import only, run

SECONDS = np.random.default_rng(7).lognormal(0, 0.1, 25).tolist()


def agreement(virtual, native):
    return difference_interval(
        np.log(virtual), np.log(native), draws=(True, False)
    ).map(math.exp)


def calibrations(top, bottom):
    return difference_interval(np.log(top), np.log(bottom), draws=(True, True)).map(
        math.exp
    )


TIMES = st.lists(st.floats(1e-3, 1e3), min_size=2, max_size=8)


def test_a_textbook_interval():
    # mean 2, s 1, n 3: t(0.975, 2) = 4.302653, half width 4.302653 / sqrt(3)
    centre, low, high, n, _ = mean_interval([1.0, 2.0, 3.0])
    assert (centre, n) == (2.0, 3)
    assert high - centre == pytest.approx(4.302652729911275 / math.sqrt(3), rel=1e-9)
    assert centre - low == pytest.approx(high - centre)


@pytest.mark.parametrize(
    "estimate",
    [
        mean_interval([2.0]),
        time_interval([2.0]),
        paired_ratio([4.0], [2.0]),
        unpaired_ratio([4.0], [2.0] * 9),
        unpaired_ratio([4.0], [2.0]),
        unpaired_metric([4.0], [2.0] * 3),
        agreement([4.0], [2.0] * 3),
        calibrations([4.0] * 3, [2.0]),
        calibration_interval([math.log(2)]).map(math.exp),
        median_time([2.0] * 5),
        median_ratio([4.0] * 5, [2.0] * 5),
    ],
)
def test_too_few_values_have_a_centre_and_no_interval(estimate):
    assert estimate.value == pytest.approx(2.0)
    assert math.isnan(estimate.low)
    assert math.isnan(estimate.high)


def test_no_value_has_nothing():
    for estimate in (
        mean_interval([]),
        time_interval([]),
        paired_ratio([], []),
        median_time([]),
    ):
        assert math.isnan(estimate.value)
        assert estimate.n == 0


@given(TIMES, st.floats(0.1, 10))
def test_times_scale_with_their_unit(seconds, factor):
    cached, scaled = (
        time_interval(seconds),
        time_interval([factor * value for value in seconds]),
    )
    np.testing.assert_allclose(
        scaled[:3], [factor * value for value in cached[:3]], rtol=1e-6
    )


@given(
    st.lists(
        st.tuples(st.floats(1e-3, 1e3), st.floats(1e-3, 1e3)), min_size=2, max_size=8
    )
)
def test_a_ratio_and_its_inverse_say_the_same(pairs):
    top, bottom = zip(*pairs, strict=True)
    ratio, inverse = paired_ratio(top, bottom), paired_ratio(bottom, top)
    assert ratio.value * inverse.value == pytest.approx(1, rel=1e-6)
    assert math.log(ratio.low) == pytest.approx(-math.log(inverse.high), abs=1e-6)
    assert ratio.value == pytest.approx(
        time_interval(top).value / time_interval(bottom).value, rel=1e-6
    )


@pytest.mark.parametrize("apart", [unpaired_ratio, agreement, calibrations])
@pytest.mark.parametrize("sizes", [(2, 3), (9, 4)])
def test_unequal_numbers_are_made_equal(sizes, apart):
    random = np.random.default_rng(sizes)
    top, bottom = (
        random.lognormal(0, sigma, n)
        for n, sigma in zip(sizes, (0.1, 0.4), strict=True)
    )
    n = min(sizes)
    assert apart(top, bottom) == apart(top[:n], bottom[:n])
    assert [one.tolist() for one in equally_many(top, bottom)] == [
        top[:n].tolist(),
        bottom[:n].tolist(),
    ]
    assert apart(top, bottom).n == n


def test_two_pairs_have_more_of_their_two_degrees_of_freedom_than_welch_gives_them():
    # Variances of the means 1 and 4, of one degree each: 25 / (1/7 + 16/7) - 6 = 4.29,
    # which is more than both have; 1 and 25: 676 / (626/7) - 6 = 1.56, Welch's 676 /
    # (626/3) - 2 = 1.24.
    assert half_width([Part(1.0, 1), Part(4.0, 1)]) == pytest.approx(
        stats.t.ppf(0.975, 2) * math.sqrt(5)
    )
    freedom = 676 / (626 / 7) - 6
    assert half_width([Part(1.0, 1), Part(25.0, 1)]) == pytest.approx(
        stats.t.ppf(0.975, freedom) * math.sqrt(26)
    )


def test_welch_of_equal_numbers_has_the_degrees_of_freedom_of_his_paper():
    # Variances of the means 1 and 4, of 9 degrees of freedom each: 25 / (1/11 + 16/11)
    # - 2 = 14.176; scipy has 13.235.
    half = half_width([Part(1.0, 9), Part(4.0, 9)])
    assert half == pytest.approx(
        stats.t.ppf(0.975, 25 / (17 / 11) - 2) * math.sqrt(5), rel=1e-9
    )
    assert half < stats.t.ppf(0.975, 25 / (17 / 9)) * math.sqrt(5)


@given(
    st.lists(
        st.tuples(st.floats(1e-6, 1e6), st.integers(1, 50)), min_size=1, max_size=4
    ),
    st.sampled_from([0.95, 0.97]),
)
def test_a_half_width_lies_between_those_of_the_fewest_and_of_all_degrees_of_freedom(
    parts, level
):
    half = half_width([Part(*part) for part in parts], level)
    scale = math.sqrt(sum(variance for variance, _ in parts))
    freedoms = [freedom for _, freedom in parts]
    tail = (1 + level) / 2
    assert half >= stats.t.ppf(tail, sum(freedoms)) * scale * (1 - 1e-9)
    assert half <= stats.t.ppf(tail, min(freedoms)) * scale * (1 + 1e-9)


def test_zero_variance_does_not_change_the_width():
    alone = half_width([Part(2.0, 3)])
    assert half_width([Part(2.0, 3), Part(0.0, 1)]) == pytest.approx(alone)
    assert half_width([Part(0.0, 1), Part(0.0, 5)]) == 0
    assert math.isnan(half_width([Part(math.nan, 0), Part(2.0, 3)]))


def test_metrics_that_agree_have_no_interval_unless_they_are_differences_of_nothing():
    assert math.isnan(metric_interval([0.95] * 3).low)
    assert math.isnan(metric_interval([0.0] * 3).low)
    assert math.isnan(metric_difference([0.05, 0.05]).low)
    assert metric_difference([0.0, 0.0])[:3] == (0, 0, 0)
    assert math.isnan(unpaired_metric([0.95] * 3, [0.9] * 3).low)
    many = metric_difference([[0.95] * 3, [0.0] * 3, [0.9, 0.9, 1.0]])
    np.testing.assert_array_equal(np.isnan(many.low), [True, False, False])


def test_the_interval_of_a_metric_ends_where_no_value_exists():
    assert metric_interval([0.9, 0.99, 1.0], "accuracy").high == 1
    assert metric_interval([0.0, 0.01, 0.1], "accuracy").low == 0
    assert metric_interval([0.9, 0.99, 1.0]).high > 1


def test_two_metrics_are_too_few_on_a_grid():
    assert math.isnan(metric_interval([0.9, 1.0]).low)
    assert math.isnan(unpaired_metric([0.9, 1.0], [0.8, 0.9]).low)
    assert math.isfinite(unpaired_metric([0.9, 1.0, 1.0], [0.8, 0.9, 0.9]).low)


@given(TIMES)
def test_the_relative_width_is_that_of_the_interval_of_a_time(seconds):
    estimate = time_interval(seconds)
    expected = (estimate.high - estimate.low) / estimate.value
    assert relative_width(np.log(seconds)) == pytest.approx(
        expected, rel=1e-6, abs=1e-9
    )


def test_a_ratio_of_constant_samples_is_exact():
    assert unpaired_ratio([4.0] * 3, [2.0] * 3)[:3] == pytest.approx((2, 2, 2))
    assert paired_ratio([4.0, 2.0], [2.0, 1.0])[:3] == pytest.approx((2, 2, 2))


def test_a_median_lies_between_order_statistics():
    # n 10: the 2nd to the 9th hold it with 97.85 %, the 3rd to the 8th with 89.06 %.
    # Hettmansperger and Sheather go i = (97.85 - 95) / (97.85 - 89.06) = 0.3244 of the
    # step, 8 i / (2 + 6 i) = 0.6575 of the way inwards.
    centre, low, high, *_ = median_interval(np.arange(1.0, 11.0))
    assert centre == 5.5
    assert low == pytest.approx(2 + 0.6575, abs=2e-4)
    assert high == pytest.approx(9 - 0.6575, abs=2e-4)


@given(st.integers(MEDIAN_FROM, 200))
def test_a_median_interval_is_never_wider_than_the_exact_one_outside_nor_narrower_than_the_one_inside(
    n,
):
    low = float(median_interval(np.arange(1.0, n + 1)).low)
    ranks = np.arange(1, n // 2 + 1)
    held = 1 - 2 * stats.binom.cdf(ranks - 1, n, 0.5)
    outside = ranks[held >= LEVEL].max()
    assert outside <= low <= outside + 1


@given(st.lists(st.floats(0.1, 10), min_size=6, max_size=12), st.floats(1.0, 1e6))
def test_one_odd_run_does_not_move_a_median_interval_far(seconds, delay):
    slowest = seconds.index(max(seconds))
    odd = [
        value * delay if place == slowest else value
        for place, value in enumerate(seconds)
    ]
    assert median_time(odd).low == pytest.approx(median_time(seconds).low)
    assert median_time(odd).value == pytest.approx(median_time(seconds).value)


@pytest.mark.parametrize("n", [3, 30])
def test_more_draws_from_a_calibration_do_not_narrow_its_interval(n):
    logs = [-0.1, 0.0, 0.1] * (n // 3)
    spread = np.std(logs, ddof=1)
    _, low, high, *_ = calibration_interval(logs).map(math.exp)
    t = stats.t.ppf(0.975, n - 1)
    assert math.log(high) == pytest.approx(t * spread * math.sqrt(1 + 1 / n), rel=1e-9)
    assert low * high == pytest.approx(1)


@given(st.floats(0.01, 1))
def test_the_variance_of_an_error_adds_to_that_of_a_calibration(error):
    both = calibration_interval([-0.1, 0.0, 0.1], Part(error**2, 5)).map(math.exp)
    own, other = 0.01 * 4 / 3, error**2  # of 2 and 5 degrees of freedom
    freedom = (own + other) ** 2 / (own**2 / 2 + other**2 / 5)
    assert math.log(both.high) == pytest.approx(
        stats.t.ppf(0.975, freedom) * math.sqrt(own + other), rel=1e-9
    )


def test_a_study_that_stops_when_narrow_has_levels_of_its_own():
    assert (
        level_of({}, 3)
        == level_of({"until": None}, 3)
        == level_of({"until": "5%"}, 3)
        == LEVEL
    )
    until = {"until": {"ci_width": 0.05, "at_least": 4, "at_most": 8}}
    ends, between = {4: STOPPED_AT_ONCE, 8: STOPPED_AT_MOST}, STOPPED_LATER
    assert [level_of(until, n) for n in range(4, 9)] == [
        ends.get(n, between) for n in range(4, 9)
    ]
    assert level_of(until, [4, 5]).tolist() == [STOPPED_AT_ONCE, STOPPED_LATER]
    assert level_of({"until": {"at_least": 5, "at_most": 5}}, 5) == LEVEL, (
        "nothing decides when to stop"
    )
    assert (
        time_interval([1, 2, 3], STOPPED_AT_ONCE).high > time_interval([1, 2, 3]).high
    )
    assert (level_of_ratios({}), level_of_ratios({}, until)) == (
        LEVEL,
        RATIO_WHEN_STOPPED,
    )


@given(
    st.lists(st.lists(st.floats(-5, 5), min_size=4, max_size=4), min_size=1, max_size=5)
)
def test_intervals_of_a_table_are_those_of_its_rows(table):
    for interval in (
        mean_interval,
        median_interval,
        metric_interval,
        metric_difference,
        calibration_interval,
    ):
        whole, rows = interval(table), [interval(row) for row in table]
        for n, bounds in enumerate(("value", "low", "high")):
            np.testing.assert_array_equal(
                getattr(whole, bounds), [row[n] for row in rows]
            )


def test_a_median_of_too_few_for_its_level_has_no_interval():
    six = np.arange(1.0, 7.0)
    assert np.isfinite(median_interval(six).low)
    at_a_wider_level = median_interval(six, 0.975)
    assert at_a_wider_level.value == 3.5
    assert np.isnan(at_a_wider_level.low)
    assert np.isnan(at_a_wider_level.high)


def test_bootstrap_is_the_percentile_bootstrap_of_the_trimmed_mean():
    found = bootstrap_interval(SECONDS)
    theirs = stats.bootstrap(
        (np.log(SECONDS),),
        lambda logs, axis: stats.trim_mean(logs, 0.2, axis=axis),
        method="percentile",
        n_resamples=10_000,
        rng=np.random.default_rng(1),
    ).confidence_interval
    assert found.value == pytest.approx(
        math.exp(stats.trim_mean(np.log(SECONDS), 0.2)), rel=1e-12
    )
    # Both are random: a quantile of 10,000 resamples has a standard error of 2 % of the
    # interval's width.
    assert (found.low, found.high) == pytest.approx(
        tuple(np.exp(theirs)), abs=0.06 * (found.high - found.low)
    )


def test_bootstrap_is_deterministic_per_seed():
    assert bootstrap_interval(SECONDS) == bootstrap_interval(SECONDS)
    assert bootstrap_interval(SECONDS) != bootstrap_interval(SECONDS, seed=1)


def test_bootstrap_refuses_fewer_than_twenty_repetitions(study):
    with pytest.raises(
        UsageError,
        match=r"no bootstrap of 19 repetitions: it is offered from 20.*75 to 83 %",
    ):
        bootstrap_interval(SECONDS[:19])
    rows = [
        run("allreduce", 2, t, "native", repetition=r)
        for r, t in enumerate(SECONDS[:5])
    ]
    with pytest.raises(
        UsageError, match=r"the most repetitions of a native or paced time are 5"
    ):
        bootstrap_cells(study(rows=rows))


def test_virtual_times_are_not_bootstrapped(study):
    rows = [run("allreduce", 2, t, repetition=r) for r, t in enumerate(SECONDS)]
    with pytest.raises(UsageError, match=r"native or paced time are 0"):
        bootstrap_cells(study(rows=rows))


def test_each_cell_has_an_interval_or_a_note(study):
    rows = [
        run("allreduce", 2, t, "native", repetition=r) for r, t in enumerate(SECONDS)
    ]
    rows += [
        run("allreduce", 4, t, "native", repetition=r)
        for r, t in enumerate(SECONDS[:6])
    ]
    table = bootstrap_cells(study(rows=rows))
    enough, few = only(table, workers=2), only(table, workers=4)
    assert (enough.trimmed_s, enough.low_s, enough.high_s) == bootstrap_interval(
        SECONDS
    )[:3]
    assert (enough.interval, enough.note) == ("95 % bootstrap interval", "")
    assert math.isnan(few.low_s)
    assert (few.n, few.note) == (6, "offered from 20")
