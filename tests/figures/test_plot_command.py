"""`scalebench plot` from the command line."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest
from click.testing import CliRunner

from scalebench.cli.plot import plot
from scalebench.cli.report import report
from scalebench.errors import ResultsError
from scalebench.figures.base import FIGURES, Declared, declared_figures
from scalebench.records.folder import newest_study
from scalebench.records.store import Store
from tests.facts import together
from tests.records_factory import study_rows


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    """A folder with two studies in results/, the newer one called `newer`."""
    rows = study_rows(
        strategies=("serial", "allreduce", "epoch_average"),
        workers=(1, 2),
        native_workers=(),
        repetitions=1,
    )
    for age, name in ((100, "older"), (0, "newer")):
        with Store(tmp_path / "results" / name, fsync=False) as store:
            for run, epochs in rows:
                store.append(run.model_copy(update={"study": name}), epochs)
        table = tmp_path / "results" / name / "runs.csv"
        os.utime(table, (table.stat().st_mtime - age,) * 2)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_plot_draws_newest_study_by_default(workplace):
    done = CliRunner().invoke(plot, ["--figure", "strong-scaling", "--format", "svg"])
    assert (done.exit_code, done.stdout) == (
        0,
        "plots/newer/strong-scaling{.svg,.txt,.tex,.csv}\n",
    )
    assert sorted(file.name for file in (workplace / "plots/newer").iterdir()) == [
        ".records",
        "strong-scaling.csv",
        "strong-scaling.svg",
        "strong-scaling.tex",
        "strong-scaling.txt",
    ]


@pytest.mark.parametrize("form", ["png", "pdf", "svg"])
def test_pages_of_an_earlier_plot_do_not_stay(workplace, form):
    """A second page is written as an earlier plot of more series left it, beside files of the user."""
    words = ["--figure", "strong-scaling", "--format", form]
    assert CliRunner().invoke(plot, words).exit_code == 0
    place = workplace / "plots" / "newer"
    for kind in (form, "txt"):
        shutil.copy(
            place / f"strong-scaling.{kind}", place / f"strong-scaling-2.{kind}"
        )
    (place / "strong-scaling-2.tex").write_text("\\label{fig:strong-scaling-2}")
    (place / f"strong-scaling-3.{form}").write_text("drawn by hand")
    (place / "strong-scaling-3.txt").write_text("my own words")
    assert CliRunner().invoke(plot, words).exit_code == 0
    kept = {file.name for file in place.iterdir() if "-2" in file.name}
    assert not kept
    own = {file.name for file in place.iterdir() if "-3" in file.name}
    assert own == {f"strong-scaling-3.{form}", "strong-scaling-3.txt"}


def test_own_picture_under_the_name_of_a_second_page_stays(workplace):
    words = ["--figure", "strong-scaling", "--format", "png"]
    assert CliRunner().invoke(plot, words).exit_code == 0
    own = workplace / "plots" / "newer" / "strong-scaling-2.png"
    own.write_bytes(b"by another program")
    assert CliRunner().invoke(plot, words).exit_code == 0
    assert own.read_bytes() == b"by another program"


@pytest.mark.parametrize(
    "words",
    [
        "plot FOLDER --figure strong-scaling --format svg",
        "report FOLDER",
        "check FOLDER --json",
        "status FOLDER",
        "export FOLDER --json -",
        "artifact FOLDER",
        "laws FOLDER",
        "compare FOLDER --strategy allreduce --strategy epoch_average",
        "compare FOLDER FOLDER",
    ],
)
def test_folder_of_studies_means_its_newest(workplace, invoke, monkeypatch, words):
    """Each command on the folder given to `scalebench run --output` takes the study in it."""
    # of an artifact
    monkeypatch.setattr(
        "scalebench.figures.plotting.default_figures", lambda: ["strong-scaling"]
    )
    (workplace / "results").rename(workplace / "elsewhere")
    code = int(words.startswith("laws"))  # two worker counts are too few for a law
    said = [
        invoke(*words.replace("FOLDER", folder).split(), code=code)
        for folder in ("elsewhere/newer", "elsewhere")
    ]
    assert said[0] == said[1]


def test_studies_of_one_name_get_separate_folders(workplace, monkeypatch):
    """Drawn again, each study goes to its earlier folder."""
    monkeypatch.setattr(
        "scalebench.figures.base.default_figures", lambda: ["strong-scaling"]
    )
    for folder in ("before", "after"):
        shutil.copytree(workplace / "results/newer", workplace / folder / "newer")
    places = {"before": "newer", "after": "newer-2"}
    for folder, place in [*places.items(), *places.items()]:
        drawn = CliRunner().invoke(
            plot, [f"{folder}/newer", "--figure", "strong-scaling", "--format", "svg"]
        )
        assert drawn.stdout == f"plots/{place}/strong-scaling{{.svg,.txt,.tex,.csv}}\n"
    for folder, place in places.items():
        reported = CliRunner().invoke(report, [f"{folder}/newer"])
        assert reported.stdout == f"plots/{place}/report.html\n"
    for name in ("newer", "newer-2"):
        assert (
            str(workplace) not in (workplace / "plots" / name / ".records").read_text()
        )
    (workplace / "plots/older").mkdir()
    drawn = CliRunner().invoke(
        plot, ["results/older", "--figure", "strong-scaling", "--format", "svg"]
    )
    assert drawn.stdout.startswith("plots/older/"), "a folder without a mark is taken"


def test_absent_figures_are_named_with_reason(workplace, monkeypatch):
    monkeypatch.setattr(
        "scalebench.figures.plotting.default_figures",
        lambda: ["time-reduction", "agreement"],
    )
    done = CliRunner().invoke(
        plot, ["results/older", "--output", "here", "--format", "svg"]
    )
    assert done.exit_code == 0
    assert "here/older/time-reduction{.svg,.txt,.tex,.csv}" in done.stdout
    assert together(done.stderr, "agreement", "not drawn", "virtually", "natively")


def test_figures_that_can_be_drawn_are_drawn_beside_one_that_cannot(workplace, invoke):
    words = "plot results/older --figure agreement --figure strong-scaling --format svg"
    said = invoke(*words.split(), code=2)
    assert "plots/older/strong-scaling{.svg,.txt,.tex,.csv}" in said
    assert together(said, "agreement", "not drawn", "virtually", "natively")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["results/none"], "results/none holds no runs.csv"),
        (["--figure", "scaling"], "unknown figure 'scaling'"),
        (["--format", "gif"], "'gif' is not one of 'pdf', 'svg', 'png'"),
    ],
)
def test_wrong_request_exits_2_with_one_line(workplace, arguments, message):
    done = subprocess.run(
        [sys.executable, "-m", "scalebench", "plot", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_missing_results_exit_2(tmp_path):
    with pytest.raises(ResultsError, match="run one with `scalebench run`"):
        newest_study(tmp_path)


def test_figures_are_listed_and_the_command_parsed_without_training_or_analysis():
    code = (
        "import sys, scalebench.cli.plot; heavy = ('pandas', 'matplotlib', 'torch', 'scipy')\n"
        "print([name for name in heavy if name in sys.modules])\n"
        "from scalebench.figures import PlotRequest, describe_figures\n"
        "describe_figures(); PlotRequest().figures()\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n[]\n"


def test_figures_are_imported_without_torch():
    code = "import sys; sys.modules['torch'] = None; from scalebench.figures.base import FIGURES; FIGURES.names()"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_figures_are_listed_as_their_classes_declare_them():
    classes = [FIGURES.find(name) for name in FIGURES.names()]
    assert declared_figures() == [
        Declared(kind.name, kind.summary, kind.by_default) for kind in classes
    ]


def test_plot_is_a_command():

    done = subprocess.run(
        [sys.executable, "-m", "scalebench", "plot", "--help"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "--figure" in done.stdout
