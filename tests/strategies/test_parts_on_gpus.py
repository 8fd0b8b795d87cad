"""Workers on GPUs that hold parts of a model train as virtual ones; on gloo too, so that the test itself is tested."""

from __future__ import annotations

import gc
import time
from pathlib import Path
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch

from scalebench.comm import engines, torch_dist
from scalebench.data.batch_plan import BatchPlan
from scalebench.data.catalog import prepare
from scalebench.data.dataset import open_dataset
from scalebench.launch.real_runs import RealRuns
from scalebench.native import sensors, session
from scalebench.strategies import registry
from scalebench.study.spec import Component, Run
from scalebench.system import hardware
from scalebench.system.clock import DeviceClock
from scalebench.training.loop import train
from scalebench.training.replica import Replica
from scalebench.virtual.engine import simulate
from tests.arrays import arrays_in
from tests.conftest import some

MODELS = Path(__file__).parent / "models"
IMAGES = {"kind": "images", "shape": [1, 8, 8], "classes": 3}
CONVOLUTIONAL, TRANSFORMER = "convolutional", "vision_transformer"
STRATEGIES = [  # model, strategy, options, workers
    (CONVOLUTIONAL, "model_parallel", {}, 2),
    (TRANSFORMER, "pipeline", {}, 2),
    (CONVOLUTIONAL, "pipeline", {"schedule": "interleaved"}, 2),
    (TRANSFORMER, "pipeline", {"schedule": "gpipe", "recompute": "layer"}, 2),
    (TRANSFORMER, "tensor", {}, 2),
    (CONVOLUTIONAL, "tensor", {}, 2),
    (CONVOLUTIONAL, "fsdp", {"shard": 1}, 2),
    (TRANSFORMER, "fsdp", {"shard": 3}, 2),
    (TRANSFORMER, "adaptive", {"layout": "least"}, 2),
    (TRANSFORMER, "torch_pipeline", {}, 2),
    (CONVOLUTIONAL, "torch_pipeline", {"schedule": "zbv"}, 2),
    (TRANSFORMER, "torch_tensor", {}, 2),
    (CONVOLUTIONAL, "torch_fsdp", {}, 2),
    (TRANSFORMER, "pipeline", {"stages": 4}, 4),
    (TRANSFORMER, "hybrid", {"tensor": 2}, 4),
    (CONVOLUTIONAL, "hybrid", {"within": "local_sgd", "micro_batches": 2}, 4),
    (TRANSFORMER, "torch_pipeline", {}, 4),
]
COMMON = {
    "study": "test",
    "config_hash": "x",
    "execution": "native",
    "repetition": 0,
    "seed": 5,
    "epochs": 2,
    "time_limit_s": 1000,
    "dataset": Component(name="synthetic", options={"n_train": 96, **IMAGES}),
    "optimizer": Component(name="sgd", options={"momentum": 0.9}),
    "lr": 0.02,
    "batch_per_worker": 8,
    "dtype": "float64",
    "warmup_steps": 1,
    "save_weights": True,
}
# float64, weights of order 1: a GPU sums in other orders, and has other exp and erf
CLOSE = {"nccl": 1e-10, "gloo": 1e-12}


def runs_of(engine):
    ranks = hardware.gpus() if engines.named(engine).on_gpus else 4
    if reason := "" if ranks > 1 else "no GPU here for each of two ranks":
        pytest.skip(reason)
    if reason := engines.available(engine) or engines.available("mpi"):
        pytest.skip(reason)
    return [
        Run(
            run_id=f"{place}-{name}-{workers}",
            model=Component(name=f"{MODELS / model}.py:build"),
            strategy=Component(name=name, options=options),
            workers=workers,
            engine=engine,
            **COMMON,
        )
        for place, (model, name, options, workers) in enumerate(STRATEGIES)
        if workers <= ranks
    ]


def launched(runs, folder):
    """Return the data sets of the runs by worker count, and their outcomes by run; weights are in a folder."""
    outcomes = {}
    counts = {run.workers for run in runs}
    prepared = {workers: prepare(runs[0], workers) for workers in counts}
    RealRuns(
        prepared,
        ranks=max(counts),
        work_dir=folder / "work",
        weights_folder=folder / "weights",
        on_start=lambda run: None,
        on_outcome=lambda run, outcome: outcomes.update({run.run_id: outcome}),
        log=lambda message: None,
    ).launch(runs)
    return prepared, outcomes


@pytest.mark.parametrize("engine", some(["nccl", "gloo"], "nccl"))
def test_parts_train_as_virtual_workers_do(engine, machine, tmp_path):
    runs = runs_of(engine)
    prepared, outcomes = launched(runs, tmp_path)
    for run in runs:
        outcome = outcomes[run.run_id]
        assert outcome.status == "completed", (run.run_id, outcome.error)
        on_gpus = engines.named(engine).on_gpus
        peaks = [worker.peak_device_mib for worker in outcome.workers]
        assert all(peak is not None and peak > 0 for peak in peaks) == on_gpus
        found = arrays_in(tmp_path / "weights" / f"{run.run_id}.npz")
        twin = run.model_copy(update={"execution": "virtual", "engine": "virtual"})
        _, weights = simulate(twin, open_dataset(prepared[run.workers]), machine)
        np.testing.assert_allclose(
            found["final"],
            weights["final"].numpy(),
            atol=CLOSE[engine],
            rtol=0,
            err_msg=run.run_id,
        )
        assert np.abs(found["final"] - found["initial"]).max() > 1e-3


