"""Rank tests against other implementations and by enumeration, and their use on strategies."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy import stats

from scalebench.analysis import against, differences
from scalebench.analysis.intervals import unpaired_ratio
from scalebench.analysis.pairing import (
    explained_by_a_cut,
    holm,
    rank_sum_test,
    repetitions_needed,
    signed_rank_test,
    smallest_rank_sum_p,
    smallest_signed_rank_p,
    time_trend,
    two_groups_p,
)
from scalebench.analysis.rounds import runs_by_cell
from scalebench.errors import UsageError
from tests.analysis.test_comparing import only, run
from tests.facts import in_order

FEW = st.lists(st.integers(-4, 4), min_size=1, max_size=8)  # ties and zeros abound


@pytest.mark.parametrize("n", [1, 5, 12, 20])
def test_the_tests_are_those_of_scipy(n):
    random = np.random.default_rng(n)
    for _ in range(5):
        top, bottom = random.lognormal(0, 0.1, n), random.lognormal(0.05, 0.1, n)
        theirs = stats.wilcoxon(np.log(top / bottom), method="exact").pvalue
        assert signed_rank_test(top, bottom).p == pytest.approx(theirs, rel=1e-9)
        other = random.lognormal(0.05, 0.1, n + 2)
        theirs = stats.mannwhitneyu(top, other, method="exact").pvalue
        assert rank_sum_test(top, other).p == pytest.approx(theirs, rel=1e-9)


@given(FEW)
@settings(deadline=None)
def test_signed_ranks_with_ties_are_counted(values):
    signs = [value for value in values if value]
    ranks = stats.rankdata(np.abs(signs)) if signs else np.array([])
    seen = ranks[np.array(signs) > 0].sum() if signs else 0
    every = [
        sum(r for r, up in zip(ranks, flip, strict=True) if up)
        for flip in itertools.product((0, 1), repeat=len(signs))
    ]
    tails = min(
        np.mean(np.array(every) <= seen + 1e-9), np.mean(np.array(every) >= seen - 1e-9)
    )
    assert signed_rank_test(
        [2.0**v for v in values], [1.0] * len(values)
    ).p == pytest.approx(min(1, 2 * tails))


@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=4),
    st.lists(st.integers(1, 4), min_size=1, max_size=4),
)
@settings(deadline=None)
def test_rank_sums_with_ties_are_counted(top, bottom):
    ranks = stats.rankdata([*top, *bottom])
    seen = ranks[: len(top)].sum()
    every = np.array(
        [sum(chosen) for chosen in itertools.combinations(ranks, len(top))]
    )
    tails = min(np.mean(every <= seen + 1e-9), np.mean(every >= seen - 1e-9))
    assert rank_sum_test(top, bottom).p == pytest.approx(min(1, 2 * tails))


def test_the_smallest_p_is_reached_and_known():
    assert smallest_signed_rank_p(5) == 0.0625
    assert smallest_rank_sum_p(4, 4) == pytest.approx(2 / 70)
    fast, slow = [1.0, 2.0, 3.0, 4.0, 5.0], [9.0, 8.5, 8.0, 9.5, 7.0]
    assert (
        signed_rank_test(fast, slow).p
        == signed_rank_test(fast, slow).smallest_p
        == 0.0625
    )
    assert rank_sum_test(fast, slow)[1:] == pytest.approx((2 / 252, 2 / 252))


@given(st.integers(1, 40), st.booleans())
def test_repetitions_needed_reach_the_first_step_of_holm(family, paired):
    n = repetitions_needed(family, paired=paired)
    reach = smallest_signed_rank_p if paired else lambda m: smallest_rank_sum_p(m, m)
    assert reach(n) <= 0.05 / family < reach(n - 1)


def test_holm_matches_a_textbook_example():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    adjusted = holm([0.01, math.nan])
    assert adjusted[0] == pytest.approx(0.02), (
        "what was not tested still belongs to the family"
    )
    assert math.isnan(adjusted[1])


@given(st.lists(st.floats(0, 1), max_size=8))
def test_holm_only_raises_p_and_keeps_its_order(p):
    adjusted = holm(p)
    assert all(low <= high <= 1 for low, high in zip(p, adjusted, strict=True))
    assert [x for _, x in sorted(zip(p, adjusted, strict=True))] == sorted(adjusted)


def round_runs(strategy, workers, seconds, place, **changes):
    """One run per round; all strategies of a round follow one another."""
    return [
        run(
            strategy,
            workers,
            t,
            repetition=r,
            seed=r,
            run_order=10 * r + 2 * workers + place,
            **changes,
        )
        for r, t in enumerate(seconds)
    ]


def two_strategies(n, **changes):
    slow = [1.0 + 0.01 * r for r in range(n)]
    rows = []
    for workers in (1, 2):
        rows += round_runs("allreduce", workers, slow, 0, **changes)
        rows += round_runs(
            "epoch_average",
            workers,
            [0.5 * t + 0.001 * r for r, t in enumerate(slow)],
            1,
            **changes,
        )
    return rows


def test_a_test_is_offered_where_it_can_reach_its_level(study):
    table = differences(
        study(rows=two_strategies(7, execution="native")), "epoch_average", "allreduce"
    )
    assert set(table["test"]) == {"Wilcoxon signed-rank"}
    assert table["p"].tolist() == pytest.approx([2 / 2**7] * 2)
    assert table["p_adjusted"].tolist() == pytest.approx([4 / 2**7] * 2)
    assert table["significant"].tolist() == [True, True]
    assert table["repetitions_needed"].tolist() == [0, 0]


def test_repetitions_needed_are_given_without_a_test(study):
    table = differences(
        study(rows=two_strategies(6, execution="native")), "epoch_average", "allreduce"
    )
    assert set(table["test"]) == {""}
    assert table["p"].isna().all()
    assert table["repetitions_needed"].tolist() == [7, 7]
    (note,) = set(table["note"])
    assert in_order(note, "2 worker counts", "7 repetitions", "0.05")
    assert table["significant"].tolist() == [None, None]


def test_virtual_times_get_no_test_at_any_number(study):
    table = differences(study(rows=two_strategies(30)), "epoch_average", "allreduce")
    assert set(table["test"]) == {""}
    assert set(table["repetitions_needed"]) == {0}
    assert set(table["note"]) == {"virtual times get no test"}
    assert (table["ratio"] < 0.6).all()


def test_launches_apart_are_independent_samples(study):
    rows = [
        run("allreduce", 2, 1.0 + 0.01 * r, "native", repetition=r, run_order=r)
        for r in range(5)
    ]
    rows += [
        run("ddp", 2, 2.0 + 0.01 * r, "native", "gloo", repetition=r, run_order=5 + r)
        for r in range(4)
    ]
    row = only(differences(study(rows=rows), "ddp", "allreduce"), workers=2)
    assert not row.paired
    assert (row.engine_a, row.engine_b, row.test) == (
        "gloo",
        "mpi",
        "Wilcoxon rank-sum",
    )
    assert row.p == pytest.approx(2 / math.comb(9, 4))
    welch = unpaired_ratio([2.0, 2.01, 2.02, 2.03], [1.0, 1.01, 1.02, 1.03])
    assert (row.ratio_low, row.ratio_high) == pytest.approx(welch[1:3]), (
        "of as many runs of both"
    )


def test_oversubscribed_baseline_has_no_ratio_and_no_family(study):
    rows = two_strategies(6, execution="native")
    crowded = [
        row.model_copy(update={"oversubscribed": True}) if row.workers == 2 else row
        for row in rows
    ]
    table = differences(study(rows=crowded), "epoch_average", "allreduce")
    alone, both = only(table, workers=1), only(table, workers=2)
    assert (alone.test, alone.p_adjusted) == (
        "Wilcoxon signed-rank",
        pytest.approx(2 / 2**6),
    )
    assert both.test == ""
    assert in_order(
        both.note, "allreduce", "oversubscribed at 2 workers", "no baseline"
    )
    assert math.isnan(both.ratio)


def test_oversubscribed_strategy_is_in_no_family(study):
    rows = two_strategies(6, execution="native")
    crowded = [
        row.model_copy(update={"oversubscribed": True})
        if (row.workers, row.strategy) == (2, "epoch_average")
        else row
        for row in rows
    ]
    table = differences(study(rows=crowded), "epoch_average", "allreduce")
    alone, both = only(table, workers=1), only(table, workers=2)
    assert (alone.test, alone.p_adjusted) == (
        "Wilcoxon signed-rank",
        pytest.approx(2 / 2**6),
    )
    assert (both.test, both.repetitions_needed) == ("", 0)
    assert in_order(
        both.note, "epoch_average", "oversubscribed at 2 workers", "not tested"
    )


def test_metrics_are_paired_by_seed_in_every_execution(study):
    rows = []
    for seed, (a, b) in enumerate([(0.90, 0.95), (0.80, 0.86), (0.70, 0.77)]):
        rows.append(
            run("epoch_average", 2, 1.0, repetition=seed, seed=seed, final_metric=a)
        )
        rows.append(
            run("allreduce", 2, 1.0, repetition=seed, seed=seed, final_metric=b)
        )
    row = only(differences(study(rows=rows), "epoch_average", "allreduce"), workers=2)
    half = stats.t.ppf(0.975, 2) * 0.01 / math.sqrt(3)
    assert (row.metric_difference, row.metric_n) == (pytest.approx(-0.06), 3)
    assert (row.metric_low, row.metric_high) == pytest.approx(
        (-0.06 - half, -0.06 + half)
    )


def test_equal_metric_differences_have_no_interval(study):
    rows = []
    # of 360 test samples
    for seed, (a, b) in enumerate([(345, 350), (344, 349), (347, 352)]):
        rows.append(
            run(
                "epoch_average",
                2,
                1.0,
                repetition=seed,
                seed=seed,
                final_metric=a / 360,
            )
        )
        rows.append(
            run("allreduce", 2, 1.0, repetition=seed, seed=seed, final_metric=b / 360)
        )
    row = only(differences(study(rows=rows), "epoch_average", "allreduce"), workers=2)
    assert (row.metric_difference, row.metric_n) == (pytest.approx(-5 / 360), 3)
    assert math.isnan(row.metric_low)
    assert math.isnan(row.metric_high)


def test_against_compares_all_with_the_baseline(study):
    results = study(rows=[*two_strategies(3), *round_runs("ddp", 2, [3.0] * 3, 2)])
    table = against(results)
    assert set(table["label_a"]) == {"epoch_average", "ddp"}
    assert set(table["label_b"]) == {"allreduce"}
    assert against(results, "horovod").empty


def test_an_unknown_strategy_is_named_with_its_neighbour(study):
    with pytest.raises(
        UsageError, match="'epoch_averag'; did you mean 'epoch_average'"
    ):
        differences(study(rows=two_strategies(2)), "epoch_averag", "allreduce")


@given(st.lists(st.floats(-5, 5), min_size=5, max_size=12))
def test_explained_by_a_cut_finds_the_best_cut(values):
    ordered = sorted(values)
    total = np.var(ordered)
    assume(total > 1e-12)
    least = max(2, math.ceil(len(values) / 4))
    shares = [
        1
        - (k * np.var(ordered[:k]) + (len(values) - k) * np.var(ordered[k:]))
        / len(values)
        / total
        for k in range(least, len(values) - least + 1)
    ]
    assert float(explained_by_a_cut(values)) == pytest.approx(max(shares), abs=1e-6)


def test_p_is_the_share_of_simulated_samples_that_look_as_clear():
    random = np.random.default_rng(5)
    seconds = np.exp(random.normal(0, 0.1, 8))
    simulated = explained_by_a_cut(np.random.default_rng(99).random((20_000, 8)))
    share = np.mean(simulated >= explained_by_a_cut(np.log(seconds)))
    # three standard errors of both
    assert two_groups_p(seconds.tolist()) == pytest.approx(share, abs=0.015)


def test_two_tight_groups_are_clear_and_equal_times_are_not():
    assert two_groups_p([1.0, 1.001, 1.002, 1.3, 1.301, 1.302, 1.303]) < 0.001
    assert two_groups_p([1.0] * 6) == 1.0
    assert math.isnan(two_groups_p([1.0, 1.0, 2.0, 2.0]))


def drifting(study, growth, noise=0.0, rounds=4, seed=0):
    random = np.random.default_rng(seed)
    rows, order = [], 0
    for number in range(rounds):
        for place in random.permutation(5):
            seconds = (1.0 + place) * math.exp(growth * order + noise * random.normal())
            rows.append(
                run(
                    "allreduce",
                    int(2**place),
                    seconds,
                    "native",
                    repetition=number,
                    run_order=order,
                )
            )
            order += 1
    return runs_by_cell(study(rows=rows))


def test_drift_is_that_of_least_squares_with_a_level_for_every_cell(study):
    found = drifting(study, 0.004, 0.02)
    order = np.array([at for cell in found for at in cell.order.values()], dtype=float)
    logs = np.array([math.log(t) for cell in found for t in cell.seconds.values()])
    levels = np.repeat(
        np.eye(len(found)), [len(cell.seconds) for cell in found], axis=0
    )
    design = np.column_stack([order, levels])
    beta, squares, *_ = np.linalg.lstsq(design, logs, rcond=None)
    freedom = len(logs) - len(found) - 1
    error = math.sqrt(squares[0] / freedom * np.linalg.inv(design.T @ design)[0, 0])
    factor, p = time_trend(found)
    assert factor == pytest.approx(
        math.exp(beta[0] * (order.max() - order.min())), rel=1e-9
    )
    assert p == pytest.approx(2 * stats.t.sf(abs(beta[0]) / error, freedom), rel=1e-6)


def test_known_drift_is_recovered(study):
    factor, p = time_trend(drifting(study, 0.01, 0.001))
    assert factor == pytest.approx(math.exp(0.19), rel=0.01)
    assert p < 1e-6


def test_few_runs_show_no_drift(study):
    assert time_trend(drifting(study, 0.01, rounds=2)) is None
