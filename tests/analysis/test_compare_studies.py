"""Comparison of two studies, and of two strategies of one."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from scalebench.analysis import cells, differences, load
from scalebench.analysis.intervals import RATIO_WHEN_STOPPED, STOPPED_LATER
from scalebench.analysis.verdicts import compare_strategies, compare_studies
from scalebench.errors import ResultsError, UsageError
from scalebench.study.cell import Cell
from tests.doctored import Doctored, make_sound
from tests.facts import naming


def native(row):
    return row.execution == "native"


@pytest.fixture
def studies(tmp_path) -> Callable[..., tuple[Path, Path]]:
    """The sound study as A, and a doctored copy as B."""

    def make(
        doctor: Callable[[Doctored], object] = lambda study: None,
        both: Callable[[Doctored], object] = lambda study: None,
    ):
        folders = []
        for name in ("a", "b"):
            study = make_sound()
            both(study)
            if name == "b":
                doctor(study)
            folders.append(study.write(tmp_path / name))
        return tuple(load(folder) for folder in folders)

    return make


def nothing(study):
    pass


def slower(study):
    study.change(train_s=lambda row: 1.1 * row.train_s)


def cell(comparison, label, workers, execution="native"):
    table = comparison.table
    (row,) = table[
        (table["label_a"] == label)
        & (table["workers"] == workers)
        & (table["execution"] == execution)
    ].to_dict("records")
    return row


def test_slower_cells_regress(studies):
    def slow_down(study):
        study.change(
            lambda row: native(row) and row.strategy == "allreduce",
            train_s=lambda row: 1.3 * row.train_s,
        )

    found = compare_studies(*studies(slow_down))
    verdicts = (
        found.table.groupby(["execution", "label_a"])["verdict"]
        .unique()
        .map(list)
        .to_dict()
    )
    assert verdicts["native", "allreduce"] == ["regression"]
    assert verdicts["native", "epoch_average"] == ["unchanged"]
    assert verdicts["virtual", "allreduce"] == ["unchanged"]
    assert (found.count("regression"), found.regressed) == (3, True)
    assert cell(found, "allreduce", 2)["ratio"] == pytest.approx(1.3)


def test_metric_repeats_unless_it_depends_on_arrival_order(studies):
    """At one worker, of one calibration, or with a barrier; two calibrations are two machines."""

    def racing(study):
        study.change(
            lambda row: row.strategy == "epoch_average", strategy="epoch_async"
        )

    def repeats(found):
        return found.table.set_index(["execution", "label_a", "workers"])[
            "metric_repeats"
        ].to_dict()

    rerun = repeats(compare_studies(*studies(both=racing)))
    assert {cell for cell, same in rerun.items() if not same} == {
        ("native", "epoch_async", 2),
        ("native", "epoch_async", 4),
    }
    other = studies(
        lambda study: setattr(study, "calibration", {"tables": [1]}), both=racing
    )
    background = repeats(
        compare_studies(*other, execution="virtual", ignore=["calibration"])
    )
    assert {cell for cell, same in background.items() if not same} == {
        ("virtual", "epoch_async", 2),
        ("virtual", "epoch_async", 4),
    }


def test_a_faster_study_improves(studies):
    a, b = studies(
        lambda study: study.change(native, train_s=lambda row: 0.7 * row.train_s)
    )
    found = compare_studies(a, b, execution="native")
    assert set(found.table["verdict"]) == {"improvement"}
    assert not found.regressed
    assert set(compare_studies(b, a, execution="native").table["verdict"]) == {
        "regression"
    }


def test_measured_cells_are_independent_samples(studies):
    """Against Welch's interval on logs with his own degrees of freedom (1947), and scipy's exact rank-sum test."""
    a, b = studies(
        lambda study: study.change(native, train_s=lambda row: 1.1 * row.train_s**1.5)
    )
    row = cell(compare_studies(a, b), "epoch_average", 4)
    times = [
        np.log(
            results.runs.query(
                "execution == 'native' and label == 'epoch_average' and workers == 4"
            )["train_s"]
        )
        for results in (b, a)
    ]
    n, shares = len(times[0]), [x.var(ddof=1) / len(x) for x in times]
    freedom = sum(shares) ** 2 / sum(share**2 / (n + 1) for share in shares) - 2
    half = stats.t(min(freedom, 2 * n - 2)).ppf(0.975) * math.sqrt(sum(shares))
    centre = times[0].mean() - times[1].mean()
    assert np.log([row["ratio_low"], row["ratio_high"]]) == pytest.approx(
        [centre - half, centre + half]
    )
    assert row["p"] == pytest.approx(stats.mannwhitneyu(*times, method="exact").pvalue)
    assert row["p"] <= row["p_adjusted"] <= 3 * row["p"]
    assert (row["paired"], row["interval"]) == (False, "95 % confidence interval")


def test_adaptive_studies_keep_their_level(studies):
    """Times have the level of their study, ratios the level of adaptive studies if either is."""

    def stopped(study):
        study.study |= {"until": {"ci_width": 0.05, "at_least": 3, "at_most": 20}}
        study.study.pop("repetitions", None)

    def times(results):
        own = results.runs.query(
            "execution == 'native' and label == 'epoch_average' and workers == 4"
        )
        return np.log(own["train_s"]).to_numpy()

    widths = {}
    ordinary, later = (
        stats.t(4).ppf((1 + level) / 2) for level in (0.95, STOPPED_LATER)
    )
    for name, doctor, both in (
        ("none", slower, nothing),
        ("b", stopped, nothing),
        ("both", nothing, stopped),
    ):
        a, b = studies(doctor, both)
        row = cell(compare_studies(a, b), "epoch_average", 4)
        own = times(a)
        error = own.std(ddof=1) / math.sqrt(len(own))
        halves = [
            math.log(row[f"{side}_high"] / row[f"{side}_s"]) / error
            for side in ("a", "b")
        ]
        widths[name] = *halves, math.log(row["ratio_high"] / row["ratio"])
    assert widths["none"][0] == widths["b"][0] == pytest.approx(ordinary)
    assert (
        widths["b"][1] == widths["both"][0] == widths["both"][1] == pytest.approx(later)
    )
    # Of equal samples, Welch's: eight degrees of freedom.
    assert widths["none"][2] / stats.t(8).ppf(0.975) == pytest.approx(
        widths["b"][2] / stats.t(8).ppf((1 + RATIO_WHEN_STOPPED) / 2)
    )
    assert widths["b"][2] == pytest.approx(widths["both"][2])


def test_a_test_is_offered_only_where_it_can_reach_its_level(studies):
    a, b = studies(both=lambda study: study.drop(lambda row: row.repetition > 2))
    row = cell(compare_studies(a, b), "allreduce", 2)
    assert (row["test"], row["repetitions_needed"]) == ("", 5)
    assert math.isnan(row["p"])
    # never
    assert (
        cell(compare_studies(a, b), "allreduce", 2, "virtual")["repetitions_needed"]
        == 0
    )


def test_virtual_times_of_one_calibration_are_paired_by_their_draw(studies):
    """Draws scatter by 20 %, and B is 10 % slower in each: only pairing shows it."""

    def scatter(study):
        study.change(
            lambda row: not native(row),
            train_s=lambda row: row.train_s * 1.2**row.repetition,
        )

    def unchecked(study):
        scatter(study)
        study.drop(native)

    a, b = studies(
        lambda study: study.change(train_s=lambda row: 1.1 * row.train_s),
        both=unchecked,
    )
    found = compare_studies(a, b)
    row = cell(found, "allreduce", 4, "virtual")
    assert (row["verdict"], row["paired"], row["interval"]) == (
        "regression",
        True,
        "no interval, as nothing varies",
    )
    assert [row["ratio_low"], row["ratio_high"]] == pytest.approx([1.1, 1.1])
    assert found.virtual_errors == (None, None)


def off_by(*logs):
    """Native times of serial and three other points, at these log distances from virtual ones."""

    def doctor(study):
        virtual = {}
        for row in study.rows:
            if not native(row):
                virtual.setdefault((row.strategy, row.workers), []).append(
                    math.log(row.train_s)
                )
        errors = dict(
            zip(
                [
                    ("serial", 1),
                    ("allreduce", 2),
                    ("allreduce", 4),
                    ("epoch_average", 2),
                ],
                logs,
                strict=True,
            )
        )
        study.drop(
            lambda row: native(row) and (row.strategy, row.workers) not in errors
        )
        off = {
            point: math.exp(np.mean(virtual[point]) - error)
            for point, error in errors.items()
        }
        study.change(native, train_s=lambda row: off[row.strategy, row.workers])

    return doctor


def half_width(*parts):
    """Student's half width of several variances, by docs/statistics.md."""
    total = sum(variance for variance, _ in parts)
    surplus = 2 if len({freedom for _, freedom in parts}) == 1 else 0
    freedom = (
        1 / sum((variance / total) ** 2 / (own + surplus) for variance, own in parts)
        - surplus
    )
    freedom = min(
        max(freedom, *(-math.inf, min(own for _, own in parts))),
        sum(own for _, own in parts),
    )
    return stats.t(freedom).ppf(0.975) * math.sqrt(total)


