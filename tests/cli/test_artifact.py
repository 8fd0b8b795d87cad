"""`scalebench artifact`: packing by an author, verifying by a reviewer."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from scalebench.cli.main import main
from scalebench.figures import PlotRequest, plot_folder
from scalebench.records.store import Store
from tests.facts import together
from tests.records_factory import study_rows


@pytest.fixture
def scalebench(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "scalebench.figures.plotting.default_figures", lambda: ["time-reduction"]
    )
    for room in ("artifact", "artifact.verification"):
        own = partial(plot_folder, request=PlotRequest(formats=("svg",)))
        monkeypatch.setattr(
            f"scalebench.{room}.plot_folder", lambda *a, jobs, own=own: own(*a)
        )
    with Store(tmp_path / "results" / "synthetic", fsync=False) as store:
        for run, epochs in study_rows(workers=(1, 2), native_workers=(), repetitions=2):
            store.append(run, epochs)

    def call(*words, code=0):
        with pytest.raises(SystemExit) as end:
            main.main(["artifact", *words], prog_name="scalebench")
        out, err = capsys.readouterr()
        assert int(end.value.code or 0) == code, err
        return out + err

    return call


def test_packed_artifact_verifies(scalebench):
    said = scalebench()
    assert "artifacts/synthetic-artifact.zip\n" in said
    assert "note: no licence is stated" in said
    assert together(said, "minutes", "reviewer", "set-up not timed")
    folder = Path("artifacts/synthetic-artifact")
    said = scalebench("--verify", str(folder))
    assert "time-reduction: the same " in said
    assert together(said.splitlines()[-1], "every figure", "artifact")
    (folder / "README.md").write_text("")
    assert "README.md is not as it was packed" in scalebench(
        "--verify", str(folder), code=2
    )


def test_differing_figure_is_named_with_exit_code_1(scalebench, monkeypatch):
    scalebench()
    monkeypatch.setattr(
        "scalebench.artifact.verification._equal", lambda before, now: False
    )
    real = plot_folder

    def altered(folder, output, *, jobs):
        drawn = real(folder, output, PlotRequest(formats=("svg",)))
        table = drawn[0].files[-1]
        table.write_text(table.read_text().replace("2", "3", 1))
        return drawn

    monkeypatch.setattr("scalebench.artifact.verification.plot_folder", altered)
    said = scalebench("--verify", "artifacts/synthetic-artifact", code=1)
    assert "time-reduction: DIFFERS: line " in said
    assert "1 of 1 figure differs" in said


def test_usage_error_is_one_line(scalebench, tmp_path):
    assert "takes neither RESULTS nor --paper" in scalebench(
        "results/synthetic", "--verify", "x", code=2
    )
    assert "expected an unpacked artifact" in scalebench("--verify", "results", code=2)
    (tmp_path / "artifacts" / "synthetic-artifact").mkdir(parents=True)
    assert "is there and no artifact" in scalebench(code=2)
