"""Packing and verifying artifacts."""

from __future__ import annotations

import base64
import csv
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from functools import partial
from pathlib import Path

import pytest
import yaml

from scalebench import artifact
from scalebench.artifact import write_artifact, write_wheel
from scalebench.artifact.artifact_description import PaperFile, load_paper
from scalebench.artifact.verification import verify_artifact
from scalebench.calibration.calibration_file import Calibration
from scalebench.cluster.cluster_file import load_cluster
from scalebench.errors import ResultsError, StudyError
from scalebench.figures import PlotRequest, plot_folder
from scalebench.figures.plotting import Drawn
from scalebench.records.progress import Planned, begun_in, keep_planned
from scalebench.records.store import Store
from scalebench.study.load import load_study
from tests.facts import together
from tests.records_factory import keep_study, study_rows

PLANTED = "hf_s3cr3t-0123456789"
PROVENANCE = {
    "cpu": {"model": "a CPU", "usable_cores": 97},
    "memory_mib": 2048,
    "python": "3.11.7",
    "packages": {
        "numpy": "2.4.6",
        "torch": "2.13.0+cpu",
        "scalebench": "0.1.0",
        "horovod": "0.28.1",
    },
}
STUDY = {
    "name": "mine",
    "workers": [1, 2],
    "dataset": "wine",
    "model": "mlp",
    "epochs": 2,
}


@pytest.fixture(autouse=True)
def no_figures(monkeypatch):
    """Draw nothing, to save time, except in tests with `one_figure`."""
    left_out = [Drawn("time-reduction", [], "left out")]
    monkeypatch.setattr("scalebench.artifact.plot_folder", lambda *_, **__: left_out)


@pytest.fixture(autouse=True)
def one_file(monkeypatch):
    """Pack one file of the package, to save time, except in tests with `whole_package`."""
    all_files = artifact._package_files
    monkeypatch.setattr(artifact, "_package_files", lambda: [("scalebench/x.py", b"")])
    return all_files


@pytest.fixture
def whole_package(monkeypatch, one_file):
    """Pack the package as it is."""
    monkeypatch.setattr(artifact, "_package_files", one_file)


@pytest.fixture
def one_figure(monkeypatch, no_figures):
    """Draw one figure in one format."""
    monkeypatch.setattr(
        "scalebench.figures.plotting.default_figures", lambda: ["time-reduction"]
    )
    for room in ("artifact", "artifact.verification"):
        monkeypatch.setattr(
            f"scalebench.{room}.plot_folder",
            partial(plot_folder, request=PlotRequest(formats=("svg",))),
        )


@pytest.fixture
def study(tmp_path, monkeypatch):
    """`study(study={...}, error=...)` writes records whose texts hold a home, a user and a secret."""
    home = tmp_path / "home" / "carla"
    home.mkdir(parents=True)
    for name, value in {
        "HOME": str(home),
        "USER": "carla",
        "HF_TOKEN": PLANTED,
    }.items():
        monkeypatch.setenv(name, value)

    def make(
        study: dict[str, object] | None = None, *, error: str = "", **changes: object
    ) -> Path:
        folder = home / "results" / "mine"
        with Store(folder, fsync=False) as store:
            keep_study(store.folder, STUDY | (study or {}))
            store.keep_provenance(PROVENANCE)
            for run, epochs in study_rows(
                workers=(1, 2), native_workers=(1,), repetitions=2
            ):
                said = {
                    "study": "mine",
                    "started_utc": f"2026-11-21T08:{run.run_order:02d}:00.000+00:00",
                    **changes,
                }
                store.append(run.model_copy(update=said), epochs)
            failed = study_rows(
                strategies=("allreduce",),
                workers=(4,),
                native_workers=(),
                repetitions=1,
            )[0][0]
            said = {
                "study": "mine",
                "status": "failed",
                "error": error or "it broke",
                "train_s": None,
                **changes,
            }
            store.append(failed.model_copy(update=said))
        return folder

    return make


def read(folder: Path) -> dict[str, bytes]:
    return {
        file.relative_to(folder).as_posix(): file.read_bytes()
        for file in folder.rglob("*")
        if file.is_file()
    }