@pytest.mark.parametrize("same_draws", [True, False])
def test_virtual_ratio_contains_the_simulation_error(studies, same_draws):
    """Against the formula, from the rows: mean squares of four checks of each study plus the variance of draws."""
    first, second = (0.1, -0.1, 0.2, 0.0), (0.05, 0.05, -0.1, 0.1)

    def make_b(study):
        rng = np.random.default_rng(0)
        study.change(
            lambda row: not native(row),
            train_s=lambda row: row.train_s * 1.3 * math.exp(rng.normal(0, 0.02)),
        )
        off_by(*second)(study)

    a, b = studies(make_b, both=off_by(*first))
    if not same_draws:
        for results, numbers in ((a, [1]), (b, [2])):
            (results.folder / "calibration.json").write_text(
                json.dumps({"tables": numbers})
            )
    found = compare_studies(a, b, ignore=["calibration"])
    row = cell(found, "allreduce", 4, "virtual")

    logs = [
        np.log(
            results.runs.query(
                "execution == 'virtual' and label == 'allreduce' and workers == 4"
            )["train_s"]
        )
        for results in (a, b)
    ]
    squares = [np.mean(np.square(own)) for own in (first, second)]
    draws = [(logs[1] - logs[0])] if same_draws else logs
    half = half_width(
        *((own.var(ddof=1) * (1 + 1 / 5), 4) for own in draws), (sum(squares), 4)
    )
    centre = (logs[1] - logs[0]).mean()
    assert np.log([row["ratio_low"], row["ratio_high"]]) == pytest.approx(
        [centre - half, centre + half]
    )
    assert (row["verdict"], row["interval"]) == (
        "undecided",
        "calibration interval with virtual-native error",
    )
    assert [error.rms**2 for error in found.virtual_errors] == pytest.approx(squares)
    own = found.virtual_errors[0].own("allreduce")
    half = half_width(
        (logs[0].var(ddof=1) * (1 + 1 / 5), 4), (own.variance, own.freedom)
    )
    assert math.log(row["a_high"] / row["a_s"]) == pytest.approx(half)


