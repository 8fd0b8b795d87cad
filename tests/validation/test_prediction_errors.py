"""Errors of predictions, skill over linear scaling, coverage and order are those of their definitions."""

from __future__ import annotations

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalebench.validation.prediction_errors import (
    error_by_distance,
    error_by_source,
    pairs_in_order,
    skill,
    with_errors,
)


def predictions(**columns: list[object]) -> pd.DataFrame:
    length = len(next(iter(columns.values())))
    plain: dict[str, object] = {
        "source": "a page",
        "nodes": 1,
        "workers": 8,
        "doublings": 3.0,
        "configuration": "one",
        "strategy": "ring",
        "measured": 100.0,
        "predicted": 100.0,
        "linear": 100.0,
        "low": 90.0,
        "high": 110.0,
        "seconds": 1.0,
        "predicted_s": 1.0,
    }
    return pd.DataFrame(
        {name: columns.get(name, [value] * length) for name, value in plain.items()}
    )


def test_errors_are_signed_and_relative_to_the_measurement() -> None:
    errors = with_errors(
        predictions(predicted=[110.0, 80.0], linear=[140.0, 60.0], high=[120.0, 85.0])
    )
    assert errors["error"].tolist() == pytest.approx([0.1, -0.2])
    assert errors["held"].tolist() == [True, False]
    table = error_by_source(errors).set_index("source").loc["a page"]
    assert (table["mape"], table["bias"], table["linear_mape"]) == pytest.approx(
        (0.15, -0.05, 0.4)
    )
    assert table["skill"] == pytest.approx(1 - 0.15 / 0.4)


@given(st.lists(st.floats(50, 200), min_size=1, max_size=8))
def test_linear_scaling_has_no_skill_over_itself(values: list[float]) -> None:
    errors = with_errors(predictions(predicted=list(values), linear=list(values)))
    assert (
        skill(errors) == pytest.approx(0.0) or errors["linear_error"].abs().sum() == 0
    )


def test_one_node_rows_and_distances_are_reported_apart() -> None:
    errors = with_errors(
        predictions(
            nodes=[1, 2, 2],
            predicted=[101.0, 110.0, 120.0],
            doublings=[0.6, 1.0, 3.0],
            linear=[150.0] * 3,
        )
    )
    by_source = error_by_source(errors).set_index("source")
    assert by_source.loc["all of one node", "points"] == 1
    assert by_source.loc["all of one node", "mape"] == pytest.approx(0.01)
    by_distance = error_by_distance(errors)
    assert by_distance["doublings"].tolist() == [1, 3]
    assert by_distance["mape"].tolist() == pytest.approx([0.055, 0.2])


def test_only_strategies_that_differ_clearly_are_put_in_order() -> None:
    errors = with_errors(
        predictions(
            strategy=["ring", "tree", "server"],
            seconds=[1.0, 1.05, 2.0],
            predicted_s=[1.0, 1.3, 1.2],
            workers=[8] * 3,
        )
    )
    assert pairs_in_order(errors) == (
        1,
        2,
    )  # ring before server, not tree before server; ring and tree are too close
    assert pairs_in_order(errors, clearly=0.01) == (2, 3)
    assert pairs_in_order(errors.assign(workers=[1, 2, 4])) == (0, 0)
