"""The same class in one process and on real ranks ends with the same weights.

Parameter servers, options, Adasum, and strategies of few bytes on Horovod. Float64:
sums in another order differ by some 1e-16 a step; what a wire of 16 bits rounds is
rounded alike.
"""

from __future__ import annotations

import json

import numpy as np
import pytest

from scalebench.comm import engines
from scalebench.data.catalog import prepare
from scalebench.data.dataset import open_dataset
from scalebench.launch.real_runs import RealRuns
from scalebench.records.rows import rows_of
from scalebench.study.spec import Component, Run
from scalebench.virtual.engine import simulate
from tests.arrays import arrays_in

MOMENTUM = Component(name="sgd", options={"momentum": 0.9})
EXACT, ROUNDED = 1e-9, 1e-6
SHAPES = (
    (16, 13),
    (16,),
    (16, 16),
    (16,),
    (3, 16),
    (3,),
)  # of wine's features, two layers and classes
CASES = {
    "mpi": [
        ("bsp", {}, 4, EXACT),
        ("ssp", {"staleness": 0, "shards": 2}, 3, EXACT),
        ("dssp", {"lower": 0, "upper": 0, "bound": "paper"}, 2, EXACT),
        ("allreduce", {"compression": "fp16"}, 4, ROUNDED),
        ("allreduce", {"compression": "topk", "keep": 0.2}, 4, EXACT),
        ("allreduce", {"compression": "powersgd", "rank": 2}, 4, EXACT),
        ("allreduce", {"collective": "tree"}, 3, EXACT),
        ("allreduce", {"collective": "hierarchical"}, 4, EXACT),
        ("allreduce", {"accumulate": 3}, 4, EXACT),
        ("adasum", {}, 4, EXACT),
    ],
    "gloo": [
        ("allreduce", {"compression": "topk", "keep": 0.2}, 2, EXACT),
        ("ddp", {"compression": "powersgd", "rank": 2}, 4, EXACT),
        ("ddp", {"accumulate": 3}, 2, EXACT),
        (
            "ddp",
            {"compression": "fp16"},
            4,
            1e-3,
        ),  # torch divides before it sums, we after: half a bit of float16
    ],
    "horovod": [
        ("adasum", {}, 4, EXACT),
        ("allreduce", {"compression": "fp16"}, 2, ROUNDED),
        ("horovod", {"accumulate": 3}, 2, EXACT),
        (
            "horovod",
            {"compression": "fp16"},
            2,
            1e-3,
        ),  # Horovod divides the half-precision sum
        ("streaming_diloco", {"steps": 4}, 4, EXACT),
        ("streaming_diloco", {"steps": 4, "bits": 8}, 2, EXACT),
        ("streaming_diloco", {"steps": 4, "bits": 4}, 2, EXACT),
        ("sparse_loco", {"steps": 4, "keep": 0.2, "tile": 8}, 4, EXACT),
        ("demo", {"k": 3, "tile": 4}, 2, EXACT),
        ("sparta", {"share": 0.2}, 4, EXACT),
    ],
}
FURTHER_CASES = {
    "mpi": [
        ("bsp", {"shards": 3}, 3, EXACT),
        ("ssp", {"staleness": 0}, 4, EXACT),
        ("allreduce", {"compression": "bf16"}, 4, ROUNDED),
        ("allreduce", {"collective": "tree"}, 4, EXACT),
    ],
    "gloo": [
        ("allreduce", {"collective": "tree"}, 4, EXACT),
        ("ddp", {"compression": "powersgd", "rank": 2}, 2, EXACT),
        ("ddp", {"accumulate": 2, "compression": "powersgd", "rank": 2}, 2, EXACT),
        ("ddp", {"compression": "fp16"}, 2, 1e-3),
        ("ddp", {"compression": "bf16"}, 2, 1e-2),
        ("ddp", {"compression": "bf16"}, 4, 1e-2),
    ],
    "horovod": [
        ("adasum", {}, 2, EXACT),
        ("allreduce", {"compression": "topk", "keep": 0.2}, 2, EXACT),
        ("horovod", {"accumulate": 2}, 4, EXACT),
        ("horovod", {"compression": "fp16"}, 4, 1e-3),
    ],
}
LOOSE = [("asp", {"staleness_lr": True}), ("asp", {"shards": 2}), ("elastic_bsp", {"shards": 2}),
         ("ssp", {"staleness": 1}), ("dssp", {"lower": 1, "upper": 3}),
         ("elastic_bsp", {}), ("bsp_backup", {})]  # fmt: skip


def make_run(engine, name, options, workers):
    label = "".join(c for c in json.dumps(options) if c.isalnum())
    return Run(
        study="test",
        run_id=f"{engine}-{name}-{workers}-{label}",
        config_hash="x",
        execution="native",
        engine=engine,
        strategy=Component(name=name, options=options),
        workers=workers,
        repetition=0,
        seed=5,
        epochs=2,
        dataset=Component(name="wine"),
        model=Component(name="mlp", options={"hidden": [16, 16]}),
        optimizer=MOMENTUM,
        lr=0.05,
        batch_per_worker=12,
        dtype="float64",
        warmup_steps=3,
        save_weights=True,
    )


