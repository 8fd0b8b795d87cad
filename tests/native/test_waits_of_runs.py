"""Waits of real paced workers, one of them three times as slow, compared with those of virtual workers."""

from __future__ import annotations

import pytest

from scalebench.cluster.cluster_file import load_cluster
from scalebench.cluster.engine_costs import EngineCosts
from scalebench.comm.engines import available
from scalebench.data.batch_plan import BatchPlan
from scalebench.data.catalog import prepare
from scalebench.data.dataset import open_dataset
from scalebench.launch.hosts import reachable
from scalebench.launch.real_runs import RealRuns
from scalebench.launch.sweep import expand
from scalebench.pricing.machine import Machine, stated_table
from scalebench.study.spec import Study
from scalebench.virtual.engine import simulate

pytestmark = pytest.mark.thorough
WORKERS, SLOW, STEP_S = 4, 1, 0.02
LOCKSTEP = ["allreduce", "bsp", "epoch_average", "gossip", "hierarchical_local_sgd"]
FREE = ["asp", "epoch_async", "ad_psgd"]
OPTIONS = {"hierarchical_local_sgd": {"groups": {2: 1, 4: 5}}, "ssp": {"staleness": 2}}


def study(execution):
    engine = "auto" if execution == "virtual" else "mpi"
    return Study.model_validate(
        {
            "strategies": [
                {name: OPTIONS.get(name, {})} for name in (*LOCKSTEP, *FREE, "ssp")
            ],
            "workers": [WORKERS],
            "execution": execution,
            "engine": engine,
            "device_step_time": STEP_S,
            "repetitions": 1,
            "epochs": 2,
            "dataset": "wine",
            "batch_per_worker": 8,
            "model": {"mlp": {"hidden": [16]}},
            "virtual": {"slowdown": {SLOW: 3.0}, "jitter": "none"},
        }
    )


@pytest.fixture(scope="module")
def paced(tmp_path_factory):
    if reason := available("mpi"):
        pytest.skip(reason)
    said, outcomes = study("paced"), {}
    RealRuns({WORKERS: prepare(said, WORKERS)}, ranks=WORKERS,
        work_dir=tmp_path_factory.mktemp("paced"), on_start=lambda run: None, log=lambda message: None,
        on_outcome=lambda run, outcome: outcomes.update({run.strategy.name: outcome}),
    ).launch(expand(said, load_cluster("this-machine"), reachable()).runs)  # fmt: skip
    assert {outcome.error for outcome in outcomes.values()} == {""}
    return outcomes


@pytest.fixture(scope="module")
def virtual():
    said, cluster = study("virtual"), load_cluster("this-machine")
    dataset, outcomes = open_dataset(prepare(said, WORKERS)), {}
    for run in expand(said, cluster, reachable()).runs:
        batch = BatchPlan.of(said, WORKERS, run.seed, dataset).batch_size
        machine = Machine(cluster, EngineCosts(), [stated_table(said, cluster, batch)])
        outcomes[run.strategy.name], _ = simulate(run, dataset, machine)
    return outcomes


def in_epochs(worker):
    """Without the barrier behind the last one."""
    return sum(epoch.wait_s for epoch in worker.epochs)


@pytest.mark.parametrize("strategy", [*LOCKSTEP, *FREE, "ssp"])
def test_waiting_is_part_of_communication(paced, strategy):
    """A fast worker waits about as long as the slow one computes longer."""
    workers = paced[strategy].workers
    assert [len(worker.epochs) for worker in workers] == [2] * WORKERS
    for worker in workers:
        assert 0 <= worker.wait_s <= worker.comm_s
        assert all(0 <= epoch.wait_s <= epoch.comm_s + 1e-9 for epoch in worker.epochs)
        assert in_epochs(worker) <= worker.wait_s + 1e-9
    slow = workers[SLOW]
    for worker in workers:
        if worker is not slow:
            assert worker.wait_s > 0.5 * (slow.compute_s - worker.compute_s)
            assert worker.wait_s > slow.wait_s


def test_fast_workers_wait_in_every_epoch_only_in_lockstep(paced):
    for name in LOCKSTEP:
        assert all(epoch.wait_s > STEP_S for epoch in paced[name].workers[0].epochs)
    for name in FREE:
        # the last one of ad_psgd ends in a mean of all
        first = paced[name].workers[0].epochs[0]
        assert first.wait_s < 0.25 * first.compute_s
    fast = {name: in_epochs(paced[name].workers[0]) for name in ("bsp", "ssp", "asp")}
    assert fast["asp"] < fast["ssp"] < fast["bsp"]


@pytest.mark.parametrize("strategy", [*LOCKSTEP, *FREE, "ssp"])
def test_real_waits_agree_with_virtual_ones(paced, virtual, strategy):
    """Compared as shares of the slow worker's additional compute time, which a busy machine changes too."""
    shares = []
    for workers in (paced[strategy].workers, virtual[strategy].workers):
        fast, slow = workers[0], workers[SLOW]
        shares.append(
            [
                waited / (slow.compute_s - fast.compute_s)
                for waited in (fast.wait_s, in_epochs(fast))
            ]
        )
    assert shares[0] == pytest.approx(shares[1], abs=0.35)
