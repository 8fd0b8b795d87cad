"""A study in the place of a model: what it trains is read from its file, before and after it ran."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import yaml

from scalebench.analysis.loading import load
from scalebench.calibration import charging
from scalebench.calibration.calibration_file import Calibration
from scalebench.cluster.engine_costs import EngineCost, EngineCosts
from tests.facts import in_order, together

STUDY = {
    "name": "priced",
    "dataset": {"synthetic": {"n_train": 4096, "n_test": 16}},
    "model": {"layers": {"table": "resnet50"}},
    "workers": [1, 8],
    "strategies": ["serial", "allreduce", "local_sgd"],
    "epochs": 6,
    "repetitions": 1,
    "batch_per_worker": 16,
    "execution": "modelled",
    "cluster": "juwels-booster",
    "device_step_time": 0.01,
    "virtual": {"jitter": "none"},
}


@pytest.fixture
def written(tmp_path, monkeypatch):
    """A study's file in a folder of its own, with other keys than the usual."""
    monkeypatch.chdir(tmp_path)

    def write(**keys: object) -> str:
        kept = {
            key: value for key, value in (STUDY | keys).items() if value is not None
        }
        Path("mine.yaml").write_text(yaml.safe_dump(kept))
        return "mine.yaml"

    return write


@pytest.fixture
def predict(invoke):
    """Rows of `scalebench predict`, and what it says."""

    def rows(*words: str) -> tuple[list[dict[str, str]], str]:
        said = invoke("predict", *words, "--csv", "points.csv")
        with Path("points.csv").open() as file:
            return list(csv.DictReader(file)), said

    return rows


def times(rows) -> dict[tuple[str, int], float]:
    return {
        (row["strategy"], int(row["workers"])): float(row["train_s"]) for row in rows
    }


def test_file_is_predicted_as_it_is_priced_when_it_runs(written, predict, invoke):
    file = written()
    rows, said = predict(file)
    assert "those of the study; --workers 1..1024" in said
    invoke("run", file, "--quiet")
    runs = load(Path("results/priced")).runs
    priced = {(row.strategy, row.workers): row.train_s for row in runs.itertuples()}
    del priced["serial", 1]
    assert times(rows) == pytest.approx(priced, rel=1e-9)
    again, _ = predict("results/priced")
    assert times(again) == times(rows)
    other, said = predict(file, "--workers", "4", "--strategy", "allreduce")
    assert list(times(other)) == [("allreduce", 4)]
    assert "those of the study" not in said


def test_engine_of_the_study_is_charged_as_measured_here(
    written, predict, invoke, monkeypatch
):
    """Before the study ran it is measured, as the run does; afterwards its calibration counts."""
    slow = EngineCost(
        engine="gloo",
        source="a test",
        ranks=2,
        alpha_s=0.03,
        points=[(4.0, 0.03), (1e9, 0.03)],
    )
    asked = []

    def measure(*_: object, **__: object) -> EngineCosts:
        asked.append(1)
        return EngineCosts(entries=[slow])

    monkeypatch.setattr(charging, "measure_engines", measure)
    file = written(
        cluster="this-machine", engine="gloo", workers=[2], strategies=["allreduce"]
    )
    rows, said = predict(file)
    assert together(said, "note: the engines of this machine are measured", file)
    assert together(said, "Engine: gloo", "a test")
    assert float(rows[0]["step_s"]) > 0.03
    invoke("run", file, "--quiet")
    (run,) = load(Path("results/priced")).runs.itertuples()
    assert times(rows)["allreduce", 2] == pytest.approx(run.train_s, rel=1e-9)
    assert len(asked) == 2
    assert times(predict(file)[0]) == times(rows)
    assert len(asked) == 2


def test_axes_are_varied_at_the_largest_count_of_the_study(written, invoke):
    said = invoke("predict", written(), "--vary", "latency=1x,100x")
    assert "8 workers" in said
    assert in_order(said, "local_sgd", "allreduce")


def test_strategies_of_a_study_without_the_axis_have_a_line(written, invoke):
    file = written(strategies=["allreduce", "pipeline"], epochs=1)
    said = invoke("predict", file, "--vary", "micro_batches=2,4")
    assert "pipeline" in said.splitlines()[0]
    assert together(said, "Not predicted", "micro_batches", "allreduce")
    refused = written(strategies=["allreduce", "local_sgd"])
    said = invoke("predict", refused, "--vary", "micro_batches=2,4", code=2)
    assert "allreduce has no option for it" in said


