"""Elastic runs with real ranks, one of which is killed: they go on, stand in a table of their own, or fail for good."""

from __future__ import annotations

import csv
import json
import subprocess
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from click.testing import CliRunner

from scalebench.cli.main import main
from scalebench.comm import engines
from scalebench.comm.launchers import horovodrun, using
from scalebench.data.catalog import prepare
from scalebench.errors import EngineError
from scalebench.launch import elastic
from scalebench.launch.elastic import ElasticLaunch, elastic_runs
from scalebench.launch.planning import plan_study
from scalebench.native.heartbeat import Beat, Phase
from scalebench.native.job_files import JsonLines
from scalebench.study.spec import Component, Study
from tests.arrays import arrays_in
from tests.conftest import some
from tests.facts import together
from tests.launch.test_real_runs import Recorder, make_run

MODEL = f"{Path(__file__).parent / 'models' / 'mortal.py'}:build"
STEPS = 5  # of a worker in an epoch: 142 samples of wine for 2 workers, 16 a batch
EPOCHS = 4


def mortal_run(engine, workers=2, strategy="epoch_average", **options):
    """A run whose rank 1 is killed in the second epoch, and whose model drops out and counts what it sees."""
    if reason := engines.available(engine):
        pytest.skip(reason)
    return make_run(
        "mortal",
        workers=workers,
        strategy=strategy,
        engine=engine,
        epochs=EPOCHS,
        model=Component(name=MODEL, options={"at": STEPS + 2, **options}),
        optimizer=Component(name="sgd", options={"momentum": 0.9}),
        save_weights=True,
    )


def launched(run, tmp_path, restarts=1):
    """What came of an elastic run; no process of it is left."""
    with using(engines.named(run.engine).elastic_launcher):
        launch = ElasticLaunch(
            run,
            prepare(run, run.workers),
            tmp_path / "launch",
            tmp_path / "weights",
            restarts,
            patience_s=60.0,
        )
        ended = launch.execute()
    assert not [
        p
        for p in psutil.process_iter(["cmdline"])
        if str(tmp_path) in " ".join(p.info["cmdline"] or ())
    ]
    assert not (tmp_path / "launch" / "checkpoints").exists()
    return ended


def test_torchrun_goes_on_to_the_weights_of_an_undisturbed_run(tmp_path, monkeypatch):
    """By the command, which makes a completed run once: its row is in elastic.csv, and none is in runs.csv."""
    undisturbed = mortal_run("gloo", at=10**6)
    with using("local"):
        Recorder([undisturbed], tmp_path)
    expected = arrays_in(tmp_path / "weights" / "mortal.npz")

    monkeypatch.chdir(tmp_path)
    (tmp_path / "study.yaml").write_text(
        "name: mortal\ndataset: wine\nworkers: 2\nrepetitions: 1\nbatch_per_worker: 16\nwarmup_steps: 2\nseed: 3\n"
        f"epochs: {EPOCHS}\nlr: {undisturbed.lr}\noptimizer: {{sgd: {{momentum: 0.9}}}}\nsave_weights: true\n"
        f"model: {{'{MODEL}': {{at: {STEPS + 2}, once: died}}}}\n"
        "strategies: [epoch_average]\nengine: gloo\nexecution: native\n"
    )
    command = ["run", "study.yaml", "--elastic", "--output", "out"]
    said = CliRunner().invoke(main, command)
    assert said.exit_code == 0, said.output
    folder = tmp_path / "out" / "mortal"
    (row,) = rows(folder)
    assert (row["status"], row["interruptions"], row["launcher"]) == (
        "completed",
        "1",
        "torchrun",
    )
    assert (row["workers"], row["workers_at_end"], row["dealt_anew"]) == (
        "2",
        "2",
        "false",
    )
    assert (row["interrupted_rank"], row["interrupted_epoch"]) == ("[1]", "[1]")
    (lost_s,), (pause_s,) = (
        json.loads(row["interrupted_lost_s"]),
        json.loads(row["interrupted_pause_s"]),
    )
    assert lost_s >= 0
    assert pause_s > 0
    assert lost_s + pause_s < float(row["total_s"])
    assert not (folder / "runs.csv").exists()
    assert not (folder / "logs").exists()
    (weights,) = (folder / "weights" / "elastic").iterdir()
    for name in ("initial", "final"):
        assert np.array_equal(arrays_in(weights)[name], expected[name]), name

    again = CliRunner().invoke(main, command)
    assert again.exit_code == 0
    assert together(again.output, "0 elastic runs", "1 was")
    assert len(rows(folder)) == 1