def test_error_of_one_checked_study_is_used_for_both(studies):
    def unchecked(study):
        study.drop(native)
        study.change(train_s=lambda row: 1.1 * row.train_s)

    a, b = studies(unchecked, both=off_by(0.1, -0.1, 0.2, 0.0))
    for pair in ((a, b), (b, a)):
        row = cell(compare_studies(*pair), "allreduce", 4, "virtual")
        half = stats.t(4).ppf(0.975) * math.sqrt(2 * 0.06 / 4)
        assert math.log(row["ratio_high"] / row["ratio"]) == pytest.approx(half)


@pytest.mark.parametrize(
    ("left", "variance", "freedom"), [(2, 0.06 / 4 + 0.02 / 2, 2), (1, 2 * 0.06 / 4, 4)]
)
def test_fewer_checks_count_of_two_checked_studies(studies, left, variance, freedom):
    """Two checks have two degrees of freedom; one check is too few, and those of the other study are used for both.

    Of a time two checks do not tell which part of the error is common, so that it has
    no interval.
    """
    points = [("serial", 1), ("allreduce", 2)][:left]

    def fewer(study):
        study.drop(
            lambda row: native(row) and (row.strategy, row.workers) not in points
        )
        study.change(
            lambda row: not native(row) and row.workers == 4,
            train_s=lambda row: 1.1 * row.train_s,
        )

    a, b = studies(fewer, both=off_by(0.1, -0.1, 0.2, 0.0))
    for pair in ((a, b), (b, a)):
        row = cell(compare_studies(*pair), "allreduce", 4, "virtual")
        half = stats.t(freedom).ppf(0.975) * math.sqrt(variance)
        assert math.log(row["ratio_high"] / row["ratio"]) == pytest.approx(half)
        whole, thinned = ("a_high", "b_high") if pair[0] is a else ("b_high", "a_high")
        assert math.isfinite(row[whole])
        assert math.isfinite(row[thinned]) == (left == 1)


def test_two_strategies_of_a_checked_study_show_the_error_of_the_simulation_too(
    studies,
):
    a, _ = studies(both=off_by(0.1, -0.1, 0.2, 0.0))
    found = compare_strategies(a, "allreduce", "epoch_average", execution="virtual")
    table = cells(a).query("execution == 'virtual' and workers == 4").set_index("label")
    row = cell(found, "allreduce", 4, "virtual")
    assert [row["a_low"], row["a_high"]] == pytest.approx(
        table.loc["allreduce", ["low_s", "high_s"]].tolist()
    )
    assert [row["b_low"], row["b_high"]] == pytest.approx(
        table.loc["epoch_average", ["low_s", "high_s"]].tolist()
    )
    assert row["interval"] == "calibration interval with virtual-native error"
    assert found.virtual_errors[0].checks == 4


