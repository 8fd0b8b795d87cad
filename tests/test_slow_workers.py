"""Slow workers, slow windows and slow links in virtual and paced runs."""

from __future__ import annotations

import json
import re
import time
import tracemalloc
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from scalebench.cluster.cluster_file import Cluster, load_cluster
from scalebench.cluster.network import Network
from scalebench.comm.counters import SlowLinks, numbers
from scalebench.comm.engines import available
from scalebench.comm.native import InFlight, Pending
from scalebench.data.catalog import prepare
from scalebench.errors import StudyError
from scalebench.launch.hosts import reachable
from scalebench.launch.planning import plan_study
from scalebench.launch.real_runs import RealRuns
from scalebench.launch.sweep import expand
from scalebench.records.rows import rows_of
from scalebench.study.heterogeneity import VirtualOptions, jitter_source
from scalebench.study.load import dump_study, load_study
from scalebench.study.spec import Study
from scalebench.system.clock import Task, WallClock
from scalebench.training.pacing import PacedClock, PacedStep, jitter_of, slowness_of
from tests.conftest import needs_mpi
from tests.facts import naming, together
from tests.operations import allreduce, message

WINDOW = {"rank": 1, "from_s": 0.010, "until_s": 0.035, "factor": 3.0}


def test_window_slows_tasks_that_begin_in_it(play):
    """6 steps of 1 ms an epoch: the window holds the end of the second, the third, and the beginning of the fourth."""
    quiet = {"jitter": "none", "ties": "rank"}
    options = {"epochs": 4, "batch_per_worker": 8}  # 6 steps an epoch at 2 workers
    plain, _ = play("epoch_average", 2, virtual=quiet, **options)
    slow, _ = play(
        "epoch_average", 2, virtual={**quiet, "slow_windows": [WINDOW]}, **options
    )
    compute = [
        [epoch.compute_s for epoch in worker.epochs]
        for worker in (*plain.workers, *slow.workers)
    ]
    assert compute[2] == compute[0]
    assert compute[3][0] == pytest.approx(compute[1][0])  # 6 ms: before the window
    assert compute[3][1] > 1.5 * compute[1][1]
    assert compute[3][2] == pytest.approx(3 * compute[1][2])
    assert compute[3][3] < 1.5 * compute[1][3]
    assert slow.workers[0].wait_s > plain.workers[0].wait_s + 0.01


def test_windows_multiply_and_end():
    options = VirtualOptions(
        slow_windows=[
            WINDOW,
            {**WINDOW, "from_s": 0.020, "until_s": 0.040, "factor": 2.0},
        ]
    )
    factor = options.slowness(1)
    assert [factor(now) for now in (0.0, 0.010, 0.020, 0.035, 0.040)] == [1, 3, 6, 2, 1]
    assert options.slowness(0) is None
    with pytest.raises(ValidationError, match=r"a window from 2 s until 1 s is empty"):
        VirtualOptions(
            slow_windows=[{"rank": 0, "from_s": 2, "until_s": 1, "factor": 2}]
        )


def test_merges_of_a_slow_worker_are_stale(play):
    windows = [{"rank": 0, "from_s": 0.0, "until_s": 0.02, "factor": 4.0}]
    outcome, _ = play(
        "epoch_async", 3, epochs=8, virtual={"slow_windows": windows, "jitter": "none"}
    )
    stale = [epoch.max_staleness for epoch in outcome.workers[0].epochs]
    assert stale[0] > 4
    assert max(stale[3:]) <= 2


def test_slow_cards_slow_messages_between_nodes():
    cluster = load_cluster("ethernet-10g")
    node = cluster.node.model_copy(update={"workers_per_node": 2})
    even = cluster.model_copy(update={"node": node})
    uneven = even.model_copy(
        update={"links": cluster.links.model_copy(update={"slow": {"1": 4.0}})}
    )
    plain, slow = Network(even), Network(uneven)
    n = 10_000_000
    latency = cluster.links.inter.latency_s
    assert slow.time(message(n, 0, 1)) == plain.time(message(n, 0, 1))
    # inside the slow node
    assert slow.time(message(n, 2, 3)) == plain.time(message(n, 2, 3))
    assert slow.time(message(n, 0, 4)) == plain.time(message(n, 0, 4))
    assert slow.time(message(n, 0, 2)) - latency == pytest.approx(
        4 * (plain.time(message(n, 0, 2)) - latency)
    )
    assert slow.time(allreduce(n, (0, 4))) == plain.time(allreduce(n, (0, 4)))
    assert (
        2 * plain.time(allreduce(n, range(8)))
        < slow.time(allreduce(n, range(8)))
        <= 4 * plain.time(allreduce(n, range(8)))
    )


