"""Curves of other studies and of files, drawn beside those of a study."""

from __future__ import annotations

import pandas as pd
import pytest

from scalebench.analysis import load
from scalebench.errors import UsageError
from scalebench.figures import PlotRequest, plot_folder
from scalebench.figures.selection import EVERYTHING, Selection, parse_added
from scalebench.records.store import Store
from tests.facts import together
from tests.records_factory import study_rows

COUNTS = {"workers": (1, 2, 4), "native_workers": (), "repetitions": 2}


@pytest.fixture(scope="module")
def studies(tmp_path_factory):
    """Two studies of the same strategies, and one that scales weakly."""
    folder = tmp_path_factory.mktemp("results")
    for name, changes in (
        ("mine", {}),
        ("other", {"seed": 7}),
        ("weak", {"scaling": "weak"}),
    ):
        with Store(folder / name, fsync=False) as store:
            for run, epochs in study_rows(
                strategies=("serial", "allreduce", "epoch_average"), **COUNTS, **changes
            ):
                store.append(run.model_copy(update={"study": name}), epochs)
    return folder


def drawn(studies, place, name, *added, selection=EVERYTHING):
    request = PlotRequest(
        (name,),
        ("svg",),
        selection=selection,
        added=tuple(parse_added(text) for text in added),
    )
    (figure,) = plot_folder(studies / "mine", place, request, place=place)
    return pd.read_csv(figure.files[-1]), (place / f"{name}.txt").read_text()


def test_two_studies_in_one_figure(studies, tmp_path):
    data, caption = drawn(
        studies, tmp_path, "strong-scaling", f"{studies / 'other'}:seed 7"
    )
    times = data[data["quantity"] == "train_s"]
    assert {"epoch_average", "epoch_average in seed 7"} <= set(times["series"])
    other = load(studies / "other").completed.query(
        "strategy == 'epoch_average' and workers == 4"
    )["train_s"]
    point = times[
        (times["series"] == "epoch_average in seed 7") & (times["workers"] == 4)
    ]["y"].item()
    assert other.min() < point < other.max()
    assert together(
        caption,
        "seed 7",
        "mlp(hidden=[128])",
        "digits_shifted",
        "Virtual",
        "this-machine",
    )


def test_reductions_of_an_added_study_are_against_its_own_baseline(studies, tmp_path):
    data, _ = drawn(studies, tmp_path, "time-reduction", str(studies / "other"))
    (file,) = plot_folder(
        studies / "other",
        tmp_path / "alone",
        PlotRequest(("time-reduction",), ("svg",)),
    )
    alone = pd.read_csv(file.files[-1])
    own = data[data["series"] == "epoch_average in other"].sort_values("workers")["y"]
    assert (
        own.tolist()
        == alone[alone["series"] == "epoch_average"]
        .sort_values("workers")["y"]
        .tolist()
    )


def test_curve_from_a_file_has_its_efficiency_and_stays_in_a_selection(
    studies, tmp_path
):
    (tmp_path / "lee.csv").write_text("workers,time_s\n1,8\n2,5\n4,2.5\n")
    selection = Selection(strategies=("epoch_average",))
    data, caption = drawn(
        studies,
        tmp_path,
        "strong-scaling",
        f"{tmp_path / 'lee.csv'}:Lee 2020",
        selection=selection,
    )
    assert set(data["series"]) - {"ideal", "ideal (virtual)"} == {
        "epoch_average",
        "Lee 2020",
    }
    lee = data[data["series"] == "Lee 2020"]
    assert lee.loc[lee["quantity"] == "train_s", "y"].tolist() == [8, 5, 2.5]
    assert lee.loc[lee["quantity"] == "efficiency", "y"].tolist() == [1, 0.8, 0.8]
    assert "Lee 2020: from lee.csv." in caption


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "workers,seconds\n1,2\n",
            "expected the columns workers and time_s or efficiency or metric; it has workers, sec",
        ),
        ("workers,time_s\n1,fast\n", "time_s 'fast' is no number"),
        ("workers,time_s\n0,3\n", "workers '0' is no number that fits"),
        ("", "cannot be read as CSV"),
    ],
)
def test_odd_files_are_refused(studies, tmp_path, text, message):
    (tmp_path / "odd.csv").write_text(text)
    with pytest.raises(UsageError, match=message):
        drawn(studies, tmp_path, "strong-scaling", str(tmp_path / "odd.csv"))


def test_what_cannot_be_added_is_refused(studies, tmp_path):
    with pytest.raises(
        UsageError,
        match="breakdown shows one study; added curves are drawn in strong-scaling, time-r",
    ):
        drawn(studies, tmp_path, "breakdown", str(studies / "other"))
    with pytest.raises(
        UsageError, match="its scaling is weak, that of the study strong"
    ):
        drawn(studies, tmp_path, "strong-scaling", str(studies / "weak"))
    with pytest.raises(UsageError, match="no file or folder nowhere; expected FILE"):
        parse_added("nowhere:x")