def test_table_has_medians_and_spread(studies):
    a, b = studies(
        lambda study: study.change(native, train_s=lambda row: row.train_s**1.5)
    )
    row = cell(compare_studies(a, b), "allreduce", 4)
    for side, results in (("a", a), ("b", b)):
        own = (
            cells(results)
            .query("execution == 'native' and label == 'allreduce' and workers == 4")
            .iloc[0]
        )
        assert (row[f"{side}_median_s"], row[f"{side}_spread"]) == pytest.approx(
            (own["median_s"], own["spread"])
        )


def test_the_same_computation_is_unchanged_even_if_it_ran_once(studies):
    a, b = studies(both=lambda study: study.drop(lambda row: row.repetition > 0))
    found = compare_studies(a, b, threshold=0.0, execution="virtual")
    assert set(found.table["verdict"]) == {"unchanged"}
    # one run has no interval
    assert set(compare_studies(a, b, execution="native").table["verdict"]) == {
        "undecided"
    }


def test_virtual_times_of_two_calibrations_vary_by_both(studies):
    def scatter(study):
        study.change(
            lambda row: not native(row),
            train_s=lambda row: row.train_s * 1.1**row.repetition,
        )
        study.drop(native)

    a, b = studies(both=scatter)
    for results, numbers in ((a, [1]), (b, [2])):
        (results.folder / "calibration.json").write_text(
            json.dumps({"key": "same", "tables": numbers})
        )
    row = cell(compare_studies(a, b, ignore=["calibration"]), "allreduce", 4, "virtual")
    logs = np.log(
        a.runs.query(
            "execution == 'virtual' and label == 'allreduce' and workers == 4"
        )["train_s"]
    )
    half = (
        math.sqrt(2) * stats.t(8).ppf(0.975) * logs.std(ddof=1) * math.sqrt(1 + 1 / 5)
    )
    assert np.log([row["ratio_low"], row["ratio_high"]]) == pytest.approx([-half, half])
    assert (row["paired"], row["verdict"]) == (False, "undecided")


def test_metrics_are_paired_by_seed(studies):
    def unlearn(study):
        study.change(
            lambda row: row.strategy == "epoch_average",
            final_metric=lambda row: (
                row.final_metric - 0.05 - 1e-4 * (row.repetition % 2)
            ),
        )

    found = compare_studies(*studies(unlearn))
    row = cell(found, "epoch_average", 2)
    assert row["metric_difference"] == pytest.approx(-0.05, abs=1e-4)
    # the seeds' own spread, 0.001 each, cancels
    assert row["metric_high"] - row["metric_low"] < 1e-3
    assert (row["verdict"], row["metric_verdict"]) == ("unchanged", "worse")
    assert found.regressed
    assert cell(found, "allreduce", 2)["metric_verdict"] == "equal"


def test_metrics_of_other_seeds_are_independent(studies):
    row = cell(
        compare_studies(
            *studies(lambda study: study.change(seed=lambda row: row.seed + 100))
        ),
        "epoch_average",
        2,
    )
    values = 0.97 + 0.001 * np.arange(5)
    welch = stats.ttest_ind(values, values, equal_var=False).confidence_interval(0.95)
    assert [row["metric_low"], row["metric_high"]] == pytest.approx(list(welch))


def test_missing_and_failed_cells_are_distinguished(studies):
    def doctor(study):
        study.drop(
            lambda row: row.workers == 4 and row.strategy == "allreduce" and native(row)
        )
        study.change(
            lambda row: (
                row.workers == 2 and row.strategy == "allreduce" and native(row)
            ),
            status="failed",
        )

    found = compare_studies(*studies(doctor), execution="native")
    assert [cell.at_any_batch for cell in found.missing] == [
        Cell("native", "mpi", "allreduce", 4)
    ]
    assert [cell.at_any_batch for cell in found.failed] == [
        Cell("native", "mpi", "allreduce", 2)
    ]
    assert found.regressed


def at_batch_16(study):
    """Every run again at twice the batch, in 0.8 of the time."""
    for row in list(study.rows):
        name = f"{row.run_id}-b16"
        batch = {"batch_per_worker": 16, "batch_global": 2 * row.batch_global}
        study.rows.append(
            row.model_copy(
                update={"run_id": name, "train_s": 0.8 * row.train_s, **batch}
            )
        )
        study.epochs[name] = [
            epoch.model_copy(update={"run_id": name})
            for epoch in study.epochs[row.run_id]
        ]