def test_paced_worker_has_the_stated_slowness(make_run):
    """Lower bounds, which a loaded machine cannot violate."""
    window = {
        "rank": 1,
        "from_s": 0.05,
        "until_s": 9,
        "factor": 2.0,
    }  # not when a step of 0.02 s ends
    run = make_run(
        "allreduce", 2, execution="paced", engine="mpi", device_step_time=0.01,
        virtual={"slowdown": {1: 2.0}, "slow_windows": [window]},
    )  # fmt: skip
    assert slowness_of(run, 0) is None
    slowness = slowness_of(run, 1)
    assert [slowness(now) for now in (0.0, 0.049, 0.05, 9.0)] == [2, 2, 4, 2]
    clock = PacedClock(PacedStep(0.004, 0.005, 0.001), slowness=slowness)
    clock.start()
    seconds = []
    while not seconds or seconds[-1][0] < 0.06:
        began = clock.ledger.total_s  # a reading of the test's own would come later
        for task in (Task.FORWARD, Task.BACKWARD, Task.UPDATE):
            clock.did(task)
        seconds.append((began, clock.ledger.total_s - began))
    assert min(step for _, step in seconds) > 0.0199
    assert all(step > 0.0399 for began, step in seconds if began >= 0.06)
    assert seconds[-1][0] >= 0.06


@needs_mpi
def test_paced_runs_get_the_slow_workers_and_native_ones_do_not():
    study = Study(
        strategies=["epoch_average"], workers=[2], engine="mpi", execution="paced", device_step_time=0.1, repetitions=1,
        virtual={"slowdown": {1: 2.0}, "slow_windows": [WINDOW], "jitter": "none"},
    )  # fmt: skip
    (run,) = expand(study, load_cluster("this-machine"), reachable()).runs
    assert (run.virtual.slowdown, len(run.virtual.slow_windows)) == ({1: 2.0}, 1)
    assert run.virtual.jitter == "measured"
    (native,) = expand(
        study.model_copy(update={"execution": "native"}),
        load_cluster("this-machine"),
        reachable(),
    ).runs
    assert native.virtual == VirtualOptions()


@needs_mpi
@pytest.mark.parametrize("kind", ["normal", "lognormal", "exponential"])
def test_paced_worker_has_the_stated_jitter(make_run, kind):
    """Lower bounds, step by step: the factors of the virtual worker of that seed and rank."""
    study = Study(
        strategies=["epoch_average"], workers=[2], engine="mpi", execution="paced", device_step_time=0.01, seed=3,
        repetitions=1, virtual={"jitter": kind, "jitter_sigma": 0.3, "slow_links": {1: 4.0}},
    )  # fmt: skip
    sweep = expand(study, load_cluster("this-machine"), reachable())
    (run,) = sweep.runs
    assert (run.virtual.jitter, run.virtual.jitter_sigma, run.virtual.slow_links) == (
        kind,
        0.3,
        {"1": 4.0},
    )
    assert sweep.notes == ()
    native = expand(
        study.model_copy(update={"execution": "native"}),
        load_cluster("this-machine"),
        reachable(),
    )
    assert native.runs[0].virtual == VirtualOptions()
    (note,) = native.notes
    assert together(
        note, "native", "slow_links, jitter", "left out", "--execution paced"
    )
    factors = [jitter_source(kind, 0.3, seed=3, worker=1)(step) for step in range(8)]
    clock = PacedClock(PacedStep(0.004, 0.005, 0.001), jitter=jitter_of(run, 1))
    clock.start()
    seconds = []
    for _ in factors:
        # before the lap that the step begins with, which a busy machine may delay
        began = clock.elapsed()
        clock.did(Task.DATA)
        for task in (Task.FORWARD, Task.BACKWARD, Task.UPDATE):
            clock.did(task)
        seconds.append(clock.elapsed() - began)
    assert all(
        found > 0.00999 * factor for found, factor in zip(seconds, factors, strict=True)
    )
    assert max(factors) > 1.2
    # what was measured, the machine does itself
    assert jitter_of(make_run("allreduce", 2), 1) is None


