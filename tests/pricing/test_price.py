"""Priced schedules against the event engine."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from scalebench.cluster.cluster_file import load_cluster
from scalebench.cluster.operation import Kind, Operation
from scalebench.data.batch_plan import BatchPlan
from scalebench.errors import RunError
from scalebench.pricing.charges import Charges, gradients
from scalebench.pricing.price import NotLockStepError, price
from scalebench.pricing.program import programs_of
from scalebench.pricing.recording import record
from scalebench.pricing.schedule import Event, RankGroups, Schedule
from scalebench.strategies import registry
from scalebench.system.clock import Task
from scalebench.virtual.engine import model_time, simulate
from scalebench.virtual.lock_step import Prepared


@pytest.mark.parametrize("name", registry.names())
def test_modelled_run_takes_the_time_of_the_virtual_one(make_run, blobs, machine, name):
    workers = 1 if name == "serial" else 4
    run = make_run(
        name, workers, virtual={"jitter": "lognormal", "slowdown": {workers - 1: 1.3}}
    )
    computed, _ = simulate(run, blobs, machine)
    modelled = model_time(
        run.model_copy(update={"execution": "modelled"}), blobs, machine
    )
    assert modelled.status == computed.status == "completed", modelled.error
    for found, expected in zip(modelled.workers, computed.workers, strict=True):
        for column in ("train_s", "compute_s", "comm_s", "wait_s", "data_s", "other_s"):
            assert getattr(found, column) == pytest.approx(
                getattr(expected, column), rel=1e-9, abs=1e-15
            ), column
        assert (found.syncs, found.bytes_sent) == (expected.syncs, expected.bytes_sent)
        assert [epoch.train_loss for epoch in found.epochs] == [None] * run.epochs
    assert not modelled.evaluations
    # Facts of gradients, which a modelled run does not compute: why_single is measured.
    how = {"arithmetic": None, "why_single": ""}
    assert modelled.facts == replace(computed.facts, **how)


def test_groups_that_call_different_collectives_pay_their_own(make_run, blobs, machine):
    """DASO's devices take turns, so that the n-th exchange of one group is another one than that of the next."""
    options = {"warm_up_epochs": 1, "cool_down_epochs": 2}
    run = make_run(
        {"daso-heat": options},
        4,
        epochs=8,
        batch_per_worker=3,
        virtual={"jitter": "none"},
    )
    computed, _ = simulate(run, blobs, machine)
    modelled = model_time(
        run.model_copy(update={"execution": "modelled"}), blobs, machine
    )
    assert len(computed.workers) == 4
    for found, expected in zip(modelled.workers, computed.workers, strict=True):
        assert expected.comm_s > 0
        assert (found.train_s, found.comm_s) == pytest.approx(
            (expected.train_s, expected.comm_s), rel=1e-9
        )


def replace_cluster(machine, name):
    return replace(machine, cluster=load_cluster(name))


def test_transfer_of_a_blocking_collective_is_exposed_and_that_of_an_overlapped_one_is_not(
    make_run, machine
):
    exposed = {}
    for name in ("allreduce", "ddp"):
        run = make_run(
            name, 8, epochs=1, batch_per_worker=4, virtual={"jitter": "none"}
        )
        program = registry.create(name, {}, "virtual")
        model = torch.nn.Sequential(
            *[torch.nn.Linear(2000, 2000) for _ in range(4)]
        ).to("meta")
        slow = replace(machine, tables=[table.scaled(50.0) for table in machine.tables])
        charges = Charges.of([run], replace_cluster(slow, "dgx-h100"))
        charges.costs.gradients = gradients(model, [])
        end = price(
            record(
                run, program, BatchPlan(64, 8, seed=0, batch_per_worker=4), model, 8
            ),
            charges,
        )[0].end
        exposed[name] = (end.seconds[Task.COMM] / end.transfer).max()
    assert exposed["allreduce"] == pytest.approx(1.0)
    assert exposed["ddp"] < 0.9


@pytest.mark.parametrize("name", ["pipeline", "hybrid", "model_parallel"])
def test_replicas_of_parts_are_recorded_and_priced_together(
    make_run, blobs, machine, name
):
    run = make_run(
        name, 16, epochs=2, virtual={"jitter": "lognormal", "slowdown": {5: 1.3}}
    )
    prepared = Prepared([run], blobs, machine)
    schedules = prepared.schedules()
    programs = programs_of(schedules)
    recorded = {id(schedule.events) for schedule in schedules}
    assert len(programs) == len(recorded) < 16
    assert sorted(
        rank for program in programs for rank in program.ranks.tolist()
    ) == list(range(16))
    # nothing in common: each by itself
    own = [replace(each, events=list(each.events)) for each in schedules]
    assert len(programs_of(own)) == 16
    (together,), (apart,) = (price(each, prepared.charges) for each in (schedules, own))
    assert together.end.now.tolist() == apart.end.now.tolist()
    assert together.end.wait.tolist() == apart.end.wait.tolist()
    assert together.end.bubble.tolist() == apart.end.bubble.tolist()
    assert together.end.bubble.any()


def test_workers_whose_partners_do_something_else_have_programs_of_their_own():
    to_next = Event.of(Operation(Kind.SEND, 8, (0, 1)))
    from_first = Event("receive", operation=to_next.operation)
    sent, received, later = [to_next], [from_first], [Event("update"), from_first]
    alike = [
        Schedule(0, sent),
        Schedule(1, received),
        Schedule(2, sent, moved=2),
        Schedule(3, received, moved=2),
    ]
    assert [program.ranks.tolist() for program in programs_of(alike)] == [
        [0, 2],
        [1, 3],
    ]
    unlike = [*alike[:3], Schedule(3, later, moved=2)]
    assert sorted(program.ranks.tolist() for program in programs_of(unlike)) == [
        [0],
        [1],
        [2],
        [3],
    ]


def test_programs_that_do_not_meet_are_refused(make_run, machine):
    everyone = RankGroups.of_all(2)
    alone = Schedule(0, [Event.of(Operation(Kind.BARRIER, 0, (0, 1)), everyone)])
    charges = Charges.of([make_run("allreduce", 2)], machine)
    with pytest.raises(RunError, match="others do not call"):
        price([alone, Schedule(1)], charges)
    with pytest.raises(NotLockStepError):
        price(
            [Schedule(0, [Event.of(Operation(Kind.SERVE, 4, (0, 0)))]), Schedule(1)],
            charges,
        )


def test_partition_numbers_the_parts_of_each_group():
    halves = RankGroups.of_all(8).part(0, lambda rank: rank // 4)
    assert [list(halves.members(label)) for label in (0, 1)] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
    ]
    strided = halves.part(0, lambda rank: rank % 2)
    assert [list(strided.members(label)) for label in range(4)] == [
        [0, 2],
        [1, 3],
        [4, 6],
        [5, 7],
    ]
    assert strided is halves.part(0, lambda rank: 0), (
        "a split has one result for all members"
    )