def rows(folder):
    with (folder / "elastic.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("strategy", some(["epoch_average", "horovod"], "horovod"))
def test_horovod_goes_on_with_the_workers_that_are_left(tmp_path, strategy):
    """The data are dealt anew: an epoch has twice the steps for the one that is left."""
    run = mortal_run("horovod", strategy=strategy, once=str(tmp_path / "died"))
    ended = launched(run, tmp_path)
    assert ended.outcome.status == "completed", ended.outcome.error
    (death,) = ended.deaths
    assert (death.rank, death.epoch) == (1, 1)
    assert death.pause_s > 0
    assert ended.workers_at_end == 1
    (worker,) = ended.outcome.workers
    assert [epoch.epoch for epoch in worker.epochs] == [1, 2, 3]
    assert worker.samples == 142
    assert ended.outcome.evaluations[-1].epoch == EPOCHS - 1
    assert ended.total_s > death.lost_s + death.pause_s


@pytest.mark.thorough
@pytest.mark.parametrize("engine", ["gloo", "horovod"])
def test_worker_0_which_tells_the_launcher_may_die_as_any_other(tmp_path, engine):
    ended = launched(mortal_run(engine, rank=0, once=str(tmp_path / "died")), tmp_path)
    assert ended.outcome.status == "completed", ended.outcome.error
    assert [(death.rank, death.epoch) for death in ended.deaths] == [(0, 1)]
    assert ended.outcome.evaluations[-1].epoch == EPOCHS - 1


@pytest.mark.parametrize(
    ("engine", "restarts"),
    [("gloo", 1), pytest.param("horovod", 0, marks=pytest.mark.thorough)],
)
def test_a_run_whose_ranks_die_too_often_fails(tmp_path, engine, restarts):
    """Under torchrun rank 1 is killed after every beginning; under horovodrun it does not come back."""
    ended = launched(mortal_run(engine), tmp_path, restarts)
    assert ended.outcome.status == "failed"
    assert "rank 1 was ended by signal 9" in ended.outcome.error
    assert ended.outcome.error.endswith(f"of at most {restarts} (--max-restarts)")
    assert "\n" not in ended.outcome.error
    assert [death.rank for death in ended.deaths] == [1] * restarts
    assert ended.total_s is None


@pytest.mark.parametrize("noticed", [True, False])
def test_a_death_is_dated_by_the_last_look_at_which_the_rank_lived(
    tmp_path, monkeypatch, noticed
):
    """On a busy machine the launcher looks again when others train already, or reads of that before it looks."""
    rank = subprocess.Popen(["sleep", "600"])
    beat = Beat(rank.pid, Phase.TRAINING, 0, 0)
    monkeypatch.setattr(elastic.heartbeat, "read_heartbeats", lambda path: [beat])
    run = make_run("mortal", workers=2, strategy="epoch_average", engine="gloo")
    launch = ElasticLaunch(run, tmp_path, tmp_path, None, 1, patience_s=60.0)
    events = JsonLines(tmp_path / "events")
    events.append({"began": 0.0, "epoch": 0, "workers": 2})
    launch._hear(events)
    launch._lives.look()
    alive_s = time.monotonic()
    rank.kill()
    rank.wait()
    began_s = time.monotonic()
    if noticed:
        launch._lives.look()
    events.append({"began": began_s, "epoch": 1, "workers": 1})
    launch._hear(events)
    (death,) = launch._deaths
    assert death.rank == 0
    assert death.pause_s >= began_s - alive_s


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (
            ["--strategy", "allreduce", "--engine", "mpi"],
            "engine mpi cannot go on without a rank that died",
        ),
        (
            ["--strategy", "epoch_average", "--engine", "tasks"],
            "engine tasks cannot go on without a rank that died",
        ),
        (["--strategy", "asp"], "engine mpi cannot go on"),
        (
            ["--strategy", "pipeline", "--engine", "gloo"],
            "pipeline cannot go on from the weights and the optimizer",
        ),
        (
            ["--strategy", "diloco", "--engine", "gloo"],
            "use allreduce, ddp, dislib-compat, epoch_average, horovod, serial",
        ),
        (
            ["--strategy", "allreduce:compression=topk", "--engine", "gloo"],
            "allreduce(compression=topk) cannot go on",
        ),
        (
            ["--strategy", "ddp", "--engine", "gloo", "--launcher", "local"],
            "is local; leave that out",
        ),
        (
            ["--strategy", "ddp", "--execution", "virtual"],
            "this study has none (virtual)",
        ),
        (["--strategy", "ddp", "--retry"], "--retry"),
    ],
)
def test_what_cannot_be_elastic_is_refused_in_one_line(
    tmp_path, monkeypatch, options, reason
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SCALEBENCH_LAUNCHER", "")
    command = [
        "run",
        "--elastic",
        "--dataset",
        "wine",
        "--workers",
        "2",
        "--repetitions",
        "1",
    ]
    execution = [] if "--execution" in options else ["--execution", "native"]
    said = CliRunner().invoke(main, [*command, *execution, *options])
    assert said.exit_code == 2
    assert reason in said.output
    assert len(said.output.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_missing_launcher_is_named_with_the_command_that_adds_it(monkeypatch):
    monkeypatch.setattr(horovodrun, "find", lambda: None)
    plan = plan_study(
        Study(dataset="wine", strategies=["horovod"], workers=[2], execution="native")
    )
    with pytest.raises(
        EngineError, match=r"--elastic: no horovodrun .* scalebench install horovod"
    ):
        elastic_runs(plan)