def test_jitter_of_a_worker_takes_the_memory_of_a_thousand_numbers():
    tracemalloc.start()
    try:
        factor = jitter_source("lognormal", 0.1, seed=0, worker=0)
        before, _ = tracemalloc.get_traced_memory()
        assert type(factor(0)) is float
        kept = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert kept < 2 * 8 * 1024  # each takes 8 bytes, in a list 32 more


def test_slow_link_between_two_nodes_slows_its_messages():
    cluster = load_cluster("ethernet-10g").with_slow_links({"0-2": 8.0})
    slow, plain = Network(cluster), Network(load_cluster("ethernet-10g"))
    n, latency = 10_000_000, cluster.links.inter.latency_s
    assert slow.time(message(n, 0, 2)) - latency == pytest.approx(
        8 * (plain.time(message(n, 0, 2)) - latency)
    )
    assert slow.time(message(n, 2, 0)) == slow.time(message(n, 0, 2))
    assert slow.time(message(n, 1, 2)) == plain.time(message(n, 1, 2))
    assert slow.time(allreduce(n, (0, 1))) == plain.time(allreduce(n, (0, 1)))
    assert slow.time(allreduce(n, (0, 1, 2))) > 4 * plain.time(allreduce(n, (0, 1, 2)))


@pytest.mark.parametrize(
    "links", [{"a": 2}, {"1-1": 2}, {"1-2-3": 2}, {-1: 2}, {"3": 0.5}]
)
def test_invalid_link_is_refused(links):
    with pytest.raises(
        ValidationError,
        match=r"expected a node, such as 3, or two of them|greater than or equal to 1",
    ):
        VirtualOptions(slow_links=links)


@pytest.mark.parametrize(
    ("links", "said"),
    [
        (
            {"9": 2.0},
            "names node 9; the largest run has the nodes 0 to 3 (4 workers, 1 on a node of ethernet-10g)",
        ),
        ({"1": 2.0, "4-0": 2.0}, "names node 4; the largest run has the nodes 0 to 3 "),
    ],
)
def test_slow_link_of_an_unused_node_is_refused(links, said):
    values = {
        "workers": [2, 4],
        "strategies": ["allreduce"],
        "cluster": "ethernet-10g",
        "dataset": "wine",
    }
    study = Study.model_validate(
        {**values, "execution": "virtual", "virtual": {"slow_links": links}}
    )
    with pytest.raises(StudyError, match=re.escape(f"virtual.slow_links {said}")):
        plan_study(study)
    there = study.model_copy(
        update={"virtual": VirtualOptions(slow_links={"3": 2.0, "0-2": 2.0})}
    )
    assert len(plan_study(there).sweep.runs) == 6
    with pytest.raises(
        StudyError,
        match=naming("virtual.slow_links", "one node", "1 worker", "1 on a"),
    ):
        plan_study(there.model_copy(update={"workers": [1]}))


def test_slow_link_of_a_missing_cluster_node_is_refused():
    cluster = load_cluster("ethernet-10g").model_dump() | {"nodes": 2}
    for slow in (
        {"links": cluster["links"] | {"slow": {"0-2": 2.0}}},
        {"uneven": {"slow_links": {"2": 2.0}}},
    ):
        with pytest.raises(
            ValidationError,
            match=r"slow\w* names node 2; the cluster has the nodes 0 to 1",
        ):
            Cluster.model_validate(cluster | slow)