@pytest.mark.usefixtures("one_figure")
def test_unpacked_zip_verifies_with_the_same_figures(study, tmp_path):
    made = write_artifact(study(), tmp_path / "out", PaperFile())
    with zipfile.ZipFile(made.archive) as archive:
        names = archive.namelist()
        assert names == sorted(names)
        archive.extractall(tmp_path / "fresh")
        modes = {
            entry.filename: entry.external_attr >> 16 & 0o777
            for entry in archive.infolist()
        }
    root = tmp_path / "fresh" / "mine-artifact"
    assert modes["mine-artifact/reproduce.sh"] == 0o755
    assert set(modes.values()) == {0o755, 0o644}
    assert read(root) == read(made.folder)
    subprocess.run(
        ["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=root, check=True
    )
    listed = {
        line.split("  ")[1] for line in (root / "SHA256SUMS").read_text().splitlines()
    }
    assert listed == set(read(root)) - {"SHA256SUMS"}
    verdicts = verify_artifact(root)
    assert {verdict.figure for verdict in verdicts} == {
        file.stem for file in (root / "plots" / "mine").glob("*.csv")
    }
    assert not [verdict for verdict in verdicts if verdict.fault or not verdict.cells]


@pytest.mark.usefixtures("one_figure")
def test_verify_accepts_escaped_and_unescaped_formula_texts(
    study, tmp_path, monkeypatch
):
    """Artifacts packed before formulas were escaped verify as well."""
    # has no baseline
    monkeypatch.setattr(
        "scalebench.figures.plotting.default_figures", lambda: ["strong-scaling"]
    )
    folder = write_artifact(study(strategy="=cmd()"), tmp_path, PaperFile()).folder
    assert not [verdict for verdict in verify_artifact(folder) if verdict.fault]
    sums, named = folder / "SHA256SUMS", 0
    for figure in (folder / "plots" / "mine").glob("*.csv"):
        told = figure.read_bytes()
        assert b",=cmd()" not in told
        named += told.count(b",'=cmd()")
        figure.write_bytes(told.replace(b"'=", b"="))
        before, now = (
            hashlib.sha256(data).hexdigest() for data in (told, figure.read_bytes())
        )
        sums.write_text(sums.read_text().replace(before, now))
    assert named
    assert not [verdict for verdict in verify_artifact(folder) if verdict.fault]


@pytest.mark.parametrize("execution", ["native", "paced"])
def test_oversubscribed_study_states_no_expected_time(tmp_path, execution):
    with Store(tmp_path / "mine", fsync=False) as store:
        for run, epochs in study_rows(workers=(1, 2), native_workers=(), repetitions=1):
            marked = {"execution": execution, "engine": "mpi", "oversubscribed": True}
            store.append(run.model_copy(update=marked), epochs)
    folder = write_artifact(tmp_path / "mine", tmp_path, PaperFile()).folder
    said = (folder / "README.md").read_text(encoding="utf-8")
    assert together(said, "every", "oversubscribed")
    assert together(said, "No time", "every", "oversubscribed")
    crate = json.loads((folder / "ro-crate-metadata.json").read_text(encoding="utf-8"))
    (timed,) = [one for one in crate["@graph"] if one["@id"].endswith("durations.json")]
    assert timed["description"] == "How long the commands on the study took, in seconds"


@pytest.mark.usefixtures("one_figure")
def test_verify_finds_changed_row_and_changed_file(study, tmp_path):
    folder = write_artifact(study(), tmp_path, PaperFile()).folder
    shutil.copytree(folder, tmp_path / "forged")
    forged, table = tmp_path / "forged", "results/mine/runs.csv"
    rows = list(csv.reader((forged / table).read_text(encoding="utf-8").splitlines()))
    column = rows[0].index("train_s")
    baseline = next(row for row in rows if "allreduce" in row)  # of the one figure
    baseline[column] = str(2 * float(baseline[column]))
    with (forged / table).open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows(rows)
    with pytest.raises(
        ResultsError, match=r"results/mine/runs.csv is not as it was packed"
    ):
        verify_artifact(forged)
    digest = hashlib.sha256((forged / table).read_bytes()).hexdigest()
    sums = (forged / "SHA256SUMS").read_text()
    (forged / "SHA256SUMS").write_text(re.sub(rf"\w+(?=  {table})", digest, sums))
    assert any(verdict.fault for verdict in verify_artifact(forged))


@pytest.mark.usefixtures("one_figure")
def test_same_records_give_same_bytes(study, tmp_path):
    folder = study()
    first, second = (
        write_artifact(folder, tmp_path / name, PaperFile()).archive.read_bytes()
        for name in ("one", "two")
    )
    assert first == second


@pytest.mark.usefixtures("one_figure")
def test_first_packing_times_drawing_and_later_ones_reuse_it(study, tmp_path):
    folder = study()
    assert not (folder / "durations.json").exists()
    first = write_artifact(folder, tmp_path / "first", PaperFile())
    assert first.description.minutes.analysis == "1"
    assert not [remark for remark in first.remarks if "drawing" in remark]
    kept = json.loads((folder / "durations.json").read_text())
    assert kept.keys() == {"plot"}
    second = write_artifact(folder, tmp_path / "second", PaperFile())
    assert first.archive.read_bytes() == second.archive.read_bytes()
    (folder / "durations.json").write_text('{"plot": 200.0}')
    assert (
        write_artifact(
            folder, tmp_path / "third", PaperFile()
        ).description.minutes.analysis
        == "4"
    )


@pytest.mark.parametrize(
    ("cluster", "stated"),
    [("juwels-booster", True), ("this-machine", False), ("no.yaml", False)],
)
def test_shipment_is_stated_only_for_stated_clusters(study, tmp_path, cluster, stated):
    shipment = write_artifact(
        study({"cluster": cluster}), tmp_path, PaperFile()
    ).description.shipment
    assert (shipment.is_stated, shipment.has_calibration) == (stated, False)


def test_artifact_is_replaced_unless_changed_by_hand(study, tmp_path):
    folder = study()
    made = write_artifact(folder, tmp_path, PaperFile())
    assert (
        write_artifact(folder, tmp_path, PaperFile(title="Another")).description.title
        == "Another"
    )
    (made.folder / "README.md").write_text("mine")
    with pytest.raises(
        ResultsError, match=r"README.md was changed by hand and would be lost"
    ):
        write_artifact(folder, tmp_path, PaperFile())
    assert (made.folder / "README.md").read_text() == "mine"


@pytest.mark.usefixtures("one_figure")
@pytest.mark.usefixtures("whole_package")
def test_artifact_holds_no_user_host_home_or_secret(study, tmp_path):
    home, host = os.environ["HOME"], platform.node()
    own = Path(home) / "models" / "net.py"
    own.parent.mkdir()
    own.write_text(
        f"# by carla on {host}, {home}/models, token {PLANTED}\ndef build(shape, outputs): ...\n"
    )
    error = (
        f"rank 1 of carla on {host}: cannot read {home}/x or /home/dora/y "
        f"with https://carla:pw@host/z and {PLANTED}"
    )
    folder = study(
        {
            "model": f"{own}:build",
            "data_dir": f"{home}/data",
            "description": f"see {home}/notes",
        },
        error=error,
        model=f"{own}:build",
    )
    made = write_artifact(folder, tmp_path / "out", PaperFile())
    with zipfile.ZipFile(made.archive) as archive:
        texts = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(next((made.folder / "software").glob("*.whl"))) as wheel:
        texts |= {name: wheel.read(name) for name in wheel.namelist()}
    hidden = [
        home,
        str(tmp_path),
        PLANTED,
        "/home/dora",
        "carla:pw",
        "by carla",
        "of carla",
        f"on {host}",
    ]
    for name, data in texts.items():
        for word in hidden:
            assert word.encode() not in data, (name, word)
    rows = (made.folder / "results" / "mine" / "runs.csv").read_text()
    assert (
        "rank 1 of <user> on <host>: cannot read ~/x or ~/y with https://<credentials>@host/z and <secret>"
        in rows
    )


def test_inputs_are_copied_and_renamed_in_study_and_rows(study, tmp_path, machine):
    home = Path(os.environ["HOME"])
    for name in ("net.py", "our cluster.yaml", "start.npz"):
        (home / name).write_text("x = 1\n")
    given = Calibration(
        key="given", tables=machine.tables, engines=machine.engines
    ).model_dump_json()
    (home / "given.json").write_text(given)
    places = {
        "model": f"{home}/net.py:build",
        "cluster": f"{home}/our cluster.yaml",
        "init_weights": f"{home}/start.npz",
        "calibration": f"{home}/given.json",
        "data_dir": f"{home}/data",
    }
    folder = study(places, model=places["model"], cluster=places["cluster"])
    keep_planned(folder, [Planned("r", "h", "virtual")], begun_in=tmp_path)
    assert begun_in(folder) == tmp_path
    root = write_artifact(folder, tmp_path / "out", PaperFile()).folder
    assert begun_in(root / "results" / "mine") == root.resolve(), (
        "there, and not at the author's, begin its paths"
    )
    shipped = load_study(root / "results" / "mine" / "study.yaml", {}, [])
    assert shipped.model.name == "inputs/net.py:build"
    assert shipped.cluster == "inputs/our-cluster.yaml"
    assert str(shipped.init_weights) == "inputs/start.npz"
    assert str(shipped.data_dir) == "inputs/data"
    assert {path.name for path in (root / "inputs").iterdir()} == {
        "net.py",
        "our-cluster.yaml",
        "start.npz",
    }
    assert (root / "results" / "mine" / "calibration.json").read_text() == given
    rows = list(
        csv.DictReader(
            (root / "results" / "mine" / "runs.csv")
            .read_text(encoding="utf-8")
            .splitlines()
        )
    )
    assert {(row["model"], row["cluster"]) for row in rows} == {
        ("inputs/net.py:build", "inputs/our-cluster.yaml")
    }
    script = (root / "reproduce.sh").read_text()
    assert '--calibration "results/$study/calibration.json"' in script
    assert together(script, "data set", "inputs/data")


def test_rerun_uses_node_size_of_the_recorded_machine(study, tmp_path):
    root = write_artifact(
        study({"cluster": "this-machine"}), tmp_path / "out", PaperFile()
    ).folder
    assert (
        "options+=(--cluster inputs/this-machine.yaml)"
        in (root / "reproduce.sh").read_text()
    )
    node = load_cluster(root / "inputs" / "this-machine.yaml").node
    assert (node.cores, node.workers_per_node, node.memory_gib) == (97, 97, 2.0)
    assert load_cluster(root / "inputs" / "this-machine.yaml").compute == "this-machine"


def test_constraints_pin_recorded_versions(study, tmp_path):
    made = write_artifact(study(), tmp_path, PaperFile())
    pins = (made.folder / "constraints.txt").read_text().splitlines()
    assert pins == [
        "# Python 3.11.7",
        "horovod==0.28.1",
        "numpy==2.4.6",
        "torch==2.13.0",
    ]
    light = (made.folder / "requirements-analysis.txt").read_text()
    assert "pandas>=" in light
    assert "torch" not in light


def test_hardware_lists_gpus_and_nodes_of_real_runs(study, tmp_path, monkeypatch):
    gpu = {"name": "NVIDIA H100", "driver": "550.54", "memory": "81559 MiB"}
    node = {"cpu": {"model": "another CPU", "usable_cores": 64}}
    monkeypatch.setitem(PROVENANCE, "gpus", [gpu])
    monkeypatch.setitem(PROVENANCE, "nodes", {"cafe": node, "f00d": node})
    (said,) = write_artifact(study(), tmp_path, PaperFile()).description.machines
    assert dict(said)["GPUs"] == "NVIDIA H100 (driver 550.54, 81559 MiB)"
    assert dict(said)["nodes of real runs"] == "2 of another CPU, 64 cores"


@pytest.mark.usefixtures("whole_package")
def test_wheel_installs_with_pip(tmp_path):
    pytest.importorskip("pip")
    wheel = write_wheel(tmp_path)
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
    ]
    subprocess.run([*pip, "--target", tmp_path / "there", wheel], check=True)
    program = "import scalebench, importlib.metadata as m; print(scalebench.__file__, m.version('scalebench'))"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "there")}
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
        cwd=tmp_path,
    )
    assert done.stdout.startswith(str(tmp_path / "there" / "scalebench"))
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        record = next(name for name in names if name.endswith("RECORD"))
        for path, digest, size in csv.reader(
            archive.read(record).decode().splitlines()
        ):
            if path != record:
                data = archive.read(path)
                own = (
                    base64.urlsafe_b64encode(hashlib.sha256(data).digest())
                    .rstrip(b"=")
                    .decode()
                )
                assert (digest, int(size)) == (f"sha256={own}", len(data))
    assert "scalebench/cluster/presets/this-machine.yaml" in names
    assert "scalebench/artifact/templates/artifact.tex.j2" in names
    assert not [name for name in names if "__pycache__" in name]
    assert {entry.date_time for entry in archive.infolist()} == {(1980, 1, 1, 0, 0, 0)}


