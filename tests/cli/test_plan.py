"""`scalebench plan`: its answer, the study that it writes, and what it refuses."""

from __future__ import annotations

import csv
import re
import subprocess
import sys

import pytest
import yaml

from scalebench.analysis import load
from tests.facts import together

VIT = (
    "plan",
    "vit_b16",
    "--cluster",
    "juwels-booster",
    "--device",
    "a100-40gb",
    "--roofline",
)


def test_one_sentence_answers_and_each_kind_has_a_row(invoke):
    said = invoke(*VIT, "--devices", 8, "--batch", 64)
    first, second, third, fourth, *rest = said.splitlines()
    assert re.match(
        r"vit_b16 on 8 a100-40gb at a global batch of 64: .* is the fastest of \d+ layouts, .* a worker;",
        first,
    )
    assert "ends of the intervals" in second
    assert third.startswith("adaptive shares")
    assert "Deciding one number after the other" in fourth
    kinds = (
        "ddp",
        "fsdp",
        "tensor",
        "model_parallel",
        "pipeline",
        "hybrid",
        "adaptive",
    )
    rows = [line for line in rest if line.startswith(kinds)]
    assert [sum(line.startswith(name) for line in rows) for name in kinds] == [
        1,
        3,
        1,
        1,
        2,
        1,
        1,
    ]
    assert sum(bool(re.match(r" *\d  (patches|blocks)", line)) for line in rest) > 1, (
        "stages"
    )


