"""`scalebench calibrate`: one file for many studies, completed by the same command."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from scalebench.analysis import load
from scalebench.calibration import charging
from scalebench.calibration.calibration_file import read_calibration
from scalebench.calibration.steps_under_load import MeasuredTables
from scalebench.errors import RunError
from scalebench.pricing.machine import Choice, OperationTime
from tests.facts import in_order, together

STUDY = (
    "--dataset",
    "wine",
    "--set",
    "workers=1,2",
    "--set",
    'strategies=["serial", "epoch_average"]',
)
FILE = Path("machine.json")


@pytest.fixture
def scalebench(tmp_path, monkeypatch, invoke, machine):
    """The command on a machine without measuring; `invoke.measured` has the sizes, of which `invoke.fails` fails."""
    monkeypatch.chdir(tmp_path)
    invoke.measured, invoke.fails, invoke.disturbed = [], None, False

    def steps(run, folder, sizes, node_workers, budget, device):
        if invoke.fails in sizes:
            raise RunError("calibration: a measuring process ended before its time")
        invoke.measured += sorted(sizes)
        (like,) = machine.tables
        batches = [
            like.batches[0].model_copy(update={"samples": size}) for size in sizes
        ]
        loads, common = (
            sorted({1, node_workers}),
            {"batches": batches, "disturbed": invoke.disturbed},
        )
        return MeasuredTables(
            [like.model_copy(update=common | {"busy_workers": n}) for n in loads],
            1e-3,
            [],
        )

    monkeypatch.setattr("scalebench.calibration.charging.measure_steps", steps)
    monkeypatch.setattr(
        "scalebench.calibration.engine_measurement.measure_engine_costs",
        lambda *_, **__: machine.engines,
    )
    return invoke


def test_study_that_states_its_steps_gets_the_costs_of_engines(scalebench):
    said = scalebench("calibrate", *STUDY, "--set", "device_step_time=0.01", "-o", FILE)
    assert scalebench.measured == []
    assert "no steps" in said
    assert read_calibration(FILE).tables == []
    assert read_calibration(FILE).engines.entries


def test_file_is_completed_by_the_same_command_and_charges_a_study(scalebench):
    words = ("calibrate", *STUDY, "--batch", 4, "--batch", 8, "--batch", 16, "-o", FILE)
    scalebench.fails = 16
    scalebench(*words, code=1)
    assert scalebench.measured == [4, 8]
    scalebench.fails = None
    said = scalebench(*words)
    assert scalebench.measured == [4, 8, 16], "what was measured stays"
    assert "steps of 16 samples (3 of 3, within 40 s)" in said
    assert "steps of 8 samples" not in said
    assert re.search(
        r"machine\.json: mlp\(hidden=\[128\]\) .*float32 .*3 batch sizes \(4, 8, 16\)",
        said,
        re.DOTALL,
    )
    found = read_calibration(FILE)
    assert found.measured.dtype == "float32"
    assert {batch.samples for table in found.tables for batch in table.batches} == {
        4,
        8,
        16,
    }
    scalebench("run", *STUDY, "--execution", "virtual", "--name", "mine", "--jobs", "1", "--epochs", "1",
               "--repetitions", "1", "--calibration", FILE)  # fmt: skip
    assert len(load("results/mine").completed) == 3
    ways = {size: list(known) for size, known in found.arithmetic.items()}
    assert ways == {4: [2], 8: [2], 16: [2]}, "of two workers, the most of the study"
    scalebench("recalibrate", "results/mine", "--calibration", FILE)
    assert scalebench.measured == [4, 8, 16]
    predicted = scalebench(
        "predict",
        "--calibration",
        FILE,
        "--workers",
        "1,2",
        "--epochs",
        "3",
        "--batch",
        "8",
    )
    words = " ".join(predicted.split())
    assert "modelled (measured on " in words
    assert "mlp(hidden=[128]) on this-machine" in words
    scaled = scalebench("predict", "--calibration", FILE, "--measured-on", "epyc-7742", "--device", "xeon-8160",
                        "--workers", "1,2", "--epochs", "3", "--batch", "8")  # fmt: skip
    assert re.search(
        r"scaled .*xeon-8160 in float32 over .*epyc-7742", " ".join(scaled.split())
    )
    refused = scalebench("predict", "resnet50", "--calibration", FILE, code=2)
    assert "measured for mlp(hidden=[128])" in refused
    assert len(refused.strip().splitlines()) == 1
    # results bring their calibration, and the strategies and epochs of the study
    words = ("predict", "results/mine", "--workers", "1,2")
    said = scalebench(*words)
    assert said.startswith("1 worker: epoch_average ")
    assert together(said, "on this-machine", "1 epoch of 142 samples")
    assert "allreduce" not in said
    elsewhere = (*words, "--cluster", "juwels-booster")
    assert "as --measured-on epyc-7742, to scale" in scalebench(*elsewhere, code=2)
    said = scalebench(*elsewhere, "--measured-on", "epyc-7742")
    assert in_order(said, "scaled by roofline of a100-40gb", "on juwels-booster")


def bits(name):
    """How the gradients of a study were computed, and losses that show every bit of its weights."""
    runs = load(f"results/{name}").completed.sort_values("run_id")
    return set(runs["arithmetic"]), runs["final_train_loss"].tolist()


def test_file_says_how_gradients_are_computed(scalebench, monkeypatch, tmp_path):
    words = ("run", "--quiet", "--dataset", "wine", "--execution", "virtual", "--jobs", "1", "--epochs", "1",
             "--workers", "4", "--strategy", "epoch_average", "--repetitions")  # fmt: skip
    slow = Choice(records=True, reason="measured as slow")
    monkeypatch.setattr(charging, "choice_for", lambda *_: slow)
    scalebench(*words, 1, "--name", "mine")
    path = Path("results/mine/calibration.json")
    assert read_calibration(path).arithmetic == {16: {4: slow}}

    monkeypatch.setattr(charging, "choice_for", lambda *_: pytest.fail("measured"))
    scalebench(*words, 2, "--name", "mine")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "of another machine"))
    scalebench(*words, 2, "--name", "again", "--calibration", path)
    assert bits("again") == bits("mine")
    assert bits("mine")[0] == {"per_replica"}

    raw = json.loads(path.read_text())
    of_adam = raw | {"measured": raw["measured"] | {"optimizer": "adam"}}
    without = {key: value for key, value in raw.items() if key != "arithmetic"}
    for name, content in {"of-adam": of_adam, "without": without}.items():
        Path(f"{name}.json").write_text(json.dumps(content))
        scalebench(*words, 2, "--name", name, "--calibration", f"{name}.json")
        assert bits(name)[0] == {"batched"}, "by the size of the model"
    assert bits("of-adam") == bits("without")


def test_steps_on_gpus_are_measured_in_seconds_with_one_process_for_each(
    scalebench, monkeypatch
):
    monkeypatch.setattr("scalebench.comm.engines.available", lambda engine, **_: None)
    monkeypatch.setattr("scalebench.system.hardware.gpus", lambda: 2)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda *_: "NVIDIA T4")
    said = scalebench(
        "calibrate", "--dataset", "wine", "--device", "cuda", "--batch", 8, "-o", FILE
    )
    assert "on NVIDIA T4 (torch" in said
    assert together(said, "8)", "1, 2 busy", "no engine")
    found = read_calibration(FILE)
    assert found.reference_s is None, (
        "a GPU's steps are not scaled by the speed of a core"
    )
    assert not found.operations
    assert "nothing is charged" in " ".join(said.split())
    words = (
        "predict",
        "--calibration",
        FILE,
        "--workers",
        "1,2",
        "--strategy",
        "allreduce",
        "--strategy",
        "easgd",
    )
    predicted = " ".join(scalebench(*words).split())
    assert "GPU-hours" in predicted
    assert re.search(r"easgd computes .*not measured", predicted)
    assert "allreduce computes" not in predicted


def test_steps_on_a_gpu_need_one(scalebench, monkeypatch):
    monkeypatch.setattr(
        "scalebench.comm.engines.available", lambda engine, **_: "no NVIDIA GPU here"
    )
    said = scalebench("calibrate", "--device", "cuda", "-o", FILE, code=2)
    assert re.fullmatch(
        r"scalebench: error: --device cuda: .*no NVIDIA GPU here", said.strip()
    )
    assert not FILE.exists()


def test_file_of_another_model_is_not_completed(scalebench):
    scalebench("calibrate", *STUDY, "--batch", 8, "-o", FILE)
    before = FILE.read_bytes()
    said = scalebench(
        "calibrate",
        *STUDY,
        "--model",
        "mlp: {hidden: [4]}",
        "--batch",
        8,
        "-o",
        FILE,
        code=2,
    )
    assert re.search(
        r"machine\.json .*mlp\(hidden=\[128\]\) .*this is mlp\(hidden=\[4\]\)", said
    )
    assert FILE.read_bytes() == before
    assert json.loads(before)["measured"]["optimizer"] == "sgd(momentum=0.9)"


def test_next_study_of_a_model_takes_the_steps_of_the_first(scalebench, monkeypatch):
    run = (
        "run",
        *STUDY,
        "--execution",
        "virtual",
        "--epochs",
        "1",
        "--jobs",
        "1",
        "-v",
        "--set",
        "repetitions=1",
    )
    assert "step times are" not in scalebench(*run, "--name", "first")
    measured = list(scalebench.measured)
    assert measured
    monkeypatch.setattr(
        "scalebench.calibration.cost_sources.measure_reference", lambda threads: 2e-3
    )
    assert "step times are" in scalebench(*run, "--name", "second")
    assert scalebench.measured == measured, "nothing is measured again"
    first, second = (
        load(f"results/{name}").completed["train_s"].to_numpy()
        for name in ("first", "second")
    )
    assert second == pytest.approx(2 * first, rel=0.2), (
        "on a machine of half the speed, where messages take as long"
    )
    scalebench("recalibrate", "results/second")
    assert scalebench.measured == 2 * measured


def test_steps_of_the_first_study_stay_as_they_are_beside_busy_programs(
    scalebench, monkeypatch
):
    run = (
        "run",
        *STUDY,
        "--execution",
        "virtual",
        "--epochs",
        "1",
        "--jobs",
        "1",
        "--quiet",
        "--set",
        "repetitions=1",
    )
    scalebench(*run, "--name", "first")
    monkeypatch.setattr(
        "scalebench.calibration.cost_sources.measure_reference", lambda threads: None
    )
    scalebench(*run, "--name", "second")
    monkeypatch.setattr(
        "scalebench.calibration.cost_sources.measure_reference", lambda threads: 2e-3
    )
    scalebench(*run, "--name", "slower")
    monkeypatch.setattr(
        "scalebench.calibration.cost_sources.measure_reference", lambda threads: None
    )
    scalebench(*run, "--name", "fourth")
    times = [
        load(f"results/{name}").completed["train_s"].tolist()
        for name in ("first", "second", "slower", "fourth")
    ]
    assert times[0]
    assert times[1] == times[0]
    assert times[3] == times[2] != times[0], (
        "the last speed that nothing disturbed counts"
    )


def test_next_study_takes_what_strategies_of_the_first_compute_beside_steps(
    scalebench, monkeypatch
):
    measured = []

    def measure(runs, datasets, machine, seconds):
        assert seconds == 0.1, "a tenth of the time for a calibration"
        measured.append([str(run.strategy) for run in runs])
        return {
            str(run.strategy): {"merge": OperationTime(seconds=1e-3)} for run in runs
        }

    monkeypatch.setattr("scalebench.calibration.charging.measure_operations", measure)
    monkeypatch.setattr(
        "scalebench.calibration.charging.disturbed", lambda cores: len(measured) == 2
    )
    monkeypatch.setattr(
        "scalebench.calibration.cost_sources.measure_reference", lambda threads: 1e-3
    )
    run = (
        "run",
        *STUDY,
        "--execution",
        "virtual",
        "--epochs",
        "1",
        "--jobs",
        "1",
        "--quiet",
        "--set",
        "repetitions=1",
    )
    scalebench(*run, "--name", "first")
    first = measured[0]
    assert first
    scalebench(*run, "--name", "second")
    assert measured == [first], "those of the first study are read"
    more = (*(word.replace("epoch_average", "local_sgd") for word in run),)
    scalebench(*more, "--name", "third")
    scalebench(*more, "--name", "fourth")
    assert measured == [first, ["local_sgd"], ["local_sgd"]], (
        "measured beside busy programs, it is not kept"
    )


def test_disturbed_steps_are_not_kept(scalebench):
    scalebench.disturbed = True
    run = (
        "run",
        *STUDY,
        "--execution",
        "virtual",
        "--epochs",
        "1",
        "--jobs",
        "1",
        "--quiet",
        "--set",
        "repetitions=1",
    )
    scalebench(*run, "--name", "first")
    measured = list(scalebench.measured)
    scalebench(*run, "--name", "second")
    assert scalebench.measured == 2 * measured


def test_cache_that_cannot_be_written_stops_no_study(scalebench, monkeypatch):
    Path("cache").mkdir()
    monkeypatch.setattr(
        "scalebench.calibration.cost_sources.cache_folder", lambda kind: Path("cache")
    )
    monkeypatch.setattr(
        "scalebench.calibration.calibration_file.write_atomic", refusing("cache")
    )
    scalebench(
        "run",
        *STUDY,
        "--execution",
        "virtual",
        "--epochs",
        "1",
        "--jobs",
        "1",
        "--name",
        "first",
    )
    assert not list(Path("cache").iterdir())
    assert Path("results/first/calibration.json").exists()


def refusing(folder):
    """`write_atomic` on a disk on which nothing can be written below `folder`."""
    from scalebench.system.file_access import write_atomic

    def write(path, text):
        if path.parent.name == folder:
            raise OSError(30, "Read-only file system")
        write_atomic(path, text)

    return write
