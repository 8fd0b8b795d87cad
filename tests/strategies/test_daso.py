"""DASO against final weights of heat 1.8.0 itself, and against a single-process transcription of its rule."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import given as for_all
from hypothesis import strategies as st

from scalebench.errors import StudyError
from scalebench.pricing.machine import Choice
from scalebench.strategies import registry
from scalebench.strategies.daso import Skips, calls_of
from scalebench.virtual import engine
from tests.conftest import setting
from tests.facts import in_order
from tests.strategies import daso_case


def simulate(run, replica_class, x, y, machine, monkeypatch):
    # gradients replica by replica
    monkeypatch.setattr(engine, "choose", lambda *_: Choice())
    monkeypatch.setattr(engine, "Replica", replica_class)
    replica_class.made.clear()
    outcome, weights = engine.simulate(run, daso_case.stand_in(x, y), machine)
    assert outcome.status == "completed", outcome.error
    return outcome, weights


@pytest.mark.parametrize("name", "abcde")
def test_schedule_and_final_weights_are_those_of_heat(
    name, machine, monkeypatch, tmp_path
):
    """float32, as the reference computed it; sums in another order differ by some 1e-7."""
    case = daso_case.reference(name)
    np.savez(tmp_path / "initial.npz", initial=case["initial"])
    replicas = daso_case.reference_class(case)
    run = daso_case.reference_run(case, tmp_path / "initial.npz")
    _, weights = simulate(run, replicas, case["x"], case["y"], machine, monkeypatch)
    np.testing.assert_array_equal(weights["initial"].numpy(), case["initial"])
    assert len(replicas.made) == 4
    for replica in replicas.made:
        assert [list(skips) for skips in replica.state.skips] == case[
            "schedule"
        ].tolist()
        np.testing.assert_allclose(
            weights["final"].numpy(), case["final"][replica.rank], atol=1e-6, rtol=0
        )
        daso_case.check_epoch_losses(replica.epoch_losses, case, replica.rank)
    assert np.abs(case["final"][0] - case["initial"]).max() > 0.1


class Transcription:
    """Section 3 of the algorithms, one process, all ranks in one array: `w[rank]`, rank = devices x node + device."""

    def __init__(self, x, y, initial, devices, options, *, fixed=None, losses=None):
        self.x, self.y, self.G, self.options, self.fixed, self.given = (
            x,
            y,
            devices,
            options,
            fixed,
            losses,
        )
        self.epochs, self.batches, self.K = x.shape[:3]
        self.P = self.K // devices
        self.w = np.repeat(initial[None], self.K, 0)
        self.momentum = np.zeros_like(self.w)
        self.counted = np.zeros((self.K, 2), int)  # collectives and bytes sent, by rank
        self.schedule = []

    def gradient(self, rank, x, y):
        d_in, d_out = x.shape[1], y.shape[1]
        matrix, bias = (
            self.w[rank, : d_in * d_out].reshape(d_out, d_in),
            self.w[rank, d_in * d_out :],
        )
        error = x @ matrix.T + bias - y
        slope = 2 * error / error.size
        return np.concatenate([(slope.T @ x).ravel(), slope.sum(0)]), (error**2).mean()

    def count(self, ranks, nbytes=None, root=None):
        for rank in ranks:
            sends = root in (None, rank)
            self.counted[rank] += (
                1,
                sends * (self.w[0].nbytes if nbytes is None else nbytes),
            )

    def members(self, group):
        return [self.G * node + group for node in range(self.P)]

    def share(self, group):
        if self.G == 1:
            return
        for node in range(self.P):
            ranks = range(self.G * node, self.G * (node + 1))
            self.w[list(ranks)] = self.w[self.G * node + group]
            self.count(ranks, root=self.G * node + group)

    def receive(self):
        if self.previous is None:
            return
        if self.flying is not None:
            total, sent_with, group = self.flying
            own = 2 * sent_with if sent_with else 1
            for rank in self.members(group):
                self.w[rank] = (own * self.w[rank] + total) / (own + self.P)
            self.flying = None
        self.share(self.previous)

    def total(self, group):
        ranks = self.members(group)
        if self.gs != 0:
            self.count(ranks)
            return self.w[ranks].sum(0)
        self.count(ranks, 2 * self.w.shape[1])
        halves = torch.from_numpy(self.w[ranks]).to(torch.bfloat16)
        return halves.double().sum(0).bfloat16().double().numpy()

    def run(self):
        options = self.options
        warm, cool = options["warm_up_epochs"], options["cool_down_epochs"]
        self.flying = self.previous = None
        group, local, loss, best, poor = 0, True, np.inf, np.inf, 0
        self.gs, self.ls, self.wait = (0, 0, 0)
        for epoch in range(self.epochs + 1):  # what e = `epoch` completed epochs say
            plateau = False
            if epoch >= self.epochs - cool:
                self.gs, self.ls, self.wait = 0, 0, 0
            elif epoch >= warm:
                if self.fixed:
                    self.gs, self.ls, self.wait = self.fixed
                else:
                    if epoch == warm:
                        self.gs, self.ls, self.wait = 4, 1, 1
                    if epoch > 0:
                        for rank in range(self.K):
                            self.count([rank], 8)
                        if loss < best * 0.95:
                            best, poor = loss, 0
                        else:
                            poor += 1
                        if poor == options["patience"] + 1:
                            plateau, poor = True, 0
                    if plateau and self.gs > 1:
                        self.gs, self.ls, self.wait = (
                            max(self.gs // 2, 1),
                            max(self.ls // 2, 1),
                            max(self.wait - 1, 1),
                        )
                    elif plateau and self.gs == 1:
                        top = options["max_global_skips"]
                        self.gs, self.ls, self.wait = top, top // 4, top // 4
            if epoch == self.epochs:
                return self.w
            self.schedule.append((self.gs, self.ls, self.wait))
            last = self.batches - 1
            for b in range(self.batches):
                found = [
                    self.gradient(k, self.x[epoch, b, k], self.y[epoch, b, k])
                    for k in range(self.K)
                ]
                slopes = np.array([slope for slope, _ in found])
                if local and self.G > 1:
                    slopes = (
                        slopes.reshape(self.P, self.G, -1).mean(1).repeat(self.G, 0)
                    )
                    self.count(range(self.K))
                losses = (
                    [value for _, value in found]
                    if self.given is None
                    else self.given[epoch]
                )
                loss = np.mean(losses)
                self.momentum = 0.9 * self.momentum + slopes
                self.w = self.w - 0.05 * self.momentum
                S = min(self.wait, last - b)
                if b == last or self.gs == 0 or b % self.gs == 0:
                    total = self.total(group)
                    if self.wait > 0:
                        self.receive()
                    if b == last or self.wait == 0:
                        self.w[self.members(group)] = total / self.P
                        self.share(group)
                        self.previous = None
                        group = 0 if b == last else (group + 1) % self.G
                    else:
                        self.flying, self.previous = (total, S, group), group
                        group = (group + 1) % self.G
                elif (b + 1) % self.gs == 0:
                    local = True
                elif b % self.gs < S:
                    local = local or b + 1 == last
                else:
                    if b % self.gs == S:
                        self.receive()
                        if self.ls > 1:
                            local = False
                    if self.ls > 1:
                        local = (b + 1) % self.ls == 0 or b + 1 == last
        return None


HELD = [
    HealthCheck.function_scoped_fixture,
    HealthCheck.too_slow,
]  # fixtures that no example changes
SHAPES = st.tuples(
    st.integers(1, 40),
    st.integers(1, 20),
    st.sampled_from([(2, 1), (2, 2), (2, 3), (3, 2)]),
    st.integers(0, 2**32 - 1),
)


def compare(name, shape, options, fixed, flat, machine, monkeypatch):
    epochs, batches, (nodes, devices), seed = shape
    random = np.random.default_rng(seed)
    x = random.standard_normal((epochs, batches, nodes * devices, 3, 2))
    y = x @ random.standard_normal((2, 2)) + 0.3 * random.standard_normal(
        (*x.shape[:-1], 2)
    )
    losses = np.ones((epochs, nodes * devices)) if flat else None
    replicas = daso_case.given(x, y, losses)
    run = daso_case.daso_run({name: {"devices_per_node": devices, **options}}, x, y)
    outcome, weights = simulate(run, replicas, x, y, machine, monkeypatch)
    rule = Transcription(
        x, y, weights["initial"].numpy(), devices, options, fixed=fixed, losses=losses
    )
    expected = rule.run()
    for replica in replicas.made:
        assert [tuple(skips) for skips in replica.state.skips] == rule.schedule
        np.testing.assert_allclose(
            replica.parameters.numpy(), expected[replica.rank], atol=1e-6, rtol=0
        )
    for report in outcome.workers:
        assert [report.syncs, report.bytes_sent] == rule.counted[report.rank].tolist()
        assert sum(epoch.syncs for epoch in report.epochs) == report.syncs


@settings(max_examples=12, deadline=None, suppress_health_check=HELD)
@for_all(
    shape=SHAPES,
    warm_up=st.integers(0, 6),
    cool_down=st.integers(0, 4),
    top=st.sampled_from([1, 2, 3, 4, 8, 13, 16]),
    patience=st.integers(0, 2),
    flat=st.booleans(),
)
def test_weights_schedule_and_counts_are_those_of_the_transcription(
    shape, warm_up, cool_down, top, patience, flat, machine, monkeypatch
):
    options = {
        "warm_up_epochs": warm_up, "cool_down_epochs": cool_down, "max_global_skips": top, "patience": patience,
    }  # fmt: skip
    compare("daso-heat", shape, options, None, flat, machine, monkeypatch)


@settings(max_examples=15, deadline=None, suppress_health_check=HELD)
@for_all(
    shape=SHAPES,
    skips=st.tuples(st.integers(1, 9), st.integers(1, 4), st.integers(0, 5)),
    warm_up=st.integers(0, 3),
)
def test_constant_skips_are_those_of_the_transcription(
    shape, skips, warm_up, machine, monkeypatch
):
    shape = (min(shape[0], 8), *shape[1:])
    options = {"warm_up_epochs": warm_up, "cool_down_epochs": 1}
    named = dict(zip(("global_skip", "local_skip", "wait"), skips, strict=True))
    compare(
        "daso-fixed", shape, {**options, **named}, skips, False, machine, monkeypatch
    )


def test_counted_sums_are_those_of_the_schedule(play):
    """Of 12 batches 0, 4, 8 and the last one send; every worker of one-device nodes takes part in each."""
    strategy = {"daso-fixed": {"devices_per_node": 1}}
    outcome, _ = play(strategy, 4, epochs=3, batch_per_worker=2)
    syncs = [[epoch.syncs for epoch in report.epochs] for report in outcome.workers]
    assert syncs == [[4] * 3] * 4


def test_pending_sum_costs_less_than_a_blocking_one(play):
    blocking, _ = play(
        {"daso-fixed": {"devices_per_node": 1, "global_skip": 2, "wait": 0}},
        4,
        batch_per_worker=2,
    )
    flying, _ = play(
        {"daso-fixed": {"devices_per_node": 1, "global_skip": 2, "wait": 1}},
        4,
        batch_per_worker=2,
    )
    slow, fast = (
        sum(report.comm_s for report in outcome.workers)
        for outcome in (blocking, flying)
    )
    assert fast < 0.5 * slow


@pytest.mark.parametrize("name", ["daso-heat", "daso-fixed"])
def test_impossible_setting_is_refused_in_one_line(name):
    strategy = registry.create(name, {})
    for workers, per_node, message in [
        (
            1,
            4,
            "do not fill 2 or more whole nodes of 4 devices; use a multiple of 4, from 8 workers on",
        ),
        (4, 4, "from 8 workers on, or another devices_per_node"),
        (6, 4, "do not fill 2 or more whole nodes of 4 devices"),
    ]:
        with pytest.raises(StudyError, match=message) as caught:
            strategy.check(setting(workers, per_node, epochs=9))
        assert "\n" not in str(caught.value)
    with pytest.raises(StudyError, match="whole nodes of 8 devices"):
        registry.create(name, {"devices_per_node": 8}).check(setting(8, 4, epochs=9))
    with pytest.raises(
        StudyError,
        match=r"devices_per_node 4 asks for more groups .* set it to at most 1,",
    ):
        registry.create(name, {"devices_per_node": 4}).check(setting(8, 1, epochs=9))
    assert strategy.check(setting(8, 4, epochs=9)) == []
    assert (
        registry.create(name, {"devices_per_node": 1}).check(setting(2, 4, epochs=9))
        == []
    )


def test_training_without_a_cycle_is_warned_of():
    strategy = registry.create("daso-heat", {})
    (warning,) = strategy.check(setting(8, 4, epochs=8))
    assert in_order(warning, "never cycles", "8", "4 of warm-up", "4 of cool-down")
    assert strategy.check(setting(8, 4, epochs=9)) == []
    fixed = registry.create("daso-fixed", {"warm_up_epochs": 2, "cool_down_epochs": 1})
    (warning,) = fixed.check(setting(8, 4, epochs=3))
    assert in_order(warning, "never cycles", "3", "2 of warm-up", "1 of cool-down")
    assert (
        fixed.check(setting(8, 4, epochs=4))
        == registry.create("daso-fixed", {}).check(setting(8, 4, epochs=1))
        == []
    )


def test_wait_beyond_the_next_sum_is_warned_of():
    """After the first of 9 batches a sum is sent; the next one, 2 batches later, is what merges it."""
    late = registry.create("daso-fixed", {"global_skip": 2, "wait": 7})
    (warning,) = late.check(setting(8, 4, epochs=4))
    assert in_order(warning, "wait 7", "global_skip 2", "merged", "after 2 batches")
    calls = [calls_of(batch, 8, Skips(2, 1, 7)) for batch in range(3)]
    assert [each.merge for each in calls[1:]] == [False, True]
    assert (calls[0].wait, calls[2].send) == (7, True)
    assert (
        registry.create("daso-fixed", {"global_skip": 2, "wait": 2}).check(
            setting(8, 4, epochs=4)
        )
        == []
    )
    blocking = registry.create(
        "daso-fixed", {"global_skip": 2, "wait": 7, "warm_up_epochs": 4}
    )
    # and no sum is ever in flight
    assert "never cycles" in blocking.check(setting(8, 4, epochs=4))[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"max_global_skips": 0},
            "option 'max_global_skips'.*greater than or equal to 1",
        ),
        ({"stability": 1.0}, "option 'stability'.*less than 1"),
        ({"warmup_epochs": 3}, "option 'warmup_epochs'.*did you mean 'warm_up_epochs'"),
    ],
)
def test_option_out_of_range_is_named(options, message):
    with pytest.raises(StudyError, match=message):
        registry.create("daso-heat", options)
