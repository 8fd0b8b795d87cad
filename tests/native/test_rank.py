"""Whole native runs: one launch for all engines, equal arithmetic on each, idle ranks, kept weights, paced compute."""

import numpy as np
import pytest

from scalebench.comm import engines
from scalebench.data.catalog import prepare
from scalebench.launch.real_runs import RealRuns
from scalebench.study.spec import Component, Run
from tests.arrays import arrays_in

STRATEGIES = {
    "mpi": ("serial", "allreduce", "epoch_average", "epoch_async", "bsp"),
    "horovod": ("horovod", "allreduce", "epoch_average"),
    "gloo": ("ddp", "allreduce", "epoch_average"),
}
PACED = {"mpi": "allreduce", "horovod": "horovod", "gloo": "ddp"}
COUNTS = (4, 1, 2)  # in this order: ranks fall asleep and are woken
STEP_S, BATCH = 0.02, 5


def make_run(engine, strategy, workers, **changes):
    options = {
        "study": "test",
        "run_id": f"{engine}-{strategy}-{workers}-{changes.get('execution', 'native')}",
        "config_hash": "x",
        "execution": "native",
        "engine": engine,
        "strategy": Component(name=strategy),
        "workers": workers,
        "repetition": 0,
        "seed": 5,
        "epochs": 2,
        "dataset": Component(
            name="wine"
        ),  # its training rows divide by neither 2 nor 4: uneven shards and batches
        "model": Component(name="mlp", options={"hidden": [6]}),
        "batch_per_worker": BATCH,
        "dtype": "float64",
        "warmup_steps": 3,
        "save_weights": True,
    }
    return Run(**(options | changes))


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """Outcomes and weights of the runs of all engines, which take turns in one launch of four ranks."""
    if reason := engines.available("mpi"):
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("launched")
    here = [engine for engine in STRATEGIES if engines.available(engine) is None]
    runs = [
        make_run(engine, strategy, workers)
        for workers in COUNTS
        for engine in here
        for strategy in STRATEGIES[engine]
        if strategy != "serial" or workers == 1
    ]
    runs += [
        make_run(engine, PACED[engine], 2, execution="paced", device_step_time=STEP_S)
        for engine in here
    ]
    outcomes, messages = {}, []
    RealRuns(
        {workers: prepare(runs[0], workers) for workers in COUNTS},
        ranks=4,
        work_dir=folder / "work",
        weights_folder=folder / "weights",
        on_start=lambda run: None,
        on_outcome=lambda run, outcome: outcomes.update({run.run_id: outcome}),
        log=messages.append,
    ).launch(runs)
    assert not messages, "one launch served all"
    assert [path.name for path in (folder / "work").iterdir()] == ["launch-1"]
    assert list(outcomes) == [run.run_id for run in runs], "in run order"
    weights = {
        run.run_id: arrays_in(folder / "weights" / f"{run.run_id}.npz") for run in runs
    }
    return outcomes, {
        name: (kept["initial"], kept["final"]) for name, kept in weights.items()
    }


@pytest.fixture(scope="module", params=STRATEGIES)
def swept(request, launched):
    """engine, outcomes and weights of its runs, by strategy, workers and execution."""
    engine = request.param
    if reason := engines.available(engine):
        pytest.skip(reason)
    outcomes, weights = (
        {
            name.removeprefix(f"{engine}-"): value
            for name, value in all_of.items()
            if name.startswith(f"{engine}-")
        }
        for all_of in launched
    )
    assert {(outcome.status, outcome.error) for outcome in outcomes.values()} == {
        ("completed", "")
    }
    return engine, outcomes, weights


@pytest.fixture(scope="module")
def reference():
    """Reference loops of gradient averaging and epoch averaging in one process."""
    import torch

    from scalebench.data.batch_plan import BatchPlan
    from scalebench.data.dataset import open_dataset
    from scalebench.system.clock import WallClock
    from scalebench.training.replica import Replica

    class Alone:
        collectives = bytes_sent = 0
        size = 1
        alltoallv = None  # no rows move

        def __init__(self, rank):
            self.rank = rank

    def train(workers, per_batch):
        run = make_run("mpi", "allreduce", workers)
        dataset = open_dataset(prepare(run, workers))
        plan = BatchPlan.of(run, workers, run.seed, dataset)
        replicas = []
        for rank in range(workers):
            replica = Replica(run, dataset, plan, Alone(rank), WallClock())
            replica.size = workers
            replicas.append(replica)
        for epoch in range(run.epochs):
            for batches in zip(
                *(replica.batches(epoch) for replica in replicas), strict=True
            ):
                for replica, batch in zip(replicas, batches, strict=True):
                    replica.gradient(batch, batch.weight if per_batch else 1.0)
                if per_batch:
                    mean = torch.stack(
                        [replica.gradients for replica in replicas]
                    ).mean(0)
                    for replica in replicas:
                        replica.gradients.copy_(mean)
                for replica in replicas:
                    replica.update()
            if not per_batch:
                mean = torch.stack([replica.parameters for replica in replicas]).mean(0)
                for replica in replicas:
                    replica.parameters.copy_(mean)
        return replicas[0].parameters.numpy()

    return {
        (workers, per_batch): train(workers, per_batch)
        for workers in COUNTS
        for per_batch in (True, False)
    }


