"""Shares of communication and waiting in the training time."""

from __future__ import annotations

import math

import pytest

from scalebench.analysis.grouping import communication_shares
from tests.analysis.test_comparing import only, run


def test_shares_are_of_the_training_time_and_waiting_is_a_part_of_exposed(study):
    rows = [
        run("serial", 1, 8.0, comm_s=0.0),
        run("allreduce", 4, 4.0, comm_s=1.0, wait_s=0.4, hidden_comm_s=2.0),
    ]
    table = communication_shares(study(rows=[*rows, run("ddp", 4, 4.0)]))
    cell = only(table)
    assert cell["label"] == "allreduce", (
        "serial communicates with nobody, and ddp's split is unknown"
    )
    assert tuple(cell[["exposed", "transfer", "waiting", "hidden"]]) == pytest.approx(
        (0.25, 0.15, 0.1, 0.5)
    )


def test_measured_shares_have_an_interval_within_0_and_1_and_simulated_none(study):
    split = [(0.1, 0.0), (1.9, 0.0), (3.0, 0.1)]
    rows = [
        run(
            "allreduce",
            4,
            4.0,
            execution,
            repetition=at,
            seed=at,
            comm_s=comm,
            wait_s=wait,
        )
        for execution in ("native", "virtual")
        for at, (comm, wait) in enumerate(split)
    ]
    table = communication_shares(study(rows=rows))
    native, virtual = only(table, execution="native"), only(table, execution="virtual")
    assert native["exposed"] == virtual["exposed"] == pytest.approx(5.0 / 12)
    assert native["exposed_low"] == 0
    assert native["exposed_high"] == 1
    assert math.isnan(virtual["exposed_low"])


def test_unknown_waiting_is_not_zero(study):
    cell = only(
        communication_shares(study(rows=[run("allreduce", 4, 4.0, comm_s=1.0)]))
    )
    assert cell["exposed"] == pytest.approx(0.25)
    assert math.isnan(cell["waiting"])
    assert math.isnan(cell["transfer"])