def test_what_a_study_trains_is_stated_once(written, predict, invoke):
    file = written()
    for option in (("--layers", "mine.csv"), ("--input", "3x4x4")):
        assert together(invoke("predict", file, *option, code=2), option[0], file)
    memory = [
        float(predict(file, *words)[0][0]["memory_optimizer_bytes"])
        for words in ((), ("--optimizer", "adam"))
    ]
    assert memory[0] < memory[1]


def test_layouts_of_the_model_of_a_study_are_planned(written, invoke):
    file = written()
    said = invoke("plan", file, "--devices", "4", "--batch", "64", "--write", "w.yaml")
    study = yaml.safe_load(Path("w.yaml").read_text())
    assert study["cluster"] == STUDY["cluster"]
    assert study["execution"] == "modelled"
    assert study["device_step_time"] == pytest.approx(4 * STUDY["device_step_time"])
    assert "4 workers" in invoke("predict", "w.yaml", "--strategy", "ddp")
    assert together(said, "resnet50 on 4 workers", "global batch of 64")
    assert together(said, "stated: 0.01 s", "16 samples")


def test_study_without_a_step_names_what_gives_one(written, predict, invoke):
    on = {"cluster": "ethernet-10g", "execution": None}
    # of several workers the engines of this machine would be measured
    file = written(device_step_time=None, workers=[1], **on)
    said = invoke("predict", file, code=2)
    assert in_order(said, "--step-time", "--device", f"calibrate {file}")
    assert said.count("\n") == 1
    rows, said = predict(file, "--step-time", "0.02", "--jitter", "0", "--workers", "1")
    assert together(said, "stated: 0.02 s", "step of 16 samples")
    assert float(rows[0]["step_s"]) == pytest.approx(0.02)
    assert "a100-40gb" in predict(file, "--device", "a100-40gb")[1]
    with_device = written(device_step_time=None, execution=None)
    assert "a100-40gb" in predict(with_device)[1], "that of the nodes of the cluster"


def test_stated_step_and_device_replace_what_was_measured_for_a_study(
    written, predict, invoke
):
    """Its calibration.json would refuse both."""
    file = written(
        model={"mlp": {"hidden": [8]}}, dataset="wine", cluster="this-machine"
    )
    invoke("run", file, "--quiet")
    measured = Calibration(key="", tables=[], engines=EngineCosts())
    measured.save(Path("results/priced/calibration.json"))
    for place in ("results/priced", file):
        said = predict(place, "--step-time", "0.02")[1]
        assert together(said, "stated: 0.02 s", "step of 16 samples")
        said = predict(place, "--device", "a100-40gb")[1]
        assert together(said, "a100-40gb", "mlp")


def test_strategies_that_a_model_cannot_be_divided_for_are_not_predicted(
    written, invoke
):
    """As its run refuses them; sharing an optimizer's state alone needs no layers."""
    Path("tied.py").write_text(
        "from torch import nn\n"
        "class Tied(nn.Module):\n"
        "    def __init__(self, input_shape, outputs):\n"
        "        super().__init__()\n"
        "        self.read, self.made = nn.Linear(13, 13), nn.Linear(13, 13)\n"
        "        self.made.weight, self.head = self.read.weight, nn.Linear(13, outputs)\n"
        "    def forward(self, x):\n"
        "        return self.head(self.made(self.read(x)))\n"
    )
    divided = ["pipeline", "tensor", "fsdp: {shard: 3}"]
    asked = ["allreduce", "fsdp: {shard: 1}", *divided]
    words = [word for each in asked for word in ("--strategy", each)]
    file = written(model="tied.py:Tied", dataset="wine", execution=None)
    place = ["--input", "13", "--cluster", "juwels-booster", "--step-time", "0.01"]
    for what in ([file], ["tied.py:Tied", *place]):
        said = invoke("predict", *what, "--workers", "2", *words)
        refused = said[said.index("Not predicted") :]
        assert "read and made share a parameter" in refused
        for name in ("pipeline", "tensor", "fsdp(shard=3)"):
            assert name in refused
        assert "fsdp(shard=1)" not in refused


def test_folder_that_is_no_study_is_refused(invoke, tmp_path):
    said = invoke("predict", tmp_path, code=2)
    assert in_order(said, f"no study.yaml in {tmp_path}", "a study's file or a model")
