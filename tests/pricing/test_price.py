"""Priced schedules against the event engine."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from scalebench.cluster.cluster_file import load_cluster
from scalebench.cluster.operation import Kind, Operation
from scalebench.data.plan import BatchPlan
from scalebench.errors import RunError
from scalebench.pricing.charges import Charges, gradients
from scalebench.pricing.price import NotLockStepError, price
from scalebench.pricing.recording import record
from scalebench.pricing.schedule import Event, RankGroups, Schedule
from scalebench.strategies import registry
from scalebench.system.clock import Task
from scalebench.virtual.engine import model_time, simulate


@pytest.mark.parametrize("name", registry.names())
def test_modelled_run_takes_the_time_of_the_virtual_one(make_run, blobs, machine, name):
    workers = 1 if name == "serial" else 4
    run = make_run(name, workers, virtual={"jitter": "lognormal", "slowdown": {workers - 1: 1.3}})
    computed, _ = simulate(run, blobs, machine)
    modelled = model_time(run.model_copy(update={"execution": "modelled"}), blobs, machine)
    assert modelled.status == computed.status == "completed", modelled.error
    for found, expected in zip(modelled.workers, computed.workers, strict=True):
        for column in ("train_s", "compute_s", "comm_s", "wait_s", "data_s", "other_s"):
            assert getattr(found, column) == pytest.approx(getattr(expected, column), rel=1e-9, abs=1e-15), column
        assert (found.syncs, found.bytes_sent) == (expected.syncs, expected.bytes_sent)
        assert [epoch.train_loss for epoch in found.epochs] == [None] * run.epochs
    assert not modelled.evaluations
    assert modelled.facts == replace(computed.facts, arithmetic=None)


def test_groups_that_call_different_collectives_pay_their_own(make_run, blobs, machine):
    """DASO's devices take turns, so that the n-th exchange of one group is another one than that of the next."""
    options = {"warm_up_epochs": 1, "cool_down_epochs": 2}
    run = make_run({"daso-heat": options}, 4, epochs=8, batch_per_worker=3, virtual={"jitter": "none"})
    computed, _ = simulate(run, blobs, machine)
    modelled = model_time(run.model_copy(update={"execution": "modelled"}), blobs, machine)
    assert len(computed.workers) == 4
    for found, expected in zip(modelled.workers, computed.workers, strict=True):
        assert expected.comm_s > 0
        assert (found.train_s, found.comm_s) == pytest.approx((expected.train_s, expected.comm_s), rel=1e-9)


def replace_cluster(machine, name):
    return replace(machine, cluster=load_cluster(name))


def test_transfer_of_a_blocking_collective_is_exposed_and_that_of_an_overlapped_one_is_not(make_run, machine):
    exposed = {}
    for name in ("allreduce", "ddp"):
        run = make_run(name, 8, epochs=1, batch_per_worker=4, virtual={"jitter": "none"})
        program = registry.create(name, {}, "virtual")
        model = torch.nn.Sequential(*[torch.nn.Linear(2000, 2000) for _ in range(4)]).to("meta")
        slow = replace(machine, tables=[table.scaled(50.0) for table in machine.tables])
        charges = Charges.of([run], replace_cluster(slow, "dgx-h100"))
        charges.costs.gradients = gradients(model, [])
        end = price(record(run, program, BatchPlan(64, 8, seed=0, batch_per_worker=4), model, 8), charges)[0].end
        exposed[name] = (end.seconds[Task.COMM] / end.transfer).max()
    assert exposed["allreduce"] == pytest.approx(1.0)
    assert exposed["ddp"] < 0.9


def test_programs_that_do_not_meet_are_refused(make_run, machine):
    everyone = RankGroups.of_all(2)
    alone = Schedule(0, [Event.of(Operation(Kind.BARRIER, 0, (0, 1)), everyone)])
    charges = Charges.of([make_run("allreduce", 2)], machine)
    with pytest.raises(RunError, match="others do not call"):
        price([alone, Schedule(1)], charges)
    with pytest.raises(NotLockStepError):
        price([Schedule(0, [Event.of(Operation(Kind.SERVE, 4, (0, 0)))]), Schedule(1)], charges)


def test_partition_numbers_the_parts_of_each_group():
    halves = RankGroups.of_all(8).part(0, lambda rank: rank // 4)
    assert [list(halves.members(label)) for label in (0, 1)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    strided = halves.part(0, lambda rank: rank % 2)
    assert [list(strided.members(label)) for label in range(4)] == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert strided is halves.part(0, lambda rank: 0), "a split has one result for all members"
