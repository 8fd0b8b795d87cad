"""The figure of scaling laws."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from scalebench.analysis import load
from scalebench.analysis.laws import scaling_laws
from scalebench.errors import ResultsError
from scalebench.figures import default_figures, plot
from scalebench.records.store import Store
from tests.records_factory import study_rows


def keep(folder, **options):
    with Store(folder, fsync=False) as store:
        for run, epochs in study_rows(
            strategies=("serial", "allreduce", "epoch_average"), **options
        ):
            store.append(run, epochs)
    return load(folder)


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    results = keep(tmp_path_factory.mktemp("results") / "mine")
    output = tmp_path_factory.mktemp("plots")
    plot(results, output, ["scaling-laws"], ["svg"])
    return results, pd.read_csv(output / "synthetic" / "scaling-laws.csv")


def test_drawn_curve_equals_fitted_law_and_band(drawn):
    results, table = drawn
    fitted = {
        one.series.key.label: one for one in scaling_laws(results) if not one.refusal
    }
    assert set(fitted) == {"allreduce", "epoch_average"}
    for label, scaling in fitted.items():
        curve = table[
            (table["series"] == label)
            & table["quantity"].str.startswith("law: ", na=False)
        ]
        assert set(curve["quantity"]) == {f"law: {scaling.best.fit.law.name}"}
        np.testing.assert_allclose(
            curve["y"], scaling.best.fit.seconds(curve["x"].to_numpy(dtype=float))
        )
        assert (curve["low"] < curve["y"]).all()
        assert (curve["y"] < curve["high"]).all()
        assert curve["x"].min() == 1
        assert curve["x"].max() == 128  # twice what was measured
        knee = table[(table["series"] == label) & (table["quantity"] == "knee")]
        assert scaling.advice is not None
        shown = (
            scaling.advice.knee.workers <= 128 and not scaling.advice.knee.is_guessed
        )
        assert knee["x"].tolist() == ([scaling.advice.knee.workers] if shown else [])


def test_series_without_law_are_not_drawn(drawn):
    _, table = drawn
    # native ran at two usable worker counts
    assert set(table["execution"].dropna()) == {"virtual"}


def test_same_records_give_same_bytes(drawn, tmp_path):
    results, _ = drawn
    for folder in ("one", "two"):
        plot(results, tmp_path / folder, ["scaling-laws"], ["svg"])
    one, two = (
        tmp_path / folder / "synthetic" / "scaling-laws.svg"
        for folder in ("one", "two")
    )
    assert one.read_bytes() == two.read_bytes()


def test_one_repetition_gives_law_without_band(tmp_path):
    results = keep(tmp_path / "once", repetitions=1, native_workers=())
    plot(results, tmp_path, ["scaling-laws"], ["svg"])
    table = pd.read_csv(tmp_path / "synthetic" / "scaling-laws.csv")
    assert (
        "low" not in table
        or table.loc[table["quantity"].str.startswith("law: ", na=False), "low"]
        .isna()
        .all()
    )


def test_five_counts_give_band_up_to_the_last(tmp_path):
    results = keep(tmp_path / "five", workers=(1, 2, 4, 8, 16), native_workers=())
    plot(results, tmp_path, ["scaling-laws"], ["svg"])
    table = pd.read_csv(tmp_path / "synthetic" / "scaling-laws.csv")
    curve = table[table["quantity"].str.startswith("law: ", na=False)]
    assert curve["x"].max() == 32
    assert (curve["low"].notna() == (curve["x"] <= 16)).all()


def test_fewer_than_four_counts_are_refused(tmp_path):
    results = keep(tmp_path / "few", workers=(1, 2, 4), native_workers=())
    with pytest.raises(
        ResultsError, match=r"scaling-laws cannot be drawn: 3 worker counts \(1, 2, 4\)"
    ):
        plot(results, tmp_path, ["scaling-laws"])


def test_scaling_laws_are_drawn_by_default():
    assert "scaling-laws" in default_figures()
