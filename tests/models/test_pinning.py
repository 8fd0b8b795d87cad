"""A study is bound to the content of its model and cluster files."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import numpy as np
import pytest

from scalebench.analysis import compare_studies, load
from scalebench.analysis.methodology import check
from scalebench.artifact import write_artifact
from scalebench.artifact.artifact_description import PaperFile
from scalebench.cli.main import main
from scalebench.errors import ModelError, ResultsError, RunError
from scalebench.launch.planning import plan_study
from scalebench.models.pinning import pinned, require_unchanged
from scalebench.study.load import load_study

NET = """\
from torch import nn

def build(input_shape, outputs):
    return nn.Sequential(nn.Flatten(), nn.Linear(13, outputs))
"""
OTHER = NET.replace("nn.Flatten(), ", "nn.Flatten(), nn.Dropout(0.0), ")
RUN = ("run", "--name", "mine", "--dataset", "wine", "--epochs", "1", "--execution", "virtual", "--jobs", "1",
       "--strategy", "serial", "--workers", "1", "--cluster", "juwels-booster", "--device-step-time", "0.002",
       "--repetitions", "1", "--quiet")  # fmt: skip
CLUSTER = """\
name: ours
nodes: 2
node: {cores: this-machine, workers_per_node: 2, source: sinfo}
links:
  intra: {latency_s: 1.0e-6, bandwidth_bytes_per_s: 2.0e+10, source: assumed}
  inter: {latency_s: 2.0e-6, bandwidth_bytes_per_s: 1.0e+10, source: assumed}
