"""Secrets, user name and home in the environment of a study: no file that it writes contains them."""

from __future__ import annotations

import csv
import re
import zipfile
import zlib
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from scalebench.calibration.calibration_file import (
    Calibration,
    Measurement,
    read_calibration,
)
from scalebench.cli.main import main
from scalebench.cluster.cluster_file import preset
from scalebench.comm import engines
from scalebench.study.load import load_study

SECRET, PERSON = "hf_0123456789abcdef", "carlotta"
# in values of variables whose names say nothing, or begin as those that are recorded
GIVEN = "Qz4vBn8wXr2k"
SHORT = "zq7Kx"  # of a secret variable, too short to be looked for in every text
MODEL = """\
import os
import sys
import torch

class Net(torch.nn.Linear):
    def forward(self, x):
        if os.path.exists("broken") and len(x) > 4:
            print(f"{os.environ['USER']} has", os.environ["HF_TOKEN"], flush=True)
            print("in", __file__, file=sys.stderr, flush=True)
            raise OSError(f"cannot open {__file__} with {os.environ['HF_TOKEN']}")
        return super().forward(x)

def build(input_shape, outputs):
    return Net(input_shape[0], outputs)
"""
STUDY = (
    *(
        "--dataset",
        "wine",
        "--execution",
        "virtual",
        "--workers",
        "1,2",
        "--epochs",
        "1",
        "--repetitions",
        "2",
    ),
    *("--strategy", "allreduce", "--name", "open", "--jobs", "1"),
)


@pytest.fixture
def home(tmp_path, monkeypatch, machine):
    """The home folder of a user, with a model and a calibration in it, and an environment full of secrets."""
    folder = tmp_path / "home" / PERSON
    folder.mkdir(parents=True)
    (folder / "net.py").write_text(MODEL)
    measured = Measurement(
        model=f"{folder}/net.py:build",
        dtype="float32",
        optimizer="sgd",
        threads_per_worker=1,
        cpu="x",
        cores=2,
        torch="2",
    )
    given = Calibration(
        key="given", measured=measured, tables=machine.tables, engines=machine.engines
    )
    (folder / "given.json").write_text(given.model_dump_json())
    (folder / f"{PERSON}-cluster.yaml").write_text(preset("this-machine").read_text())
    for name, value in {
        "HOME": str(folder),
        "USER": PERSON,
        "LOGNAME": PERSON,
        "HF_TOKEN": SECRET,
        "HOROVOD_SECRET_KEY": SECRET,
        "HOROVOD_DB_PASS": SECRET,
        "GLOO_PWD": SECRET,
        "NCCL_MY_KEY": SECRET,
        "NCCL_TOPO_FILE": f"https://{PERSON}:{SECRET}@host/topo.xml",
        "OMPI_MCA_param": f"{folder}/x",
        "LOADEDMODULES": f"{folder}/modules/gcc",
        "FI_AUTH_KEY": SHORT,
        "FI_PROVIDER": f"verbs;cookie={SHORT}",
        "I_MPI_PIN_TOKEN": SHORT,
        "MPICH_OPTION": f"{folder}/{SHORT}/{SECRET}",
        "SLURM_JOB_PARTITION": f"gpu-{SHORT}",
        "UCX_CMD": f"--token={GIVEN}",
        "OMP_DSN": f"postgres://user:{GIVEN}@h/db?password={GIVEN}",
        "NCCL_COOKIE": f"ghp_{GIVEN}",
        "NCCL_NOTE": f"ghp_{GIVEN}",
        "HOROVOD_JWT": f"eyJhbGciOiJI.{GIVEN}.{GIVEN}",
        "HOROVOD_NOTE": f"eyJhbGciOiJI.{GIVEN}.{GIVEN}",
        "FI_BEARER": f"Bearer {GIVEN}",
        "FI_NOTE": f"Bearer {GIVEN}",
        "UCX_SESSION": GIVEN,
        "UCX_NOTE": f"AKIA{GIVEN.upper()}",
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": "remote.origin.url",
        "GIT_CONFIG_VALUE_0": f"https://{PERSON}:{SECRET}@git.example/{PERSON}/study.git",
    }.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "scratch" / PERSON).mkdir(parents=True)
    np.savez(tmp_path / "scratch" / PERSON / "start.npz", initial=np.zeros(3 * 14))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return folder


def call(*words: str) -> object:
    with pytest.raises(SystemExit) as end:
        main.main([*words], prog_name="scalebench")
    return end.value.code


def start(home: Path) -> Path:
    """Initial weights in a folder of the user's that is not at home."""
    return home.parents[1] / "scratch" / PERSON / "start.npz"


def run(home: Path) -> object:
    """A study with a calibration of a model at home, on a cluster whose file is named after its owner."""
    words = (
        "--model",
        f"{home}/net.py:build",
        "--calibration",
        f"{home}/given.json",
        "--init-weights",
        start(home),
    )
    cluster = (
        "--cluster",
        f"{home}/{PERSON}-cluster.yaml",
        "--set",
        f"description=with ghp_{GIVEN}, in {home}/x",
    )
    return call("run", *STUDY, *map(str, words), *cluster)


