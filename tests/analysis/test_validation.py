"""Virtual against native."""

from __future__ import annotations

import pytest

from scalebench.analysis import agreement, median_error
from tests.analysis.test_comparing import only, run


def test_errors_are_of_the_same_strategy_and_count(study):
    rows = [
        run("serial", 1, 10.0, "native"),
        run("serial", 1, 9.0),
        run("allreduce", 2, 10.0, "native"),
        run("allreduce", 2, 14.0, "native", "gloo"),
        run("allreduce", 2, 13.0),
        run("allreduce", 4, 10.0, "native", oversubscribed=True),
        run("allreduce", 4, 1.0),
        run("allreduce", 8, 1.0),
    ]
    table = agreement(study(rows=rows))
    assert table["error"].tolist() == pytest.approx([0.3, -0.9, -0.1])
    assert only(table, label="allreduce", workers=2).engine == "mpi"
    assert median_error(table) == pytest.approx(0.2), "the oversubscribed cell does not count"


def test_without_native_runs_there_is_no_error(study):
    table = agreement(study(rows=[run("serial", 1, 9.0)]))
    assert table.empty
    assert median_error(table) is None


def test_known_gap_lies_inside_the_interval(study):
    table = agreement(study(noise=0.02, repetitions=5))
    fair = table[~table["oversubscribed"]]
    inside = (fair["ratio_low"] < 1 / 1.1) & (fair["ratio_high"] > 1 / 1.1)
    assert inside.mean() > 0.8
