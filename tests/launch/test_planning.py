"""The plan of a study, and its warnings."""

from __future__ import annotations

import math

import pytest

from scalebench.calibration.calibration_file import Calibration
from scalebench.comm import engines
from scalebench.comm.launchers import srun
from scalebench.errors import EngineError
from scalebench.launch import hosts, planning
from scalebench.launch.hosts import Allocation
from scalebench.launch.planning import plan_study
from scalebench.pricing.machine import LayerShare
from scalebench.study.load import load_study
from scalebench.system import hardware
from tests.conftest import needs_mpi
from tests.facts import in_order

VIRTUAL = {
    "dataset": "wine",
    "workers": "1,2",
    "strategies": ["allreduce"],
    "execution": "virtual",
}


@needs_mpi
@pytest.mark.parametrize(
    ("keys", "measures"),
    [
        ({}, True),
        ({"execution": "native", "workers": "1"}, True),
        ({"device_step_time": 0.01}, False),
        ({"device_step_time": 0.01, "execution": "paced"}, True),
        ({"device_step_time": 0.01, "cluster": "juwels-booster"}, False),
    ],
)
def test_plan_measures_times_in_real_runs_and_calibrations(keys, measures):
    assert plan_study(load_study(None, {**VIRTUAL, **keys}, [])).measures is measures


def test_batch_is_global_where_replicas_have_several_workers():
    study = {
        **VIRTUAL,
        "workers": "1,2,4",
        "strategies": ["serial", "pipeline"],
        "device_step_time": 0.01,
    }
    plan = plan_study(load_study(None, study, []))
    assert (plan.study.batch_per_worker, plan.study.batch_global) == (None, 64)
    assert {run.batch_global for run in plan.sweep.runs} == {64}
    assert any("batch_policy is global, 64 samples" in note for note in plan.notes)
    stated = plan_study(load_study(None, {**study, "batch_per_worker": 8}, []))
    assert stated.study.batch_per_worker == 8
    assert any("state batch_global" in note for note in stated.notes)
    assert not any("batch_policy is global" in note for note in stated.notes)


def test_stages_are_cut_by_the_times_of_layers_that_a_calibration_has(
    tmp_path, machine
):
    """The first of four layers takes most of a step, whatever its operations."""
    shares = [
        LayerShare(name=str(place), forward=share, backward=share)
        for place, share in enumerate((0.7, 0.1, 0.1, 0.1))
    ]
    (table,) = machine.tables
    (batch,) = table.batches
    path = tmp_path / "calibration.json"

    def balance(layers, option="times", **keys):
        tables = [table.model_copy(update={"batches": [layers]})]
        Calibration(
            key="here", measured=None, tables=tables, engines=machine.engines
        ).save(path)
        strategies = [
            {"pipeline": {"balance": option}},
            {"hybrid": {"balance": option}},
        ]
        study = {
            **VIRTUAL,
            "workers": "1,2",
            "model": {"mlp": {"hidden": [8, 8, 8]}},
            "strategies": strategies,
            "calibration": path,
            **keys,
        }
        plan = plan_study(load_study(None, study, []))
        assert {
            str(run.strategy) for run in plan.sweep.runs if run.workers == 2
        } == set(map(str, plan.study.strategies))
        return [each.options["balance"] for each in plan.study.strategies]

    timed = batch.model_copy(update={"layers": shares})
    assert balance(timed) == [[1, 3], [1, 3]]
    assert balance(timed, "even") == ["even", "even"]
    assert balance(batch) == ["times", "times"], "no layer was timed"
    stated = {"device_step_time": 0.01, "cluster": "juwels-booster"}
    assert balance(timed, **stated) == ["times", "times"], "of another device"


def notes(strategies, workers, **said):
    study = {
        "dataset": "wine",
        "execution": "auto",
        "strategies": strategies,
        "workers": workers,
        **said,
    }
    return plan_study(load_study(None, study, [])).notes


@pytest.mark.parametrize(
    ("strategies", "workers", "named"),
    [
        (["serial", "allreduce", "allreduce: {accumulate: 2}", "asp"], "1,2", None),
        (
            ["serial", "allreduce", "epoch_average", "local_sgd: {steps: 4}"],
            "1,4",
            "epoch_average, local_sgd(steps=4)",
        ),
        (["epoch_average"], "1", None),
    ],
)
def test_linear_lr_policy_warns_for_averaging_strategies(strategies, workers, named):
    said = [
        note
        for note in notes(strategies, workers, lr_policy="linear")
        if "lr_policy" in note
    ]
    if named is None:
        assert not said
    else:
        assert len(said) == 1
        assert in_order(said[0], f"{named}: lr_policy linear", "up to 4")
    assert not [note for note in notes(strategies, workers) if "lr_policy" in note]


