"""BatchNorm's statistics without averaging: DDP's workers take over worker 0's, Horovod's keep their own."""

from __future__ import annotations

import numpy as np
import pytest

from scalebench.cluster.network import Network
from scalebench.comm.engines import available
from scalebench.pricing.costs import Costs
from scalebench.strategies import ddp
from scalebench.virtual import engine
from scalebench.virtual.engine import simulate
from scalebench.virtual.pool import simulate_alike
from tests.operations import broadcast
from tests.strategies.test_native_equality import MODEL, launched, native_runs

CASES = {
    "gloo": {"ddp": {"ddp": {}}, "ddp-accumulating": {"ddp": {"accumulate": 3}}},
    "horovod": {"horovod": {"horovod": {}}},
}
BYTES = 8 * (5 + 5 + 1)  # mean and variance of five features, and a counter


@pytest.fixture
def simulated(blobs, machine, monkeypatch):
    """`simulated(run)`: the outcome, the weights, and the buffers (worker, number) that training ended with."""
    real = engine.evaluate

    def of(run):
        found = {}

        def looking(replica, *arguments):
            buffers = [
                buffer.double().reshape(-1).numpy().copy()
                for buffer in replica.model.buffers()
            ]
            found[replica.rank] = np.concatenate(buffers)
            return real(replica, *arguments)

        monkeypatch.setattr(engine, "evaluate", looking)
        virtual = run.model_copy(update={"execution": "virtual", "engine": "virtual"})
        outcome, weights = simulate(virtual, blobs, machine)
        assert outcome.status == "completed", outcome.error
        return outcome, weights, np.stack([found[rank] for rank in sorted(found)])

    return of


@pytest.mark.thorough
def test_real_ranks_end_with_the_buffers_of_virtual_workers(
    make_run, blobs, simulated, tmp_path
):
    """On two and four ranks, to 1e-10 in float64, for sums in another order."""
    if reason := available("gloo"):
        pytest.skip(reason)
    here = [name for name in CASES if available(name) is None]
    runs = [
        run
        for name in here
        for run in native_runs(name, CASES[name], make_run, counts=(2, 4), model=MODEL)
    ]
    assert {"ddp-2", "ddp-4", "ddp-accumulating-2", "ddp-accumulating-4"} <= {
        run.run_id for run in runs
    }
    found = launched("gloo", runs, [], blobs, tmp_path)
    for run in runs:
        native, (outcome, weights, buffers) = found[run.run_id], simulated(run)
        np.testing.assert_allclose(
            native["final"],
            weights["final"].numpy(),
            atol=1e-10,
            rtol=0,
            err_msg=run.run_id,
        )
        np.testing.assert_allclose(
            native["buffers"], buffers, atol=1e-10, rtol=0, err_msg=run.run_id
        )
        counted = [[report.syncs, report.bytes_sent] for report in outcome.workers]
        assert native["counted"].tolist() == counted, run.run_id
        metrics = [
            evaluation.metric
            for evaluation in sorted(outcome.evaluations, key=lambda each: each.epoch)
        ]
        assert native["metrics"].tolist() == metrics, run.run_id


def test_buffers_of_ddp_workers_are_one_batch_past_those_of_worker_0(
    make_run, simulated
):
    """m <- 0.9 m + 0.1 batch: what two workers differ in is a tenth of how their last batches differ, no history."""
    _, _, sent = simulated(make_run("ddp", 4, model=MODEL, epochs=6))
    _, _, kept = simulated(make_run("horovod", 4, model=MODEL, epochs=6))
    np.testing.assert_array_equal(sent[0], kept[0])  # worker 0 keeps its own
    means = slice(0, 5)
    apart = [np.abs(each[1:, means] - each[0, means]).max() for each in (sent, kept)]
    assert 0 < apart[0] < apart[1]
    assert np.abs(sent[1:, means] - kept[1:, means]).max() > 1e-3


@pytest.mark.parametrize(
    "options",
    [{}, {"accumulate": 5}, {"compression": "fp16"}, {"compression": "powersgd"}],
)
@pytest.mark.parametrize("workers", [2, 4])
def test_recorded_traffic_of_ddp_holds_its_buffers(
    make_run, simulated, recorded, options, workers
):
    run = make_run(
        {"ddp": options}, workers, model={MODEL: {"width": 12}}, batch_per_worker=4
    )
    outcome, _, _ = simulated(run)
    for worker, schedule in zip(outcome.workers, recorded(run), strict=True):
        assert (worker.syncs, worker.bytes_sent) == (
            schedule.syncs,
            schedule.bytes_sent,
        )
    updates = 2 * -(-outcome.facts.steps_per_epoch // options.get("accumulate", 1))
    first, second = (report.bytes_sent for report in outcome.workers[:2])
    assert first - second == updates * 8 * (12 + 12 + 1)  # worker 0 alone sends buffers


def test_each_step_of_ddp_is_charged_a_broadcast(
    make_run, simulated, machine, monkeypatch
):
    run = make_run("ddp", 4, model=MODEL, virtual={"jitter": "none"})
    whole = simulated(run)[0]
    monkeypatch.setattr(ddp, "broadcast_bytes_", lambda comm, tensors: None)
    without = simulated(run)[0]
    costs = Costs(
        Network(machine.cluster, machine.cluster.node.workers_per_node),
        machine.engines,
        "gloo",
    )
    price = 2 * whole.facts.steps_per_epoch * costs.time(broadcast(BYTES, (0, 1, 2, 3)))
    assert price > 0
    assert len(whole.workers) == 4
    for charged, free in zip(whole.workers, without.workers, strict=True):
        assert charged.train_s - free.train_s == pytest.approx(price, rel=1e-9)


def test_workers_that_share_arithmetic_keep_buffers_of_their_own(
    make_run, blobs, machine
):
    runs = [
        make_run(name, 3, run_id=name, model=MODEL)
        for name in ("ddp", "allreduce", "horovod")
    ]
    found = list(simulate_alike(runs, blobs, machine))
    assert [run.run_id for run, _, _ in found] == ["ddp", "allreduce", "horovod"]
    for run, outcome, _ in found:
        alone, _ = simulate(run, blobs, machine)
        assert [each.train_s for each in outcome.workers] == pytest.approx(
            [each.train_s for each in alone.workers], rel=1e-9
        )
        assert [each.syncs for each in outcome.workers] == [
            each.syncs for each in alone.workers
        ]
        for mine, its in zip(outcome.evaluations, alone.evaluations, strict=True):
            assert mine.elapsed_s == pytest.approx(its.elapsed_s, rel=1e-9)
            assert (mine.epoch, mine.metric) == (its.epoch, its.metric)
