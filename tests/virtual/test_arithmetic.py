"""Gradients of virtual workers: batched, of one replica for all, and of each by itself, with equal results."""

from __future__ import annotations

import gc
import warnings
import weakref
from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from scalebench.cluster.operation import BY_MESSAGES
from scalebench.comm.simulated import lone_communicator
from scalebench.data.batch_plan import BatchPlan
from scalebench.pricing.machine import Choice
from scalebench.strategies import registry
from scalebench.strategies.allreduce import Allreduce
from scalebench.strategies.epoch_average import EpochAverage
from scalebench.strategies.replica_state import model_buffers
from scalebench.system.clock import WallClock
from scalebench.training.replica import Replica
from scalebench.training.torch_optimizers import FlatSgd
from scalebench.virtual import arithmetic, batched, engine, lock_step, worker_rows
from scalebench.virtual.arithmetic import choice_for, choose
from scalebench.virtual.pool import simulate_alike
from tests.strategies.parts_case import images

# float64, relative to weights of order 1: sums over samples and workers in another
# order
SUMS = 1e-12
WORKERS = 4
OTHERS = Path(__file__).parents[1] / "strategies" / "models"
# with BatchNorm
NORMALISED, CONVOLUTIONAL = (
    f"{OTHERS / name}:build" for name in ("normalised.py", "convolutional.py")
)
NEEDS = {
    "hierarchical_local_sgd": {"groups": {1: 2, 64: 4}},
    "torch_hierarchical_local_sgd": {"groups": {1: 2, 64: 4}},
}
WITH = {"powersgd": {"start": 2}}  # or it begins behind all steps of these tests


def variants(name):
    """The strategy by default, with each compression or number of bits that it has, and with sums of gradients."""
    fields = registry.find(name, "virtual").model_fields
    needed = NEEDS.get(name, {})
    yield needed
    for option in ("compression", "bits"):
        if option in fields:
            for value in get_args(fields[option].annotation):
                if value != fields[option].default:
                    yield {**needed, option: value, **WITH.get(value, {})}
    if "accumulate" in fields:
        yield {**needed, "accumulate": 2}


# Every strategy for several workers, none of them named here.
EVERY = [
    (name, options)
    for name in registry.names()
    if registry.find(name, "virtual").requires
    for options in variants(name)
]
TRAITS = {
    (name, str(options)): registry.create(name, options, "virtual").traits
    for name, options in EVERY
}


def is_whole(name, options):
    """Return True if each worker computes gradients of a whole model."""
    traits = TRAITS[name, str(options)]
    return traits.mesh(WORKERS).parts == 1 and not traits.sharded and not traits.mixed


ONE_BATCH = [
    {name: options}
    for name, options in EVERY
    if TRAITS[name, str(options)].equals_one_batch
]
ONE_BATCH_WITH = [
    {"allreduce": {"collective": "tree"}},
    {"ssp": {"staleness": 0}},
    {"pipeline": {"schedule": "1f1b", "micro_batches": 2}},
    {"hybrid": {"data": 2, "pipeline": 1, "tensor": 2}},
    {"torch_pipeline": {"schedule": "zbv"}},
]


@pytest.fixture(autouse=True)
def _nothing_tried_before(monkeypatch):
    monkeypatch.setattr(arithmetic, "_supposed_before", {})


def weights_by(choice, run, dataset, machine, monkeypatch):
    monkeypatch.setattr(engine, "choose", lambda *_: choice)
    ((_, outcome, weights),) = simulate_alike([run], dataset, machine)
    assert outcome.status == "completed", outcome.error
    return outcome, weights["final"]


def losses(outcome):
    return np.array(
        [[epoch.train_loss for epoch in worker.epochs] for worker in outcome.workers],
        dtype=float,
    )


def case(value):
    """A strategy with options, as one writes it."""
    return value if isinstance(value, str) else str(value or "").replace("'", "")