def test_cells_of_two_batches_are_compared_each_with_its_own(studies):
    def slow_down(study):
        study.change(
            lambda row: row.batch_per_worker == 16,
            train_s=lambda row: 1.3 * row.train_s,
        )

    found = compare_studies(*studies(slow_down, both=at_batch_16), execution="native")
    assert (
        found.count("regression")
        == found.count("unchanged")
        == len(found.table) / 2
        > 0
    )


def test_batch_that_one_study_lacks_is_missing(studies):
    def drop(study):
        study.drop(lambda row: row.batch_per_worker == 16)

    found = compare_studies(*studies(drop, both=at_batch_16), execution="native")
    assert {cell.batch_per_worker for cell in found.missing} == {16}
    assert len(found.missing) == len(found.table)
    assert not found.failed


def test_oversubscribed_cells_get_no_verdict(studies):
    def crowd(study):
        study.change(
            lambda row: native(row) and row.workers == 4,
            oversubscribed=True,
            train_s=9.0,
        )

    found = compare_studies(*studies(crowd))
    assert cell(found, "allreduce", 4)["verdict"] == "not compared"
    assert not found.regressed


def test_strategies_and_executions_can_be_chosen(studies):
    a, b = studies()
    found = compare_studies(a, b, strategies=["allreduce"], execution="virtual").table
    assert set(zip(found["label_a"], found["execution"], strict=True)) == {
        ("allreduce", "virtual")
    }
    with pytest.raises(
        UsageError,
        match=naming("no completed run", "'alreduce'", "'allreduce'"),
    ):
        compare_studies(a, b, strategies=["alreduce"])


def test_studies_without_a_common_cell_are_refused(studies):
    a, b = studies(lambda study: study.drop(native), both=lambda study: None)
    with pytest.raises(
        UsageError,
        match=r"no cell in common: serial at 1 worker \(native mpi\).* against none",
    ):
        compare_studies(a, b, execution="native")


def test_refusals_are_short_and_name_each_difference_once(studies):
    def elsewhere(study):
        study.change(native, cluster="here")
        study.change(lambda row: not native(row), cluster="there")
        study.change(lr=0.7)

    a, b = studies(elsewhere)
    with pytest.raises(ResultsError, match="cannot be compared") as caught:
        compare_studies(a, b)
    assert str(caught.value).count("cluster") == 1
    assert str(caught.value).endswith("or override with --ignore KEY for each")
    a, b = studies(lambda study: study.change(strategy="ddp"))
    with pytest.raises(
        UsageError,
        match=r"no strategy is of both \(allreduce, epoch_average, serial against ddp\)$",
    ):
        compare_studies(a, b)


def test_two_strategies_are_compared_as_the_statistics_do(studies):
    a, _ = studies()
    found = compare_strategies(a, "allreduce", "epoch_average")
    table = differences(a, "epoch_average", "allreduce")
    for row in table.to_dict("records"):
        own = cell(found, "allreduce", row["workers"], row["execution"])
        for name in ("ratio", "ratio_low", "ratio_high", "metric_difference", "p"):
            assert own[name] == pytest.approx(row[name], nan_ok=True)
        assert (own["a_s"], own["b_s"]) == pytest.approx((row["b_s"], row["a_s"]))
        assert own["ratio"] == pytest.approx(own["b_s"] / own["a_s"])
    assert cell(found, "allreduce", 4)["verdict"] == "improvement"
    assert (
        cell(compare_strategies(a, "epoch_average", "allreduce"), "epoch_average", 4)[
            "verdict"
        ]
        == "regression"
    )


def test_a_strategy_with_options_is_named_by_its_label_where_the_name_is_not_enough(
    studies,
):
    def vary(study):
        study.change(
            lambda row: row.strategy == "allreduce",
            strategy="local_sgd",
            strategy_options='{"every": 2}',
        )
        study.change(
            lambda row: row.strategy == "epoch_average",
            strategy="local_sgd",
            strategy_options='{"every": 4}',
        )

    a, _ = studies(both=vary)
    with pytest.raises(
        UsageError, match=r"name one of 'local_sgd\(every=2\)', 'local_sgd\(every=4\)'"
    ):
        compare_strategies(a, "serial", "local_sgd")
    assert (
        len(compare_strategies(a, "local_sgd(every=2)", "local_sgd(every=4)").table)
        == 6
    )