def test_crate_fulfils_ro_crate_1_2(study, tmp_path):
    paper = PaperFile.model_validate(
        {
            "title": "A paper",
            "license": "CC-BY-4.0",
            "doi": "10.5281/zenodo.1",
            "authors": [
                {"name": "Ada", "orcid": "0000-0002-1825-0097", "affiliation": "There"}
            ],
        }
    )
    folder = write_artifact(study(), tmp_path, paper).folder
    whole = json.loads((folder / "ro-crate-metadata.json").read_text(encoding="utf-8"))
    assert whole["@context"] == "https://w3id.org/ro/crate/1.2/context"
    entities = {entity["@id"]: entity for entity in whole["@graph"]}
    assert len(entities) == len(whole["@graph"])
    descriptor, root = entities["ro-crate-metadata.json"], entities["./"]
    assert descriptor["@type"] == "CreativeWork"
    assert descriptor["about"] == {"@id": "./"}
    assert descriptor["conformsTo"] == {"@id": "https://w3id.org/ro/crate/1.2"}
    assert root["@type"] == "Dataset"
    assert (root["name"], root["datePublished"]) == ("A paper", "2026-11-21")
    assert root["description"]
    assert entities[root["license"]["@id"]]["name"] == "CC-BY-4.0"
    files = set(read(folder)) - {"ro-crate-metadata.json", "SHA256SUMS"}
    assert {part["@id"] for part in root["hasPart"]} == files
    for name in files:
        assert "File" in entities[name]["@type"]
        assert entities[name]["contentSize"] == str((folder / name).stat().st_size)
        assert (
            entities[name]["sha256"]
            == hashlib.sha256((folder / name).read_bytes()).hexdigest()
        )
    linked = set(re.findall(r'"@id": "([^"]+)"', json.dumps(whole)))
    assert linked - set(entities) == {"https://w3id.org/ro/crate/1.2"}