@pytest.mark.parametrize(("name", "options"), EVERY, ids=case)
def test_batched_gradients_give_the_weights_and_times_of_single_ones(
    name, options, make_run, blobs, machine, monkeypatch
):
    values = {
        "model": {"mlp": {"hidden": [16]}},  # PowerSGD shrinks a matrix of it
        "optimizer": {"sgd": {"momentum": 0.9, "weight_decay": 1e-3}},
        "virtual": {"jitter": "lognormal"},
    }
    run = make_run({name: options}, WORKERS, **values)
    single, expected = weights_by(Choice(), run, blobs, machine, monkeypatch)
    batched, found = weights_by(Choice(batched=True), run, blobs, machine, monkeypatch)
    # A sum that is rounded differently has another sign now and then.
    signs = TRAITS[name, str(options)].takes_signs
    way = "batched" if is_whole(name, options) and not signs else "per_replica"
    assert (single.facts.arithmetic, batched.facts.arithmetic) == ("per_replica", way)
    assert torch.allclose(found, expected, rtol=0, atol=SUMS)
    assert losses(batched) == pytest.approx(losses(single), abs=SUMS, nan_ok=True), (
        "no loss on all but the last stage"
    )
    assert [each.bytes_sent for each in batched.workers] == [
        each.bytes_sent for each in single.workers
    ]
    assert batched.train_s == pytest.approx(single.train_s, rel=SUMS), (
        "sleeping takes no turn of another worker"
    )


@pytest.fixture
def buffers_of(monkeypatch):
    """`buffers_of(function)`: what it returns, and the buffers of each worker behind its training, as one vector."""
    evaluate = engine.evaluate

    def found(function, *arguments):
        held = {}

        def looking(replica, *others):
            buffers = [each.double().reshape(-1) for each in model_buffers(replica)]
            held[replica.rank] = torch.cat([torch.empty(0).double(), *buffers])
            return evaluate(replica, *others)

        monkeypatch.setattr(engine, "evaluate", looking)
        made = function(*arguments)
        return *made, [held[rank] for rank in sorted(held)]

    return found


@pytest.mark.parametrize(
    ("name", "options"), [each for each in EVERY if is_whole(*each)], ids=case
)
def test_batched_gradients_give_the_statistics_of_single_ones(
    name, options, make_run, machine, buffers_of, monkeypatch
):
    """A convolutional network with BatchNorm: weights, statistics, evaluations and bytes of every strategy."""
    run = make_run(
        {name: options},
        WORKERS,
        model=CONVOLUTIONAL,
        batch_per_worker=7,
        evaluate_every=1,
        optimizer={"sgd": {"momentum": 0.9}},
        virtual={"jitter": "lognormal"},
    )
    (single, expected, theirs), (batched, found, ours) = (
        buffers_of(weights_by, choice, run, images(), machine, monkeypatch)
        for choice in (Choice(), Choice(batched=True))
    )
    signs = TRAITS[name, str(options)].takes_signs
    assert batched.facts.arithmetic == ("per_replica" if signs else "batched")
    assert torch.allclose(found, expected, rtol=0, atol=SUMS)
    for own, its in zip(ours, theirs, strict=True):
        assert torch.allclose(own, its, rtol=0, atol=SUMS)
    assert losses(batched) == pytest.approx(losses(single), abs=SUMS)
    assert by_epoch(batched) == by_epoch(single)
    for one, other in zip(batched.workers, single.workers, strict=True):
        assert (one.syncs, one.bytes_sent) == (other.syncs, other.bytes_sent)
        assert one.collective_calls == other.collective_calls
    assert batched.train_s == pytest.approx(single.train_s, rel=SUMS)


def test_rows_of_a_run_are_free_when_it_ends(make_run, blobs, machine, monkeypatch):
    """At once, not at the next search for objects that refer to one another."""
    made = []

    def watched(*arguments, **options):
        rows = batched.Batched(*arguments, **options)
        made.append(weakref.ref(rows))
        return rows

    monkeypatch.setattr(engine, "Batched", watched)
    gc.disable()
    try:
        run = make_run("epoch_average", WORKERS)
        weights_by(Choice(batched=True), run, blobs, machine, monkeypatch)
        assert [rows() for rows in made] == [None]
    finally:
        gc.enable()


class CountedClones(TorchDispatchMode):
    """Counts clones of tensors of `numbers` elements."""

    def __init__(self, numbers):
        super().__init__()
        self.numbers, self.count = numbers, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.clone.default:
            self.count += args[0].numel() == self.numbers
        return function(*args, **(kwargs or {}))


