"""Comparing two studies, and two strategies of one."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from scalebench.analysis import differences, load
from scalebench.analysis.regression import compare_strategies, compare_studies
from scalebench.errors import UsageError
from tests.doctored import Doctored, make_sound


def native(row):
    return row.execution == "native"


@pytest.fixture
def studies(tmp_path) -> Callable[..., tuple[Path, Path]]:
    """The sound study as A, and as B once it has been doctored."""

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


def cell(comparison, label, workers, execution="native"):
    table = comparison.table
    (row,) = table[
        (table["label_a"] == label) & (table["workers"] == workers) & (table["execution"] == execution)
    ].to_dict("records")
    return row


def test_a_slower_study_regresses_in_each_cell_that_is_slower(studies):
    def slow_down(study):
        study.change(lambda row: native(row) and row.strategy == "allreduce", train_s=lambda row: 1.3 * row.train_s)

    found = compare_studies(*studies(slow_down))
    verdicts = found.table.groupby(["execution", "label_a"])["verdict"].unique().map(list).to_dict()
    assert verdicts["native", "allreduce"] == ["regression"]
    assert verdicts["native", "epoch_average"] == ["unchanged"]
    assert verdicts["virtual", "allreduce"] == ["unchanged"]
    assert (found.count("regression"), found.regressed) == (3, True)
    assert cell(found, "allreduce", 2)["ratio"] == pytest.approx(1.3)


def test_a_faster_study_improves(studies):
    a, b = studies(lambda study: study.change(native, train_s=lambda row: 0.7 * row.train_s))
    found = compare_studies(a, b, execution="native")
    assert set(found.table["verdict"]) == {"improvement"}
    assert not found.regressed
    assert set(compare_studies(b, a, execution="native").table["verdict"]) == {"regression"}


def test_measured_cells_are_independent_samples(studies):
    """Against Welch's interval on logs with his own degrees of freedom (1947), and scipy's exact rank-sum test."""
    a, b = studies(lambda study: study.change(native, train_s=lambda row: 1.1 * row.train_s**1.5))
    row = cell(compare_studies(a, b), "epoch_average", 4)
    times = [
        np.log(results.runs.query("execution == 'native' and label == 'epoch_average' and workers == 4")["train_s"])
        for results in (b, a)
    ]
    n, shares = len(times[0]), [x.var(ddof=1) / len(x) for x in times]
    freedom = sum(shares) ** 2 / sum(share**2 / (n + 1) for share in shares) - 2
    half = stats.t(min(freedom, 2 * n - 2)).ppf(0.975) * math.sqrt(sum(shares))
    centre = times[0].mean() - times[1].mean()
    assert np.log([row["ratio_low"], row["ratio_high"]]) == pytest.approx([centre - half, centre + half])
    assert row["p"] == pytest.approx(stats.mannwhitneyu(*times, method="exact").pvalue)
    assert row["p"] <= row["p_adjusted"] <= 3 * row["p"]
    assert (row["paired"], row["interval"]) == (False, "95 % confidence interval")


def test_a_test_is_offered_only_where_it_can_reach_its_level(studies):
    a, b = studies(both=lambda study: study.drop(lambda row: row.repetition > 2))
    row = cell(compare_studies(a, b), "allreduce", 2)
    assert (row["test"], row["repetitions_needed"]) == ("", 5)
    assert math.isnan(row["p"])
    assert cell(compare_studies(a, b), "allreduce", 2, "virtual")["repetitions_needed"] == 0  # never


def test_virtual_times_of_one_calibration_are_paired_by_their_draw(studies):
    """Draws scatter by 20 %, but B is 10 % slower in each: without pairing that would be lost."""

    def scatter(study):
        study.change(lambda row: not native(row), train_s=lambda row: row.train_s * 1.2**row.repetition)

    a, b = studies(lambda study: study.change(train_s=lambda row: 1.1 * row.train_s), both=scatter)
    row = cell(compare_studies(a, b), "allreduce", 4, "virtual")
    assert (row["verdict"], row["paired"], row["interval"]) == ("regression", True, "calibration interval")
    assert [row["ratio_low"], row["ratio_high"]] == pytest.approx([1.1, 1.1])


def test_the_same_computation_is_unchanged_even_if_it_ran_once(studies):
    a, b = studies(both=lambda study: study.drop(lambda row: row.repetition > 0))
    found = compare_studies(a, b, threshold=0.0, execution="virtual")
    assert set(found.table["verdict"]) == {"unchanged"}
    assert set(compare_studies(a, b, execution="native").table["verdict"]) == {"undecided"}  # one run has no interval


def test_virtual_times_of_two_calibrations_vary_by_both(studies):
    def scatter(study):
        study.change(lambda row: not native(row), train_s=lambda row: row.train_s * 1.1**row.repetition)

    a, b = studies(both=scatter)
    for results, numbers in ((a, [1]), (b, [2])):
        (results.folder / "calibration.json").write_text(json.dumps({"key": "same", "tables": numbers}))
    row = cell(compare_studies(a, b, ignore=["calibration"]), "allreduce", 4, "virtual")
    logs = np.log(a.runs.query("execution == 'virtual' and label == 'allreduce' and workers == 4")["train_s"])
    half = math.sqrt(2) * stats.t(8).ppf(0.975) * logs.std(ddof=1) * math.sqrt(1 + 1 / 5)
    assert np.log([row["ratio_low"], row["ratio_high"]]) == pytest.approx([-half, half])
    assert (row["paired"], row["verdict"]) == (False, "undecided")


def test_metrics_are_paired_by_seed(studies):
    def unlearn(study):
        study.change(
            lambda row: row.strategy == "epoch_average",
            final_metric=lambda row: row.final_metric - 0.05 - 1e-4 * (row.repetition % 2),
        )

    found = compare_studies(*studies(unlearn))
    row = cell(found, "epoch_average", 2)
    assert row["metric_difference"] == pytest.approx(-0.05, abs=1e-4)
    assert row["metric_high"] - row["metric_low"] < 1e-3  # the seeds' own spread, 0.001 each, cancels
    assert (row["verdict"], row["metric_verdict"]) == ("unchanged", "regression")
    assert found.regressed
    assert cell(found, "allreduce", 2)["metric_verdict"] == "unchanged"


def test_metrics_of_other_seeds_are_independent(studies):
    row = cell(
        compare_studies(*studies(lambda study: study.change(seed=lambda row: row.seed + 100))), "epoch_average", 2
    )
    values = 0.97 + 0.001 * np.arange(5)
    welch = stats.ttest_ind(values, values, equal_var=False).confidence_interval(0.95)
    assert [row["metric_low"], row["metric_high"]] == pytest.approx(list(welch))


def test_what_b_lacks_is_told_from_what_failed_there(studies):
    def doctor(study):
        study.drop(lambda row: row.workers == 4 and row.strategy == "allreduce" and native(row))
        study.change(lambda row: row.workers == 2 and row.strategy == "allreduce" and native(row), status="failed")

    found = compare_studies(*studies(doctor), execution="native")
    assert found.missing == [("native", "mpi", "allreduce", 4)]
    assert found.failed == [("native", "mpi", "allreduce", 2)]
    assert found.regressed


def test_oversubscribed_cells_get_no_verdict(studies):
    def crowd(study):
        study.change(lambda row: native(row) and row.workers == 4, oversubscribed=True, train_s=9.0)

    found = compare_studies(*studies(crowd))
    assert cell(found, "allreduce", 4)["verdict"] == "not compared"
    assert not found.regressed


def test_strategies_and_executions_can_be_chosen(studies):
    a, b = studies()
    found = compare_studies(a, b, strategies=["allreduce"], execution="virtual").table
    assert set(zip(found["label_a"], found["execution"], strict=True)) == {("allreduce", "virtual")}
    with pytest.raises(UsageError, match="no completed run of strategy 'alreduce'; did you mean 'allreduce'"):
        compare_studies(a, b, strategies=["alreduce"])


def test_studies_without_a_common_cell_are_refused(studies):
    a, b = studies(lambda study: study.drop(native), both=lambda study: None)
    with pytest.raises(UsageError, match=r"no cell in common: serial at 1 worker \(native mpi\).* against none"):
        compare_studies(a, b, execution="native")


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
    assert cell(compare_strategies(a, "epoch_average", "allreduce"), "epoch_average", 4)["verdict"] == "regression"


def test_a_strategy_with_options_is_named_by_its_label_where_the_name_is_not_enough(studies):
    def vary(study):
        study.change(lambda row: row.strategy == "allreduce", strategy="local_sgd", strategy_options='{"every": 2}')
        study.change(lambda row: row.strategy == "epoch_average", strategy="local_sgd", strategy_options='{"every": 4}')

    a, _ = studies(both=vary)
    with pytest.raises(UsageError, match=r"name one of 'local_sgd\(every=2\)', 'local_sgd\(every=4\)'"):
        compare_strategies(a, "serial", "local_sgd")
    assert len(compare_strategies(a, "local_sgd(every=2)", "local_sgd(every=4)").table) == 6
