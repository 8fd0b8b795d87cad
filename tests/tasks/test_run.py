"""Strategies of whole epochs by tasks: the weights of the loop, dead processes, time limits, and what is refused."""

from __future__ import annotations

import multiprocessing
import time

import numpy as np
import pytest

from scalebench.data.catalog import prepare
from scalebench.data.dataset import open_dataset
from scalebench.launch.real_runs import RealRuns
from scalebench.pricing.machine import Choice
from scalebench.tasks.run import TaskRuns
from scalebench.virtual import engine
from tests.conftest import needs_mpi, some
from tests.facts import together
from tests.tasks.conftest import SLOW, kill_one_training, task_run

STRATEGIES = [
    "epoch_average",
    {"epoch_average": {"every": 2}},
    {"epoch_average": {"optimizer_state": "reset_per_block"}},
    {"epoch_average": {"optimizer_state": "average", "weighting": "samples"}},
    "dislib-compat",
    {"fedavg": {"fraction": 0.67}},
]


def in_the_loop(run, machine, monkeypatch):
    """The weights of the same run in one process, each replica computing its own gradients."""
    monkeypatch.setattr(
        engine, "choose", lambda *of: Choice(reason="bits are compared")
    )
    virtual = run.model_copy(update={"engine": "virtual", "execution": "virtual"})
    outcome, weights = engine.simulate(
        virtual, open_dataset(prepare(run, run.workers)), machine
    )
    assert outcome.status == "completed", outcome.error
    return outcome, weights["final"].numpy()


@pytest.mark.parametrize(
    "strategy",
    some(STRATEGIES, "epoch_average", "dislib-compat", STRATEGIES[2]),
    ids=str,
)
def test_weights_and_losses_are_those_of_the_loop_bit_for_bit(
    strategy, executed, machine, monkeypatch
):
    run = task_run(strategy, 3, blocks=6, optimizer={"sgd": {"momentum": 0.9}})
    outcome, weights = executed(run)
    assert (outcome.status, outcome.error) == ("completed", "")
    virtual, final = in_the_loop(run, machine, monkeypatch)
    assert np.array_equal(weights["final"], final)
    for report, other in zip(outcome.workers, virtual.workers, strict=True):
        assert [epoch.train_loss for epoch in report.epochs] == [
            epoch.train_loss for epoch in other.epochs
        ]
        assert (report.syncs, report.bytes_sent) == (other.syncs, other.bytes_sent)
        assert report.optimizer_steps == other.optimizer_steps
    assert [e.metric for e in outcome.evaluations] == [
        e.metric for e in virtual.evaluations
    ]


NOISY = """
from torch import nn

def build(input_shape, outputs):
    return nn.Sequential(nn.Linear(input_shape[0], 6), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.Linear(6, outputs))
"""


@pytest.mark.parametrize(
    "changes",
    [
        {"optimizer": {"adamw": {}}, "lr_policy": "cosine"},
        {"model": "noisy.py:build", "optimizer": {"sgd": {"momentum": 0.9}}},
        {"shuffle": "rotate_blocks", "blocks": 4, "dtype": "float32"},
    ],
    ids=str,
)
def test_optimizers_buffers_random_states_and_blocks_travel(
    changes, executed, machine, monkeypatch, tmp_path
):
    if "model" in changes:
        (tmp_path / "noisy.py").write_text(NOISY)
        changes = changes | {"model": f"{tmp_path / 'noisy.py'}:build"}
    run = task_run("epoch_average", 2, **changes)
    outcome, weights = executed(run)
    assert outcome.status == "completed", outcome.error
    assert np.array_equal(weights["final"], in_the_loop(run, machine, monkeypatch)[1])


@needs_mpi
def test_weights_are_those_of_mpi_bit_for_bit(executed, tmp_path):
    run = task_run()
    mpi = run.model_copy(update={"engine": "mpi"})
    outcomes = []
    RealRuns(
        {2: prepare(run, 2)},
        ranks=2,
        work_dir=tmp_path / "work",
        weights_folder=tmp_path,
        on_start=lambda run: None,
        on_outcome=lambda run, outcome: outcomes.append(outcome),
        log=print,
    ).launch([mpi])
    assert outcomes[0].status == "completed", outcomes[0].error
    with np.load(tmp_path / f"{run.run_id}.npz") as kept:
        assert np.array_equal(kept["final"], executed(run)[1]["final"])


def test_asynchronous_merges_come_in_the_order_of_the_tasks(executed):
    outcome, weights = executed(task_run("epoch_async", 3))
    assert outcome.status == "completed", outcome.error
    positions = sorted(
        int(p)
        for worker in outcome.workers
        for p in worker.histograms["merge_position"]
    )
    assert positions == list(range(9))
    assert not np.array_equal(weights["initial"], weights["final"])