def test_replicas_of_rows_share_one_copy_of_their_initial_weights(
    make_run, blobs, machine
):
    simulation = engine.Simulation(make_run("epoch_average", WORKERS), blobs, machine)
    pool = batched.Batched(simulation.replica(0), WORKERS, fills=True)
    simulation._pool = pool
    with CountedClones(len(pool.initial)) as clones:
        replicas = [simulation.replica(rank) for rank in range(WORKERS)]
    assert all(replica.initial is pool.initial for replica in replicas)
    assert clones.count == 0


def by_epoch(outcome):
    return [
        (each.epoch, each.elapsed_s, each.metric)
        for each in sorted(outcome.evaluations, key=lambda one: one.epoch)
    ]


@pytest.mark.parametrize("strategy", [*ONE_BATCH, *ONE_BATCH_WITH], ids=case)
@pytest.mark.parametrize("workers", [2, 4])
def test_one_replica_gives_the_weights_and_times_of_all_that_average_gradients(
    strategy, workers, make_run, blobs, machine, monkeypatch
):
    virtual = {"jitter": "lognormal", "slowdown": {1: 1.3}}
    run = make_run(
        strategy,
        workers,
        evaluate_every=1,
        lr_policy="linear",
        epochs=3,
        virtual=virtual,
    )
    single, expected = weights_by(Choice(), run, blobs, machine, monkeypatch)
    one, found = weights_by(Choice(one_batch=True), run, blobs, machine, monkeypatch)
    assert one.facts.arithmetic == "one_batch"
    assert torch.allclose(found, expected, rtol=0, atol=SUMS)
    assert losses(one) == pytest.approx(losses(single), abs=SUMS, nan_ok=True), (
        "no loss on all but the last stage"
    )
    assert one.train_s == pytest.approx(single.train_s, rel=SUMS)
    assert by_epoch(one) == [pytest.approx(each, rel=SUMS) for each in by_epoch(single)]
    assert [each.optimizer_steps for each in one.workers] == [
        each.optimizer_steps for each in single.workers
    ]
    assert [each.bytes_sent for each in one.workers] == [
        each.bytes_sent for each in single.workers
    ]
    assert [each.histograms for each in one.workers] == [
        each.histograms for each in single.workers
    ]


class Watching(Allreduce):
    """`allreduce` whose workers meet once more after an epoch with a loss below a bound."""

    def train_epoch(self, worker, epoch):
        super().train_epoch(worker, epoch)
        loss = worker.last_loss.clone().view(1)
        worker.comm.allreduce_(loss, "max")
        if loss.item() < 0.3:
            worker.comm.barrier()
            worker.comm.count(BY_MESSAGES)

    @property
    def traits(self):
        return super().traits


def test_program_that_reads_the_loss_is_computed_by_every_replica(
    make_run, blobs, machine, monkeypatch
):
    monkeypatch.setattr(lock_step, "strategy_of", lambda run: Watching())
    # arithmetic of its own
    run = make_run({"allreduce": {"collective": "tree"}}, 2, epochs=6)
    single, _ = weights_by(Choice(), run, blobs, machine, monkeypatch)
    found, _ = weights_by(Choice(one_batch=True), run, blobs, machine, monkeypatch)
    steps = single.workers[0].optimizer_steps
    assert steps + 6 < single.workers[0].syncs < steps + 12, (
        "the bound is met, and not from the beginning"
    )
    assert [each.syncs for each in found.workers] == [
        each.syncs for each in single.workers
    ]


@pytest.mark.parametrize(
    "optimizer", ["sgd", {"sgd": {"momentum": 0.5, "nesterov": True}}, "adam"]
)
def test_batched_steps_are_those_of_the_optimizer(
    optimizer, make_run, blobs, machine, monkeypatch
):
    run = make_run(
        "local_sgd", WORKERS, optimizer=optimizer, lr_policy="cosine", lr=0.01
    )
    _, expected = weights_by(Choice(), run, blobs, machine, monkeypatch)
    _, found = weights_by(Choice(batched=True), run, blobs, machine, monkeypatch)
    assert torch.allclose(found, expected, rtol=0, atol=SUMS)


