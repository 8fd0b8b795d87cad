"""Epochs to a target by the batch: exact laws, outliers, intervals, later rounds of MLPerf, series of a study."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from scalebench.analysis.target import (
    EpochsLaw,
    critical_batches,
    fit_epochs,
    read_law,
)
from scalebench.errors import ResultsError
from tests.analysis.test_comparing import run

PUBLISHED = Path(__file__).parents[2] / "experiments/mlperf-batch/entries.csv"
BATCHES = np.array([64, 128, 256, 512, 1024, 2048, 4096, 8192])


@pytest.mark.parametrize("critical", [500.0, 5_000.0, 50_000.0])
def test_exact_rows_give_the_law(critical):
    law = fit_epochs(BATCHES, 30 * (1 + BATCHES / critical), draws=2)
    # of the optimizer's tolerance
    assert law.epochs_at_zero == pytest.approx(30, rel=1e-3)
    assert law.critical_batch == pytest.approx(critical, rel=1e-2)
    assert law.epochs(critical).value == pytest.approx(60, rel=1e-2)


def test_another_recipe_does_not_move_the_law():
    epochs = 30 * (1 + BATCHES / 5000)
    rows = np.append(BATCHES, [256, 4096]), np.append(epochs, [90, 20])
    assert fit_epochs(*rows, draws=2).epochs(2048).value == pytest.approx(
        30 * (1 + 2048 / 5000), rel=0.02
    )


def test_intervals_hold_the_law_and_shrink_with_rows():
    def rows(repeats, seed):
        x = np.tile(BATCHES, repeats)
        noise = np.random.default_rng(seed).lognormal(0, 0.04, len(x))
        return x, 30 * (1 + x / 5000) * noise

    held, widths = 0, []
    for seed in range(6):
        low, high = fit_epochs(*rows(3, seed), draws=40).critical[1:3]
        held += low <= 5000 <= high
        widths.append(high - low)
    assert held >= 4  # of 6 intervals of 95 %: fewer happens twice in 1,000 times
    low, high = fit_epochs(*rows(30, 0), draws=40).critical[1:3]
    assert high - low < 0.6 * np.median(widths)


def test_epochs_that_do_not_grow_have_no_critical_batch_in_range():
    law = fit_epochs(BATCHES, np.full(8, 12.0), draws=2)
    assert law.epochs(BATCHES).value == pytest.approx(np.full(8, 12.0), rel=1e-3)
    assert law.critical_batch > 1e6


def test_a_given_law_has_no_interval():
    law = EpochsLaw(34, 44_361)
    low, high = law.epochs([0, 44_361])[1:3]
    assert np.array_equal(low, high)
    assert law.epochs([0, 44_361]).value == pytest.approx([34, 68])


def test_mlperf_rounds_predict_later_ones():
    """The goal is 6 %; 3.9 % is reached. Fitted on 2019 to mid 2021 (56 entries), held out 2021 and 2022 (93)."""
    rows = pd.read_csv(PUBLISHED, dtype={"round": str})
    early, late = rows[rows["round"] <= "1.0"], rows[rows["round"] > "1.0"]
    assert (len(early), len(late)) == (56, 93)
    law = fit_epochs(early["batch_global"], early["epochs"], draws=100)
    errors = np.abs(law.epochs(late["batch_global"]).value / late["epochs"] - 1)
    assert errors.mean() < 0.045
    assert errors.median() < 0.035
    low, high = law.critical[1:3]
    everything = fit_epochs(rows["batch_global"], rows["epochs"], draws=1)
    assert low < everything.critical_batch < high


def test_rows_of_a_file_are_fitted(tmp_path):
    fitted, rows = read_law(PUBLISHED, draws=2), pd.read_csv(PUBLISHED)
    assert (fitted.least, fitted.most) == (
        rows["batch_global"].min(),
        rows["batch_global"].max(),
    )
    assert fitted.law == fit_epochs(rows["batch_global"], rows["epochs"], draws=2)
    (tmp_path / "mine.csv").write_text("batch_global,epochs\n64,12\n128,many\n")
    with pytest.raises(
        ResultsError, match=r"mine\.csv: expected numbers in the columns batch_global"
    ):
        read_law(tmp_path / "mine.csv")
    with pytest.raises(ResultsError, match=r"cannot read .*none\.csv: No such file"):
        read_law(tmp_path / "none.csv")


@pytest.mark.parametrize(
    ("batches", "epochs", "message"),
    [
        (
            [8, 16, 16],
            [1, 2, 2],
            "3 or more global batches are needed to fit the critical batch, got 2",
        ),
        ([8, 16, 0], [1, 2, 2], "missing or not greater than 0"),
        ([8, 16, 32], [1, 2, float("nan")], "missing or not greater than 0"),
    ],
)
def test_rows_that_cannot_be_fitted(batches, epochs, message):
    with pytest.raises(ResultsError, match=message):
        fit_epochs(batches, epochs)


@pytest.mark.parametrize(
    ("epochs", "critical"), [(0, 100), (30, -1), (30, float("inf"))]
)
def test_given_numbers_are_checked(epochs, critical):
    with pytest.raises(ResultsError, match="expected a number greater than 0"):
        EpochsLaw(epochs, critical)


def aimed(strategy, workers, epochs, seed=0, **changes):
    """A run at the global batch 8 x workers that reached its target after `epochs`; None: never."""
    time = None if epochs is None else 0.01 * epochs
    changes = {
        "epochs": 100,
        "target_metric": 0.9,
        "time_to_target_s": time,
        "epochs_to_target": epochs,
    } | changes
    return run(strategy, workers, 4.0, repetition=seed, seed=seed, **changes)


def law(workers):
    return round(20 * (1 + 8 * workers / 64))


COUNTS = (1, 2, 4, 8, 16)


def test_series_of_three_batches_has_a_critical_batch_and_others_have_none(study):
    rows = [
        aimed("allreduce", workers, law(workers), seed)
        for workers in COUNTS
        for seed in (0, 1)
    ]
    (found,) = critical_batches(study(rows=[aimed("serial", 1, 20), *rows]), draws=5)
    assert found.series == ("virtual", "virtual", "allreduce")
    assert (found.least, found.most) == (8, 128)
    assert found.law.critical_batch == pytest.approx(64, rel=0.05)
    assert found.grows


def test_batches_that_some_run_fails_at_are_not_fitted(study):
    rows = [
        aimed("allreduce", workers, law(workers), seed)
        for workers in COUNTS
        for seed in (0, 1)
    ]
    rows += [aimed("allreduce", 32, 21, 0), aimed("allreduce", 32, None, 1)]
    (found,) = critical_batches(study(rows=rows), draws=5)
    assert found.most == 128
    assert found.law.critical_batch == pytest.approx(64, rel=0.05), (
        "21 epochs at batch 256 would raise it"
    )


def test_equal_epochs_have_no_critical_batch_within_reach(study):
    (found,) = critical_batches(
        study(rows=[aimed("allreduce", workers, 20) for workers in COUNTS]), draws=2
    )
    assert not found.grows


def test_laws_of_a_study_are_fitted_once(study, monkeypatch):
    made = study(rows=[aimed("allreduce", workers, law(workers)) for workers in COUNTS])
    monkeypatch.setattr("scalebench.analysis.target.DRAWS", 2)
    found = critical_batches(made)
    monkeypatch.delattr("scalebench.analysis.target.fit_epochs")
    assert critical_batches(made) == found