def test_every_engine_gives_the_weights_of_a_reference_loop(swept, reference):
    engine, _, weights = swept
    compared = [
        name for name in STRATEGIES[engine] if name not in ("serial", "epoch_async")
    ]
    assert compared
    for workers in COUNTS:
        for strategy in compared:
            _, final = weights[f"{strategy}-{workers}-native"]
            wanted = reference[workers, strategy != "epoch_average"]
            # float64; the engines add in another order, over a few dozen steps
            np.testing.assert_allclose(
                final,
                wanted,
                rtol=1e-9,
                atol=1e-12,
                err_msg=f"{engine} {strategy} {workers}",
            )


def test_one_worker_equals_serial_bit_for_bit(swept):
    engine, _, weights = swept
    if engine != "mpi":
        pytest.skip("not applicable: serial runs on mpi")
    for strategy in ("allreduce", "epoch_average"):
        assert np.array_equal(
            weights[f"{strategy}-1-native"][1], weights["serial-1-native"][1]
        )
    # half of the first merge is the initial weights: asynchronous merging is not serial
    # at one worker
    assert not np.array_equal(
        weights["epoch_async-1-native"][1], weights["serial-1-native"][1]
    )


def test_all_runs_start_from_the_same_weights(swept):
    _, _, weights = swept
    first = next(iter(weights.values()))[0]
    assert len(weights) > 1
    assert all(np.array_equal(initial, first) for initial, _ in weights.values())
    assert all(
        not np.array_equal(initial, final) for initial, final in weights.values()
    )


def test_outcome_holds_the_facts_of_its_run(swept):
    _, outcomes, _ = swept
    assert outcomes
    for run_id, outcome in outcomes.items():
        facts = outcome.facts
        assert (facts.launcher, facts.nodes) == ("mpirun", 1)
        assert facts.parameters == 13 * 6 + 6 + 6 * 3 + 3
        assert facts.metric_name == "accuracy"
        assert (
            len(outcome.workers) == facts.workers_per_node == int(run_id.split("-")[1])
        )
        assert outcome.eval_s > 0
        epochs = [evaluation.epoch for evaluation in outcome.evaluations]
        assert epochs[-1] == 1
        assert epochs == sorted(set(epochs))
        assert 0.5 < outcome.evaluations[-1].metric <= 1.0


def test_unmeasured_times_are_none(swept):
    _, outcomes, _ = swept
    assert outcomes
    for run_id, outcome in outcomes.items():
        worker = outcome.workers[0]
        if run_id.startswith("ddp"):
            assert (
                worker.compute_s
                is worker.comm_s
                is worker.wait_s
                is worker.other_s
                is None
            )
        else:
            parts = worker.compute_s + worker.comm_s + worker.data_s + worker.other_s
            assert parts == pytest.approx(worker.train_s, rel=0.05)
        if run_id.endswith("-1-native") and not run_id.startswith(("ddp", "bsp")):
            assert worker.wait_s == 0.0
        # the one worker of bsp waits where its server is kept from the core
        elif not run_id.startswith("ddp"):
            assert 0 <= worker.wait_s <= worker.comm_s


def test_paced_compute_takes_the_stated_time(swept):
    engine, outcomes, _ = swept
    (outcome,) = [
        outcome for run_id, outcome in outcomes.items() if run_id.endswith("paced")
    ]
    assert len(outcome.workers) == 2
    for worker in outcome.workers:
        least = 2 * worker.samples / BATCH * STEP_S * 0.999  # of two epochs
        assert worker.train_s >= least
        assert 0 <= worker.paced_overrun <= 1
        # else others keep the cores from the steps, which then take as long as they do
        if not worker.paced_overrun:
            assert worker.train_s < 2 * least
        if PACED[engine] == "ddp":
            assert worker.compute_s is None
        else:
            assert worker.compute_s >= least