@pytest.mark.parametrize("places", [[1, 2, 3], [0, 2, 5]])
@pytest.mark.parametrize("rates", [[0.1] * 3, [0.1, 0.07, 0.3]])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"momentum": 0.9, "weight_decay": 0.01},
        {"momentum": 0.9, "nesterov": True},
    ],
)
@torch.no_grad()
def test_steps_on_rows_are_bit_for_bit_those_of_each_optimizer(options, rates, places):
    generator = torch.Generator().manual_seed(0)
    weights, gradients, momenta = torch.randn(3, 6, 257, generator=generator).unbind()
    expected = weights.clone()
    for place, rate in zip(places, rates, strict=True):
        optimizer = FlatSgd([expected[place]], rate, **options)
        (parameter,) = optimizer.param_groups[0]["params"]
        parameter.grad = gradients[place]
        if "momentum" in options:
            optimizer.state[parameter]["momentum_buffer"] = momenta[place].clone()
        optimizer.step()
    rows = worker_rows.Rows(weights, gradients.clone(), momenta)
    worker_rows.take_row_steps(FlatSgd([weights], 0.1, **options), rates, rows, places)
    assert torch.equal(weights, expected)
    assert torch.equal(rows.gradients, gradients)


class Looped(EpochAverage):
    """`epoch_average` whose steps are taken one by one, as a user's strategy takes them."""

    def train_epoch(self, worker, epoch):
        for batch in worker.batches(epoch):
            worker.local_step(batch)
        self.average(worker)


@pytest.mark.parametrize(
    "values",
    [{}, {"lr_policy": "cosine"}, {"optimizer": "adam"}, {"batch_per_worker": 7}],
)
@pytest.mark.parametrize("fills", [False, True])
def test_steps_that_are_taken_together_are_those_taken_one_by_one(
    fills, values, make_run, blobs, machine, monkeypatch
):
    run = make_run(
        "epoch_average", 5, virtual={"jitter": "normal", "slowdown": {1: 2.0}}, **values
    )
    choice = Choice(batched=True, fills=fills)
    other, found = weights_by(choice, run, blobs, machine, monkeypatch)
    monkeypatch.setattr(lock_step, "strategy_of", lambda run: Looped())
    one, expected = weights_by(choice, run, blobs, machine, monkeypatch)
    assert one.facts.arithmetic == other.facts.arithmetic == "batched"
    assert torch.allclose(found, expected, rtol=0, atol=SUMS)
    assert losses(other) == pytest.approx(losses(one), abs=SUMS)
    assert other.train_s == one.train_s, "bit for bit"
    assert [worker.compute_s for worker in other.workers] == [
        worker.compute_s for worker in one.workers
    ]


@pytest.mark.parametrize(
    "optimizer", [{"sgd": {"momentum": 0.9, "weight_decay": 1e-3}}, "sgd"]
)
@pytest.mark.parametrize("at_once", [2, 64])
def test_steps_on_averaged_gradients_that_are_taken_together_are_those_taken_one_by_one(
    at_once, optimizer, make_run, blobs, machine, monkeypatch
):
    virtual = {"jitter": "normal", "slowdown": {1: 2.0}}
    run = make_run(
        {"allreduce": {"compression": "topk"}}, 5, virtual=virtual, optimizer=optimizer
    )
    monkeypatch.setattr(batched, "_LEAST", at_once)
    monkeypatch.setattr(batched, "_CACHED", 0)
    choice = Choice(batched=True)
    together, found = weights_by(choice, run, blobs, machine, monkeypatch)
    monkeypatch.setattr(batched.BatchedReplica, "update", Replica.update)
    one, expected = weights_by(choice, run, blobs, machine, monkeypatch)
    assert torch.equal(found, expected)
    assert together.train_s == one.train_s, "bit for bit"


