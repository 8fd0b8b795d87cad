"""Every strategy on every engine that carries it, native and paced by the same class, on real ranks.

The pace changes the clock, not the weights. One launch for each engine, two workers,
one of which is stated to be three times as slow. Lower bounds on times are exact on any
machine, for a paced step only ends when its time is over.
"""

from __future__ import annotations

import numpy as np
import pytest

from scalebench.comm import engines
from scalebench.data.batch_plan import BatchPlan
from scalebench.data.catalog import prepare
from scalebench.data.dataset import open_dataset
from scalebench.data.shard import equal_batches
from scalebench.launch.engine_choice import describe_strategies
from scalebench.launch.real_runs import RealRuns
from scalebench.strategies import registry
from scalebench.study.heterogeneity import VirtualOptions
from scalebench.study.spec import Component, Run
from scalebench.virtual.engine import simulate
from tests.arrays import arrays_in

STEP_S, SLOW, BATCH = 1e-3, 3.0, 12
EXACT = 1e-9  # float64: sums in another order, and no half precision anywhere
BY_TIMING = {
    "epoch_async",
    "dislib-compat-async",
    "ad_psgd",
    "asp",
    "ssp",
    "dssp",
    "elastic_bsp",
    "bsp_backup",
}
# They cut each block into equal batches, and leave out what does not fill these.
EQUAL_BATCHES = {"dislib-compat", "dislib-compat-async"}
OPTIONS = {  # small enough to synchronise within a few steps, and to be exact
    "local_sgd": {"steps": 4},
    "post_local_sgd": {"start": 3, "steps": 4},
    "hierarchical_local_sgd": {"groups": {2: 4}},
    "slowmo": {"steps": 4},
    "bmuf": {"steps": 4},
    "diloco": {"steps": 4},
    "easgd": {"steps": 4},
    "streaming_diloco": {"steps": 4},
    "noloco": {"steps": 4},
    "sparse_loco": {"steps": 4, "keep": 0.2, "tile": 8},
    "daso-heat": {"devices_per_node": 1, "warm_up_epochs": 0, "cool_down_epochs": 0},
    "daso-fixed": {"devices_per_node": 1, "global_skip": 3, "wait": 2},
    "torch_local_sgd": {"period": 4},
    "torch_hierarchical_local_sgd": {"groups": {2: 4}},
    "torch_post_local_sgd": {"start": 3, "period": 4},
}
PLACES = [
    (entry.name, engine)
    for entry in describe_strategies()
    for engine in entry.engines
    if engine in ("mpi", "gloo", "horovod")
]
EXECUTIONS = ("native", "paced")


def make_run(name, engine, execution):
    workers = 1 if not registry.find(name).requires else 2
    pace = {
        "device_step_time": STEP_S,
        "virtual": VirtualOptions(slowdown={workers - 1: SLOW}),
    }
    return Run(
        study="test",
        run_id=f"{name}-{engine}-{execution}",
        config_hash="x",
        execution=execution,
        engine=engine,
        strategy=Component(name=name, options=OPTIONS.get(name, {})),
        workers=workers,
        repetition=0,
        seed=5,
        epochs=1,
        time_limit_s=120,
        dataset=Component(name="wine"),
        model=Component(name="mlp", options={"hidden": [8]}),
        optimizer=Component(name="sgd", options={"momentum": 0.9}),
        lr=0.02,
        batch_per_worker=BATCH,
        dtype="float64",
        warmup_steps=0,
        save_weights=True,
        **(pace if execution == "paced" else {}),
    )


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """`launched(engine)`: the outcomes of all runs of an engine, from one launch, and the folder of their weights."""
    known = {}

    def of(engine):
        if reason := engines.available(engine):
            pytest.skip(reason)
        if engine not in known:
            folder, outcomes = tmp_path_factory.mktemp(engine), {}
            runs = [
                make_run(name, engine, how)
                for name, on in PLACES
                if on == engine
                for how in EXECUTIONS
            ]
            RealRuns(
                {workers: prepare(runs[0], workers) for workers in (1, 2)},
                ranks=3 if engine == "mpi" else 2,  # the third is a server's
                work_dir=folder / "work",
                weights_folder=folder / "weights",
                on_start=lambda run: None,
                on_outcome=lambda run, outcome: outcomes.update({run.run_id: outcome}),
                log=lambda message: None,
            ).launch(runs)
            known[engine] = outcomes, folder / "weights"
        return known[engine]

    return of


def computed_samples(run, dataset, rank, steps):
    """Return the fewest samples of a worker in so many steps: it may skip batches whose round is over."""
    plan = BatchPlan.of(run, run.workers, run.seed, dataset)
    sizes, *_ = plan.batches(0, rank)
    if run.strategy.name in EQUAL_BATCHES:
        starts, samples = plan.block_starts(0, rank), sum(sizes)
        slices, _ = equal_batches(starts, samples, plan.batch_size)
        sizes = [high - low for low, high in slices]
    return sum(sorted(sizes)[:steps])


def test_every_registered_strategy_is_here():
    assert list(dict.fromkeys(name for name, _ in PLACES)) == list(registry.names())
    assert len(PLACES) == len(set(PLACES)) > len(registry.names())
    assert BY_TIMING | EQUAL_BATCHES | set(OPTIONS) <= set(registry.names())


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "engine"), PLACES)
def test_pacing_changes_times_and_not_weights(launched, machine, name, engine):
    outcomes, folder = launched(engine)
    runs = {execution: make_run(name, engine, execution) for execution in EXECUTIONS}
    for run in runs.values():
        assert outcomes[run.run_id].status == "completed", outcomes[run.run_id].error
    paced = runs["paced"]
    workers = outcomes[paced.run_id].workers
    assert sum(worker.optimizer_steps for worker in workers) > 0
    computed = [
        worker.train_s if worker.compute_s is None else worker.compute_s
        for worker in workers
    ]
    dataset = open_dataset(prepare(paced, paced.workers))
    in_parts = (
        registry.create(name, OPTIONS.get(name, {})).traits.mesh(paced.workers).parts
        > 1
    )
    for rank, worker in enumerate(workers):
        factor, samples = 1.0, worker.samples
        if not in_parts:
            factor = SLOW if rank == paced.workers - 1 else 1.0
            samples = computed_samples(paced, dataset, rank, worker.optimizer_steps)
        least = samples / BATCH * STEP_S * factor
        assert (sum(computed) if in_parts else computed[rank]) >= least * (1 - 1e-6)
        assert 0 <= worker.paced_overrun <= 1
    kept = {
        execution: arrays_in(folder / f"{run.run_id}.npz")
        for execution, run in runs.items()
    }
    found = kept["paced"]["final"]
    assert np.abs(found - kept["paced"]["initial"]).max() > 1e-3
    if name in BY_TIMING:
        assert np.isfinite(found).all()
        return
    twin = paced.model_copy(update={"execution": "virtual", "engine": "virtual"})
    virtual, weights = simulate(twin, dataset, machine)
    assert virtual.status == "completed", virtual.error
    np.testing.assert_allclose(found, weights["final"].numpy(), atol=EXACT, rtol=0)
    np.testing.assert_allclose(found, kept["native"]["final"], atol=EXACT, rtol=0)