def test_slow_links_of_a_study_are_charged(play, machine):
    study = load_study(None, {}, ["virtual.slow_links={1: 4, 2-0: 8}"])
    assert study.virtual.slow_links == {"1": 4.0, "0-2": 8.0}
    quiet = {"jitter": "none", "ties": "rank"}
    fast, _ = play("allreduce", 4, virtual=quiet)  # two nodes of two
    slow, _ = play("allreduce", 4, virtual={**quiet, "slow_links": {1: 1000.0}})
    assert slow.workers[0].comm_s > fast.workers[0].comm_s
    assert slow.workers[0].compute_s == fast.workers[0].compute_s


@needs_mpi
def test_slowdown_that_sizes_native_shards_is_named_as_such():
    study = Study(
        strategies=["epoch_average"], workers=[2], engine="mpi", execution="native", repetitions=1, dataset="wine",
        partition={"iid": {"balance": "speed"}}, virtual={"slowdown": {1: 4.0}, "slow_windows": [
            {"rank": 0, "until_s": 2, "factor": 3}]},
    )  # fmt: skip
    (note,) = expand(study, load_cluster("this-machine"), reachable()).notes
    sized = ", except that slowdown sizes the shards of balance: speed"
    assert note.startswith(f"native runs: slowdown, slow_windows left out{sized}, for")
    assert expand(
        study.model_copy(update={"partition": Study().partition}),
        load_cluster("this-machine"),
        reachable(),
    ).notes == (note.replace(sized, ""),)


def test_cluster_heterogeneity_applies_to_unset_options(tmp_path):
    file = tmp_path / "uneven.yaml"
    preset = (
        Path(__file__).parents[1] / "scalebench/cluster/presets/ethernet-10g.yaml"
    ).read_text()
    file.write_text(f"{preset}\nuneven: {{slowdown: {{1: 2.0}}, jitter: lognormal, jitter_sigma: 0.2, slow_windows: "
                    "[{rank: 0, until_s: 2, factor: 3}]}\n")  # fmt: skip
    values = {
        "workers": "2",
        "execution": "virtual",
        "strategies": ["epoch_average"],
        "cluster": str(file),
    }
    (run, *_) = plan_study(Study.model_validate(values)).sweep.runs
    assert (run.virtual.slowdown, run.virtual.jitter, run.virtual.jitter_sigma) == (
        {1: 2.0},
        "lognormal",
        0.2,
    )
    assert run.virtual.slowness(0)(1.0) == 3.0
    kept = tmp_path / "study.yaml"
    kept.write_text(dump_study(Study.model_validate(values)))
    (again, *_) = plan_study(load_study(kept, {}, [])).sweep.runs
    assert again == run  # what results keep of the study is the same study still
    said = {**values, "virtual": {"slowdown": {}, "jitter": "none"}}
    (run, *_) = plan_study(Study.model_validate(said)).sweep.runs
    assert (run.virtual.slowdown, run.virtual.jitter, run.virtual.jitter_sigma) == (
        {},
        "none",
        0.2,
    )


@pytest.fixture(scope="module")
def paced(tmp_path_factory):
    """Two workers in one launch: runs and outcomes with a slow link, and those with a slow worker, by strategy."""
    if reason := available("mpi"):
        pytest.skip(reason)
    common = {
        "workers": [2], "engine": "mpi", "execution": "paced", "repetitions": 1, "epochs": 1, "dataset": "wine",
        "batch_per_worker": 8,
    }  # fmt: skip
    linked = Study(
        strategies=["allreduce", "asp", "epoch_async", {"gossip": {"peers": "pair"}}], cluster="ethernet-10g",
        device_step_time=0.002, virtual={"slow_links": {1: 1000.0}}, **common,
    )  # fmt: skip
    slowed = Study(
        strategies=["allreduce", "epoch_async"],
        device_step_time=0.02,
        virtual={"slowdown": {1: 5.0}},
        **common,
    )
    links = expand(linked, load_cluster("ethernet-10g"), reachable()).runs
    workers = expand(slowed, load_cluster("this-machine"), reachable()).runs
    outcomes = {}
    RealRuns({2: prepare(linked, 2)}, ranks=3, work_dir=tmp_path_factory.mktemp("paced"),
        on_start=lambda run: None, on_outcome=lambda run, outcome: outcomes.update({run.run_id: outcome}),
        log=lambda message: None,
    ).launch([*links, *workers])  # fmt: skip
    assert {(outcome.status, outcome.error) for outcome in outcomes.values()} == {
        ("completed", "")
    }
    assert len(outcomes) == len(links) + len(workers)
    return [
        {run.strategy.name: (run, outcomes[run.run_id]) for run in runs}
        for runs in (links, workers)
    ]