class LoopedByBlock(EpochAverage):
    """`dislib-compat` with an allreduce, whose steps are taken one by one."""

    def train_epoch(self, worker, epoch):
        for batch in worker.block_batches(epoch):
            if batch.first_of_block:
                worker.reset_optimizer()
            worker.local_step(batch)
        self.average(worker)


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("optimizer", [{"sgd": {"momentum": 0.9}}, "adam"])
def test_steps_of_a_block_that_are_taken_together_are_those_taken_one_by_one(
    optimizer, batched, make_run, blobs, machine, monkeypatch
):
    run = make_run(
        {"dislib-compat": {"aggregation": "allreduce"}},
        3,
        blocks=8,  # of 12 and 13 samples, two or three a worker
        batch_per_worker=5,
        optimizer=optimizer,
        virtual={"jitter": "normal", "slowdown": {1: 2.0}},
    )
    choice = Choice(batched=batched, records=True)
    other, found = weights_by(choice, run, blobs, machine, monkeypatch)
    monkeypatch.setattr(lock_step, "strategy_of", lambda run: LoopedByBlock())
    one, expected = weights_by(choice, run, blobs, machine, monkeypatch)
    assert torch.allclose(found, expected, rtol=0, atol=SUMS)
    assert losses(other) == pytest.approx(losses(one), abs=SUMS)
    assert other.train_s == one.train_s, "bit for bit"


def test_filled_batches_give_the_gradients_of_unequal_ones(
    make_run, blobs, machine, monkeypatch
):
    # 19 and 20 samples: batches of 6 and 7
    run = make_run("allreduce", 5, evaluate_every=1)
    _, expected = weights_by(Choice(batched=True), run, blobs, machine, monkeypatch)
    _, found = weights_by(
        Choice(batched=True, fills=True), run, blobs, machine, monkeypatch
    )
    assert torch.allclose(found, expected, rtol=0, atol=SUMS)


@pytest.mark.parametrize(
    "strategy",
    [
        "asp",
        {"epoch_average": {"weighting": "samples"}},
        {"allreduce": {"accumulate": 2}},
    ],
)
@pytest.mark.parametrize("model", [{"mlp": {"hidden": [6]}}, NORMALISED])
def test_rows_that_no_worker_fills_change_nothing(
    model, strategy, make_run, blobs, machine, buffers_of, monkeypatch
):
    """Gradients of few workers are computed with those of others beside them, so that few numbers are recorded."""
    run = make_run(
        strategy, 5, batch_per_worker=7, model=model, virtual={"jitter": "lognormal"}
    )
    choice = Choice(batched=True, fills=model != NORMALISED)
    found = {}
    monkeypatch.setattr(batched, "_ROWS_OF_RECORDING", -1)
    for rows in (1, 5):  # at least, in each call
        monkeypatch.setattr(
            batched, "_rounded_up", lambda asked, rows=rows: max(asked, rows)
        )
        found[rows] = buffers_of(weights_by, choice, run, blobs, machine, monkeypatch)
    (exact, weights, theirs), (outcome, filled, ours) = found.values()
    for own, its in zip(ours, theirs, strict=True):
        assert torch.allclose(own, its, rtol=0, atol=SUMS)
    assert torch.allclose(filled, weights, rtol=0, atol=SUMS)
    assert losses(outcome) == pytest.approx(losses(exact), abs=SUMS)
    assert outcome.train_s == exact.train_s