@pytest.mark.usefixtures("one_figure")
def test_paper_file_sets_contributions_and_elements(study, tmp_path):
    path = tmp_path / "paper.yaml"
    said = {
        "contributions": [
            {"text": "It pays", "figures": ["strong-scaling", "time-reduction"]}
        ],
        "elements": {"time-reduction": "Figure 3"},
    }
    path.write_text(yaml.safe_dump(said))
    made = write_artifact(study(), tmp_path / "out", load_paper(path))
    elements = {
        one.figure: (one.paper, one.contributions) for one in made.description.elements
    }
    assert elements == {"time-reduction": ("Figure 3", ("C1",))}
    assert any("no licence is stated" in remark for remark in made.remarks)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (
            "elements: {strong-scalling: Figure 1}",
            "unknown figure 'strong-scalling'; did you mean 'strong-scaling'?",
        ),
        ("titel: x", "did you mean 'title'"),
        ("license: 'free for all!'", "license"),
        ("- a", "expected a mapping"),
    ],
)
def test_invalid_paper_is_refused_in_one_line(tmp_path, text, complaint):
    (tmp_path / "paper.yaml").write_text(text)
    with pytest.raises(StudyError) as error:
        load_paper(tmp_path / "paper.yaml")
    assert complaint in str(error.value)
    assert str(tmp_path) in str(error.value)


def test_records_without_study_cannot_be_rerun(study, tmp_path):
    folder = study()
    (folder / "study.yaml").unlink()
    made = write_artifact(folder, tmp_path / "out", PaperFile())
    assert any("cannot be run again" in remark for remark in made.remarks)
    assert "the study cannot be run again" in (made.folder / "reproduce.sh").read_text()
    subprocess.run(["bash", "-n", made.folder / "reproduce.sh"], check=True)
