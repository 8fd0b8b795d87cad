"""The local SGD family against its formulas, written here once more with numpy, in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scalebench.errors import StudyError
from scalebench.pricing.machine import Choice
from scalebench.strategies import registry
from scalebench.strategies.base import Synchronisation
from scalebench.virtual import engine
from tests.conftest import setting
from tests.strategies import daso_case

EPOCHS, BATCHES, WORKERS, LR = 3, 7, 4, 0.05
STEPS = EPOCHS * BATCHES
EXACT = {"atol": 1e-10, "rtol": 0}  # sums in another order


@pytest.fixture(scope="module")
def arrays():
    """x, y [epoch, batch, rank]: every worker sees a regression of its own."""
    random = np.random.default_rng(5)
    x = random.standard_normal((EPOCHS, BATCHES, WORKERS, 6, 3))
    slopes = random.standard_normal((WORKERS, 3, 2))
    y = np.einsum("ebkni,kio->ebkno", x, slopes) + 0.1 * random.standard_normal(
        (EPOCHS, BATCHES, WORKERS, 6, 2)
    )
    return x, y


@pytest.fixture
def trained(arrays, machine, monkeypatch):
    """Run a strategy on the arrays: `outcome, final, replicas = trained({"local_sgd": {"steps": 4}})`."""

    def run(strategy, order=None, samples=None, **values):
        x, y = (
            arrays
            if order is None
            else (arrays[0][:, :, order], arrays[1][:, :, order])
        )
        made = daso_case.given(x, y)
        if samples is not None:
            made = type(
                "Uneven",
                (made,),
                {"samples": property(lambda self: samples[self.rank])},
            )
        # gradients replica by replica
        monkeypatch.setattr(engine, "choose", lambda *_: Choice())
        monkeypatch.setattr(engine, "Replica", made)
        made.made.clear()
        spec = daso_case.daso_run(strategy, x, y, lr=LR, **values)
        outcome, weights = engine.simulate(spec, daso_case.stand_in(x, y), machine)
        assert outcome.status == "completed", outcome.error
        return outcome, weights, made.made

    return run


class Replicas:
    """K linear models, `w` (K, n), under SGD with momentum 0.9 or under AdamW."""

    def __init__(self, arrays, initial, optimizer="sgd", rate=lambda t: LR):
        self.x, self.y = arrays
        self.w = np.repeat(initial.numpy()[None], WORKERS, 0)
        self.m, self.v = np.zeros_like(self.w), np.zeros_like(self.w)
        self.optimizer, self.rate = optimizer, rate

    def gradients(self, t):
        """(K, n) of the mean squared error at step t = 0, 1, ..."""
        x, y = self.x[t // BATCHES, t % BATCHES], self.y[t // BATCHES, t % BATCHES]
        matrix, bias = self.w[:, :6].reshape(-1, 2, 3), self.w[:, 6:]
        slope = (
            2 * (np.einsum("kni,koi->kno", x, matrix) + bias[:, None] - y) / y[0].size
        )
        return np.concatenate(
            [np.einsum("kno,kni->koi", slope, x).reshape(WORKERS, -1), slope.sum(1)], 1
        )

    def update(self, t, g, who=slice(None)):
        if self.optimizer == "sgd":
            self.m[who] = 0.9 * self.m[who] + g[who]
            self.w[who] -= self.rate(t) * self.m[who]
        else:
            self.m, self.v = 0.9 * self.m + 0.1 * g, 0.999 * self.v + 0.001 * g**2
            unbiased = self.m / (1 - 0.9 ** (t + 1)), self.v / (1 - 0.999 ** (t + 1))
            self.w = self.w * (1 - LR * 0.01) - LR * unbiased[0] / (
                np.sqrt(unbiased[1]) + 1e-8
            )

    def step(self, t, who=slice(None)):
        self.update(t, self.gradients(t), who)


def intervals(steps):
    """After which steps (1-based) an interval ends; the last one may be partial."""
    return [t for t in range(1, STEPS + 1) if t % steps == 0 or t == STEPS]


def after_intervals(replicas, steps, synchronise):
    for t in range(STEPS):
        replicas.step(t)
        if t + 1 in intervals(steps):
            replicas.w[:] = synchronise(replicas.w)


def test_local_sgd_averages_after_every_interval_and_a_partial_one(trained, arrays):
    _, weights, _ = trained({"local_sgd": {"steps": 4}})
    replicas = Replicas(arrays, weights["initial"])
    after_intervals(replicas, 4, lambda w: w.mean(0))
    np.testing.assert_allclose(weights["final"].numpy(), replicas.w[0], **EXACT)


def test_weights_by_samples_and_averaged_momentum(trained, arrays):
    samples = [10, 20, 30, 40]
    options = {"steps": 4, "weighting": "samples", "optimizer_state": "average"}
    outcome, weights, _ = trained({"local_sgd": options}, samples=samples)
    replicas = Replicas(arrays, weights["initial"])
    for t in range(STEPS):
        replicas.step(t)
        if t + 1 in intervals(4):
            replicas.w[:] = np.average(replicas.w, axis=0, weights=samples)
            replicas.m[:] = np.average(replicas.m, axis=0, weights=samples)
    np.testing.assert_allclose(weights["final"].numpy(), replicas.w[0], **EXACT)
    # fused with momentum
    assert len(outcome.workers) == WORKERS
    for report in outcome.workers:
        assert report.bytes_sent == report.syncs * 2 * 8 * 8


def test_reset_policy_forgets_momentum_at_each_average(trained, arrays):
    _, weights, _ = trained({"local_sgd": {"steps": 4, "optimizer_state": "reset"}})
    replicas = Replicas(arrays, weights["initial"])
    for t in range(STEPS):
        replicas.step(t)
        if t + 1 in intervals(4):
            replicas.w[:] = replicas.w.mean(0)
            replicas.m[:] = 0
    np.testing.assert_allclose(weights["final"].numpy(), replicas.w[0], **EXACT)


@pytest.mark.parametrize("subgroup", [1, 2])
def test_post_local_sgd_averages_gradients_until_it_starts(trained, arrays, subgroup):
    outcome, weights, _ = trained(
        {"post_local_sgd": {"start": 9, "steps": 5, "subgroup": subgroup}}
    )
    replicas = Replicas(arrays, weights["initial"])
    for t in range(STEPS):
        g = replicas.gradients(t)
        if t < 9:
            g = g.mean(0, keepdims=True).repeat(WORKERS, 0)
        elif subgroup == 2:
            g = g.reshape(2, 2, -1).mean(1).repeat(2, 0)
        replicas.update(t, g)
        if t + 1 in (14, 19, STEPS):
            replicas.w[:] = replicas.w.mean(0)
    np.testing.assert_allclose(weights["final"].numpy(), replicas.w[0], **EXACT)
    inside = STEPS - 9 if subgroup == 2 else 0
    syncs = [report.syncs for report in outcome.workers]
    assert syncs == [9 + 3 + inside] * WORKERS


def test_hierarchical_local_sgd_averages_in_the_largest_group_that_is_due(
    trained, arrays
):
    _, weights, _ = trained({"hierarchical_local_sgd": {"groups": {2: 2, 64: 6}}})
    replicas = Replicas(arrays, weights["initial"])
    for t in range(1, STEPS + 1):
        replicas.step(t - 1)
        if t % 6 == 0 or t == STEPS:
            replicas.w[:] = replicas.w.mean(0)
        elif t % 2 == 0:
            replicas.w = replicas.w.reshape(2, 2, -1).mean(1).repeat(2, 0)
    np.testing.assert_allclose(weights["final"].numpy(), replicas.w[0], **EXACT)


def test_slowmo_equals_its_formula(trained, arrays):
    _, weights, _ = trained(
        {"slowmo": {"steps": 4, "slow_lr": 0.8, "slow_momentum": 0.6}}
    )
    start, u = weights["initial"].numpy().copy(), 0.0

    def slow(w):
        nonlocal start, u
        u = 0.6 * u + (start - w.mean(0)) / LR
        start = start - 0.8 * LR * u
        return start

    after_intervals(Replicas(arrays, weights["initial"]), 4, slow)
    np.testing.assert_allclose(weights["final"].numpy(), start, **EXACT)


RATES = {
    "cosine": (
        {"lr_policy": "cosine"},
        lambda t: LR * (1 + np.cos(np.pi * t / STEPS)) / 2,
    ),
    "step": (
        {"lr_policy": "step", "lr_decay_every": 1, "lr_decay": 0.5},
        lambda t: LR * 0.5 ** (t // BATCHES),
    ),
    "optimizer_steps": (
        {"lr_policy": "optimizer_steps", "lr_decay_every": 5, "lr_decay": 0.3},
        lambda t: LR * 0.3 ** (t // 5),
    ),
}


@pytest.mark.parametrize("policy", RATES)
def test_the_eta_of_slowmo_is_the_learning_rate_of_the_intervals_last_step(
    trained, arrays, policy
):
    """Intervals of 4 steps end inside epochs of 7: u keeps moves in units of the rate that each was made with."""
    values, rate = RATES[policy]
    _, weights, _ = trained(
        {"slowmo": {"steps": 4, "slow_lr": 0.8, "slow_momentum": 0.6}}, **values
    )
    replicas = Replicas(arrays, weights["initial"], rate=rate)
    start, u = weights["initial"].numpy().copy(), 0.0
    for t in range(STEPS):
        replicas.step(t)
        if t + 1 in intervals(4):
            u = 0.6 * u + (start - replicas.w.mean(0)) / rate(t)
            start = start - 0.8 * rate(t) * u
            replicas.w[:] = start
    assert len({rate(t - 1) for t in intervals(4)}) > 2
    np.testing.assert_allclose(weights["final"].numpy(), start, **EXACT)


@pytest.mark.parametrize(
    ("options", "mu"), [({}, 0.75), ({"block_momentum": 0.5}, 0.5)]
)
def test_bmuf_equals_its_formula(trained, arrays, options, mu):
    _, weights, _ = trained({"bmuf": {"steps": 4, "block_lr": 0.9, **options}})
    previous, delta = weights["initial"].numpy().copy(), 0.0

    def filtered(w):
        nonlocal previous, delta
        delta = mu * delta + 0.9 * (w.mean(0) - previous)
        previous = previous + delta
        return previous

    after_intervals(Replicas(arrays, weights["initial"]), 4, filtered)
    np.testing.assert_allclose(weights["final"].numpy(), previous, **EXACT)


def test_diloco_is_adamw_inside_and_nesterov_outside(trained, arrays):
    optimizer = {"adamw": {"weight_decay": 0.01}}
    _, weights, _ = trained({"diloco": {"steps": 5}}, optimizer=optimizer)
    outer, velocity = weights["initial"].numpy().copy(), 0.0

    def nesterov(w):
        nonlocal outer, velocity
        slope = outer - w.mean(0)
        velocity = 0.9 * velocity + slope
        outer = outer - 0.7 * (slope + 0.9 * velocity)
        return outer

    after_intervals(Replicas(arrays, weights["initial"], "adamw"), 5, nesterov)
    np.testing.assert_allclose(weights["final"].numpy(), outer, **EXACT)


@pytest.mark.parametrize(
    ("options", "alpha"), [({}, 0.9 / WORKERS), ({"alpha": 0.1}, 0.1)]
)
def test_easgd_draws_replicas_and_centre_to_one_another(
    trained, arrays, options, alpha
):
    _, weights, made = trained({"easgd": {"steps": 4, **options}}, evaluate_every=1)
    replicas, centre = (
        Replicas(arrays, weights["initial"]),
        weights["initial"].numpy().copy(),
    )

    def elastic(w):
        nonlocal centre
        d = alpha * (w - centre)
        centre = centre + d.sum(0)
        return w - d

    after_intervals(replicas, 4, elastic)
    np.testing.assert_allclose(weights["final"].numpy(), centre, **EXACT)
    assert [snapshot.epoch for snapshot in made[0].snapshots] == [0, 1, 2]


@pytest.mark.parametrize("every", [1, 3])
def test_gossip_on_a_ring_mixes_by_thirds(trained, arrays, every):
    _, weights, _ = trained({"gossip": {"every": every}})
    mixing = (
        np.eye(WORKERS)
        + np.roll(np.eye(WORKERS), 1, 0)
        + np.roll(np.eye(WORKERS), -1, 0)
    ) / 3
    replicas = Replicas(arrays, weights["initial"])
    for t in range(STEPS):
        g = replicas.gradients(t)
        if (t + 1) % every == 0:
            replicas.w = mixing @ replicas.w
        replicas.update(t, g)
    np.testing.assert_allclose(weights["final"].numpy(), replicas.w.mean(0), **EXACT)


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_gossip_decays_weights_as_they_were_before_mixing(trained, arrays, name):
    """The step of D-PSGD, decay included, is that at w_i, where the gradient was computed (Lian et al., 2017)."""
    decay = 0.3 if name == "sgd" else 0.01
    optimizer = (
        {"sgd": {"momentum": 0.9, "weight_decay": decay}} if name == "sgd" else "adamw"
    )
    _, weights, _ = trained({"gossip": {"every": 2}}, optimizer=optimizer)
    mixing = (
        np.eye(WORKERS)
        + np.roll(np.eye(WORKERS), 1, 0)
        + np.roll(np.eye(WORKERS), -1, 0)
    ) / 3
    replicas = Replicas(arrays, weights["initial"], name)
    for t in range(STEPS):
        own, g = replicas.w.copy(), replicas.gradients(t)
        # Replicas' AdamW decays by itself
        replicas.update(t, g + decay * own if name == "sgd" else g)
        if (t + 1) % 2 == 0:
            replicas.w = replicas.w - own + mixing @ own
    np.testing.assert_allclose(weights["final"].numpy(), replicas.w.mean(0), **EXACT)


@pytest.mark.parametrize(("fraction", "mu"), [(1.0, 0.0), (0.5, 0.0), (0.5, 0.3)])
def test_federated_averaging_weighs_the_chosen_by_their_samples(
    trained, arrays, fraction, mu
):
    samples = [10, 20, 30, 40]
    name = "fedprox" if mu else "fedavg"
    options = {"fraction": fraction, "local_epochs": 2, **({"mu": mu} if mu else {})}
    outcome, weights, _ = trained({name: options}, samples=samples)
    strategy = registry.create(name, options)
    replicas, common = (
        Replicas(arrays, weights["initial"]),
        weights["initial"].numpy().copy(),
    )
    idle = 0
    for round_, epochs in enumerate([(0, 1), (2,)]):
        clients = sorted(strategy.clients(3, round_, WORKERS))
        assert len(clients) == WORKERS * fraction
        for t in (
            epoch * BATCHES + batch for epoch in epochs for batch in range(BATCHES)
        ):
            replicas.update(
                t, replicas.gradients(t) + mu * (replicas.w - common), clients
            )
        share = np.array([samples[client] for client in clients])
        common = (share[:, None] * replicas.w[clients]).sum(0) / share.sum()
        replicas.w[:], replicas.m[:] = common, 0
        idle += (WORKERS - len(clients)) * len(epochs)
    np.testing.assert_allclose(weights["final"].numpy(), common, **EXACT)
    losses = [epoch.train_loss for report in outcome.workers for epoch in report.epochs]
    assert losses.count(None) == idle


@pytest.mark.parametrize("fraction", [0.3, 0.5, 0.75])
def test_each_round_draws_clients_anew_and_all_alike(fraction):
    strategy = registry.create("fedavg", {"fraction": fraction})
    rounds = [strategy.clients(3, round_, 8) for round_ in range(400)]
    assert {len(chosen) for chosen in rounds} == {int(8 * fraction)}
    often = (
        np.bincount([client for chosen in rounds for client in chosen], minlength=8)
        / 400
    )
    # four standard errors of 0.025
    np.testing.assert_allclose(often, int(8 * fraction) / 8, atol=0.1)
    assert rounds != [strategy.clients(4, round_, 8) for round_ in range(400)]


PERIODIC = ["local_sgd", "slowmo", "bmuf", "diloco", "easgd", "torch_local_sgd"]
FAMILY = [
    *(
        {name: {"period" if name == "torch_local_sgd" else "steps": 4}}
        for name in PERIODIC
    ),
    {"post_local_sgd": {"start": 10, "steps": 4}},
    {"post_local_sgd": {"start": 50, "steps": 4}},
    {"hierarchical_local_sgd": {"groups": {2: 2, 4: 6}}},
    {"torch_hierarchical_local_sgd": {"groups": {2: 2, 4: 6}}},
    {"torch_post_local_sgd": {"start": 10, "period": 4}},
    {"gossip": {"every": 2}},
    {"gossip": {"peers": "pair"}},
    {"fedavg": {"local_epochs": 2}},
    "fedprox",
]


@pytest.mark.parametrize("strategy", FAMILY, ids=str)
def test_messages_are_whole_vectors(trained, strategy):
    outcome, weights, _ = trained(strategy)
    name, options = (
        (strategy, {}) if isinstance(strategy, str) else next(iter(strategy.items()))
    )
    messages = 2 if options.get("peers", "ring") == "ring" else 1
    assert len(outcome.workers) == WORKERS
    for report in outcome.workers:
        assert report.syncs > 0
        mixings = report.syncs - 1 if name == "gossip" else 0
        vectors = report.syncs + (messages - 1) * mixings
        assert report.bytes_sent == vectors * weights["final"].numel() * 8


@pytest.mark.parametrize(
    "optimizer", ["sgd", {"sgd": {"momentum": 0.9, "nesterov": True}}], ids=str
)
def test_local_sgd_of_one_step_is_allreduce_where_batches_are_equal(play, optimizer):
    options = {"epochs": 3, "optimizer": optimizer}
    for strategy in (
        {"local_sgd": {"steps": 1}},
        {"slowmo": {"steps": 1, "slow_momentum": 0.0}},
    ):
        for workers, equal in (
            (4, True),
            (5, False),
        ):  # 96 samples: shards of 24, or of 19 and 20
            _, reduced = play("allreduce", workers, **options)
            _, averaged = play(strategy, workers, **options)
            apart = float((averaged["final"] - reduced["final"]).abs().max())
            assert apart < 1e-12 if equal else apart > 1e-5


def test_local_sgd_of_one_step_of_adam_is_never_allreduce(play):
    options = {"epochs": 3, "optimizer": "adam", "lr": 1e-3}
    (_, reduced), (_, averaged) = (
        play(each, 4, **options) for each in ("allreduce", {"local_sgd": {"steps": 1}})
    )
    assert float((averaged["final"] - reduced["final"]).abs().max()) > 1e-5


@pytest.mark.parametrize("strategy", FAMILY, ids=str)
def test_evaluation_never_changes_training(play, strategy):
    options = {"epochs": 4, "batch_per_worker": 4}
    _, often = play(strategy, 4, evaluate_every=1, **options)
    _, never = play(strategy, 4, evaluate_every=0, **options)
    assert torch.equal(often["final"], never["final"])


@given(size=st.integers(2, 40), seed=st.integers(0, 1000))
def test_gossip_pairs_are_disjoint_and_reach_every_worker(size, seed):
    import random

    from scalebench.strategies.gossip import partner_of

    partners = [partner_of(rank, size, random.Random(seed)) for rank in range(size)]
    assert [partners[partner] for partner in partners] == list(range(size))
    assert sum(partner == rank for rank, partner in enumerate(partners)) == size % 2
    draw = random.Random(seed)
    seen = {partner_of(0, size, draw) for _ in range(40 * size)}
    assert seen | {0} == set(range(size))


def test_batchnorm_statistics_are_averaged_unless_switched_off(play, tmp_path):
    source = tmp_path / "net.py"
    source.write_text(
        "from torch import nn\n"
        "def build(input_shape, outputs):\n"
        "    return nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, outputs))\n"
    )
    outcome, _ = play({"local_sgd": {"steps": 4}}, 2, model=f"{source}:build")
    kept, _ = play(
        {"local_sgd": {"steps": 4, "buffers": "keep"}}, 2, model=f"{source}:build"
    )
    more = outcome.workers[0].bytes_sent - kept.workers[0].bytes_sent
    # a running mean and variance of 4 features, float32 carried as float64
    assert more == outcome.workers[0].syncs * 8 * 8
    assert outcome.workers[0].syncs == kept.workers[0].syncs


def test_policies_are_in_the_records():
    strategy = registry.create(
        "local_sgd", {"optimizer_state": "average", "weighting": "samples"}
    )
    averaged = "parameters+buffers+optimizer"
    assert strategy.synchronisation == Synchronisation(
        8, "batch", averaged, "average", "mean by samples"
    )
    federated = registry.create("fedavg", {"local_epochs": 3}).synchronisation
    assert (federated.every, federated.unit, federated.optimizer_state) == (
        3,
        "epoch",
        "reset",
    )


@pytest.mark.parametrize(
    ("name", "options", "workers", "message"),
    [
        (
            "gossip",
            {},
            1,
            "gossip at 1 worker: there is nobody to mix with; start at 2",
        ),
        (
            "fedavg",
            {"fraction": 0.1},
            4,
            "'fraction' 0.1 of 4 workers selects nobody; use 0.25 or more, or .* 10 workers",
        ),
        (
            "post_local_sgd",
            {"subgroup": 3},
            4,
            "option 'subgroup': groups of 3 do not divide 4 workers",
        ),
        (
            "hierarchical_local_sgd",
            {"groups": {3: 2, 8: 4}},
            4,
            "groups of 3 do not divide 4 workers",
        ),
        (
            "post_local_sgd",
            {"subgroup": 0},
            3,
            "option 'subgroup': groups of 2 do not divide 3 workers; use a divisor",
        ),
        (
            "torch_post_local_sgd",
            {"subgroup": 0},
            3,
            "^strategy torch_post_local_sgd: option 'subgroup': groups of 2",
        ),
        (
            "torch_hierarchical_local_sgd",
            {"groups": {3: 2, 8: 4}},
            4,
            "^strategy torch_hierarchical_.* groups of 3 do not",
        ),
        (
            "torch_hierarchical_local_sgd",
            {"groups": {2: 2}},
            4,
            "the largest group, 2, has to hold all 4 workers",
        ),
    ],
)
def test_impossible_setting_is_refused_in_one_line(name, options, workers, message):
    with pytest.raises(StudyError, match=message):
        registry.create(name, options).check(setting(workers))


@pytest.mark.parametrize("shuffle", ["rotate_blocks", "pairwise", "global"])
def test_data_of_clients_never_leave_them(shuffle):
    for name in ("fedavg", "fedprox"):
        with pytest.raises(
            StudyError,
            match=f"strategy {name}: shuffle {shuffle} moves rows between clients",
        ):
            registry.create(name, {}).check(setting(4, shuffle=shuffle))
        registry.create(name, {}).check(setting(4))


def test_doubtful_settings_are_warned_of():
    warnings = registry.create("hierarchical_local_sgd", {"groups": {2: 2}}).check(
        setting(4)
    )
    assert "no group holds all 4 workers" in warnings[0]
    assert "overshoots" in registry.create("easgd", {"alpha": 0.5}).check(setting(4))[0]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("local_sgd", {"steps": 0}, "option 'steps'.*greater than or equal to 1"),
        ("slowmo", {"slow_momentum": 1.0}, "option 'slow_momentum'.*less than 1"),
        (
            "hierarchical_local_sgd",
            {"groups": {2: 8, 4: 4}},
            "a larger group needs a longer period",
        ),
        (
            "hierarchical_local_sgd",
            {"groups": {0: 8}},
            "option 'groups.*greater than 0",
        ),
        (
            "easgd",
            {"alpha": 1.5},
            "option 'alpha': expected a number less than or equal to 1, got 1.5",
        ),
        ("fedavg", {"fraction": 0}, "option 'fraction'.*greater than 0"),
        ("fedprox", {"mu": -1}, "option 'mu'.*greater than or equal to 0"),
        ("gossip", {"peers": "star"}, "option 'peers'.*'ring' or 'pair'"),
        ("diloco", {"outer_lrr": 1}, "did you mean 'outer_lr'"),
    ],
)
def test_option_out_of_range_is_named(name, options, message):
    with pytest.raises(StudyError, match=message):
        registry.create(name, options)