class Counting(nn.Linear):
    """Counts its batches, in a buffer, and treats each sample by itself."""

    def __init__(self):
        super().__init__(2, 3)
        self.register_buffer("batches", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.batches += 1
        return super().forward(x)


def test_buffers_of_workers_that_are_done_with_a_stretch_stay(
    make_run, blobs, monkeypatch
):
    """Though others, who take more steps, compute beside them."""

    def built(*_, **__):
        torch.manual_seed(0)
        return Counting().double()

    monkeypatch.setattr("scalebench.training.replica.build_model", built)
    run = make_run("epoch_average", 3)
    plan = BatchPlan.of(run, run.workers, run.seed, blobs)
    at = [lone_communicator(3, rank) for rank in range(3)]
    pool = batched.Batched(Replica(run, blobs, plan, at[0], WallClock()), 3, fills=True)
    replicas = [
        Replica(run, blobs, plan, comm, WallClock(), memory=pool.memory(comm.rank))
        for comm in at
    ]
    x, y = replicas[0].samples_of(0)
    for replica, steps in zip(replicas, [1, 4, 2], strict=True):
        rates = [0.1] * steps
        asked = pool.ask(replica, [x[:8]] * steps, [y[:8]] * steps, rates=rates)
    pool.complete(asked)
    counted = [int(*model_buffers(replica)) for replica in replicas]
    assert counted == [1, 4, 2]


def test_numbers_of_rows_are_rounded_up_by_a_quarter_at_most():
    rounded = [batched._rounded_up(rows) for rows in range(1, 1025)]
    assert all(
        rows <= each <= rows * 1.25 for rows, each in enumerate(rounded, start=1)
    )
    assert len(set(rounded)) == 36


def hooked():
    net = nn.Linear(2, 3)
    net.register_forward_hook(lambda module, inputs, made: made)
    return net


def doubled(gradient):
    return 2 * gradient


def hooked_at_a_parameter():
    net = nn.Linear(2, 3)
    net.bias.register_hook(doubled)
    return net


def clip(parameter):
    parameter.grad.clamp_(-0.01, 0.01)


def hooked_behind_a_gradient():
    net = nn.Linear(2, 3)
    net.weight.register_post_accumulate_grad_hook(clip)
    return net


class Coupled(nn.Linear):
    """Its output of a sample depends on the others of the batch, without any buffer."""

    def forward(self, x):
        made = super().forward(x)
        return made - made.mean(dim=0)


class Masked(nn.Linear):
    """Its buffers never change: a table that is added, and a mask."""

    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs)
        self.register_buffer("table", torch.linspace(0, 1, inputs))
        self.register_buffer("mask", torch.arange(inputs) > 0)

    def forward(self, x):
        return super().forward((x + self.table).masked_fill(self.mask, 0.5))


class Replacing(nn.Linear):
    """Its buffer becomes another tensor at each step."""

    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs)
        self.register_buffer("mean", torch.zeros(inputs))

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(dim=0)
        return super().forward(x - self.mean)


class Sharing(nn.Linear):
    """A buffer is a part of another one."""

    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs)
        self.register_buffer("counts", torch.zeros(inputs, dtype=torch.int64))
        self.register_buffer("first", self.counts[:1])


class Branching(nn.Linear):
    """Its program depends on values, which has no batched form."""

    def forward(self, x):
        made = super().forward(x)
        return made if bool(made.sum() > 0) else 2 * made


@pytest.mark.parametrize(
    ("build", "one_batch", "reason"),
    [
        (lambda: nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)), False, ""),
        (
            lambda: nn.Sequential(
                nn.Linear(2, 3), nn.BatchNorm1d(3, momentum=None, affine=False)
            ),
            False,
            "reads values of tensors: __float__",
        ),
        (lambda: Replacing(2, 3), False, "replaces its buffers"),
        (lambda: Sharing(2, 3), False, "share memory"),
        (lambda: Masked(2, 3), True, ""),
        (
            lambda: nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.5)),
            False,
            "random numbers",
        ),
        (hooked, False, "hooks"),
        (hooked_at_a_parameter, False, "hooks"),
        (hooked_behind_a_gradient, False, "hooks"),
        (lambda: Coupled(2, 3), False, ""),
        (lambda: Branching(2, 3), False, "reads values of tensors: __bool__"),
    ],
    ids=[
        "batch normalisation",
        "mean of all batches",
        "other buffers",
        "shared buffers",
        "constant buffers",
        "dropout",
        "hooks",
        "hook of a parameter",
        "hook behind a gradient",
        "coupled",
        "branching",
    ],
)
def test_models_without_a_batched_form_keep_single_gradients(
    build, one_batch, reason, make_run, blobs, monkeypatch
):
    def built(*_, **__):
        torch.manual_seed(0)
        return build().double()

    monkeypatch.setattr("scalebench.training.replica.build_model", built)
    monkeypatch.setattr(arithmetic, "_FASTER", 1e9)
    run = make_run("local_sgd", WORKERS)
    choice = choice_for(run, blobs, 8)
    assert choice.one_batch is one_batch
    independent = isinstance(build(), Masked)
    assert choice.fills is independent, "a coupled model must not see samples twice"
    assert choice.records is (not reason or "differ" in reason)
    assert reason in choice.reason
    assert choice.batched is (not reason)


