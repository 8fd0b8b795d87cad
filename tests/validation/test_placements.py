"""Placements on few nodes predict those on more; held rows take no part."""

from __future__ import annotations

import math
from pathlib import Path

import pandas as pd
import pytest

from scalebench.errors import ResultsError
from scalebench.validation.placements import (
    is_placements,
    predict_placements,
    read_placements,
)
from scalebench.validation.prediction_errors import skill, with_errors

FOLDER = Path(__file__).parents[2] / "experiments" / "published"


def rows_of_a_model() -> pd.DataFrame:
    """Steps of T = 0.002 b (1 + 0.02 sqrt(2 ln p)) + 0.8 sync, where sync is a ring on links of its own."""
    rows = []
    for nodes in (1, 2, 3, 4, 8):
        for inside in (1, 2, 3, 4):
            p = nodes * inside
            latency, transfer = (1e-4, 0.05) if nodes == 1 else (1e-3, 0.3)
            sync = 2 * (p - 1) * latency + 2 * (p - 1) / p * transfer if p > 1 else 1e-6
            sync *= 1 + 0.1 * math.log2(nodes / 2) if nodes > 2 else 1.0
            for batch in (32, 64, 128):
                step = 0.002 * batch * (1 + 0.02 * math.sqrt(2 * math.log(p))) + (
                    0.8 * sync if p > 1 else 0.0
                )
                rows.append(("net", str(inside) * nodes, nodes, p, batch, step, sync))
    columns = [
        "model",
        "placement",
        "nodes",
        "replicas",
        "local_batch",
        "step_time_s",
        "sync_time_s",
    ]
    return pd.DataFrame(rows, columns=columns)


def written(table: pd.DataFrame, folder: Path) -> Path:
    file = folder / "placements.csv"
    table.to_csv(file, index=False)
    return file


def test_the_largest_node_count_is_predicted_from_the_others(tmp_path: Path) -> None:
    found = predict_placements(read_placements(written(rows_of_a_model(), tmp_path)))
    assert set(found["nodes"]) == {8}
    errors = with_errors(found)
    assert errors["error"].abs().max() < 0.02  # the form that made the rows
    assert skill(errors) > 0.9
    assert errors["doublings"].tolist() == pytest.approx([1.0] * 12)


def test_stated_held_rows_are_predicted_and_take_no_part(tmp_path: Path) -> None:
    table = rows_of_a_model().assign(
        split=lambda frame: frame["nodes"].gt(3).map({True: "hold", False: "base"})
    )
    before = predict_placements(read_placements(written(table, tmp_path)))
    assert set(before["nodes"]) == {4, 8}
    table.loc[table["split"] == "hold", ["step_time_s", "sync_time_s"]] *= 3
    after = predict_placements(read_placements(written(table, tmp_path)))
    pd.testing.assert_series_equal(before["predicted"], after["predicted"])
    pd.testing.assert_series_equal(before["high"], after["high"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda table: table.assign(step_time_s=-1.0),
            "line 2: expected a number above 0 as step_time_s, got -1.0",
        ),
        (
            lambda table: table[table["replicas"] > 1],
            "model net: to calibrate on, rows of one replica",
        ),
        (
            lambda table: table[table["nodes"] < 3],
            "on one node and on several are needed",
        ),
    ],
)
def test_unusable_placements_are_refused(
    tmp_path: Path, change: object, message: str
) -> None:
    file = written(change(rows_of_a_model()), tmp_path)  # type: ignore[operator]
    with pytest.raises(ResultsError, match=message):
        read_placements(file)


def test_files_are_told_by_their_columns(tmp_path: Path) -> None:
    assert is_placements(FOLDER / "pollux-placements.csv")
    assert not is_placements(FOLDER / "scaling.csv")
    assert not is_placements(tmp_path / "none.csv")


def test_published_placements_beat_linear_scaling() -> None:
    table = read_placements(FOLDER / "pollux-placements.csv")
    errors = with_errors(
        predict_placements(table[table["model"].isin(["bert", "yolov3"])])
    )
    assert skill(errors) > 0.8
    assert errors["error"].abs().median() < 0.08