def test_records_hold_no_secret_and_no_user_name(home):
    assert run(home) == 0
    assert run(home) == 0, "it goes on with what it wrote"
    files = [path for path in Path("results").rglob("*") if path.is_file()]
    assert {"runs.csv", "epochs.csv", "study.yaml", "planned.json"} <= {
        path.name for path in files
    }
    with Path("results/open/runs.csv").open(newline="") as table:
        named = {row["provenance"] for row in csv.DictReader(table)}
    assert named == {path.stem for path in files if path.parent.name == "provenance"}
    assert "UCX_NOTE" in "".join(
        Path(f"results/open/provenance/{name}.json").read_text() for name in named
    )
    for path in files:
        assert SECRET not in path.read_text(), path
        assert SHORT not in path.read_text(), path
        assert GIVEN.lower() not in path.read_text().lower(), path
        assert PERSON not in path.read_text(), path
    kept = load_study(Path("results/open/study.yaml"), {}, [])
    assert (str(kept.model), kept.init_weights) == (f"{home}/net.py:build", start(home))
    assert kept.cluster == f"{home}/{PERSON}-cluster.yaml"
    assert kept.description == "with <secret>, in ~/x"
    measured = read_calibration(Path("results/open/calibration.json")).measured
    assert measured is not None
    assert measured.model == f"{home}/net.py:build"


def test_error_of_a_failed_run_is_kept_without_secret_and_user_name(home):
    Path("broken").touch()
    assert run(home) == 1
    content = Path("results/open/runs.csv").read_text()
    assert "cannot open ~/net.py with <secret>" in content
    assert SECRET not in content
    assert PERSON not in content


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below `folder`, those inside of archives and compressed streams too."""
    found = {}
    for path in (path for path in folder.rglob("*") if path.is_file()):
        found[str(path)] = data = path.read_bytes()
        if path.suffix == ".zip" or path.suffix == ".whl":
            with zipfile.ZipFile(path) as archive:
                found |= {
                    f"{path}!{name}": archive.read(name) for name in archive.namelist()
                }
        if path.suffix == ".pdf":
            for number, stream in enumerate(
                re.findall(rb"stream\r?\n(.*?)\r?\nendstream", data, re.DOTALL)
            ):
                with suppress(zlib.error):
                    found[f"{path}!{number}"] = zlib.decompress(stream)
    return found


def test_figures_reports_artifacts_exports_and_timelines_hold_no_secret_and_no_user_name(
    home,
):
    """Names of packages and files are left out: they are no secrets, and a user name may equal one."""
    assert run(home) == 0
    folder = "results/open"
    (home / "paper.yaml").write_text("title: Ours\n")
    short = (
        "--dataset",
        "wine",
        "--workers",
        "2",
        "--epochs",
        "1",
        "--strategy",
        "allreduce",
        "--name",
        "open",
    )
    for words in (
        ("check", folder),
        ("status", folder),
        ("plot", folder, "--figure", "strong-scaling"),
        ("report", folder),
        ("artifact", folder, "--paper", f"{home}/paper.yaml"),
        ("export", folder, "--json", "out/open.json"),
        ("export", folder, "--parquet", "out"),
        ("export", folder, "--mlflow-dir", "out/mlruns"),
        (
            "trace",
            *short,
            "--model",
            f"{home}/net.py:build",
            "--set",
            f"calibration={home}/given.json",
        ),
    ):
        assert call(*words) in (0, None) or words[0] == "check", words
    found = contents(Path())
    names = {Path(name).name for name in found}
    assert {
        "report.html",
        "ro-crate-metadata.json",
        "open-artifact.zip",
        "open.json",
        "runs.parquet",
    } <= names
    assert any("trace" in name for name in names)
    for where, data in found.items():
        assert SECRET.encode() not in data, where
        assert SHORT.encode() not in data, where
        assert GIVEN.lower().encode() not in data.lower(), where
        assert PERSON.encode() not in data, where


@pytest.mark.skipif(engines.available("mpi") is not None, reason="no MPI here")
def test_logs_of_failed_ranks_and_printed_text_hold_no_secret_and_no_user_name(
    home, capfd
):
    Path("broken").touch()
    alone = (
        "--strategy",
        "serial",
        "--workers",
        "1",
        "--repetitions",
        "1",
        "--execution",
        "native",
    )
    assert (
        call(
            "run", *STUDY, *alone, "--engine", "mpi", "--model", f"{home}/net.py:build"
        )
        == 1
    )
    printed = "".join(capfd.readouterr())
    files = [path for path in Path("results").rglob("*") if path.is_file()]
    logged = {
        path.name: path.read_text()
        for path in files
        if path.name in ("stdout.txt", "stderr.txt")
    }
    assert not [path for path in files if path.name == "heartbeats"], (
        "it holds the names of hosts"
    )
    assert "<user> has <secret>" in logged["stdout.txt"]
    assert "in ~/net.py" in logged["stderr.txt"]
    assert "cannot open ~/net.py with <secret>" in " ".join(printed.split())
    texts = {"the terminal": printed} | {
        str(path): path.read_text(errors="replace") for path in files
    }
    for where, text in texts.items():
        assert SECRET not in text, where
        assert PERSON not in text, where