class ReadsGradient(torch.autograd.Function):
    """Scales a gradient by a value that is read in the backward pass."""

    @staticmethod
    def forward(context, x):
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        return gradient * (3 if gradient.abs().sum().item() > 1e9 else 1)


# A sum above a limit, read in each way.
READS = {
    "__bool__": lambda x: bool(x.sum() > LIMIT),
    "item": lambda x: x.sum().item() > LIMIT,
    "__float__": lambda x: float(x.sum()) > LIMIT,
    "__int__": lambda x: int(x.sum()) > LIMIT,
    "__index__": lambda x: bool([0, 1][(x.sum() > LIMIT).long()]),
    "__format__": lambda x: float(f"{x.sum():.3f}") > LIMIT,
    "tolist": lambda x: sum(map(sum, x.tolist())) > LIMIT,
    "numpy": lambda x: x.numpy().sum() > LIMIT,
    "__array__": lambda x: np.asarray(x).sum() > LIMIT,
    "__dlpack__": lambda x: np.from_dlpack(x).sum() > LIMIT,
    "nonzero": lambda x: len(torch.nonzero(x.sum() > LIMIT)) > 0,
    "__getitem__": lambda x: len(x.sum()[x.sum() > LIMIT]) > 0,
    "equal": lambda x: torch.equal(x.sum(), x.sum().clamp(min=LIMIT)),
}
LIMIT = 6.2  # of two batches of 8 samples, and of none of those that are tried


class Rare(nn.Linear):
    """Doubles what it makes of batches whose sum is found above a limit by `reads`."""

    def __init__(self, reads):
        super().__init__(2, 3)
        self._reads = reads

    def forward(self, x):
        made = super().forward(x)
        return 2 * made if self._reads(x.detach()) else made


@pytest.mark.parametrize("way", READS)
def test_models_that_read_values_are_computed_by_each_replica(
    way, make_run, blobs, machine, monkeypatch
):
    """Whatever branch was taken where the model was tried: on the batches of all it might take another."""

    def built(*_, **__):
        torch.manual_seed(0)
        return Rare(READS[way]).double()

    monkeypatch.setattr("scalebench.training.replica.build_model", built)
    run = make_run("allreduce", WORKERS, batch_per_worker=8)
    ((_, outcome, weights),) = simulate_alike([run], blobs, machine)
    assert outcome.facts.arithmetic == "per_replica"
    choice = choice_for(run, blobs, 8)
    assert f"the model reads values of tensors: {way}" in choice.reason
    _, expected = weights_by(Choice(), run, blobs, machine, monkeypatch)
    assert torch.equal(weights["final"], expected)
    one = Choice(one_batch=True)
    _, wrong = weights_by(one, run, blobs, machine, monkeypatch)
    assert (wrong - expected).abs().max() > 1e-3, "the branch matters"


def test_values_that_are_read_in_a_backward_pass_are_found(
    make_run, blobs, monkeypatch
):
    class Backwards(nn.Linear):
        def forward(self, x):
            return ReadsGradient.apply(super().forward(x))

    def built(*_, **__):
        torch.manual_seed(0)
        return Backwards(2, 3).double()

    monkeypatch.setattr("scalebench.training.replica.build_model", built)
    choice = choice_for(make_run("allreduce", WORKERS), blobs, 8)
    assert choice == Choice(reason="the model reads values of tensors: item")


def test_values_that_are_read_in_smaller_batches_alone_are_found(
    make_run, blobs, monkeypatch
):
    class Smaller(nn.Linear):
        def forward(self, x):
            made = super().forward(x)
            return 2 * made if len(x) < 8 and x.sum().item() > LIMIT else made

    monkeypatch.setattr(
        "scalebench.training.replica.build_model",
        lambda *_, **__: Smaller(2, 3).double(),
    )
    choice = choice_for(make_run("allreduce", WORKERS), blobs, 8)
    assert choice == Choice(reason="the model reads values of tensors: item")


