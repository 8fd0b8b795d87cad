"""Fits of measured collectives find the links that made them, and say what they cannot know."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalebench.cluster.engine_costs import EngineCost, EngineCosts
from scalebench.cluster.link_fit import MOST_GROWTH, Transfer, fit_engine, fit_links
from scalebench.errors import ClusterError
from tests.facts import together

SIZES = [1 << k for k in range(8, 28, 2)]


def ring(
    p: int, m: int, n: float, a: float, bandwidth: float, growth: float = 0.0
) -> float:
    crowd = 1 + growth * math.log2(m / 2) if m > 2 else 1.0
    return (2 * (p - 1) * a + 2 * (p - 1) / p * n / bandwidth) * crowd


def measured(
    nodes: list[int], a: float = 20e-6, bandwidth: float = 1e9, growth: float = 0.0
) -> list[Transfer]:
    return [
        Transfer(m, m, n, ring(m, m, n, a, bandwidth, growth))
        for m in nodes
        for n in SIZES
    ]


@settings(max_examples=15, deadline=None)
@given(
    a=st.floats(1e-6, 1e-3), bandwidth=st.floats(1e8, 1e11), growth=st.floats(0.0, 0.6)
)
def test_fit_finds_the_links_that_made_the_rows(
    a: float, bandwidth: float, growth: float
) -> None:
    fit = fit_links(measured([2, 4, 8], a, bandwidth, growth))
    assert fit.pieces[-1].latency_s.value == pytest.approx(a, rel=1e-2)
    assert fit.pieces[-1].bandwidth.value == pytest.approx(bandwidth, rel=1e-2)
    assert fit.congestion.value == pytest.approx(growth, abs=1e-2)
    assert fit.r2 > 0.999
    assert not fit.notes
    expected = ring(64, 64, 10**6, a, bandwidth, growth)
    assert fit.seconds(64, 64, 10**6).value == pytest.approx(expected, rel=0.03)


def test_eager_and_rendezvous_are_two_pieces() -> None:
    rows = [
        Transfer(p, p, n, ring(p, p, n, *((5e-6, 1e8) if n <= 16384 else (80e-6, 2e9))))
        for p in (2, 4, 8)
        for n in SIZES
    ]
    fit = fit_links(rows)
    assert [piece.up_to for piece in fit.pieces] == [16384, math.inf]
    assert fit.pieces[0].bandwidth.value == pytest.approx(1e8, rel=0.02)
    assert fit.pieces[1].latency_s.value == pytest.approx(80e-6, rel=0.02)


def test_two_node_counts_widen_the_interval_and_say_why() -> None:
    few, enough = fit_links(measured([2, 4])), fit_links(measured([2, 4, 8]))
    assert few.congestion[:3] == (0.0, 0.0, MOST_GROWTH)
    assert together(few.notes[0], "3 node counts", "from 2", "got 2, 4")
    assert "not fitted" in few.as_congestion("osu_allreduce").source
    wide, narrow = (fit.seconds(64, 64, 10**7) for fit in (few, enough))
    assert math.log(wide.high / wide.low) > math.log(narrow.high / narrow.low)


def test_interval_widens_with_the_distance_and_contains_noisy_measurements() -> None:
    draw = np.random.default_rng(7)
    rows = [
        row._replace(seconds=row.seconds * math.exp(draw.normal(0, 0.05)))
        for row in measured([2, 3, 4, 8])
    ]
    fit = fit_links(rows)
    near, far = fit.seconds(8, 8, 10**6), fit.seconds(256, 256, 10**6)
    assert fit.distance(8, 8, 10**6) == 0.0
    # two doublings of ranks, two of nodes
    assert fit.distance(32, 32, 10**6) == pytest.approx(4.0)
    assert math.log(far.high / far.low) > 1.5 * math.log(near.high / near.low)
    truth = [
        (m, n, ring(m, m, n, 20e-6, 1e9) * math.exp(draw.normal(0, 0.05)))
        for m in (2, 4, 8)
        for n in SIZES
    ]
    held = [
        fit.seconds(m, m, n).low <= seconds <= fit.seconds(m, m, n).high
        for m, n, seconds in truth
    ]
    assert np.mean(held) >= 0.85  # 95 % intervals; 30 points


def test_links_inside_nodes_are_charged_besides_those_between_them() -> None:
    def seconds(p: int, m: int, n: float) -> float:
        g = p // m
        inside = 2 * (g - 1) * 2e-6 + 2 * (g - 1) / g * n / 1e10
        return inside + 2 * (m - 1) * 30e-6 + 2 * (m - 1) / m * n / g / 1e9

    inside = fit_links(
        [Transfer(g, 1, n, seconds(g, 1, n)) for g in (2, 4) for n in SIZES],
        "hierarchical",
    )
    rows = [
        Transfer(4 * m, m, n, seconds(4 * m, m, n)) for m in (2, 4, 8) for n in SIZES
    ]
    fit = fit_links(rows, "hierarchical", inside)
    assert fit.pieces[-1].bandwidth.value == pytest.approx(1e9, rel=0.02)
    assert fit.seconds(64, 16, 10**8).value == pytest.approx(
        seconds(64, 16, 10**8), rel=0.02
    )


@pytest.mark.parametrize(
    ("rows", "algorithm", "message"),
    [
        (measured([2])[:2], "ring", "at least 3"),
        ([*measured([2]), Transfer(4, 1, 100, 1e-3)], "ring", "inside a node first"),
        ([*measured([2]), Transfer(4, 2, 100, 0.0)], "ring", "seconds > 0"),
        (measured([2]), "nccl", "expected one of"),
    ],
)
def test_unusable_rows_are_refused(
    rows: list[Transfer], algorithm: str, message: str
) -> None:
    with pytest.raises(ClusterError, match=message):
        fit_links(rows, algorithm)


def test_one_number_of_ranks_is_taken_for_a_ring() -> None:
    """At two ranks all algorithms have the same form; beyond them a ring moves the fewest bytes."""
    points = [(n, ring(2, 2, n, 20e-6, 1e9)) for n in SIZES]
    entry = EngineCost(
        engine="gloo",
        ranks=2,
        nodes=2,
        alpha_s=points[0][1],
        points=points,
        source="test",
    )
    fit = fit_engine(EngineCosts(entries=[entry]), "gloo")
    assert fit is not None
    assert fit.algorithm == "ring"
    assert fit.seconds(16, 16, 10**8).value == pytest.approx(
        ring(16, 16, 10**8, 20e-6, 1e9), rel=0.02
    )
