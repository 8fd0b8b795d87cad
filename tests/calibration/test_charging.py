"""The calibration beside a study's records charges its virtual runs, also where step times are stated."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from scalebench.analysis import load
from scalebench.calibration.calibration_file import (
    Calibration,
    Measurement,
    read_calibration,
)
from scalebench.records.machine_facts import cpu_model
from scalebench.system import hardware
from tests.conftest import needs_mpi
from tests.facts import in_order, together

RUN = ("run", "--dataset", "wine", "--epochs", "1", "--execution", "virtual", "--jobs", "1", "--repetitions", "2",
       "--strategy", "allreduce", "--strategy", "epoch_average")  # fmt: skip
STATED = (*RUN, "--device-step-time", "0.002")


@pytest.fixture
def scalebench(tmp_path, monkeypatch, invoke, machine):
    """The command on a machine whose engines take `invoke.factor` times as long as those of the fixture."""
    monkeypatch.chdir(tmp_path)

    def measured(*_, **__):
        entries = [
            cost.model_copy(
                update={
                    "points": [
                        (size, invoke.factor * seconds) for size, seconds in cost.points
                    ]
                }
            )
            for cost in machine.engines.entries
        ]
        return machine.engines.model_copy(update={"entries": entries})

    monkeypatch.setattr(
        "scalebench.calibration.engine_measurement.measure_engine_costs", measured
    )

    invoke.factor = 1.0
    return invoke


def times(name):
    runs = load(f"results/{name}").completed.sort_values("run_id")
    return runs["train_s"].tolist()


@needs_mpi
def test_extended_study_keeps_the_engine_costs_of_its_first_runs(scalebench):
    scalebench(*STATED, "--name", "whole", "--workers", "1,2,4")
    scalebench(*STATED, "--name", "parts", "--workers", "1,2")
    kept = read_calibration(Path("results/parts/calibration.json"))
    assert kept.tables == []
    scalebench.factor = 50.0  # another machine, or another version of MPI
    scalebench(*STATED, "--name", "parts", "--workers", "1,2,4")
    scalebench(*STATED, "--name", "anew", "--workers", "1,2,4")
    assert times("parts") == times("whole") != times("anew")


@needs_mpi
def test_compare_refuses_studies_of_different_calibrations(scalebench):
    scalebench(*STATED, "--name", "a", "--workers", "2")
    scalebench.factor = 50.0
    scalebench(*STATED, "--name", "b", "--workers", "2")
    said = scalebench("compare", "results/a", "results/b", code=2)
    assert "calibration is " in said
    assert "--calibration FIRST/calibration.json" in said
    scalebench(
        *STATED,
        "--name",
        "c",
        "--workers",
        "2",
        "--calibration",
        "results/a/calibration.json",
    )
    said = scalebench("compare", "results/a", "results/c")
    assert together(said, "intervals", "no interval"), (
        "nothing was calibrated that could vary"
    )
    assert "1.00 [" not in said
    assert times("a") == times("c") != times("b")


def test_interval_of_a_stated_jitter_has_its_own_name(scalebench):
    jitter = ("--set", "virtual.jitter=normal", "--workers", "1,2")
    said = scalebench(*STATED, "--name", "shaken", *jitter)
    said += scalebench("check", "results/shaken")
    said += scalebench(
        "compare",
        "results/shaken",
        "--strategy",
        "allreduce",
        "--strategy",
        "epoch_average",
    )
    assert together(said, "intervals", "repetitions", "stated step times")
    assert "calibration interval" not in said


def test_compare_offers_no_interval_of_a_single_draw(scalebench):
    for name in ("a", "b"):
        scalebench(*STATED, "--name", name, "--workers", "2", "--repetitions", "1")
    said = scalebench("compare", "results/a", "results/b")
    assert "no interval, as nothing varies" in said
    assert "1.00 [" not in said


def test_lost_calibration_of_a_stated_study_is_not_measured_again(scalebench, tmp_path):
    scalebench(*STATED, "--name", "mine", "--workers", "1")
    (tmp_path / "results" / "mine" / "calibration.json").unlink()
    assert together(
        scalebench(*STATED, "--name", "mine", "--workers", "1,2", code=2),
        "virtual runs",
        "not calibration.json",
    )
    found = json.loads(scalebench("check", "results/mine", "--json", code=1))[
        "findings"
    ]
    assert [one["rule"] for one in found if "no calibration.json" in one["what"]] == [
        "no-provenance"
    ]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ((), "has no step times, as it is of a study that states them"),
        (
            ("--cluster", "juwels-booster", "--device-step-time", "0.002"),
            "of which cluster juwels-booster has nothing",
        ),
    ],
    ids=["nothing stated", "all stated"],
)
def test_unfit_calibration_is_refused_before_writing(scalebench, tmp_path, flags, said):
    scalebench(*STATED, "--name", "mine", "--workers", "1")
    words = (
        *RUN,
        *flags,
        "--name",
        "other",
        "--workers",
        "1",
        "--calibration",
        "results/mine/calibration.json",
    )
    assert said in scalebench(*words, code=2)
    assert said in scalebench(*words, "--dry-run", code=2)
    assert not (tmp_path / "results" / "other").exists()


def test_strategy_operations_are_measured_once_and_kept(scalebench):
    words = (
        *RUN[:7],
        "--jobs",
        "1",
        "--repetitions",
        "1",
        "--workers",
        "1,2",
        "--strategy",
        "adasum",
    )
    scalebench(*words, "--name", "mine")
    path = Path("results/mine/calibration.json")
    first = read_calibration(path).operations
    assert list(first) == ["adasum"]
    assert first["adasum"]["Merging"].seconds > 0
    more = (*words, "--strategy", "easgd", "--strategy", "allreduce")
    scalebench(*more, "--name", "mine")
    both = read_calibration(path).operations
    assert both["adasum"] == first["adasum"], "runs were charged by these"
    assert {"Easgd._draw", "Easgd._follow"} == set(both["easgd"])
    assert both["allreduce"] == {}
    scalebench(*more, "--name", "again", "--calibration", path)
    assert times("again") == times("mine")
    said = scalebench(
        *more,
        "--strategy",
        "slowmo",
        "--name",
        "other",
        "--calibration",
        path,
        "--verbose",
    )
    assert in_order(" ".join(said.split()), "slowmo computes", "nothing is charged")


@pytest.fixture
def calibration(machine, tmp_path):
    """Writes a calibration for the study of RUN, with changes to its JSON."""

    def write(change=lambda raw: None, **measured):
        facts = {
            "model": "mlp(hidden=[128])",
            "dtype": "float32",
            "optimizer": "sgd(momentum=0.9)",
        }
        facts |= {
            "threads_per_worker": 1,
            "cpu": cpu_model(),
            "cores": hardware.cores(),
            "torch": torch.__version__,
        }
        own = Calibration(
            key="made up",
            measured=Measurement(**facts | measured),
            tables=machine.tables,
            engines=machine.engines,
        )
        raw = own.model_dump(mode="json")
        change(raw)
        path = tmp_path / "machine.json"
        path.write_text(json.dumps(raw))
        return path

    return write


def test_calibration_of_another_model_is_refused_by_name(scalebench, calibration):
    words = (*RUN, "--workers", "1", "--name", "mine", "--calibration")
    said = scalebench(*words, calibration(model="mlp(hidden=[64])"), code=2)
    assert together(said, "measured for", "mlp(hidden=[64])", "float32")
    assert together(said, "model mlp(hidden=[64])", "not mlp(hidden=[128])")
    assert not Path("results/mine").exists()
    said = scalebench(*words, calibration(torch="1.0", cpu="Z80"))
    said = " ".join(said.split())
    assert in_order(said, "not of this machine", f"cpu Z80, not {cpu_model()}")
    assert in_order(said, "torch 1.0, not")
    said = scalebench(
        *words[:-2],
        "real",
        "--execution",
        "auto",
        "--calibration",
        calibration(cpu="Z80"),
        code=2,
    )
    assert together(said, "another machine", "cpu Z80", f"not {cpu_model()}")
    assert len(said.strip().splitlines()) == 1
    assert not Path("results/real").exists()
    said = scalebench(*words[:-2], "same", "--calibration", calibration())
    assert "not of this machine" not in said


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda raw: raw["tables"][0]["batches"][0].pop("forward_s"),
            "'tables.0.batches.0.forward_s' is missing",
        ),
        (
            lambda raw: raw["tables"][0]["batches"][0].update(forward_s=[-1.0]),
            "tables.0.batches.0.forward_s.0",
        ),
        (
            lambda raw: raw["tables"][0]["batches"][0].update(update_s=["2 ms"]),
            "expected a number, got '2 ms'",
        ),
        (
            lambda raw: raw["tables"][0]["batches"][0].update(forward=[1.0]),
            "unknown key 'tables.0.batches.0.forward'",
        ),
        (
            lambda raw: raw["engines"]["entries"][0].update(alpha_s=-1e-5),
            "'engines.entries.0.alpha_s'",
        ),
        (
            lambda raw: raw["engines"]["entries"][0].update(points=[[4, float("inf")]]),
            "'engines.entries.0.points.0.1'",
        ),
        (lambda raw: raw["tables"][0].update(batches=[]), "tables.0.batches"),
    ],
    ids=["missing", "negative", "text", "without unit", "engine", "infinite", "empty"],
)
def test_damaged_calibration_is_refused_with_its_key(
    scalebench, calibration, change, said
):
    answer = scalebench(
        *RUN,
        "--workers",
        "1",
        "--name",
        "mine",
        "--calibration",
        calibration(change),
        code=2,
    )
    assert said in answer
    assert "machine.json" in answer
    assert len(answer.strip().splitlines()) == 1
