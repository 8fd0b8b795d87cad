"""Workers on GPUs that hold parts of a model train as virtual ones; on gloo too, so that the test itself is tested."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from scalebench.comm import engines
from scalebench.data.catalog import prepare
from scalebench.data.dataset import open_dataset
from scalebench.launch.real_runs import RealRuns
from scalebench.study.spec import Component, Run
from scalebench.system import hardware
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
# float64, weights of order 1: a GPU sums in other orders, and has other exp and erf
CLOSE = {"nccl": 1e-10, "gloo": 1e-12}


def runs_of(engine):
    ranks = hardware.gpus() if engines.named(engine).on_gpus else 4
    if reason := "" if ranks > 1 else "no GPU here for each of two ranks":
        pytest.skip(reason)
    if reason := engines.available(engine) or engines.available("mpi"):
        pytest.skip(reason)
    common = {
        "study": "test",
        "config_hash": "x",
        "execution": "native",
        "engine": engine,
        "repetition": 0,
        "seed": 5,
        "epochs": 2,
        "time_limit_s": 120,
        "dataset": Component(name="synthetic", options={"n_train": 96, **IMAGES}),
        "optimizer": Component(name="sgd", options={"momentum": 0.9}),
        "lr": 0.02,
        "batch_per_worker": 8,
        "dtype": "float64",
        "warmup_steps": 1,
        "save_weights": True,
    }
    return [
        Run(
            run_id=f"{place}-{name}-{workers}",
            model=Component(name=f"{MODELS / model}.py:build"),
            strategy=Component(name=name, options=options),
            workers=workers,
            **common,
        )
        for place, (model, name, options, workers) in enumerate(STRATEGIES)
        if workers <= ranks
    ]


@pytest.mark.parametrize("engine", some(["nccl", "gloo"], "nccl"))
def test_parts_train_as_virtual_workers_do(engine, machine, tmp_path):
    runs, outcomes = runs_of(engine), {}
    counts = {run.workers for run in runs}
    prepared = {workers: prepare(runs[0], workers) for workers in counts}
    RealRuns(
        prepared,
        ranks=max(counts),
        work_dir=tmp_path / "work",
        weights_folder=tmp_path / "weights",
        on_start=lambda run: None,
        on_outcome=lambda run, outcome: outcomes.update({run.run_id: outcome}),
        log=lambda message: None,
    ).launch(runs)
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