class QueueEvent:
    """As torch.cuda.Event, of a device that works at once; counts who waits for it."""

    waits = 0

    def __init__(self):
        self.at = time.perf_counter()

    def synchronize(self):
        QueueEvent.waits += 1

    def elapsed_time(self, end_event):
        return 1e3 * (end_event.at - self.at)


@pytest.fixture
def one_thread():
    """Torch with one thread, as a rank has beside others."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def finite(monkeypatch):
    """Workers that are not there send zeros, and what this one has: any values of memory may end the training."""
    monkeypatch.setattr(
        torch_dist.TorchCommunicator,
        "_recv",
        lambda self, tensor, source, tag: tensor.zero_(),
    )
    monkeypatch.setattr(
        torch_dist.TorchCommunicator,
        "_allgather",
        lambda self, tensor: [tensor] * self.size,
    )


def waits_in(steps, name, options, workers, model):
    """Train worker 0 among others that are not there; return how often it waited for its device."""
    run = Run(
        run_id="r",
        model=Component(name=f"{MODELS / model}.py:build"),
        strategy=Component(name=name, options=options),
        workers=workers,
        engine="gloo",
        **COMMON
        | {
            "dataset": Component(
                name="synthetic", options={"n_train": 8 * workers * steps, **IMAGES}
            )
        },
    )
    dataset = open_dataset(prepare(run, workers))
    strategy = registry.create(name, options, run.engine)
    mesh = strategy.traits.mesh(workers)
    plan = BatchPlan.of(run, workers, run.seed, dataset, mesh.parts)
    QueueEvent.waits = 0
    clock = DeviceClock(lambda: None, QueueEvent)
    with torch_dist.silent_group(workers, clock) as comm:
        replica = Replica(run, dataset, plan, comm, clock, mesh=mesh)
        report = train(replica, strategy)
    assert report.optimizer_steps >= 2 * steps
    assert report.train_s >= report.compute_s > 0
    return QueueEvent.waits


@pytest.mark.parametrize(
    ("model", "name", "options", "workers"),
    [
        (TRANSFORMER, "pipeline", {}, 2),
        (CONVOLUTIONAL, "pipeline", {"schedule": "interleaved"}, 2),
        (TRANSFORMER, "tensor", {}, 2),
        (TRANSFORMER, "fsdp", {"shard": 3}, 2),
    ],
)
def test_steps_do_not_wait_for_the_device(model, name, options, workers, finite):
    few, many = (waits_in(steps, name, options, workers, model) for steps in (1, 4))
    assert few == many


class Lone:
    """The control of a rank whose others are not there."""

    rank, size = 0, 1

    def allgather(self, value):
        return [value]

    gather = allgather

    def Barrier(self):
        pass


class SilentEngine:
    """gloo between workers that are not there."""

    provides, on_gpus = frozenset(), False

    def connect(self, place):
        return torch_dist.silent_group(2, place.clock)


def numbers_alive():
    """Return how many numbers all tensors of this process have in memory."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if type(each) is torch.Tensor]
    # those of meta models, which other tests leave in caches, have no memory
    storages = {each.untyped_storage() for each in tensors if not each.is_meta}
    return sum({each.data_ptr(): each.nbytes() for each in storages}.values()) // 8


def test_peak_memory_is_that_of_a_part_in_training(
    one_thread, finite, tmp_path, monkeypatch
):
    alive = {}
    before = numbers_alive()
    measured = {"forget_peak_memory": None, "peak_memory": (1.0, 1.0)}
    for name, value in measured.items():

        def look(device, name=name, value=value):
            assert name not in alive, "once a run"
            alive[name] = numbers_alive() - before
            return value

        monkeypatch.setattr(sensors, name, look)
    monkeypatch.setattr(session, "named", lambda name: SilentEngine())
    run = Run(
        run_id="r",
        model=Component(name="mlp", options={"hidden": [200, 200]}),
        strategy=Component(name="pipeline", options={"balance": [1, 2]}),
        workers=2,
        engine="gloo",
        **COMMON | {"warmup_steps": 0, "save_weights": False},
    )
    job = MagicMock(datasets={2: prepare(run, 2)})
    outcome = session.Session(job, run, Lone(), MagicMock()).execute()
    assert outcome.status == "completed", outcome.error
    assert outcome.workers[0].peak_device_mib == 1.0
    # Parameters, gradients, velocity and initial values of the first of three layers,
    # which has a quarter of the model's.
    part = 4 * (64 * 200 + 200)
    assert part <= alive["forget_peak_memory"] < 1.5 * part
    assert part <= alive["peak_memory"] < 2 * part, "before an evaluation"
