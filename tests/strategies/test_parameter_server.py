"""The parameter server: its arithmetic against formulas written here, its identities, its books. All in float64."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scalebench.errors import StudyError
from scalebench.launch.hosts import reachable
from scalebench.strategies import registry
from scalebench.strategies.server_rules import Elastic, Gate, Lockstep
from scalebench.strategies.server_weights import (
    PUSH_NUMBERS,
    Message,
    ParameterServer,
    Reply,
    pack,
    read_reply,
    unpack,
)
from tests.conftest import setting
from tests.facts import naming

FAMILY = ["bsp", "asp", "ssp", "dssp", "elastic_bsp"]
MOMENTUM = {"sgd": {"momentum": 0.9}}
UNEVEN = {"slowdown": {1: 2.5, 2: 1.3}, "jitter": "lognormal"}


def serve(gate, weights, ends=(), momentum=0.0, **options):
    parameter = torch.nn.Parameter(weights.clone())
    optimizer = torch.optim.SGD([parameter], lr=7.0, momentum=momentum, foreach=False)
    return ParameterServer(gate, weights, optimizer, list(ends), **options)


def push(server, worker, gradient, lr=0.1, weight=1.0):
    message = pack(torch.as_tensor(gradient, dtype=torch.float64), [lr, weight])
    return {each: read_reply(reply) for each, reply in server(worker, message, 0.0)}


# --- identities -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["sgd", MOMENTUM, "adam"], ids=str)
@pytest.mark.parametrize(
    "strategy",
    ["bsp", {"ssp": {"staleness": 0}}, {"dssp": {"lower": 0, "upper": 0}}],
    ids=str,
)
def test_a_barrier_each_step_is_allreduce(play, strategy, optimizer):
    """96 samples over 5 workers are shards of 19 and 20: gradients are weighted. Sums in another order: 1e-12."""
    options = {"epochs": 3, "optimizer": optimizer, "lr": 0.02}
    _, reduced = play("allreduce", 5, **options)
    _, weights = play(strategy, 5, virtual=UNEVEN, **options)
    torch.testing.assert_close(weights["final"], reduced["final"], atol=1e-12, rtol=0)


@pytest.mark.parametrize(
    ("strategy", "bounds"),
    [("ssp", {"staleness": 0}), ("dssp", {"lower": 0, "upper": 0})],
)
def test_a_round_that_is_summed_is_allreduce_at_k_times_the_learning_rate(
    play, strategy, bounds
):
    _, reduced = play("allreduce", 5, epochs=3, lr=0.05)
    _, weights = play(
        {strategy: {**bounds, "scale": "sum"}}, 5, epochs=3, lr=0.01, virtual=UNEVEN
    )
    torch.testing.assert_close(weights["final"], reduced["final"], atol=1e-12, rtol=0)


def test_workers_of_one_speed_meet_the_bound_of_ssp_as_asp_does(play):
    """With equal clocks no worker is ever 3 ahead: the rules agree bit for bit."""
    _, free = play("asp", 4, epochs=3)
    _, bounded = play("ssp", 4, epochs=3)
    assert torch.equal(free["final"], bounded["final"])


@pytest.mark.parametrize("strategy", [*FAMILY, "bsp_backup"])
def test_evaluation_never_changes_training_and_happens_once_an_epoch_in_order(
    play, strategy
):
    finals = []
    for every in (1, 2, 0):
        outcome, weights = play(
            strategy, 4, epochs=4, evaluate_every=every, virtual=UNEVEN
        )
        found = sorted(outcome.evaluations, key=lambda evaluation: evaluation.elapsed_s)
        assert [evaluation.epoch for evaluation in found] == {
            1: [0, 1, 2, 3],
            2: [1, 3],
            0: [3],
        }[every]
        assert found[-1].elapsed_s == max(worker.train_s for worker in outcome.workers)
        finals.append(
            (weights["final"], [worker.train_s for worker in outcome.workers])
        )
    assert torch.equal(finals[0][0], finals[1][0])
    assert torch.equal(finals[0][0], finals[2][0])
    assert finals[0][1] == finals[1][1] == finals[2][1]


# --- arithmetic -----------------------------------------------------------------------------------------------------


def test_asynchronous_pushes_with_momentum_by_hand():
    """v <- 0.9 v + s g, w <- w - 0.1 v, s = share / max(1, tau), one push after the other."""
    gradients = np.random.default_rng(1).standard_normal((6, 3))
    for slow_stale in (False, True):
        server = serve(
            Gate(3, 9),
            torch.zeros(3, dtype=torch.float64),
            momentum=0.9,
            share=1 / 3,
            slow_stale=slow_stale,
        )
        w, v, pulled = np.zeros(3), np.zeros(3), [0, 0, 0]
        for updates, (worker, gradient) in enumerate(
            zip([0, 1, 0, 0, 2, 1], gradients, strict=True)
        ):
            stale = updates - pulled[worker]
            v = 0.9 * v + gradient / 3 / (max(1, stale) if slow_stale else 1)
            w = w - 0.1 * v
            ((receiver, (weights, reply)),) = push(server, worker, gradient).items()
            assert receiver == worker
            assert reply.staleness == stale
            np.testing.assert_allclose(weights.numpy(), w, atol=1e-15)
            pulled[worker] = updates + 1
        assert server.updates == 6


def test_backup_drops_what_comes_after_its_round():
    server = serve(
        Lockstep(3, 5, backup=1), torch.zeros(1, dtype=torch.float64), ends=[1, 2]
    )
    assert push(server, 2, [3.0], weight=1.0) == {}
    released = push(server, 0, [1.0], weight=0.5)
    assert sorted(released) == [0, 2]
    for weights, reply in released.values():
        assert weights.item() == pytest.approx(-0.1 * 4.0 / 1.5)
        assert reply.used
        assert reply.rounds == 1
    assert [reply.mark for _, reply in released.values()] == [1, 0]
    ((weights, reply),) = push(server, 1, [100.0]).values()
    assert not reply.used
    assert (reply.staleness, reply.rounds) == (1, 1)
    assert weights.item() == pytest.approx(-0.1 * 4.0 / 1.5)
    assert push(server, 1, [1.0]) == {}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n", [0, 1, 7])
def test_numbers_travel_beside_the_vector_without_loss(dtype, n):
    vector = torch.randn(n, dtype=torch.float64).to(dtype)
    numbers = [0.1, -1e300, 2.0**53 - 1, float("inf")]
    found, read = unpack(pack(vector, numbers), 4)
    assert torch.equal(found, vector)
    assert read == numbers


def test_the_server_can_be_sent_to_another_process():
    start = torch.arange(7, dtype=torch.float64)
    here = serve(Lockstep(2, 4), start, momentum=0.9)
    there = pickle.loads(pickle.dumps(here))
    for _ in range(3):
        for worker in range(2):
            gradient = torch.randn(7, dtype=torch.float64)
            expected, found = (
                push(here, worker, gradient),
                push(there, worker, gradient),
            )
            assert {each: reply for each, (_, reply) in found.items()} == {
                e: r for e, (_, r) in expected.items()
            }
            for each, (weights, _) in expected.items():
                assert torch.equal(found[each][0], weights)
    assert not torch.equal(found[0][0], start)


# --- books ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", [*FAMILY, "bsp_backup"])
def test_staleness_and_lead_are_in_the_report(play, strategy):
    outcome, _ = play(strategy, 4, epochs=3, virtual=UNEVEN)
    assert len(outcome.workers) == 4
    for worker in outcome.workers:
        stale = {
            int(value): times
            for value, times in worker.histograms.get("staleness", {}).items()
        }
        dropped = sum(worker.histograms.get("dropped", {}).values())
        assert (
            sum(stale.values()) + dropped
            == worker.optimizer_steps
            == sum(worker.histograms["lead_at_push"].values())
        )
        assert worker.optimizer_steps <= 9
        means = [
            epoch.mean_staleness
            for epoch in worker.epochs
            if epoch.mean_staleness is not None
        ]
        if strategy.startswith("bsp"):
            assert set(stale) <= {0}
        if strategy == "asp":
            assert worker.optimizer_steps == 9
            total = sum(value * times for value, times in stale.items())
            assert sum(means) * 3 == pytest.approx(total)
            assert max(epoch.max_staleness for epoch in worker.epochs) == max(stale)
    # a fast worker meets few updates of others, the slow one many
    if strategy == "asp":
        assert max(map(int, outcome.workers[1].histograms["staleness"])) > 3
    if strategy == "bsp_backup":
        assert sum(outcome.workers[1].histograms["dropped"].values()) > 0


def test_leads_of_ssp_and_strict_dssp_keep_to_their_bounds_in_a_run(play):
    for strategy, bound in (
        ({"ssp": {"staleness": 1}}, 1),
        ({"dssp": {"lower": 1, "upper": 3}}, 3),
    ):
        outcome, _ = play(
            strategy, 4, epochs=6, virtual={"slowdown": {1: 4.0}, "jitter": "lognormal"}
        )
        leads = [
            int(lead)
            for worker in outcome.workers
            for lead in worker.histograms["lead_at_release"]
        ]
        assert bound - 1 <= max(leads) <= bound
        at_push = [
            int(lead)
            for worker in outcome.workers
            for lead in worker.histograms["lead_at_push"]
        ]
        assert max(at_push) <= bound + 1


def test_a_step_is_one_synchronisation_of_the_vector_and_two_numbers(play):
    for strategy in FAMILY:
        outcome, weights = play(strategy, 4, epochs=3)
        assert len(outcome.workers) == 4
        for worker in outcome.workers:
            assert worker.syncs == 9
            assert worker.bytes_sent == 9 * (
                weights["final"].numel() * 8 + 8 * PUSH_NUMBERS
            )
            parts = worker.compute_s + worker.comm_s + worker.data_s + worker.other_s
            assert parts == pytest.approx(worker.train_s, rel=1e-9)


def test_all_workers_of_a_virtual_run_are_served_by_one_rule(play, monkeypatch):
    # Each of a thousand would copy the weights and the optimizer.
    made = []
    begin = ParameterServer.__init__

    def counted(server, *arguments, **options):
        made.append(server)
        begin(server, *arguments, **options)

    monkeypatch.setattr(ParameterServer, "__init__", counted)
    play("asp")
    assert len(made) == 1


def test_waiting_less_takes_less_time_and_more_servers_take_less(play):
    slow = {"virtual": {"slowdown": {1: 3.0}}, "epochs": 6}
    times = {}
    for strategy in ("bsp", "ssp", "asp"):
        outcome, _ = play(strategy, 4, **slow)
        times[strategy] = sum(
            worker.wait_s for worker in outcome.workers if worker.rank != 1
        )
    wide = {"mlp": {"hidden": [4000]}}
    one, _ = play("bsp", 16, epochs=1, model=wide)
    four, _ = play({"bsp": {"shards": 4}}, 16, epochs=1, model=wide)
    assert four.workers[0].train_s < one.workers[0].train_s
    assert times["asp"] <= times["ssp"] <= times["bsp"]


def test_steady_jitter_does_not_freeze_where_the_server_updates(play):
    """Each step of a worker draws its own jitter, though the optimizer step is made elsewhere."""
    outcome, _ = play(
        "asp", 2, epochs=6, virtual={"jitter": "exponential", "jitter_sigma": 0.5}
    )
    seconds = {round(epoch.compute_s, 12) for epoch in outcome.workers[0].epochs}
    assert len(seconds) == 6


# --- bad input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "ssp",
            {"staleness": -1},
            r"strategy ssp: option 'staleness': .* greater than or equal to 0",
        ),
        (
            "dssp",
            {"lower": 5, "upper": 3},
            r"strategy dssp: option 'upper': expected at least lower \(5\), got 3",
        ),
        (
            "dssp",
            {"upper": 10**9},
            r"strategy dssp: option 'upper': .*less than or equal to 10000, got 1000000000",
        ),
        (
            "dssp",
            {"bound": "loose"},
            r"strategy dssp: option 'bound': .* 'strict' or 'paper'",
        ),
        ("elastic_bsp", {"lookahead": 0}, r"strategy elastic_bsp: option 'lookahead'"),
        ("bsp", {"shards": 0}, r"strategy bsp: option 'shards'"),
        ("bsp_backup", {"backup": 0}, r"strategy bsp_backup: option 'backup'"),
        (
            "asp",
            {"staleness": 3},
            r"strategy asp: unknown option 'staleness'; did you mean 'staleness_lr'",
        ),
    ],
)
def test_options_out_of_range_name_option_and_range(name, options, message):
    with pytest.raises(StudyError, match=message):
        registry.create(name, options)


def test_as_many_backups_as_workers_are_refused():
    strategy = registry.create("bsp_backup", {"backup": 2})
    assert strategy.check(setting(3)) == []
    with pytest.raises(
        StudyError, match=r"backup 2 of 2 workers .* use backup: 1 or less"
    ):
        strategy.check(setting(2))
    with pytest.raises(
        StudyError,
        match=naming("bsp_backup", "1 worker", "backup 2", "3 workers"),
    ):
        strategy.check(setting(1))


def test_nan_gradient_stops_the_run(make_run, blobs, machine):
    from scalebench.virtual.engine import simulate

    outcome, _ = simulate(
        make_run("asp", 4, lr=1e30, dtype="float32", epochs=3), blobs, machine
    )
    assert outcome.status == "diverged"


def test_reply_numbers_are_those_of_the_message():
    reply = Reply(3, True, 4, 2, 17, 1)
    weights, found = read_reply(
        pack(torch.ones(5, dtype=torch.float32), [float(x) for x in reply])
    )
    assert found == reply
    assert torch.equal(weights, torch.ones(5))


@given(
    order=st.lists(st.integers(0, 2), min_size=1, max_size=12),
    shards=st.integers(2, 5),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
)
def test_sharded_servers_answer_as_a_single_one(order, shards, dtype):
    """Each part hears of the same pushes at the same times; pieces of its pushes make pieces of its replies."""
    weights = torch.arange(7, dtype=dtype)
    whole, spread = (
        serve(Elastic(3, [99], 4), weights, momentum=0.9, shards=count)
        for count in (1, shards)
    )
    parts = [spread.part(place) for place in range(shards)]
    asked: set[int] = set()
    for time, worker in enumerate(order):
        if worker in asked:
            continue  # it still waits for its reply
        asked.add(worker)
        payload = pack(torch.full((7,), worker + 0.5 * time, dtype=dtype), [0.1, 1.0])
        replies = whole(worker, payload, float(time))
        apart = [
            part(worker, piece, float(time))
            for part, piece in zip(parts, spread.parted(payload), strict=True)
        ]
        assert all(
            [to for to, _ in replies] == [to for to, _ in each] for each in apart
        )
        for place, (to, reply) in enumerate(replies):
            asked.discard(to)
            joined = spread.joined([each[place][1] for each in apart])
            assert torch.equal(joined.view(torch.uint8), reply.view(torch.uint8))
    assert len(asked) < 3, "pushes of all workers are answered"


@pytest.mark.parametrize("gate", [Lockstep, Gate])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_server_in_the_same_process_equals_one_that_gets_messages(gate, dtype):
    """Bit for bit, at as many bytes; its answer stays as it is while others push."""
    random = torch.Generator().manual_seed(3)
    weights = torch.randn(7, generator=random, dtype=dtype)
    afar, here = (
        serve(gate(3, 99), weights, momentum=0.9, share=1 / 3, of_round=3.0)
        for _ in range(2)
    )
    held = {}
    for turn in range(12):
        gradient = torch.randn(7, generator=random, dtype=dtype)
        numbers = [0.1 + turn / 7, 1.0 + turn]
        message, pushed = pack(gradient, numbers), Message(gradient.clone(), numbers)
        assert pushed.nbytes == message.nbytes
        replies, answers = (
            afar(turn % 3, message, float(turn)),
            here(turn % 3, pushed, float(turn)),
        )
        assert [to for to, _ in replies] == [to for to, _ in answers]
        for (to, reply), (_, answer) in zip(replies, answers, strict=True):
            assert answer.nbytes == reply.nbytes
            expected, heard = read_reply(reply)
            assert answer.numbers == heard
            held[to] = expected.clone(), answer.vector
        assert all(torch.equal(expected, kept) for expected, kept in held.values())
    assert len(held) == 3


def test_several_servers_run_on_real_ranks_too(monkeypatch):
    from scalebench.cluster.cluster_file import load_cluster
    from scalebench.comm.engines import available
    from scalebench.launch.sweep import expand, is_oversubscribed
    from scalebench.native.job_files import server_ranks
    from scalebench.study.spec import Study

    if reason := available("mpi"):
        pytest.skip(reason)
    options = {
        "strategies": [{"bsp": {"shards": 4}}],
        "workers": "2",
        "execution": "native",
    }
    sweep = expand(
        Study.model_validate(options), load_cluster("this-machine"), reachable()
    )
    # no more than workers
    assert [server_ranks(run) for run in sweep.runs] == [2] * len(sweep.runs)
    monkeypatch.setattr("scalebench.system.hardware.cores", lambda: 3)
    assert is_oversubscribed(
        sweep.runs[0], reachable()
    )  # 2 workers and 2 servers want 4 cores