def test_slow_links_delay_real_messages_by_the_model(paced):
    """Lower bounds: node 1's card a thousand times slower adds 7 ms to a message of 8,716 bytes, in every step."""
    n = 4 * (13 * 128 + 128 + 128 * 3 + 3)
    comm = {
        name: [worker.comm_s for worker in outcome.workers]
        for name, (_, outcome) in paced[0].items()
    }
    slow = SlowLinks(load_cluster("ethernet-10g"), {"1": 1000.0})
    one, mean = slow.adds(message(n, 0, 1)), slow.adds(allreduce(n, (0, 1)))
    steps = -(-142 // 2 // 8)
    assert one == pytest.approx(999 * n / 1.25e9)
    assert mean == pytest.approx(one)  # 2 (p - 1) / p = 1
    assert min(comm["allreduce"]) > 0.999 * steps * mean
    # there and back; worker 0 sits beside the server
    assert comm["asp"][1] > 0.999 * steps * 2 * one
    # fetched and stored, then the mean of all
    assert comm["epoch_async"][1] > 0.999 * (2 * one + mean)
    assert min(comm["gossip"]) > 0.999 * (steps * one + mean)


def test_only_messages_over_slow_links_are_delayed():
    slow = SlowLinks(load_cluster("ethernet-10g"), {"0-2": 8.0})
    assert (
        slow.adds(allreduce(1_000_000, (0, 2)))
        > 0
        == slow.adds(allreduce(1_000_000, (0, 1)))
    )
    assert (
        slow.adds(message(1_000_000, 2, 0)) > 0 == slow.adds(message(1_000_000, 1, 2))
    )


def test_pending_allreduce_is_delayed_from_its_begin():
    clock, target = WallClock(), torch.zeros(2)
    clock.start()
    began = time.perf_counter()
    flight = InFlight(
        Pending(lambda: None, lambda: True),
        torch.ones(2),
        target,
        None,
        clock,
        began,
        numbers(),
        1.0,
    )
    assert not flight.done()
    time.sleep(0.05)  # compute that hides a part of it
    since = time.perf_counter()
    flight.wait()
    assert time.perf_counter() - began >= 1.0
    assert clock.ledger.comm_s <= time.perf_counter() - since
    assert flight.done()
    assert target.tolist() == [1.0, 1.0]


def test_paced_run_records_its_straggler(paced):
    """Worker 1 computes five times as long as the stated step: sums of padded laps, which load can only lengthen.

    The fast one waits for it even where load makes its own steps three times as long.
    """
    outcomes = paced[1]
    rows = {}
    for name, (run, outcome) in outcomes.items():
        steps = outcome.workers[0].samples / run.batch_per_worker  # whole ones
        fast, slow = (worker.compute_s for worker in outcome.workers)
        assert fast >= 0.02 * steps * 0.999
        assert slow >= 0.1 * steps * 0.999
        facts = {
            "attempt": 1,
            "oversubscribed": False,
            "started_utc": "",
            "provenance": {},
        }
        rows[name] = rows_of(run, outcome, **facts)[0]
        assert rows[name].straggler_factor == pytest.approx(
            max(fast, slow) / ((fast + slow) / 2)
        )
        assert rows[name].paced_overrun is not None
    assert rows["allreduce"].straggler_factor > 1
    waited = [worker.wait_s for worker in outcomes["allreduce"][1].workers]
    assert waited[0] > waited[1]  # the fast one waits in every step
    assert rows["allreduce"].wait_s > 0
    waited = [worker.wait_s for worker in outcomes["epoch_async"][1].workers]
    assert waited[0] > waited[1]  # the fast one waits at the end
    assert rows["epoch_async"].wait_s > 0
    assert sum(json.loads(rows["epoch_async"].staleness_histogram).values()) == 2