reduction: {seconds_per_byte: 2.0e-12, source: assumed}
"""
KEYS = {
    "model_sha256": "net.py",
    "init_weights_sha256": "start.npz",
    "cluster_sha256": "ours.yaml",
}


def sha256(path):
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def weights(path, value):
    np.savez(path, initial=np.full(3 * 14, value))


@pytest.fixture
def scalebench(tmp_path, monkeypatch, invoke):
    monkeypatch.chdir(tmp_path)
    # of artifacts
    monkeypatch.setattr(
        "scalebench.figures.plotting.default_figures", lambda: ["convergence"]
    )
    Path("net.py").write_text(NET)
    weights("start.npz", 0.0)
    Path("ours.yaml").write_text(CLUSTER)

    return invoke


FILES = (
    "--model",
    "net.py:build",
    "--init-weights",
    "start.npz",
    "--cluster",
    "ours.yaml",
)


def change(key):
    if key == "model_sha256":
        Path("net.py").write_text(OTHER)
    elif key == "cluster_sha256":
        Path("ours.yaml").write_text(CLUSTER.replace("2.0e-6", "9.0e-6"))
    else:
        weights("start.npz", 1.0)


@pytest.mark.parametrize("key", KEYS)
def test_resume_refuses_a_changed_file(scalebench, key):
    scalebench(*RUN, *FILES)
    before = sha256(KEYS[key])
    row = load("results/mine").runs.iloc[0]
    assert [row[name] for name in KEYS] == [sha256(file) for file in KEYS.values()]
    kept = load_study(Path("results/mine/study.yaml"), {}, [])
    assert [getattr(kept, name) for name in KEYS] == [
        sha256(file) for file in KEYS.values()
    ]
    change(key)
    more = (*RUN, *FILES, "--repetitions", "2")
    said = scalebench(*more, code=2)
    assert re.search(rf"{key} .*{before[:12]}, .*{sha256(KEYS[key])[:12]}", said)
    assert len(load("results/mine").runs) == 1
    said = scalebench("run", "results/mine/study.yaml", "--repetitions", "2", code=2)
    assert re.search(
        rf"{re.escape(KEYS[key])} has changed .*sha256 {before[:12]}", said
    )
    assert said.count("\n") == 1
    scalebench(*more, "--new")
    assert len(load("results/mine-2").runs) == 2
    # a flag names another file
    scalebench("run", "results/mine/study.yaml", "--name", "theirs", *FILES)


def test_file_changed_during_the_study_fails_the_run(scalebench):
    stated = {
        "model": "net.py:build",
        "dataset": "wine",
        "init_weights": "start.npz",
        "cluster": "ours.yaml",
    }
    stated |= {"device_step_time": 0.002, "workers": [1, 2], "execution": "virtual"}
    run = plan_study(load_study(None, stated, [])).sweep.runs[0]
    require_unchanged(run)
    Path("net.py").write_text(OTHER)
    with pytest.raises(
        RunError, match=r"^net\.py has changed .*put it back, or begin anew"
    ):
        require_unchanged(run)
    Path("net.py").write_text(NET)
    change("cluster_sha256")
    with pytest.raises(RunError, match=r"^ours\.yaml has changed"):
        require_unchanged(run)
    Path("ours.yaml").write_text(CLUSTER)
    Path("start.npz").unlink()
    with pytest.raises(RunError, match=r"cannot read start\.npz"):
        require_unchanged(run)


def write_data(most=6):
    lines = [
        "a,b,y",
        *(
            f"{row % 7 if row % 7 < 6 else most},{row % 5},{row % 2}"
            for row in range(60)
        ),
    ]
    Path("mine.csv").write_text("\n".join(lines) + "\n")


DATA = ("run", "--name", "mine", "--dataset", "csv", "--data-dir", ".", *RUN[5:])


def test_resume_refuses_changed_data(scalebench):
    write_data()
    scalebench(*DATA)
    before = load("results/mine").runs["dataset_sha256"].iloc[0]
    assert load_study(Path("results/mine/study.yaml"), {}, []).dataset_sha256 == before
    assert "1 run, 1 done" in scalebench(*DATA, "--dry-run")
    write_data(most=9)
    more = (*DATA, "--workers", "1,2", "--strategy", "allreduce")
    for words in (more, (*more, "--dry-run"), (*more, "--full")):
        said = scalebench(*words, code=2)
        assert re.search(rf"dataset_sha256 .*{before[:12]}", said)
        assert said.count("\n") == 1
    kept = ("run", "results/mine/study.yaml", "--repetitions", "2")
    said = scalebench(*kept, code=2)
    assert re.search(rf"mine\.csv changed .*sha256 {before[:12]}.* --new\b", said)
    assert len(load("results/mine").runs) == 1
    scalebench(*kept, "--new")
    assert load("results/mine-2").runs["dataset_sha256"].nunique() == 1
    assert load("results/mine-2").runs["dataset_sha256"].iloc[0] != before
    write_data()
    assert "1 done" in scalebench(*DATA, "--dry-run"), (
        "the same data again are the same study"
    )


def test_rows_of_other_data_are_refused_also_without_a_checksum_in_the_study(
    scalebench,
):
    write_data()
    scalebench(*DATA)
    path = Path("results/mine/study.yaml")
    path.write_text(
        "".join(
            line
            for line in path.read_text().splitlines(True)
            if "dataset_sha256" not in line
        )
    )
    assert "1 done" in scalebench(*DATA, "--dry-run")
    write_data(most=9)
    assert "in 1 row, is " in scalebench(*DATA, code=2)


def test_rows_of_different_data_are_in_no_table(scalebench, capsys):
    write_data()
    scalebench(*DATA)
    write_data(most=9)
    scalebench(
        *DATA,
        "--name",
        "other",
        "--strategy",
        "allreduce",
        "--workers",
        "1,2",
        "--set",
        "seed=5",
    )
    first, second = Path("results/mine/runs.csv"), Path("results/other/runs.csv")
    first.write_text(first.read_text() + second.read_text().partition("\n")[2])
    results = load("results/mine")
    assert len(results.runs) == 3, "those of the other data"
    (note,) = results.notes
    assert re.match(r"left out 1 run .*dataset_sha256", note)
    for words in (
        ("table", "results/mine"),
        ("compare", "results/mine", "results/other", "--fail-on", "missing"),
    ):
        with pytest.raises(SystemExit) as end:
            main([*words], prog_name="scalebench")
        assert end.value.code == 0
        assert note in capsys.readouterr().err
    assert json.loads(scalebench("status", "results/mine", "--json"))["other_data"] == 1
    assert "dataset_sha256" in scalebench("status", "results/mine")
    found = check(Path("results/mine")).findings
    assert [one.rule for one in found if "dataset_sha256 is" in one.what] == [
        "mixed-configurations"
    ]


def test_stated_checksum_is_enforced(scalebench):
    stated = {"model": "net.py:build", "model_sha256": sha256("net.py")}
    assert pinned(load_study(None, stated, [])).model_sha256 == sha256("net.py")
    with pytest.raises(ModelError, match="has changed since"):
        pinned(load_study(None, stated | {"model_sha256": "0" * 64}, []))
    assert (
        pinned(
            load_study(None, {"model": "mlp", "model_sha256": "0" * 64}, [])
        ).model_sha256
        is None
    )


def test_rows_of_different_file_contents_are_separated(scalebench):
    scalebench(*RUN, *FILES)
    Path("net.py").write_text(OTHER)
    scalebench(*RUN, *FILES, "--name", "other")
    with pytest.raises(ResultsError, match="model_sha256 is "):
        compare_studies(load("results/mine"), load("results/other"))
    first, second = Path("results/mine/runs.csv"), Path("results/other/runs.csv")
    first.write_text(first.read_text() + second.read_text().partition("\n")[2])
    assert len(load("results/mine").runs) == 1
    found = check(Path("results/mine")).findings
    assert [one.rule for one in found if "model_sha256 is" in one.what] == [
        "mixed-configurations"
    ]


def test_artifact_finds_files_from_any_folder(scalebench, tmp_path, monkeypatch):
    scalebench(*RUN, *FILES)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    made = write_artifact(Path("../results/mine"), tmp_path / "out", PaperFile())
    assert sorted(path.name for path in (made.folder / "inputs").iterdir()) == [
        "net.py",
        "ours.yaml",
        "start.npz",
    ]
    assert made.description.shipment.missing == []


def test_artifact_ships_the_files_that_ran_without_credentials(
    scalebench, tmp_path, monkeypatch
):
    monkeypatch.setenv("USER", "nn")  # called as a module in the code is
    secret = "# https://carla:pw@example.org\n"
    Path("net.py").write_text(secret + NET)
    scalebench(*RUN, *FILES)
    made = write_artifact(Path("results/mine"), tmp_path / "out", PaperFile())
    inputs, records = made.folder / "inputs", made.folder / "results" / "mine"
    assert (inputs / "net.py").read_text() == secret.replace(
        "carla:pw", "<credentials>"
    ) + NET
    kept = load_study(records / "study.yaml", {}, [])
    row = load(records).runs.iloc[0]
    for name, file in KEYS.items():
        assert getattr(kept, name) == row[name] == sha256(inputs / file), (
            "what was hidden is another content"
        )
    change("model_sha256")
    made = write_artifact(Path("results/mine"), tmp_path / "again", PaperFile())
    assert sorted(path.name for path in (made.folder / "inputs").iterdir()) == [
        "ours.yaml",
        "start.npz",
    ]
    assert any(one.startswith("inputs/net.py was not found") for one in made.remarks)
    change("cluster_sha256")
    made = write_artifact(Path("results/mine"), tmp_path / "third", PaperFile())
    assert any(one.startswith("inputs/ours.yaml was not found") for one in made.remarks)