# A model file whose batches wait for those of another process.
TOGETHER = (
    SLOW.replace(
        "import time",
        "import multiprocessing\nimport os\nimport time\nfrom pathlib import Path",
    )
    .replace("time.sleep(0.05)", "meet()")
    .replace(
        "class Slow",
        """\
def meet():
    if multiprocessing.parent_process() is None:
        return
    here = Path(__file__).parent
    mine = here / f"batches-{os.getpid()}"
    with mine.open("a") as file:
        file.write(".")
    done = mine.stat().st_size
    while sum(each.stat().st_size >= done for each in here.glob("batches-*")) < 2:
        time.sleep(0.001)

class Slow""",
    )
)


def test_workers_that_merge_train_at_the_same_time(executed, tmp_path):
    """A worker that waits for its block does not hold the shared model."""
    (tmp_path / "together.py").write_text(TOGETHER)
    model = f"{tmp_path / 'together.py'}:build"
    outcome, _ = executed(
        task_run("epoch_async", 2, model=model, epochs=2, run_id="at-once")
    )
    assert outcome.status == "completed", outcome.error


def test_a_row_says_the_backend_and_how_long_what_took(executed):
    outcome, _ = executed(task_run("serial", 1))
    assert (outcome.facts.launcher, outcome.facts.blocks_retrained) == ("processes", 0)
    (worker,) = outcome.workers
    assert worker.wait_s is None
    assert worker.compute_s > 0
    parts = worker.compute_s + worker.comm_s + worker.data_s + worker.other_s
    # the sum of the laps, in another order
    assert parts == pytest.approx(worker.train_s)


def test_processes_of_others_outlive_the_tasks(executed):
    """A child of the command that is none of the tasks', as a worker of dask or of virtual runs, goes on."""
    other = multiprocessing.get_context("spawn").Process(
        target=time.sleep, args=(60,), daemon=True
    )
    other.start()
    try:
        runs = TaskRuns({2: prepare(task_run(), 2)}, 2)
        assert runs.execute(task_run(save_weights=False)).status == "completed"
        own = {process.pid for process in runs._backends[task_run().tasks]._processes}
        assert None not in own
        runs.close()
        assert other.is_alive()
        while own & {child.pid for child in multiprocessing.active_children()}:
            time.sleep(0.05)
    finally:
        other.kill()
        other.join()


def test_a_dead_process_s_block_is_trained_again_once(
    executed, machine, monkeypatch, tmp_path
):
    kill_one_training(tmp_path, monkeypatch)
    run = task_run(model=f"{tmp_path / 'mortal.py'}:build", epochs=2, run_id="killed")
    outcome, weights = executed(run)
    assert outcome.status == "completed", outcome.error
    assert outcome.facts.blocks_retrained == 1
    assert np.array_equal(weights["final"], in_the_loop(run, machine, monkeypatch)[1])


def test_a_block_that_kills_two_processes_fails_its_run_alone(executed, tmp_path):
    source = tmp_path / "deadly.py"
    source.write_text(
        SLOW.replace("time.sleep(0.05)", "die()").replace(
            "class Slow",
            "import os, multiprocessing\ncalls = 0\n\ndef die():\n    global calls\n    calls += 1\n"
            "    if calls > 10 and multiprocessing.parent_process() is not None:\n        os.kill(os.getpid(), 9)\n\n"
            "class Slow",
        )
    )
    outcome, _ = executed(task_run(model=f"{source}:build", run_id="deadly"))
    assert outcome.status == "failed"
    assert together(outcome.error, "two processes", "same block")
    assert executed(task_run())[0].status == "completed"


def test_a_failing_model_and_a_time_limit_are_outcomes(executed, tmp_path):
    (tmp_path / "slow.py").write_text(SLOW)
    late, _ = executed(
        task_run(
            model=f"{tmp_path / 'slow.py'}:build",
            time_limit_s=0.5,
            epochs=50,
            run_id="late",
        )
    )
    assert late.status == "timeout"
    assert executed(task_run())[0].status == "completed"
    (tmp_path / "bad.py").write_text(
        SLOW.replace("time.sleep(0.05)", "raise ValueError('no such thing')")
    )
    bad, _ = executed(task_run(model=f"{tmp_path / 'bad.py'}:build", run_id="bad"))
    assert bad.status == "failed"
    assert "no such thing" in bad.error


def test_a_model_with_a_state_of_its_own_is_refused(executed, tmp_path):
    counting = SLOW.replace(
        "time.sleep(0.05)", "self.seen = getattr(self, 'seen', 0) + 1"
    )
    (tmp_path / "counting.py").write_text(counting)
    outcome, _ = executed(
        task_run(model=f"{tmp_path / 'counting.py'}:build", run_id="counting")
    )
    assert "keeps a state that is no buffer" in outcome.error
