"""Waiting times against theory: a slow worker under each family of rules, and random steps."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import integrate, stats

from scalebench.cluster.engine_costs import EngineCosts

FACTOR = 3.0
STEP = 1e-3
PUSHED = 0.95e-3  # of it, before a push: the update is the server's
STEPS = 12  # of each worker: 96 samples over 4 workers, batches of 8, 4 epochs
QUIET = {"jitter": "none", "ties": "rank"}
SLOW = {"virtual": {**QUIET, "slowdown": {1: FACTOR}}, "epochs": 4}


@pytest.fixture
def free(machine):
    """The test machine with a nearly free network, so that communication is waiting."""
    links = machine.cluster.links
    at_once = {"latency_s": 1e-12, "bandwidth_bytes_per_s": 1e18}
    ends = {
        "intra": links.intra.model_copy(update=at_once),
        "inter": links.inter.model_copy(update=at_once),
    }
    links = links.model_copy(update=ends)
    cluster = machine.cluster.model_copy(update={"links": links})
    return type(machine)(cluster, EngineCosts(), machine.tables)


@pytest.mark.parametrize(
    ("strategy", "step"),
    [
        ("allreduce", STEP),
        ({"gossip": {"peers": "ring"}}, STEP),
        ("bsp", PUSHED),
        ({"ssp": {"staleness": 0}}, PUSHED),
    ],
)
def test_lockstep_waits_for_the_slow_worker_at_every_step(play, free, strategy, step):
    """(3 - 1) x 12 steps. On a ring of four, worker 3 is held up by its neighbours a step later."""
    outcome, _ = play(strategy, 4, machine=free, **SLOW)
    waited = [worker.wait_s for worker in outcome.workers]
    assert waited[1] == pytest.approx(0, abs=1e-6)
    for rank in (0, 2, 3):
        assert waited[rank] == pytest.approx((FACTOR - 1) * STEPS * step, rel=0.01)


def test_epoch_averaging_waits_as_long_at_fewer_barriers(play, free):
    outcome, _ = play("epoch_average", 4, machine=free, **SLOW)
    assert outcome.workers[0].wait_s == pytest.approx(
        (FACTOR - 1) * STEPS * STEP, rel=0.01
    )
    assert outcome.workers[0].syncs == 4


@pytest.mark.parametrize("strategy", ["asp", "epoch_async", "ad_psgd"])
def test_asynchronous_strategies_wait_only_at_the_end(play, free, strategy):
    outcome, _ = play(strategy, 4, machine=free, **SLOW)
    assert len(outcome.workers) == 4
    for worker in outcome.workers:
        # its mean ends the last epoch
        epochs = worker.epochs[:-1] if strategy == "ad_psgd" else worker.epochs
        assert epochs
        # for one another's updates
        assert sum(epoch.wait_s for epoch in epochs) == pytest.approx(0, abs=0.5 * STEP)


@pytest.mark.parametrize("staleness", [1, 2, 5])
def test_bounded_staleness_shortens_the_wait_by_its_bound(play, free, staleness):
    """Its last push waits until the slow one has made its push number 12 - s: s slow steps less than under bsp."""
    outcome, _ = play({"ssp": {"staleness": staleness}}, 4, machine=free, **SLOW)
    in_epochs = sum(epoch.wait_s for epoch in outcome.workers[0].epochs)
    spared, lockstep = FACTOR * staleness * PUSHED, (FACTOR - 1) * STEPS * PUSHED
    # the server's updates take 0.05 ms
    assert in_epochs == pytest.approx(lockstep - spared, abs=staleness * 6e-5)
    # with the barrier at the end
    assert outcome.workers[0].wait_s == pytest.approx(lockstep, rel=0.01)


def test_gossip_partners_wait_for_each_other_only(play, free):
    """A worker without direct or indirect exchange with the slow one does not wait."""
    outcome, _ = play(
        {"gossip": {"peers": "pair"}}, 4, machine=free, **{**SLOW, "epochs": 1}
    )
    waited = sorted(worker.wait_s for worker in outcome.workers)
    assert waited[0] == pytest.approx(0, abs=1e-6)
    assert waited[-1] <= (FACTOR - 1) * 3 * STEP * 1.01


def test_message_transfer_is_not_waiting(play, machine):
    """Two equal workers arrive at the same moment, so their exchange has no waiting."""
    links = machine.cluster.links
    slow = links.model_copy(
        update={"intra": links.intra.model_copy(update={"latency_s": 5e-3})}
    )
    place = type(machine)(
        machine.cluster.model_copy(update={"links": slow}),
        EngineCosts(),
        machine.tables,
    )
    outcome, _ = play("gossip", 2, machine=place, virtual=QUIET, epochs=1)
    steps = outcome.facts.steps_per_epoch
    for worker in outcome.workers:
        assert worker.comm_s > steps * 5e-3
    assert sum(worker.wait_s for worker in outcome.workers) < 0.6 * sum(
        worker.comm_s for worker in outcome.workers
    )


# --- random steps ---------------------------------------------------------------------------------------------------

LAWS = {
    "exponential": stats.expon(),
    "lognormal": stats.lognorm(np.sqrt(np.log(1.25)), scale=1 / np.sqrt(1.25)),
    "normal": stats.truncnorm(-3, 3, 1, 0.3 / stats.truncnorm(-3, 3).std()),
}
SIGMA = {"exponential": 1.0, "lognormal": 0.5, "normal": 0.3}
WORKERS, EPOCHS = 8, 120


def moments_of_largest(law, draws):
    """Return mean and variance of the largest of K draws of a law, by integrals of 1 - F^K."""

    def above(power):
        """Return the integral of `power` times P(largest > x) over positive x."""
        return integrate.quad(
            lambda x: power(x) * (1 - law.cdf(x) ** draws), 0, np.inf
        )[0]

    mean = (
        above(lambda x: 1.0)
        - integrate.quad(lambda x: law.cdf(x) ** draws, -np.inf, 0)[0]
    )
    return mean, above(lambda x: 2 * x) - mean**2


def test_largest_of_exponentials_is_the_harmonic_number():
    assert moments_of_largest(LAWS["exponential"], 8)[0] == pytest.approx(
        sum(1 / k for k in range(1, 9))
    )


@pytest.mark.parametrize("kind", LAWS)
def test_barrier_each_step_costs_the_largest_draw(play, free, kind):
    """E[step] = E[max of K], for exponential steps H_K times the mean; waited is that less one, on the mean."""
    jitter = {"jitter": kind, "jitter_sigma": SIGMA[kind]}
    outcome, _ = play(
        "allreduce",
        WORKERS,
        machine=free,
        virtual=jitter,
        epochs=EPOCHS,
        evaluate_every=0,
    )
    steps = EPOCHS * outcome.facts.steps_per_epoch
    mean, variance = moments_of_largest(LAWS[kind], WORKERS)
    found = outcome.workers[0].train_s / (steps * STEP)
    # four standard errors, seeded
    assert found == pytest.approx(mean, abs=4 * np.sqrt(variance / steps))
    assert mean > 1.2
    waited = np.mean([worker.wait_s for worker in outcome.workers]) / (steps * STEP)
    assert waited == pytest.approx(mean - 1, abs=4 * np.sqrt(variance / steps))


def test_barrier_each_epoch_costs_the_largest_sum_of_draws(play, free):
    """A sum of S exponentials is Gamma(S): rare barriers are cheaper although the steps are the same."""
    jitter = {"jitter": "exponential", "jitter_sigma": 1.0}
    outcome, _ = play(
        "epoch_average",
        WORKERS,
        machine=free,
        virtual=jitter,
        epochs=EPOCHS,
        evaluate_every=0,
    )
    steps = outcome.facts.steps_per_epoch
    mean, variance = moments_of_largest(stats.gamma(steps), WORKERS)
    assert outcome.workers[0].train_s / (EPOCHS * STEP) == pytest.approx(
        mean, abs=4 * np.sqrt(variance / EPOCHS)
    )
    assert mean < 0.85 * steps * moments_of_largest(LAWS["exponential"], WORKERS)[0]


def test_random_steps_without_barriers_cost_their_mean(play, free):
    jitter = {"jitter": "exponential", "jitter_sigma": 1.0}
    outcome, _ = play(
        "asp", WORKERS, machine=free, virtual=jitter, epochs=EPOCHS, evaluate_every=0
    )
    steps = EPOCHS * outcome.facts.steps_per_epoch
    for worker in outcome.workers:
        assert worker.compute_s + worker.data_s == pytest.approx(
            steps * STEP, abs=4 * STEP * np.sqrt(steps)
        )
    assert (
        np.mean([epoch.wait_s for worker in outcome.workers for epoch in worker.epochs])
        < 0.1 * STEP
    )
