"""Rules about repetitions."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest

from scalebench.analysis.methodology import findings
from tests.analysis.test_comparing import run


def rules(results):
    return {finding.rule: finding for finding in findings(results)}


def repeated(
    seconds, strategy="allreduce", workers=2, execution="native", place=0, **changes
):
    return [
        run(
            strategy,
            workers,
            t,
            execution,
            repetition=r,
            run_order=10 * r + place,
            **changes,
        )
        for r, t in enumerate(seconds)
    ]


def steady(count, sigma=0.01, seed=0):
    return np.random.default_rng(seed).lognormal(0, sigma, count).tolist()


def test_steady_study_with_enough_runs_has_no_findings(study):
    rows = repeated(steady(8))
    rows += repeated([t / 2 for t in steady(8, seed=1)], "epoch_average", place=1)
    assert findings(study(rows=rows)) == []


def test_one_and_few_runs_are_warnings(study):
    found = findings(
        study(
            rows=[
                *repeated([1.0]),
                *repeated(steady(3), workers=4),
                *repeated(steady(5), workers=8),
            ]
        )
    )
    assert [(one.severity, one.where) for one in found if one.rule == "few-runs"] == [
        ("warning", "allreduce at 2 workers (native mpi)"),
        ("warning", "allreduce at 4 workers (native mpi)"),
    ]
    assert "of one run" in found[0].what
    assert "of 3 runs" in found[1].what


def test_virtual_repetitions_are_not_judged_like_runs(study):
    rows = [
        *repeated([1.0, 2.0, 9.0], execution="virtual"),
        *repeated([1.0] * 3, "epoch_average", execution="virtual"),
    ]
    found = findings(study(rows=rows))
    assert {one.rule for one in found} <= {"virtual-error", "unsettled", "few-runs"}
    (few,) = [one for one in found if one.rule == "few-runs"]
    assert few.severity == "note"
    assert "3 repetitions" in few.what


def test_spread_names_the_widest_cell(study):
    rows = [
        *repeated([1.0, 1.2, 1.4, 1.1, 1.3]),
        *repeated([1.0, 2.0, 3.0, 1.5, 2.5], workers=4),
    ]
    found = rules(study(rows=rows))["spread"]
    assert found.severity == "warning"
    assert found.where == "allreduce at 2, 4 workers (native mpi)"
    assert re.match(
        r".*2 of 2 native cells .* 10 %.*\(allreduce at 4 workers", found.what
    )
    (alone,) = [
        one
        for one in findings(study(rows=repeated([1.0, 1.2, 1.4, 1.1, 1.3])))
        if one.rule == "spread"
    ]
    assert re.match(r"the times of 1 of 1 native cell .* 10 %", alone.what)
    assert "spread" not in rules(study(rows=repeated(steady(5))))


def test_odd_run_that_moves_the_mean_is_found(study):
    seconds = [1.0, 1.001, 1.002, 1.003, 1.004, 1.005, 1.006, 1.2]
    assert (
        rules(study(rows=repeated(seconds)))["odd-runs"].where
        == "allreduce at 2 workers (native mpi)"
    )
    assert "odd-runs" not in rules(study(rows=repeated(seconds[:-1])))


def test_two_groups_in_a_cell_are_found(study):
    rows = repeated([1.0, 1.3, 1.001, 1.301, 1.002, 1.302, 1.003, 1.303])
    assert (
        rules(study(rows=rows))["two-groups"].where
        == "allreduce at 2 workers (native mpi)"
    )
    assert "two-groups" not in rules(study(rows=repeated(steady(8, 0.1))))


def test_drift_is_found_with_its_size(study):
    rows = []
    for place, workers in enumerate((1, 2, 4, 8)):
        noise = steady(4, 0.001, seed=workers)
        rows += repeated(
            [t * math.exp(0.01 * (10 * r + place)) for r, t in enumerate(noise)],
            workers=workers,
            place=place,
        )
    found = rules(study(rows=rows))["drift"]
    assert "+39 %" in found.what  # exp(0.01 x 33)
    still = [
        row.model_copy(update={"train_s": 1.0 + 0.001 * (n % 3)})
        for n, row in enumerate(rows)
    ]
    assert "drift" not in rules(study(rows=still))


def checked(factor):
    rows = []
    for workers in (1, 2, 4, 8):
        rows += repeated(steady(5, 0.001), workers=workers)
        rows += repeated(
            [factor * t for t in steady(5, 0.001)], workers=workers, execution="virtual"
        )
    return rows


def test_unchecked_or_wrong_simulation_is_found(study):
    assert (
        rules(study(rows=repeated(steady(5), execution="virtual")))[
            "virtual-error"
        ].severity
        == "note"
    )
    other = [
        row.model_copy(update={"cluster": "juwels"})
        for row in repeated(steady(5), execution="virtual")
    ]
    assert rules(study(rows=other))["virtual-error"].fix.startswith(
        "quote them as virtual times"
    )
    far = rules(study(rows=checked(1.4)))["virtual-error"]
    assert far.severity == "warning"
    assert "by 40 %" in far.what
    assert "virtual-error" not in rules(study(rows=checked(1.05)))
    assert "virtual-error" not in rules(study(rows=checked(1.14)))
    assert "by 16 %" in rules(study(rows=checked(1.16)))["virtual-error"].what
    assert (
        "a factor of 3.1 (" in rules(study(rows=checked(1 / 3.1)))["virtual-error"].what
    )


def test_unsettled_is_a_difference_within_its_interval(study):
    rows = [
        *repeated([1.10, 0.98, 1.07, 0.99, 1.06]),
        *repeated([1.0] * 5, "epoch_average", place=1),
    ]
    assert (
        rules(study(rows=rows))["unsettled"].where
        == "epoch_average at 2 workers (native mpi)"
    )
    rows = [
        *repeated([1.5, 1.51, 1.49, 1.5, 1.52]),
        *repeated([1.0] * 5, "epoch_average", place=1),
    ]
    assert "unsettled" not in rules(study(rows=rows))


def test_findings_are_sorted_and_empty_without_completed_runs(study):
    rows = [*repeated(steady(3)), *repeated([1.0], workers=4)]
    severities = [one.severity for one in findings(study(rows=rows))]
    assert severities == sorted(severities, key=["error", "warning", "note"].index)
    failed = [run("allreduce", 2, None, "native", status="failed", error="rank 1 died")]
    assert findings(study(rows=failed)) == []


@pytest.mark.parametrize("repetitions", [1, 3, 5])
def test_default_study_has_few_findings(study, repetitions):
    assert len(findings(study(repetitions=repetitions))) <= 4
