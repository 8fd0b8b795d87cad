"""AD-PSGD: what an averaging keeps, the order of accesses written out with numpy, traffic, staleness, real ranks."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st

from scalebench.comm import engines
from scalebench.data.batch_plan import BatchPlan
from scalebench.data.catalog import prepare
from scalebench.data.dataset import open_dataset
from scalebench.errors import DataError, StudyError
from scalebench.launch.real_runs import RealRuns
from scalebench.pricing.machine import Choice
from scalebench.records.rows import rows_of
from scalebench.strategies import registry
from scalebench.strategies.ad_psgd import AdPsgd, neighbours_of
from scalebench.study.spec import Run
from scalebench.training.replica import Replica
from scalebench.virtual import engine
from tests.arrays import arrays_in
from tests.conftest import setting
from tests.facts import naming

QUIET = {"ties": "rank", "jitter": "none"}
LR, MOMENTUM = 0.05, 0.9
LINEAR = {
    "model": {"mlp": {"hidden": []}},
    "optimizer": {"sgd": {"momentum": MOMENTUM}},
    "lr": LR,
    "epochs": 1,
}


@pytest.fixture
def replicas(monkeypatch, play):
    """`outcome, made = replicas(strategy, workers, ...)`: a virtual run and its workers as training left them."""

    def of(strategy, workers, **values):
        made = []

        class Kept(Replica):
            def __init__(self, *arguments, **options):
                super().__init__(*arguments, **options)
                made.append(self)

        # gradients replica by replica
        monkeypatch.setattr(engine, "choose", lambda *_: Choice())
        monkeypatch.setattr(engine, "Replica", Kept)
        monkeypatch.setattr(
            engine, "evaluate", lambda *arguments: engine.EvaluationResult([], None)
        )
        outcome, _ = play(strategy, workers, **values)
        return outcome, made

    return of


def weights_of(made):
    return np.stack([replica.parameters.detach().numpy() for replica in made])


class Regressions:
    """Softmax regressions with momentum, written out: weights (3, 2), then biases (3,), a flat vector a worker."""

    def __init__(self, run, blobs, start):
        self.x = [start.copy() for _ in range(run.workers)]
        self.m = [np.zeros_like(start) for _ in range(run.workers)]
        plan = BatchPlan.of(run, run.workers, run.seed, blobs)
        self.rows = [
            np.split(plan.indices(0, rank), plan.bounds(0, rank)[1:-1])
            for rank in range(run.workers)
        ]
        self.data = blobs.x_train.astype(np.float64), np.eye(3)[blobs.y_train]

    def gradient(self, rank, step, at):
        x, y = (array[self.rows[rank][step]] for array in self.data)
        p = np.exp(x @ at[:6].reshape(3, 2).T + at[6:])
        slope = (p / p.sum(1, keepdims=True) - y) / len(x)
        return np.concatenate([(slope.T @ x).ravel(), slope.sum(0)])

    def average(self):
        self.x = [(self.x[0] + self.x[1]) / 2] * 2

    def update(self, rank, g):
        self.m[rank] = MOMENTUM * self.m[rank] + g
        self.x[rank] = self.x[rank] - LR * self.m[rank]


def in_step(model, steps):
    """Both compute, then both average (the second finds equal models), then both update."""
    for step in range(steps):
        slopes = [model.gradient(rank, step, model.x[rank]) for rank in (0, 1)]
        model.average()
        model.average()
        for rank in (0, 1):
            model.update(rank, slopes[rank])


def slow_second(model, steps):
    """Worker 0 is through with its steps before worker 1, whose gradient is at the initial weights, averages once."""
    stale = model.gradient(1, 0, model.x[1])
    for step in range(steps):
        slope = model.gradient(0, step, model.x[0])
        model.average()
        model.update(0, slope)
    for step in range(steps):
        slope = stale if step == 0 else model.gradient(1, step, model.x[1])
        model.average()
        model.update(1, slope)


@pytest.mark.parametrize(
    ("course", "slowdown", "staleness"),
    [
        (in_step, {}, [{"1": 6}, {"1": 6}]),
        (slow_second, {1: 20.0}, [{"0": 6}, {"0": 5, "6": 1}]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_two_workers_do_what_numpy_does(
    course, slowdown, staleness, replicas, make_run, blobs
):
    virtual = {**QUIET, "slowdown": slowdown}
    outcome, made = replicas(
        {"ad_psgd": {"trailing": "leave"}}, 2, **LINEAR, virtual=virtual
    )
    expected = Regressions(
        make_run("ad_psgd", 2, **LINEAR), blobs, made[0].initial.numpy()
    )
    course(expected, 6)
    np.testing.assert_allclose(
        weights_of(made), np.stack(expected.x), rtol=0, atol=1e-12
    )
    assert np.abs(weights_of(made) - made[0].initial.numpy()).max() > 0.01
    assert [worker.histograms["staleness"] for worker in outcome.workers] == staleness
    assert outcome.workers[1].epochs[0].max_staleness == max(
        int(value) for value in staleness[1]
    )


def test_weights_decay_as_they_were_read(replicas, make_run, blobs):
    """A step, decay included, is that at the model last read, where its gradient was computed."""
    decay, values = (
        0.3,
        {**LINEAR, "optimizer": {"sgd": {"momentum": MOMENTUM, "weight_decay": 0.3}}},
    )
    virtual = {**QUIET, "slowdown": {1: 20.0}}
    _, made = replicas({"ad_psgd": {"trailing": "leave"}}, 2, **values, virtual=virtual)

    class Decaying(Regressions):
        def gradient(self, rank, step, at):
            return super().gradient(rank, step, at) + decay * at

    expected = Decaying(
        make_run("ad_psgd", 2, **values), blobs, made[0].initial.numpy()
    )
    slow_second(expected, 6)
    np.testing.assert_allclose(
        weights_of(made), np.stack(expected.x), rtol=0, atol=1e-12
    )


@given(
    workers=st.integers(2, 5),
    neighbours=st.sampled_from(["any", "ring"]),
    weighting=st.sampled_from(["uniform", "samples"]),
    every=st.integers(1, 3),
    seed=st.integers(0, 1000),
)
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_averaging_keeps_the_mean(
    replicas, workers, neighbours, weighting, every, seed
):
    """Updates that vanish leave what the averagings do: the (weighted) mean stays, and the models draw together."""
    starts = np.random.default_rng(seed).standard_normal((workers, 39))

    def begin(self, worker):
        worker.parameters.copy_(torch.from_numpy(starts[worker.rank]))
        setup(self, worker)

    setup, options = (
        AdPsgd.setup,
        {"neighbours": neighbours, "weighting": weighting, "every": every},
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AdPsgd, "setup", begin)
        try:
            _, made = replicas(
                {"ad_psgd": {**options, "trailing": "leave"}}, workers, lr=1e-300, seed=seed, epochs=3,
                batch_per_worker=4, partition={"dirichlet": {"alpha": 5}},
            )  # fmt: skip
        except DataError:  # some draw a shard with fewer samples than the largest has batches, which is refused
            reject()
    samples = [replica.samples for replica in made] if weighting == "samples" else None
    before, after = (
        np.average(starts, 0, samples),
        np.average(weights_of(made), 0, samples),
    )
    np.testing.assert_allclose(after, before, rtol=0, atol=1e-12)
    spread = [
        np.average((models - before) ** 2, 0, samples).sum()
        for models in (starts, weights_of(made))
    ]
    assert spread[1] < 0.9 * spread[0]


@pytest.mark.parametrize(
    "options", [{}, {"neighbours": "ring"}, {"every": 5, "trailing": "leave"}], ids=str
)
def test_virtual_workers_learn_and_record_staleness(options, play, recorded, make_run):
    values = {"epochs": 8, "lr": 0.2, "virtual": {"slowdown": {3: 3.0}}}
    outcome, weights = play({"ad_psgd": options}, 4, **values)
    # of three classes
    assert max(outcome.evaluations, key=lambda each: each.epoch).metric > 0.6
    strategy = registry.create("ad_psgd", options)
    steps = 8 * outcome.facts.steps_per_epoch
    for worker, schedule in zip(
        outcome.workers, recorded({"ad_psgd": options}, 4, **values), strict=True
    ):
        assert (
            worker.syncs
            == schedule.syncs
            == steps // strategy.every + (strategy.trailing == "synchronise")
        )
        assert (
            worker.bytes_sent
            == schedule.bytes_sent
            == worker.syncs * weights["final"].numel() * 8
        )
        assert (
            sum(worker.histograms["staleness"].values())
            == worker.optimizer_steps
            == steps
        )
    facts = {"attempt": 1, "oversubscribed": False, "started_utc": "", "provenance": {}}
    row, epochs = rows_of(make_run({"ad_psgd": options}, 4, **values), outcome, **facts)
    stale = {
        int(value): times
        for value, times in json.loads(row.staleness_histogram).items()
    }
    assert sum(stale.values()) == 4 * steps
    assert max(stale) == max(epoch.max_staleness for epoch in epochs) > 0
    merges = 4 * (steps // strategy.every)
    # each merge makes one update stale, once
    assert sum(value * times for value, times in stale.items()) <= merges
    assert row.merge_policy.startswith("asynchronous pair mean")
    assert row.averaged_state == "parameters+buffers"


def test_fast_workers_wait_for_the_slow_one_only_at_the_end(play):
    """The others are through with their epochs when the slow worker is not; partners of `gossip` hold each other up."""
    virtual = {**QUIET, "slowdown": {2: 4.0}}

    def ends(strategy):
        outcome, _ = play(strategy, 4, epochs=4, virtual=virtual)
        return [worker.epochs[-2].elapsed_s for worker in outcome.workers]

    free, paired = ends("ad_psgd"), ends({"gossip": {"peers": "pair"}})
    assert max(free[rank] for rank in (0, 1, 3)) < 0.5 * free[2]
    assert max(paired[rank] for rank in (0, 1, 3)) > 0.5 * paired[2]


def test_neighbours_of_a_worker_by_topology():
    assert neighbours_of(2, 5, "any") == [0, 1, 3, 4]
    assert neighbours_of(0, 5, "ring") == [1, 4]
    assert neighbours_of(1, 2, "ring") == [0]


def test_impossible_setting_is_refused_in_one_line():
    with pytest.raises(
        StudyError,
        match=naming("ad_psgd", "1 worker", "2 workers"),
    ):
        registry.create("ad_psgd", {}).check(setting(1))
    with pytest.raises(StudyError, match=r"option 'neighbours'.*'any' or 'ring'"):
        registry.create("ad_psgd", {"neighbours": "star"})


REAL = [
    (2, {}),
    (4, {}),
    (4, {"neighbours": "ring", "every": 3, "trailing": "leave"}),
    (2, {"every": 10_000}),
]


def real_run(workers, options):
    return Run.model_validate(
        {
            "study": "test",
            "run_id": f"ad_psgd-{workers}-{len(options)}",
            "config_hash": "x",
            "execution": "native",
            "engine": "mpi",
            "strategy": {"ad_psgd": options},
            "workers": workers,
            "repetition": 0,
            "seed": 5,
            "epochs": 3,
            "dataset": "wine",
            "model": {"mlp": {"hidden": [16]}},
            "lr": 0.05,
            "batch_per_worker": 12,
            "optimizer": {"sgd": {"momentum": 0.9}},
            "dtype": "float64",
            "warmup_steps": 2,
            "save_weights": True,
        }
    )


@pytest.mark.thorough
def test_real_ranks_train_without_a_server(tmp_path, machine, recorded):
    """In any order: all complete with finite models, counted as the formula says; without merges, exactly."""
    if reason := engines.available("mpi"):
        pytest.skip(reason)
    runs, outcomes = [real_run(*case) for case in REAL], {}
    RealRuns(
        {workers: prepare(runs[0], workers) for workers in (2, 4)},
        ranks=4,
        work_dir=tmp_path / "work",
        weights_folder=tmp_path / "weights",
        on_start=lambda run: None,
        on_outcome=lambda run, outcome: outcomes.update({run.run_id: outcome}),
        log=lambda message: None,
    ).launch(runs)
    for run in runs:
        outcome = outcomes[run.run_id]
        # a model that is not finite would be `diverged`
        assert outcome.status == "completed", outcome.error
        steps = outcome.facts.steps_per_epoch
        schedules = recorded(run, data=open_dataset(prepare(run, run.workers)))
        kept = arrays_in(tmp_path / "weights" / f"{run.run_id}.npz")
        assert np.isfinite(kept["final"]).all()
        assert np.abs(kept["final"] - kept["initial"]).max() > 0.01
        for worker, schedule in zip(outcome.workers, schedules, strict=True):
            assert (worker.syncs, worker.bytes_sent) == (
                schedule.syncs,
                schedule.bytes_sent,
            )
            assert (
                sum(worker.histograms["staleness"].values())
                == worker.optimizer_steps
                == 3 * steps
            )
        losses = [
            np.mean([worker.epochs[e].train_loss for worker in outcome.workers])
            for e in (0, -1)
        ]
        assert losses[1] < losses[0]
    dataset = open_dataset(prepare(runs[-1], 2))
    twin = runs[-1].model_copy(update={"execution": "virtual", "engine": "virtual"})
    virtual, weights = engine.simulate(twin, dataset, machine)
    assert virtual.status == "completed", virtual.error
    np.testing.assert_allclose(
        kept["final"], weights["final"].numpy(), rtol=0, atol=1e-12
    )