def runs_of(cases):
    """The runs of the engines that are installed, with their tolerances."""
    here = [engine for engine in cases if engines.available(engine) is None]
    return [
        (make_run(engine, *case), tolerance)
        for engine in here
        for *case, tolerance in cases[engine]
    ]


def loose():
    return [make_run("mpi", name, options, 3) for name, options in LOOSE]


def outcomes_of(runs, folder):
    """The outcomes of the runs of all engines, from one launch, which leaves their weights in `folder`."""
    if reason := engines.available("mpi"):
        pytest.skip(reason)
    outcomes = {}
    RealRuns(
        {
            workers: prepare(runs[0], workers)
            for workers in {run.workers for run in runs}
        },
        ranks=max(run.workers for run in runs),
        work_dir=folder / "work",
        weights_folder=folder / "weights",
        on_start=lambda run: None,
        on_outcome=lambda run, outcome: outcomes.update({run.run_id: outcome}),
        log=lambda message: None,
    ).launch(runs)
    return outcomes


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    folder = tmp_path_factory.mktemp("launched")
    return outcomes_of(
        [run for run, _ in runs_of(CASES)] + loose(), folder
    ), folder / "weights"


def test_real_ranks_end_with_the_weights_of_the_virtual_run(machine, launched):
    check(runs_of(CASES), *launched, machine)


@pytest.mark.thorough
def test_real_ranks_end_with_the_weights_of_the_virtual_run_at_further_options(
    machine, tmp_path
):
    runs = runs_of(FURTHER_CASES)
    check(
        runs,
        outcomes_of([run for run, _ in runs], tmp_path),
        tmp_path / "weights",
        machine,
    )


def check(runs, outcomes, folder, machine):
    for run, tolerance in runs:
        outcome = outcomes[run.run_id]
        assert outcome.status == "completed", (run.run_id, outcome.error)
        dataset = open_dataset(prepare(run, run.workers))
        virtual, weights = simulate(
            run.model_copy(update={"execution": "virtual", "engine": "virtual"}),
            dataset,
            machine,
        )
        assert virtual.status == "completed", virtual.error
        kept = arrays_in(folder / f"{run.run_id}.npz")
        found, expected = kept["final"], weights["final"].numpy()
        np.testing.assert_array_equal(kept["initial"], weights["initial"].numpy())
        assert np.abs(found - expected).max() <= tolerance, run.run_id
        assert np.abs(found - kept["initial"]).max() > 0.01
        if run.strategy.options.get("collective") == "hierarchical":
            continue  # the virtual workers lie on two nodes, the real ones on this one
        if run.strategy.name in ("adasum", "ddp") and run.engine != "mpi":
            continue  # torch and Horovod send other messages for the same weights
        for real, modelled in zip(outcome.workers, virtual.workers, strict=True):
            assert (real.syncs, real.bytes_sent) == (
                modelled.syncs,
                modelled.bytes_sent,
            ), run.run_id


def test_rules_that_depend_on_timing_train_on_a_real_server(launched):
    """In any order of arrival every push is counted, the bounds hold and the loss falls."""
    outcomes, _ = launched
    runs = loose()
    assert runs
    for run in runs:
        outcome = outcomes[run.run_id]
        assert outcome.status == "completed", (run.run_id, outcome.error)
        steps = outcome.facts.steps_per_epoch * run.epochs
        assert len(outcome.workers) == 3
        for worker in outcome.workers:
            counted = sum(
                sum(worker.histograms.get(name, {}).values())
                for name in ("staleness", "dropped")
            )
            assert counted == worker.optimizer_steps <= steps
            if run.strategy.name != "bsp_backup":
                assert worker.optimizer_steps == steps
            leads = [int(lead) for lead in worker.histograms["lead_at_release"]]
            assert max(leads) <= {"ssp": 1, "dssp": 3}.get(run.strategy.name, steps)
        facts = {
            "attempt": 1,
            "oversubscribed": True,
            "started_utc": "",
            "provenance": {},
        }
        row = rows_of(run, outcome, **facts)[0]
        used = sum(
            sum(worker.histograms.get("staleness", {}).values())
            for worker in outcome.workers
        )
        assert sum(json.loads(row.staleness_histogram).values()) == used
        assert sum(json.loads(row.lead_histogram).values()) >= used
        losses = [np.mean([w.epochs[e].train_loss for w in outcome.workers if w.epochs[e].train_loss is not None])
                  for e in (0, -1)]  # fmt: skip
        assert losses[1] < losses[0]
        assert [evaluation.epoch for evaluation in outcome.evaluations] == [0, 1]