def test_operation_without_a_batched_form_gives_no_warning(
    make_run, blobs, monkeypatch
):
    def built(*_, **__):
        return nn.utils.parametrizations.weight_norm(nn.Linear(2, 3)).double()

    monkeypatch.setattr("scalebench.training.replica.build_model", built)
    monkeypatch.setattr(arithmetic, "_FASTER", 1e9)
    run = make_run("local_sgd", WORKERS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert choice_for(run, blobs, 8).batched


@pytest.mark.parametrize(
    ("choice", "why"),
    [(Choice(reason="it draws"), "it draws"), (Choice(batched=True), "")],
)
@pytest.mark.parametrize("strategy", ["local_sgd", "allreduce", "ddp", "epoch_async"])
def test_why_gradients_are_single_is_a_fact_of_the_run(
    strategy, choice, why, make_run, blobs, machine, monkeypatch
):
    """Also of one whose time is that of its schedule."""
    run = make_run(strategy, WORKERS)
    outcome, _ = weights_by(choice, run, blobs, machine, monkeypatch)
    assert outcome.facts.why_single == why


@pytest.fixture
def chosen(blobs, machine):
    """How a run of batches of 8 samples is computed, on a machine that knows `arithmetic`."""

    def choice(run, arithmetic=None, dataset=blobs):
        plan = BatchPlan.of(run, run.workers, 0, dataset)
        return choose(run, dataset, plan, replace(machine, arithmetic=arithmetic or {}))

    return choice


def test_measured_choice_counts_the_time(make_run, blobs, monkeypatch):
    run = make_run("local_sgd", WORKERS)
    monkeypatch.setattr(arithmetic, "_FASTER", 0.0)
    slow = choice_for(run, blobs, 8)
    assert not slow.batched
    assert slow.one_batch
    assert "of the time of single ones" in slow.reason
    monkeypatch.setattr(arithmetic, "_FASTER", 1e9)
    assert choice_for(run, blobs, 8).batched


def test_large_models_are_tried_among_two_workers(make_run, blobs, monkeypatch):
    made = []

    class Counted(batched.Batched):
        def __init__(self, first, workers, **options):
            made.append(workers)
            super().__init__(first, workers, **options)

    monkeypatch.setattr(arithmetic, "Batched", Counted)
    for largest in (1, 1000):
        monkeypatch.setattr(arithmetic, "_LARGE", largest)
        choice_for(make_run("local_sgd", 8), blobs, 8)
    assert made == [2, 8]


def test_choice_of_the_machine_counts_at_its_batch_and_workers(make_run, chosen):
    single, batched = Choice(reason="it is slow"), Choice(batched=True)
    known = {8: {2: single, 4: batched, 8: single}, 9: {4: single}}
    found = {
        workers: chosen(make_run("local_sgd", workers), known)
        for workers in (1, 2, 3, 4, 7, 8, 9)
    }
    assert found == {
        1: single,
        2: single,
        3: single,
        4: batched,
        7: batched,
        8: single,
        9: single,
    }
    lone = chosen(make_run("local_sgd", 1), {8: {2: batched}})
    assert (lone.batched, lone.reason) == (False, "a lone worker")


def test_small_models_of_several_workers_are_batched_where_nothing_was_measured(
    make_run, blobs, chosen, monkeypatch
):
    found = {
        workers: chosen(make_run("local_sgd", workers)) for workers in (1, 2, 3, 4, 16)
    }
    assert [choice.batched for choice in found.values()] == 3 * [False] + 2 * [True]
    assert "fewer than 4 workers" in found[3].reason
    assert all(choice.one_batch and choice.records for choice in found.values())
    narrow = replace(blobs, x_train=blobs.x_train[:, :1], x_test=blobs.x_test[:, :1])
    monkeypatch.setattr(arithmetic, "_SMALL", 1)
    run = make_run("local_sgd", WORKERS)
    assert chosen(run).batched, "tried before in this process"
    large = chosen(run, dataset=narrow)
    assert "parameters are many" in large.reason, "another input is another model"
    assert not large.batched


def test_time_does_not_decide_where_nothing_was_measured(make_run, chosen, monkeypatch):
    monkeypatch.setattr(arithmetic, "_share_of_time", lambda *_: pytest.fail("timed"))
    assert chosen(make_run("local_sgd", WORKERS)).batched
