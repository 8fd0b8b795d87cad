from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from scalebench.cluster.cluster_file import load_cluster
from scalebench.cluster.engine_costs import EngineCost, EngineCosts
from scalebench.cluster.network import Network
from scalebench.comm.base import Overlap
from scalebench.pricing.costs import Costs, GradientTensor
from scalebench.pricing.overlap import Stream

MIB = 1 << 20
RANKS = (0, 1)
DDP = Overlap("gloo", bucket_bytes=25 * MIB, first_bucket_bytes=MIB)
HOROVOD = Overlap(
    "horovod", bucket_bytes=128 * MIB, first_bucket_bytes=128 * MIB, cycle_s=1e-3
)


def costs(*gradients: tuple[int, float], **of_engine: float) -> Costs:
    entries = [
        EngineCost(
            engine=name,
            ranks=2,
            alpha_s=0.0,
            points=[(0, 0.0), (MIB, 1e-3)],
            source="test",
            **of_engine,
        )
        for name in ("gloo", "horovod")
    ]
    one_node = Network(load_cluster("ethernet-10g"), 2)
    return Costs(
        one_node,
        EngineCosts(entries=entries),
        "mpi",
        [GradientTensor(*each) for each in gradients],
    )


def passes(pairs):
    """Begin and seconds of each worker's backward pass."""
    return np.array(pairs).T


def test_ddp_reduces_ready_buckets_during_backward():
    # The last layer (1 MiB, 1 ms) is there after half of the 4 ms; the first layer at
    # the end.
    prices = costs((MIB, 1.0), (MIB, 0.5))
    end = Stream().end(passes([(10.0, 4e-3), (10.0, 4e-3)]), DDP, prices, RANKS)
    assert end == pytest.approx(10.0 + 4e-3 + 1e-3)


def test_ddp_fuses_small_tensors_into_one_bucket():
    prices = costs((1000, 1.0), (1000, 0.5), (1000, 0.2))
    end = Stream().end(passes([(0.0, 1e-3)] * 2), DDP, prices, RANKS)
    assert end == pytest.approx(1e-3 + 3000 / MIB * 1e-3)


def test_ddp_with_a_long_stream_is_bound_by_the_stream():
    prices = costs(*[(MIB, share) for share in (1.0, 0.75, 0.5, 0.25)])
    # 4 ms of reducing begin after a quarter of a pass of 0.4 ms; the first bucket alone
    # is 1 MiB.
    end = Stream().end(passes([(0.0, 4e-4)] * 2), DDP, prices, RANKS)
    assert end == pytest.approx(1e-4 + 4e-3)


def test_bucket_waits_for_the_slowest_worker():
    prices = costs((MIB, 1.0))
    assert Stream().end(
        passes([(0.0, 1e-3), (5e-3, 1e-3)]), DDP, prices, RANKS
    ) == pytest.approx(6e-3 + 1e-3)


def test_horovod_fuses_ready_tensors_at_its_cycle():
    prices = costs((MIB, 1.0), (MIB, 0.5))
    stream = Stream()
    # Ready at 0.1 and 0.2 ms; the first worker's turn is 0.62 ms ahead of the last
    # one's at 1 ms: one sum of 2 MiB.
    end = stream.end(passes([(0.0, 2e-4)] * 2), HOROVOD, prices, RANKS)
    assert end == pytest.approx(1e-3 + 2e-3, rel=1e-4)  # and the negotiation
    assert (stream.next_cycle, stream.turn_s) == pytest.approx((3e-3, 2e-3), rel=1e-4)


def test_horovod_does_not_fuse_above_the_threshold():
    prices = costs((MIB, 1.0), (MIB, 0.5), negotiation_s=1e-4)
    small = Overlap("horovod", MIB, MIB, 1e-3)
    assert Stream().end(
        passes([(0.0, 2e-4)] * 2), small, prices, RANKS
    ) == pytest.approx(1e-3 + 1e-4 + 2e-3, rel=1e-4)


def horovod_step_s(
    workers: int, compute_s: float, turn_s: float, steps: int = 800
) -> float:
    """Mean step of `workers` that compute for equally long."""
    prices = costs(
        (100, 1.0), negotiation_s=turn_s, cycle_s=1.05e-3, cycle_spread_s=2e-5
    )
    stream, now = Stream(), 0.0
    for _ in range(steps):
        now = stream.end(
            passes([(now, compute_s)] * 2), HOROVOD, prices, range(workers)
        )
    return now / steps


def loops_step_s(
    workers: int, compute_s: float, turn_s: float, steps: int = 3000
) -> float:
    """The same by the loops of all workers, each with a timer that overshoots by 0.05 +- 0.02 ms."""
    draw = np.random.default_rng(0)
    starts, end, ends = draw.uniform(0, 1e-3, workers), 0.0, []
    while len(ends) < steps:
        reduces = end + compute_s <= starts.min() if ends else True
        turn_end = starts.max() + (turn_s if reduces else 1e-5)
        if reduces:
            end = turn_end
            ends.append(end)
        wakes = starts + 1e-3 + draw.normal(5e-5, 2e-5, workers)
        starts = np.maximum(wakes, turn_end)
    return (ends[-1] - ends[0]) / (steps - 1)


@pytest.mark.parametrize("compute_s", [3e-4, 8e-4, 1.3e-3, 1.6e-3])
def test_horovod_step_is_that_of_loops_with_timers_of_their_own(compute_s):
    """16 workers; a turn of 0.15 ms. 3 %: as the simulated phases are correlated from step to step."""
    assert horovod_step_s(16, compute_s, 1.5e-4) == pytest.approx(
        loops_step_s(16, compute_s, 1.5e-4), rel=0.03
    )


@pytest.mark.parametrize(
    "turn_s", [1.5e-4, 1.5e-3], ids=["short turn", "turn longer than a cycle"]
)
def test_horovod_step_is_a_continuous_function_of_compute(turn_s):
    """1 % more compute is at most 5 % more time, where a timer without phases takes one cycle or two."""
    steps = [horovod_step_s(2, 1e-3 * 1.01**power, turn_s) for power in range(-8, 9)]
    assert all(
        a * 0.999 <= b <= (1.05 if turn_s < 1e-3 else 1.1) * a
        for a, b in pairwise(steps)
    )
    assert steps[-1] > steps[0]


@pytest.mark.parametrize("overlap", [DDP, HOROVOD], ids=["ddp", "horovod"])
def test_more_bytes_never_end_earlier(overlap):
    ends = [
        Stream().end(
            passes([(0.0, 1e-3)] * 2),
            overlap,
            costs((nbytes, 1.0), (nbytes, 0.4)),
            RANKS,
        )
        for nbytes in (10, 10_000, MIB, 30 * MIB, 200 * MIB)
    ]
    assert ends == sorted(ends)
    assert ends[0] >= 1e-3


def test_half_precision_halves_the_transfer_time():
    whole = (
        Stream().end(passes([(0.0, 1e-3)] * 2), DDP, costs((4 * MIB, 1.0)), RANKS)
        - 1e-3
    )
    half = Overlap("gloo", 25 * MIB, MIB, wire="float16")
    assert Stream().end(
        passes([(0.0, 1e-3)] * 2), half, costs((4 * MIB, 1.0)), RANKS
    ) - 1e-3 == pytest.approx(whole / 2)
