"""Workers that are slow always or for a while, and nodes with slow cards, virtually and by pacing."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from scalebench.clock import Task
from scalebench.cluster.load import load_cluster
from scalebench.cluster.network import Network
from scalebench.launch.sweep import expand
from scalebench.pacing import PacedClock, StepTime, slowness_of
from scalebench.study.spec import Study, VirtualOptions

WINDOW = {"rank": 1, "from_s": 0.010, "until_s": 0.035, "factor": 3.0}


def test_a_window_slows_what_begins_in_it(play):
    """6 steps of 1 ms an epoch: the window holds the end of the second, the third, and the beginning of the fourth."""
    quiet = {"jitter": "none", "ties": "rank"}
    options = {"epochs": 4, "batch_per_worker": 8}  # 6 steps an epoch at 2 workers
    plain, _ = play("epoch_average", 2, virtual=quiet, **options)
    slow, _ = play("epoch_average", 2, virtual={**quiet, "slow_windows": [WINDOW]}, **options)
    compute = [[epoch.compute_s for epoch in worker.epochs] for worker in (*plain.workers, *slow.workers)]
    assert compute[2] == compute[0]
    assert compute[3][0] == pytest.approx(compute[1][0])  # 6 ms: before the window
    assert compute[3][1] > 1.5 * compute[1][1]
    assert compute[3][2] == pytest.approx(3 * compute[1][2])
    assert compute[3][3] < 1.5 * compute[1][3]
    assert slow.workers[0].wait_s > plain.workers[0].wait_s + 0.01


def test_windows_multiply_and_end():
    options = VirtualOptions(slow_windows=[WINDOW, {**WINDOW, "from_s": 0.020, "until_s": 0.040, "factor": 2.0}])
    factor = options.slowness(1)
    assert [factor(now) for now in (0.0, 0.010, 0.020, 0.035, 0.040)] == [1, 3, 6, 2, 1]
    assert options.slowness(0) is None
    with pytest.raises(ValidationError, match=r"a window from 2 s until 1 s is empty"):
        VirtualOptions(slow_windows=[{"rank": 0, "from_s": 2, "until_s": 1, "factor": 2}])


def test_asynchronous_merges_of_a_worker_in_its_window_are_stale(play):
    windows = [{"rank": 0, "from_s": 0.0, "until_s": 0.02, "factor": 4.0}]
    outcome, _ = play("epoch_async", 3, epochs=8, virtual={"slow_windows": windows, "jitter": "none"})
    stale = [epoch.max_staleness for epoch in outcome.workers[0].epochs]
    assert stale[0] > 4
    assert max(stale[3:]) <= 2


def test_slow_cards_slow_what_crosses_them():
    cluster = load_cluster("ethernet-10g")
    node = cluster.node.model_copy(update={"workers_per_node": 2})
    even = cluster.model_copy(update={"node": node})
    uneven = even.model_copy(update={"links": cluster.links.model_copy(update={"slow": {1: 4.0}})})
    plain, slow = Network(even), Network(uneven)
    n = 10_000_000
    latency = cluster.links.inter.latency_s
    assert slow.message(n, 0, 1) == plain.message(n, 0, 1)
    assert slow.message(n, 2, 3) == plain.message(n, 2, 3)  # inside the slow node
    assert slow.message(n, 0, 4) == plain.message(n, 0, 4)
    assert slow.message(n, 0, 2) - latency == pytest.approx(4 * (plain.message(n, 0, 2) - latency))
    assert slow.allreduce(n, (0, 4)) == plain.allreduce(n, (0, 4))
    assert 2 * plain.allreduce(n, range(8)) < slow.allreduce(n, range(8)) <= 4 * plain.allreduce(n, range(8))


def test_a_paced_worker_is_as_slow_as_the_study_says(make_run):
    """What a loaded machine adds can only make steps longer: lower bounds are exact, and out of reach without."""
    window = {"rank": 1, "from_s": 0.06, "until_s": 9, "factor": 2.0}
    run = make_run(
        "allreduce", 2, execution="paced", engine="mpi", device_step_time=0.01,
        virtual={"slowdown": {1: 2.0}, "slow_windows": [window]},
    )  # fmt: skip
    assert slowness_of(run, 0) is None
    slowness = slowness_of(run, 1)
    assert [slowness(now) for now in (0.0, 0.059, 0.06, 9.0)] == [2, 2, 4, 2]
    clock = PacedClock(StepTime(0.004, 0.005, 0.001), slowness=slowness)
    clock.start()
    seconds = []
    while not seconds or seconds[-1][0] < 0.06:
        began = clock.elapsed()
        for task in (Task.FORWARD, Task.BACKWARD, Task.UPDATE):
            clock.did(task)
        seconds.append((began, clock.elapsed() - began))
    assert min(step for _, step in seconds) > 0.0199
    assert all(step > 0.0399 for began, step in seconds if began >= 0.06)
    assert seconds[-1][0] >= 0.06


def test_paced_runs_get_the_slow_workers_and_native_ones_do_not():
    study = Study(
        strategies=["epoch_average"], workers=[2], engine="mpi", execution="paced", device_step_time=0.1, repetitions=1,
        virtual={"slowdown": {1: 2.0}, "slow_windows": [WINDOW], "jitter": "none"},
    )  # fmt: skip
    (run,) = expand(study, load_cluster("this-machine")).runs
    assert (run.virtual.slowdown, len(run.virtual.slow_windows)) == ({1: 2.0}, 1)
    assert run.virtual.jitter == "measured"
    (native,) = expand(study.model_copy(update={"execution": "native"}), load_cluster("this-machine")).runs
    assert native.virtual == VirtualOptions()
