"""Laws that hold whatever the options are: the mean is kept, ranks have no names, one worker is serial."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from scalebench.errors import StudyError
from scalebench.pricing.machine import Choice
from scalebench.strategies import registry
from scalebench.virtual import engine
from tests.conftest import setting
from tests.strategies import daso_case

PAGE = Path(__file__).parents[2] / "docs" / "strategies.md"

HELD = [HealthCheck.function_scoped_fixture]  # every example makes its own replicas
SUMS = {
    "atol": 1e-11,
    "rtol": 0,
}  # float64, weights of order 1, some twenty sums in another order


def options(name, **drawn):
    """{name: {option: value}} with values drawn from the strategies given."""
    return st.fixed_dictionaries({name: st.fixed_dictionaries(drawn)})


def one_of(*values):
    return st.sampled_from(values)


def trained(
    x, y, strategy, machine, monkeypatch, starts=None, samples=None, lr=0.05, **values
):
    """(final weights, every replica's weights) of a run on given batches [epoch, batch, rank, row, feature]."""

    class Given(daso_case.given(x, y)):
        def __init__(self, *arguments, **named):
            super().__init__(*arguments, **named)
            if starts is not None:
                self.parameters.copy_(starts[self.rank])
                self.initial = self.parameters.clone()

    if samples is not None:
        Given.samples = property(lambda self: samples[self.rank])
    # gradients replica by replica
    monkeypatch.setattr(engine, "choose", lambda *_: Choice())
    monkeypatch.setattr(engine, "Replica", Given)
    run = daso_case.daso_run(strategy, x, y, lr=lr, **values)
    outcome, weights = engine.simulate(run, daso_case.stand_in(x, y), machine)
    assert outcome.status == "completed", outcome.error
    return weights["final"], torch.stack(
        [made.parameters.detach() for made in Given.made]
    )


# --- averaging keeps the mean ---------------------------------------------------------------------------------------

STEPS, SMALL = st.integers(1, 6), st.integers(1, 3)
BY = {
    "weighting": one_of("uniform", "samples"),
    "optimizer_state": one_of("keep", "average", "reset"),
}
AVERAGING = st.one_of(
    options("epoch_average", every=SMALL, aggregation=one_of("allreduce", "master"), **BY),
    options("local_sgd", steps=STEPS, first=STEPS, **BY),
    options("post_local_sgd", start=st.just(0), steps=STEPS, **BY),
    options("fedavg", local_epochs=SMALL, **BY),
    options("fedprox", local_epochs=SMALL, mu=st.just(0.0), **BY),
    options("hierarchical_local_sgd", groups=one_of({1: 1, 64: 3}, {1: 2, 64: 5})),
    options("gossip", peers=one_of("ring", "pair"), every=SMALL),
    options("noloco", steps=STEPS, gamma=one_of(None, 0.3)),
    options("sparta", share=one_of(0.1, 1.0), **BY),
    options(
        "streaming_diloco",
        steps=st.just(99),
        fragments=st.just(1),
        outer_lr=st.just(1),
        outer_momentum=st.just(0),
    ),
    options("daso-fixed", devices_per_node=st.just(1), global_skip=STEPS, local_skip=SMALL, wait=st.integers(0, 3)),
    options("torch_local_sgd", period=st.integers(2, 6)),
    options("torch_post_local_sgd", start=st.just(0), period=st.integers(2, 6)),
    options("torch_hierarchical_local_sgd", groups=one_of({1: 1, 64: 3}, {1: 2, 64: 5})),
)  # fmt: skip


@settings(max_examples=40, suppress_health_check=HELD)
@given(strategy=AVERAGING, workers=st.integers(2, 7), seed=st.integers(0, 2**32 - 1))
def test_averaging_keeps_the_mean_over_the_replicas(
    strategy, workers, seed, machine, monkeypatch
):
    """Replicas that begin apart and do not move: their mean is what they end with, and keep to 1e-12."""
    ((name, chosen),) = strategy.items()
    random = np.random.default_rng(seed)
    starts = torch.from_numpy(random.standard_normal((workers, 8)))
    held = random.integers(1, 50, workers).tolist()
    zeros = np.zeros((2, 5, workers, 2, 3)), np.zeros((2, 5, workers, 2, 2))
    final, replicas = trained(
        *zeros,
        strategy,
        machine,
        monkeypatch,
        starts=starts,
        samples=held,
        lr=1e-300,
        seed=seed % 1000,
        evaluate_every=0,
    )
    by_samples = chosen.get("weighting") == "samples"
    share = torch.tensor(held if by_samples else [1] * workers, dtype=torch.float64)
    mean = (share[:, None] * starts).sum(0) / share.sum()
    torch.testing.assert_close(final, mean, atol=1e-12, rtol=0)
    kept = (share[:, None] * replicas).sum(0) / share.sum()
    torch.testing.assert_close(kept, mean, atol=1e-12, rtol=0)
    if name != "gossip":  # which mixes and never makes them equal
        torch.testing.assert_close(
            replicas, mean.expand_as(replicas), atol=1e-12, rtol=0
        )


# --- ranks have no names --------------------------------------------------------------------------------------------

ONE = {"steps": STEPS}
SYMMETRIC = st.one_of(
    options("allreduce", collective=one_of("auto", "tree", "hierarchical")),
    options("horovod", fusion_threshold_mib=one_of(0.0, 128.0)),
    options("ddp", bucket_cap_mb=one_of(1e-4, 25.0)),
    options("fsdp", shard=one_of(1, 2, 3)),
    options("bsp", shards=SMALL),
    options("ssp", staleness=st.just(0)),
    options(
        "epoch_average", every=SMALL, aggregation=one_of("allreduce", "master"), **BY
    ),
    options("local_sgd", **ONE, **BY),
    options("post_local_sgd", start=st.integers(0, 12), **ONE, **BY),
    options("slowmo", **ONE, slow_momentum=st.floats(0, 0.8)),
    options("bmuf", **ONE),
    options("diloco", **ONE),
    options("easgd", **ONE),
    options("sparta", share=one_of(0.1, 1.0), **BY),
    options("sparse_loco", **ONE, keep=one_of(0.2, 1.0), bits=st.just(32)),
    options(
        "streaming_diloco",
        steps=st.integers(3, 6),
        fragments=st.just(1),
        delay=st.integers(0, 2),
        bits=one_of(32, 8, 4),
    ),
    options("fedavg", local_epochs=SMALL),
    options("fedprox", local_epochs=SMALL),
    options(
        "daso-fixed",
        devices_per_node=st.just(1),
        global_skip=st.just(1),
        wait=st.just(0),
    ),
    options("torch_local_sgd", period=st.integers(2, 6)),
    options("torch_post_local_sgd", start=st.integers(0, 12), period=st.integers(2, 6)),
)


@settings(max_examples=40, suppress_health_check=HELD)
@given(
    strategy=SYMMETRIC,
    order=st.integers(2, 6).flatmap(lambda k: st.permutations(range(k))),
    seed=st.integers(0, 99),
)
def test_exchanging_shards_between_workers_does_not_change_the_weights(
    strategy, order, seed, machine, monkeypatch
):
    """Workers exchange their shards: a synchronous rule ends with the same weights but for the order of its sums."""
    same_but_for_the_order(strategy, order, seed, machine, monkeypatch)


@settings(max_examples=8, suppress_health_check=HELD)
@given(
    every=SMALL,
    workers=st.integers(3, 6),
    turn=st.integers(1, 5),
    seed=st.integers(0, 99),
)
def test_rotating_a_ring_does_not_change_the_weights(
    every, workers, turn, seed, machine, monkeypatch
):
    """Neighbours stay neighbours."""
    order = np.roll(np.arange(workers), turn)
    same_but_for_the_order(
        {"gossip": {"every": every}}, order, seed, machine, monkeypatch
    )


def same_but_for_the_order(strategy, order, seed, machine, monkeypatch):
    random = np.random.default_rng(seed)
    x = random.standard_normal((2, 5, len(order), 4, 3))
    y = random.standard_normal((2, 5, len(order), 4, 2))
    held = random.integers(1, 50, len(order))
    plain, permuted = (
        trained(
            x[:, :, ranks],
            y[:, :, ranks],
            strategy,
            machine,
            monkeypatch,
            samples=held[ranks].tolist(),
        )[0]
        for ranks in (np.arange(len(order)), np.array(order))
    )
    torch.testing.assert_close(permuted, plain, **SUMS)


# --- one worker is serial -------------------------------------------------------------------------------------------
BY_KEPT = {**BY, "optimizer_state": one_of("keep", "average")}
ALONE = st.one_of(
    options("adasum"),
    options(
        "allreduce",
        collective=one_of("auto", "tree", "hierarchical"),
        accumulate=st.just(1),
    ),
    options("allreduce", compression=one_of("fp16", "bf16", "topk", "powersgd")),
    options("horovod", compression=one_of("none", "fp16")),
    options("ddp", compression=one_of("none", "bf16", "powersgd")),
    options("bsp", shards=SMALL),
    options("asp", scale=one_of("mean", "sum"), staleness_lr=st.booleans()),
    options("ssp", staleness=st.integers(0, 4)),
    options(
        "dssp", lower=SMALL, upper=st.integers(3, 9), bound=one_of("strict", "paper")
    ),
    options("elastic_bsp", lookahead=STEPS),
    options(
        "epoch_average",
        every=SMALL,
        aggregation=one_of("allreduce", "master"),
        **BY_KEPT,
    ),
    options("local_sgd", **ONE, **BY_KEPT),
    options("post_local_sgd", start=st.integers(0, 12), **ONE, **BY_KEPT),
    options("hierarchical_local_sgd", groups=one_of({2: 2, 4: 6}, {64: 3}), **BY_KEPT),
    options("torch_local_sgd", period=st.integers(2, 6), warmup=st.integers(0, 4)),
    options("torch_post_local_sgd", start=st.integers(0, 12), period=st.integers(2, 6)),
    options("torch_hierarchical_local_sgd", groups=one_of({2: 2, 4: 6}, {64: 3})),
    options(
        "fedavg",
        local_epochs=SMALL,
        optimizer_state=one_of("keep", "average"),
        weighting=BY["weighting"],
    ),
    options(
        "fedprox", local_epochs=SMALL, mu=st.just(0.0), optimizer_state=st.just("keep")
    ),
    options("sparta", share=one_of(0.1, 1.0)),
    options("epoch_async", every=SMALL, merge=st.just("inverse_k"), **BY_KEPT),
)
RHYTHMS = st.fixed_dictionaries(
    {
        "epochs": SMALL,
        "batch_per_worker": one_of(7, 16, 96),
        "optimizer": one_of("sgd", {"sgd": {"momentum": 0.9}}, "adam"),
        "evaluate_every": one_of(0, 1),
        "rate": one_of(
            {"lr_policy": "cosine"},
            {"lr_policy": "linear"},
            {"lr_policy": "linear", "lr_warmup_epochs": 1},
        ),
    }
).map(
    lambda values: (
        {key: value for key, value in values.items() if key != "rate"} | values["rate"]
    )
)


@settings(max_examples=60, suppress_health_check=HELD)
@given(strategy=ALONE, rhythm=RHYTHMS)
def test_one_worker_is_serial_bit_for_bit(strategy, rhythm, play):
    _, serial = play("serial", **rhythm)
    outcome, weights = play(strategy, 1, **rhythm)
    assert torch.equal(weights["final"], serial["final"])
    assert outcome.workers[0].bytes_sent == 0


@pytest.mark.parametrize("name", registry.names())
def test_pages_list_strategies_whose_lone_worker_is_not_serial(name, play):
    """Every strategy with its defaults: serial bit for bit, refused at one worker, or listed with its reason."""
    rhythm = {"epochs": 3, "optimizer": {"sgd": {"momentum": 0.9}}}
    listed = (
        f"- `{name}`: "
        in PAGE.read_text(encoding="utf-8")
        .partition("## One worker")[2]
        .partition("## Sources")[0]
    )
    try:
        registry.create(name, {}).check(setting(1))
    except StudyError:
        assert not listed
        return
    _, serial = play("serial", **rhythm)
    _, weights = play(name, 1, **rhythm)
    assert torch.equal(weights["final"], serial["final"]) == (not listed)
    if name == "bmuf":
        torch.testing.assert_close(
            weights["final"], serial["final"], atol=1e-12, rtol=0
        )


# --- every worker reaches the end -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", registry.names())
@pytest.mark.parametrize("shuffle", ["in_block", "global"])
def test_no_worker_waits_for_ever(name, shuffle, play):
    """96 samples among 3, 5 and 7 workers, the first of which is slow: last batches are smaller, and shards differ."""
    for workers in (3, 5, 7):
        try:
            registry.create(name, {}).check(setting(workers, shuffle=shuffle))
        except StudyError:
            continue  # as halves of a model at an odd count
        outcome, _ = play(
            name,
            workers,
            epochs=3,
            shuffle=shuffle,
            batch_per_worker=5,
            virtual={"slowdown": {0: 3.0}},
        )
        assert max(evaluation.epoch for evaluation in outcome.evaluations) == 2
