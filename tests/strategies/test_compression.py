"""Compressed messages: error feedback loses nothing, factors are torch's, trees sum, bytes are counted. float64."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scalebench.comm.base import Capability
from scalebench.comm.native import NativeCommunicator
from scalebench.errors import StudyError
from scalebench.strategies import compression, registry
from scalebench.strategies.compression import PowerSgd, TopK, places_of_largest
from scalebench.system.clock import WallClock
from scalebench.virtual.communicator import VirtualCommunicator
from scalebench.virtual.engine import simulate
from tests.conftest import setting

POWERSGD = Path(__file__).parent / "programs" / "powersgd.py"
WIDE = {"mlp": {"hidden": [16, 16]}}


class Recording:
    """A communicator of a lone worker that remembers what it was given."""

    rank, size = 0, 1

    def __init__(self):
        self.sent = []

    def allgather_combined(self, tensor, combine):
        self.sent.append(tensor.clone())
        return combine([tensor])

    def allreduce_(self, tensor, op, **_):
        self.sent.append(tensor.clone())

    def cached(self, make):
        return make()

    def by_rows(self, compute, own, *equal):
        return [each[0] for each in compute(*(row[None] for row in own), *equal)]


def lone_worker(model=None, n=None):
    parameters = sum(p.numel() for p in model.parameters()) if model is not None else n
    gradients = torch.zeros(parameters, dtype=torch.float64)
    return SimpleNamespace(
        comm=Recording(),
        clock=WallClock(),
        gradients=gradients,
        model=model,
        state=SimpleNamespace(),
    )


# --- top-k ----------------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(
    n=st.integers(1, 40),
    keep=st.floats(0.01, 1.0),
    steps=st.integers(1, 6),
    seed=st.integers(0, 999),
)
def test_topk_sends_the_largest_and_keeps_the_rest(n, keep, steps, seed):
    """After any number of steps: all that was sent + what is kept = all gradients, and what is kept is smaller."""
    random = torch.Generator().manual_seed(seed)
    worker = lone_worker(n=n)
    rule = TopK(worker, keep)
    given_in, sent = (
        torch.zeros(n, dtype=torch.float64),
        torch.zeros(n, dtype=torch.float64),
    )
    k = max(1, math.ceil(keep * n))
    for _ in range(steps):
        gradient = torch.randn(n, generator=random, dtype=torch.float64)
        given_in += gradient
        before = rule.residual + gradient
        rule.mean_(gradient)
        sent += gradient
        assert int((gradient != 0).sum()) == k
        torch.testing.assert_close(gradient + rule.residual, before, atol=0, rtol=0)
        assert gradient[gradient != 0].abs().min() >= rule.residual.abs().max()
        assert worker.comm.sent[-1].nbytes == k * 12
    torch.testing.assert_close(sent + rule.residual, given_in, atol=1e-12, rtol=0)


@settings(deadline=None)
@given(
    n=st.integers(1, 200),
    share=st.floats(0.01, 1.0),
    levels=st.sampled_from([3, 1000]),
    seed=st.integers(0, 999),
)
def test_places_of_the_largest_are_those_of_a_search_among_all(n, share, levels, seed):
    random = torch.Generator().manual_seed(seed)
    rows = torch.randint(0, levels, (4, n), generator=random).double()  # with ties
    k = math.ceil(share * n)
    places = places_of_largest(rows, k)
    assert all(len(set(row)) == k for row in places.tolist())
    found = rows.gather(-1, places).sort(descending=True).values
    assert torch.equal(found, rows.topk(k).values)


def test_topk_of_everything_is_allreduce(play):
    _, reduced = play("allreduce", 5, epochs=3)
    _, weights = play({"allreduce": {"compression": "topk", "keep": 1.0}}, 5, epochs=3)
    torch.testing.assert_close(weights["final"], reduced["final"], atol=1e-13, rtol=0)


# --- PowerSGD -------------------------------------------------------------------------------------------------------


def test_powersgd_keeps_what_the_factors_miss_and_is_exact_for_matrices_of_its_rank():
    model = torch.nn.Sequential(
        torch.nn.Linear(12, 9, dtype=torch.float64),
        torch.nn.Linear(9, 2, dtype=torch.float64),
    )
    worker = lone_worker(model)
    rule = PowerSgd(worker, rank=1, start=0)
    random = np.random.default_rng(2)
    gradient = torch.tensor(random.standard_normal(worker.gradients.numel()))
    before = gradient.clone()
    rule.mean_(gradient)
    torch.testing.assert_close(gradient + rule.residual, before, atol=1e-14, rtol=0)
    matrix = gradient[: 9 * 12].view(9, 12)
    assert torch.linalg.matrix_rank(matrix) == 1
    assert rule.residual[: 9 * 12].abs().max() > 0.1
    # biases, and a matrix too small to shrink
    assert torch.equal(gradient[9 * 12 :], before[9 * 12 :])
    # once the kept error is spent, a matrix of rank 1 passes as it is
    for _ in range(2):
        rule.forget()
        gradient = torch.zeros_like(before)
        one = torch.tensor(
            np.outer(random.standard_normal(9), random.standard_normal(12))
        )
        gradient[: 9 * 12] = one.view(-1)
        rule.mean_(gradient)
        torch.testing.assert_close(
            gradient[: 9 * 12].view(9, 12), one, atol=1e-12, rtol=0
        )


def test_virtual_workers_share_one_orthonormalisation(play, monkeypatch):
    """Five workers that each compute all they have in common end with the same bits; together they compute it once."""
    options, counted = {"allreduce": {"compression": "powersgd", "rank": 2}}, []

    def counting(matrix, plain=compression._orthonormal):
        counted.append(matrix)
        return plain(matrix)

    monkeypatch.setattr(compression, "_orthonormal", counting)
    _, together = play(options, 5, epochs=3, model=WIDE)
    of_one, counted[:] = len(counted), []
    monkeypatch.setattr(VirtualCommunicator, "cached", NativeCommunicator.cached)
    _, each = play(options, 5, epochs=3, model=WIDE)
    assert torch.equal(together["final"], each["final"])
    assert len(counted) == 5 * of_one > 0


def test_powersgd_is_allreduce_until_it_starts(play):
    _, reduced = play("allreduce", 4, epochs=2, model=WIDE)
    for start, same in ((6, True), (5, False)):
        options = {"compression": "powersgd", "start": start}
        _, weights = play({"allreduce": options}, 4, epochs=2, model=WIDE)
        assert torch.equal(weights["final"], reduced["final"]) is same


def test_a_model_with_nothing_to_factor_is_refused(make_run, blobs, machine):
    from scalebench.errors import ModelError

    with pytest.raises(ModelError, match="no layer shrinks to less than 1/2 at rank 1"):
        simulate(
            make_run({"allreduce": {"compression": "powersgd"}}, 2), blobs, machine
        )


def test_powersgd_equals_the_hook_of_torch_on_two_ranks(tmp_path):
    """Ten steps of DDP with torch's powerSGD_hook over gloo, and ours over the same gradients: 1e-9 in float64.

    The hook draws Q for each bucket, and sums its vectors; ours is it for one bucket,
    which is what our ddp asks for, also where the model (1.4 MiB of gradients) would
    have several.
    """
    done = subprocess.run(
        [sys.executable, "-W", "error", str(POWERSGD), str(tmp_path / "store")],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    difference, moved, compressed, buckets, usual = (
        float(word) for word in done.stdout.split()
    )
    assert difference < 1e-9
    assert moved > 1e-2
    assert compressed == 1
    assert (buckets, usual) == (1, 2)


def test_ddp_has_the_same_factors_and_the_same_bytes(play):
    """One bucket, after the backward pass; the real hook is met in test_real_ranks.py."""
    options = {"compression": "powersgd", "rank": 2, "start": 2}
    _, expected = play({"allreduce": options}, 4, epochs=2, model=WIDE)
    outcome, weights = play({"ddp": options}, 4, epochs=2, model=WIDE)
    assert torch.equal(weights["final"], expected["final"])
    for worker in outcome.workers:
        assert worker.syncs == 2 + 4 * 2


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_half_precision_under_ddp_is_that_of_allreduce(play, precision):
    outcome, weights = play({"ddp": {"compression": precision}}, 4, epochs=2)
    _, expected = play({"allreduce": {"compression": precision}}, 4, epochs=2)
    assert torch.equal(weights["final"], expected["final"])
    assert (
        outcome.workers[0].bytes_sent
        == 2 * weights["final"].numel() * outcome.workers[0].syncs
    )


def test_powersgd_under_ddp_starts_after_two_plain_steps():
    with pytest.raises(
        StudyError, match=r"option 'start': .* greater than or equal to 2"
    ):
        registry.create("ddp", {"start": 1})


# --- half precision -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("precision", "epsilon"), [("fp16", 2**-11), ("bf16", 2**-8)])
def test_half_precision_rounds_each_contribution(play, precision, epsilon):
    """One step: the mean of K rounded gradients, itself rounded, is off by at most two relative roundings."""
    options = {"epochs": 1, "optimizer": "sgd", "batch_per_worker": 24}
    _, reduced = play("allreduce", 4, **options)
    _, weights = play({"allreduce": {"compression": precision}}, 4, **options)
    off = (weights["final"] - reduced["final"]).abs().max()
    assert 0 < off < 4 * epsilon * 0.1  # learning rate 0.1, gradients below 1


# --- trees ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("collective", ["tree", "hierarchical"])
def test_collectives_spelled_out_sum_as_the_engine_does(play, collective, workers):
    _, reduced = play("allreduce", workers, epochs=2)
    outcome, weights = play(
        {"allreduce": {"collective": collective}}, workers, epochs=2
    )
    torch.testing.assert_close(weights["final"], reduced["final"], atol=1e-13, rtol=0)
    n, steps = (
        weights["final"].numel() * 8,
        sum(worker.optimizer_steps for worker in outcome.workers) // workers,
    )
    sent = [worker.bytes_sent for worker in outcome.workers]
    if collective == "tree":
        # each edge of the tree, up and down
        assert sum(sent) == 2 * (workers - 1) * n * steps
        assert all(worker.syncs == steps for worker in outcome.workers)


@pytest.mark.parametrize("workers", [2, 4, 8])
def test_a_tree_takes_the_time_of_besch_and_pohl(make_run, blobs, machine, workers):
    """Per step 2 ceil(lg p)(a + n/B) + ceil(lg p) n gamma, one worker per node, equal workers."""
    node = machine.cluster.node.model_copy(update={"workers_per_node": 1})
    one_each = type(machine)(
        machine.cluster.model_copy(update={"node": node}),
        machine.engines,
        machine.tables,
    )
    run = make_run(
        {"allreduce": {"collective": "tree"}}, workers, epochs=1, batch_per_worker=96
    )
    outcome, weights = simulate(run, blobs, one_each)
    nbytes, link = weights["final"].numel() * 8, one_each.cluster.links.inter
    levels = math.ceil(math.log2(workers))
    message = link.latency_s + nbytes / link.bandwidth_bytes_per_s
    expected = (
        2 * levels * message
        + levels * nbytes * one_each.cluster.reduction.seconds_per_byte
    )
    slowest = max(worker.comm_s for worker in outcome.workers)
    assert slowest == pytest.approx(expected, rel=1e-9)


def test_two_levels_cross_the_network_once_a_node(play):
    # nodes of two workers
    outcome, weights = play({"allreduce": {"collective": "hierarchical"}}, 6, epochs=2)
    n = weights["final"].numel() * 8
    steps = outcome.workers[0].optimizer_steps
    assert steps > 0
    for worker in outcome.workers:
        leader = worker.rank % 2 == 0
        assert worker.bytes_sent == steps * n * (3 if leader else 1)
        assert worker.syncs == steps * (3 if leader else 2)


def test_hierarchical_on_one_node_is_warned_about():
    strategy = registry.create("allreduce", {"collective": "hierarchical"})
    assert "on one node" in strategy.check(setting(4, 4))[0]
    assert strategy.check(setting(8, 4)) == []


# --- accumulation ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["allreduce", "horovod", "ddp"])
@pytest.mark.parametrize("workers", [1, 3, 5])
def test_accumulated_batches_are_one_large_batch(play, workers, strategy):
    """Shards of 5 workers are uneven (19 and 20 samples): the sums are weighted by samples, so it is still exact."""
    options = {"epochs": 3, "shuffle": "none", "optimizer": {"sgd": {"momentum": 0.9}}}
    _, large = play("allreduce", workers, batch_per_worker=96, **options)
    _, small = play(
        {strategy: {"accumulate": 100}}, workers, batch_per_worker=4, **options
    )
    torch.testing.assert_close(small["final"], large["final"], atol=1e-12, rtol=0)


def test_accumulation_communicates_once_per_step_and_takes_the_rest_of_an_epoch_too(
    play,
):
    # six batches an epoch: steps of 4 and 2
    outcome, _ = play({"allreduce": {"accumulate": 4}}, 2, epochs=3)
    assert [(worker.optimizer_steps, worker.syncs) for worker in outcome.workers] == [
        (6, 6)
    ] * 2


def test_the_learning_rate_follows_the_batches_not_the_optimizer_steps(play):
    """Warm-up over two epochs ends after two epochs, however many batches a step gathers."""
    options = {
        "epochs": 3,
        "lr_policy": "linear",
        "lr_warmup_epochs": 2,
        "shuffle": "none",
        "optimizer": "sgd",
    }
    _, every = play("allreduce", 2, **options)
    _, gathered = play({"allreduce": {"accumulate": 2}}, 2, **options)
    way = [
        (weights["final"] - weights["initial"]).norm().item()
        for weights in (every, gathered)
    ]
    assert 0.3 < way[1] / way[0] < 0.8  # half as many steps of about the same length


# --- books, identities and bad input --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "per_step"),
    [
        ({}, lambda n: n * 8),
        ({"compression": "fp16"}, lambda n: n * 2),
        ({"compression": "bf16"}, lambda n: n * 2),
        ({"compression": "topk", "keep": 0.1}, lambda n: math.ceil(0.1 * n) * 12),
        # 2-16-16-3: the matrices 16 x 16 and 3 x 16 travel as two vectors each, the
        # rest of n as it is
        (
            {"compression": "powersgd", "start": 0},
            lambda n: (n - 256 - 48 + 2 * 16 + 3 + 16) * 8,
        ),
    ],
    ids=["plain", "fp16", "bf16", "topk", "powersgd"],
)
def test_bytes_and_synchronisations_are_counted_as_the_rule_says(
    play, options, per_step
):
    outcome, weights = play({"allreduce": options}, 2, epochs=3, model=WIDE)
    syncs = 18 * (2 if options.get("compression") == "powersgd" else 1)
    sent = 18 * per_step(weights["final"].numel())
    assert [(worker.syncs, worker.bytes_sent) for worker in outcome.workers] == [
        (syncs, sent)
    ] * 2


@pytest.mark.parametrize(
    "options",
    [
        {"compression": "fp16"},
        {"compression": "topk"},
        {"compression": "powersgd", "start": 0},
        {"collective": "tree"},
        {"collective": "hierarchical"},
    ],
    ids=str,
)
def test_one_worker_is_serial_bit_for_bit(play, options):
    _, serial = play("serial", epochs=2, model=WIDE)
    outcome, weights = play({"allreduce": options}, 1, epochs=2, model=WIDE)
    assert torch.equal(weights["final"], serial["final"])
    assert outcome.workers[0].bytes_sent == 0


def test_only_the_plain_options_share_the_arithmetic_of_the_others():
    assert registry.create("allreduce", {}).arithmetic(4) == registry.create(
        "ddp", {}, "virtual"
    ).arithmetic(4)
    for options in ({"compression": "fp16"}, {"collective": "tree"}, {"accumulate": 2}):
        assert registry.create("allreduce", options).arithmetic(4) is None
    assert registry.create("allreduce", {"accumulate": 2}).arithmetic(1) is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"compression": "fp8"},
            r"option 'compression': .* 'none', 'fp16', 'bf16', 'topk' or 'powersgd'",
        ),
        ({"keep": 0}, r"option 'keep': .* greater than 0"),
        ({"keep": 1.5}, r"option 'keep': .* less than or equal to 1"),
        ({"rank": 0}, r"option 'rank'"),
        ({"accumulate": 0}, r"option 'accumulate'"),
        (
            {"compression": "topk", "collective": "tree"},
            r"option 'collective': .* 'auto' with compression topk",
        ),
    ],
)
def test_options_out_of_range_name_option_and_range(options, message):
    with pytest.raises(StudyError, match=message):
        registry.create("allreduce", options)


def test_options_ask_an_engine_for_what_they_use():
    needs = {
        name: registry.create("allreduce", {"collective": name}).needs
        for name in ("auto", "tree", "hierarchical")
    }
    assert needs["auto"] == {Capability.COLLECTIVES}
    assert needs["tree"] == {Capability.COLLECTIVES, Capability.POINT_TO_POINT}
    assert needs["hierarchical"] == {Capability.COLLECTIVES, Capability.SPLIT}
