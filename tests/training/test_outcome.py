"""Timelines: laps and facts of a run."""

from __future__ import annotations

import pytest

from scalebench.training.outcome import Outcome, RunFacts, timeline_from
from tests.facts import together

UNEVEN = {
    "slowdown": {1: 2.0, 5: 3.0},
    "slow_windows": [
        {"rank": 0, "until_s": 2, "factor": 3},
        {"rank": 7, "until_s": 2, "factor": 3},
    ],
    "slow_links": {"1": 4.0, "0-2": 8.0},
    "jitter": "lognormal",
    "jitter_sigma": 0.2,
}


def about(run, **facts):
    outcome = Outcome(
        "test-run", "completed", "", [], [], facts=RunFacts(steps_per_epoch=5, **facts)
    )
    return timeline_from(run, outcome).about


@pytest.mark.parametrize(
    ("execution", "engine"), [("virtual", "virtual"), ("paced", "mpi")]
)
def test_all_that_is_uneven_is_named_where_it_acts(make_run, execution, engine):
    run = make_run("allreduce", 4, execution=execution, engine=engine, virtual=UNEVEN)
    assert about(run).endswith(
        "2 epochs of 5 steps, worker 1 2 times as slow, worker 0 3 times as slow from 0 to 2 s, the cards of node 1 4 "
        "times as slow, the way between nodes 0 and 2 8 times as slow, lognormal jitter of 0.2"
    )
    even = make_run(
        "allreduce", 4, execution=execution, engine=engine, virtual={"jitter": "none"}
    )
    assert about(even).endswith("2 epochs of 5 steps")


def test_a_native_run_has_the_machines_own_pace(make_run):
    run = make_run("allreduce", 4, execution="native", engine="mpi", virtual=UNEVEN)
    assert about(run).endswith("2 epochs of 5 steps")


def test_a_pace_that_was_not_kept_is_no_lack_of_cores(make_run):
    native = make_run("allreduce", 4, execution="native", engine="mpi")
    paced = make_run("allreduce", 4, execution="paced", engine="mpi")
    assert together(
        about(native, oversubscribed=True), "oversubscribed", "processes", "cores"
    )
    assert together(about(paced, oversubscribed=True), "steps", "longer", "paced")
    for run in (native, paced):
        assert about(run, oversubscribed=False) == about(run)
        assert "longer" not in about(run)