@pytest.mark.parametrize(
    ("keys", "job", "budget_s"),
    [
        ({"execution": "auto"}, "", 90),
        ({"execution": "auto"}, "7", math.inf),
        ({"execution": "auto", "native_budget_s": 5}, "7", 5),
        ({"execution": "virtual"}, "", math.inf),
    ],
)
def test_real_runs_that_check_virtual_ones_take_90_seconds_outside_of_jobs(
    monkeypatch, keys, job, budget_s
):
    monkeypatch.setattr(planning, "in_job", lambda environment: bool(job))
    study = load_study(
        None, {**VIRTUAL, "native_budget_s": None, "device_step_time": 0.01, **keys}, []
    )
    assert plan_study(study).native_budget_s == budget_s
    assert study.patience == 60


def test_oversubscribed_points_are_noted_with_reasons(monkeypatch):
    monkeypatch.setattr(hardware, "cores", lambda: 2)
    monkeypatch.setattr(
        engines, "available", lambda name, **_: None if name != "nccl" else "none here"
    )
    (note,) = [
        note
        for note in notes(["serial", "allreduce", "ddp"], "1,2")
        if "oversubscribed" in note
    ]
    assert in_order(
        note, "oversubscribed on 2 cores", "never a baseline", "gloo at 2 workers"
    )
    assert in_order(note, "gloo has a thread", "beside")
    assert not [
        note
        for note in notes(["serial", "allreduce"], "1,2")
        if "oversubscribed" in note
    ]
    (note,) = [
        note
        for note in notes(["asp"], "2,4", execution="native")
        if "oversubscribed" in note
    ]
    assert in_order(note, "mpi with servers at 2, 4 workers", "one more process")


def test_few_steps_between_synchronisations_are_noted_with_what_they_can_save():
    keys = {"batch_per_worker": 16, "dataset": "diabetes"}  # 353 patients to train on
    (note,) = [
        note
        for note in notes(["epoch_average"], "2,4,16,32", **keys)
        if "synchronisations" in note
    ]
    assert in_order(
        note, "epoch_average", "fewer than 8 steps", "4, 16, 32 workers", "83 % to 0 %"
    )
    (note,) = [
        note
        for note in notes(["epoch_average"], "32", **keys)
        if "synchronisations" in note
    ]
    assert in_order(note, "at 32 workers", "at most 0 %")


@needs_mpi
@pytest.mark.parametrize(
    ("nodes", "slots", "held"),
    [(1, 2, {1, 2}), (4, 2, {1, 2, 4, 8}), (2, 64, {1, 2, 4, 8, 16})],
)
def test_a_study_is_planned_for_an_allocation_that_is_not_here(
    monkeypatch, nodes, slots, held
):
    monkeypatch.setattr(
        hosts, "reachable", lambda: pytest.fail("this machine was asked")
    )
    study = load_study(None, {**VIRTUAL, "execution": "auto", "workers": "1..16"}, [])
    plan = plan_study(study, Allocation.asked(nodes, slots))
    assert {run.workers for run in plan.sweep.runs if run.execution == "native"} == held
    assert {run.workers for run in plan.sweep.simulated} == {1, 2, 4, 8, 16}
    assert not [note for note in plan.notes if "oversubscribed" in note]


@pytest.mark.parametrize("execution", ["virtual", "modelled"])
def test_a_study_without_real_runs_asks_no_other_host(monkeypatch, execution):
    monkeypatch.setattr(
        hosts, "reachable", lambda: pytest.fail("other hosts were asked")
    )
    plan = plan_study(load_study(None, {**VIRTUAL, "execution": execution}, []))
    assert plan.allocation == hosts.this_host()
    assert not [note for note in plan.notes if "slot" in note]


@needs_mpi
def test_nodes_that_were_asked_for_have_the_stated_cores_and_gpus(monkeypatch):
    crowded = load_study(None, {**VIRTUAL, "execution": "native", "workers": "8"}, [])
    (note,) = [
        note
        for note in plan_study(crowded, Allocation.asked(2, 2)).notes
        if "oversubscribed" in note
    ]
    assert note.startswith("oversubscribed on 4 cores of 2 nodes")
    monkeypatch.setattr(engines, "available", lambda name, **_: None)
    on_gpus = load_study(
        None, {**VIRTUAL, "execution": "native", "workers": "8", "engine": "nccl"}, []
    )
    assert {
        run.engine
        for run in plan_study(on_gpus, Allocation.asked(2, 4, gpus=4)).sweep.runs
    } == {"nccl"}
    with pytest.raises(EngineError, match="in that allocation are 2 for 8"):
        plan_study(on_gpus, Allocation.asked(1, 8, gpus=2))


def test_srun_is_available_for_a_job_that_is_not_here(monkeypatch):
    monkeypatch.setenv("SCALEBENCH_LAUNCHER", "srun")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setattr(srun.shutil, "which", lambda name: "/usr/bin/srun")
    assert "inside a job only" in engines.available("gloo")
    assert engines.available("gloo", here=False) is None