def test_a_plan_imports_only_what_it_needs():
    """Importing sympy, for a division on the meta device, took half a second, and the other strategies as much."""
    unneeded = ("sympy", "pandas", "scipy", "matplotlib", "scalebench.strategies.daso")
    program = (
        "import sys; from scalebench.cli.main import main\n"
        f"main({[*VIT, '--devices', '8', '--batch', '64', '--quiet']!r}, standalone_mode=False)\n"
        f"sys.exit(', '.join(name for name in {unneeded} if name in sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.stderr.strip() == ""
    assert done.stdout.startswith("vit_b16 on 8 a100-40gb")


def test_adaptive_shares_the_layers_whose_gradients_are_large(invoke):
    """The layers behind the convolutions of VGG-16 hold nine tenths of its parameters."""
    place = (
        "--cluster",
        "juwels-booster",
        "--device",
        "a100-40gb",
        "--devices",
        8,
        "--batch",
        64,
        "--format",
        "csv",
    )
    layouts, *_, components = invoke("plan", "vgg16", *place).split("\n\n")
    assert layouts.startswith("Layout")
    rows = list(csv.reader(components.strip().splitlines()))
    shared = [dict(zip(rows[0], row, strict=True)) for row in rows[1:]]
    assert [(row["From"], int(row["Shared by"])) for row in shared] == [
        ("features.0", 1),
        ("classifier.0", 8),
    ]


def test_a_memory_cap_computes_again_or_is_refused(invoke):
    said = invoke(*VIT, "--devices", 4, "--batch", 256, "--memory", "1.2GiB")
    assert "do not fit into 1.2 GiB" in said
    assert "recompute=" in said
    assert "computed again" in said
    refused = invoke(*VIT, "--devices", 4, "--batch", 256, "--memory", "0.2", code=2)
    assert re.search(
        r"--memory: no layout on 4 devices fits into 0.2 GiB: the least is \S+ GiB a worker, by ",
        refused,
    )
    said = invoke(*VIT, "--devices", 4, "--batch", 256, "--memory", "4GB", code=2)
    assert together(" ".join(said.split()), "expected GiB", "40GiB", "got '4GB'")


def test_a_study_is_written_where_a_pipe_takes_the_first_line(tmp_path):
    study = tmp_path / "study.yaml"
    plan = subprocess.Popen(
        [sys.executable, "-m", "scalebench", *VIT, "--devices", "4", "--batch", "256",
         "--write", str(study)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    plan.stdout.close()
    plan.wait()
    assert study.exists()


def test_an_optimizer_of_whole_layers_leaves_out_what_shares_them(invoke):
    said = invoke(*VIT, "--devices", 4, "--batch", 32, "--optimizer", "lamb")
    assert "optimizer lamb needs whole ones" in said
    rows = {
        line.split()[0] for line in said.splitlines() if "GiB" in line or "MiB" in line
    }
    assert rows >= {"ddp", "pipeline", "model_parallel"}
    assert not rows & {"fsdp", "tensor", "hybrid", "adaptive"}


@pytest.mark.parametrize("table", [True, False])
def test_the_written_study_runs(invoke, tmp_path, monkeypatch, table):
    monkeypatch.chdir(tmp_path)
    place = (
        "--cluster",
        "juwels-booster",
        "--devices",
        4,
        "--batch",
        32,
        "--write",
        "study.yaml",
    )
    if table:
        invoke("plan", "vit_b16", "--device", "a100-40gb", "--roofline", *place)
    else:
        (tmp_path / "net.py").write_text(
            "from torch import nn\n\ndef build(input_shape, outputs):\n"
            "    hidden = nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU()\n"
            "    return nn.Sequential(*hidden, nn.Linear(16, outputs))\n"
        )
        invoke("plan", "net.py:build", "--input", "12", "--step-time", 0.01, *place)
    study = yaml.safe_load((tmp_path / "study.yaml").read_text())
    if not table:
        study["execution"] = "virtual"
        (tmp_path / "study.yaml").write_text(yaml.safe_dump(study))
    invoke("run", "study.yaml", "--jobs", "1")
    runs = load(tmp_path / "results" / study["name"]).completed
    assert len(runs) == len(study["strategies"])
    staged = [each["pipeline"] for each in study["strategies"] if "pipeline" in each]
    assert [each.get("schedule") == "gpipe" for each in staged].count(True) == 1
    assert all(
        isinstance(layers, int) for each in staged for layers in each["balance"]
    ), "as planned, and no rule"
    meshes = runs[["data_parallel", "pipeline_parallel", "tensor_parallel"]]
    assert set(meshes.prod(axis=1)) == {1, 4}
    assert set(runs["batch_global"]) == {32}


def test_a_stated_step_charges_the_written_study_too(invoke, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(NET)
    invoke(
        *("plan", "net.py:build", "--input", 16, "--cluster", "this-machine"),
        *("--devices", 2, "--batch", 8, "--step-time", 0.02, "--step-batch", 16),
        *("--write", "study.yaml"),
    )
    study = yaml.safe_load((tmp_path / "study.yaml").read_text())
    assert study["device_step_time"] == pytest.approx(0.01)


NET = """
from torch import nn

class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x):
        return x + self.inner(x)

def build(input_shape, outputs):
    return nn.Sequential(Residual(), Residual(), nn.Linear(16, outputs))

class Uncut(nn.Module):
    def __init__(self, input_shape, outputs):
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, outputs)

    def forward(self, x):
        return self.second(self.first(x if x.shape[1] == 16 else -x))
"""


def test_layouts_of_an_own_model_are_those_that_it_can_be_divided_into(
    invoke, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(NET)
    place = (
        "--input",
        "16",
        "--step-time",
        0.01,
        "--cluster",
        "juwels-booster",
        "--devices",
        2,
        "--batch",
        32,
    )
    rows = invoke("plan", "net.py:build", *place).splitlines()
    assert any(row.startswith("tensor ") for row in rows)
    assert any(row.startswith("pipeline ") for row in rows)
    rows = invoke(
        "plan", "net.py:build", *place[:-4], "--devices", 4, "--batch", 32
    ).splitlines()
    assert not any(row.startswith("hybrid ") for row in rows), (
        "the first stage has nothing that torch modules share"
    )
    said = invoke("plan", "net.py:Uncut", *place)
    assert re.search(
        r"layouts that divide the model are left out: model net.py:Uncut: Uncut cannot be cut",
        said,
    )
    assert not re.search(r"^(tensor|pipeline|fsdp shard 2)", said, re.MULTILINE)
