"""Axes of a what-if: units, ranges and titles of each quantity."""

from __future__ import annotations

import pytest

from scalebench.errors import UsageError
from scalebench.pricing.axes import QUANTITIES, Axis


@pytest.mark.parametrize(
    ("text", "title", "last"),
    [
        ("batch=8..32:3", "batch (samples)", "32"),
        ("flops=0.5,2", "flops (times the platform's)", "2.00 x"),
        ("memory-bandwidth=1,2", "memory bandwidth (times the platform's)", "2.00 x"),
        ("network-bandwidth=10,25", "network bandwidth (Gbit/s)", "25.0 Gbit/s"),
        ("link-bandwidth=10,25", "network bandwidth (Gbit/s)", "25.0 Gbit/s"),
        ("node-bandwidth=1x,2x", "node bandwidth (times the platform's)", "2.00 x"),
        ("workers=1..1024:11", "workers", "1,024"),
        ("latency=0.1,1", "latency (times the platform's)", "1.00 x"),
        ("jitter=0..0.1:2", "jitter (share of a step)", "0.100"),
        ("interval=1,8", "interval (steps or epochs)", "8"),
        ("pipeline=1,2", "pipeline", "2"),
        ("tensor=1,2", "tensor", "2"),
        ("micro_batches=4,8", "micro_batches", "8"),
    ],
)
def test_values_are_written_with_their_unit(text, title, last):
    axis = Axis.parse(text)
    assert axis.title == title
    assert axis.text(axis.values[-1]) == last


def test_every_quantity_is_parsed():
    for name, quantity in QUANTITIES.items():
        assert Axis.parse(f"{name}=1,2").quantity is quantity


def test_ranges_are_logarithmic_but_from_zero():
    assert Axis.parse("latency=1..4:3").values == pytest.approx((1, 2, 4))
    assert Axis.parse("jitter=0..0.4:3").values == pytest.approx((0, 0.2, 0.4))
    with pytest.raises(UsageError, match="a range that rises from above 0"):
        Axis.parse("latency=0..4:3")


@pytest.mark.parametrize("name", ["batch", "workers", "jitter", "interval", "tensor"])
def test_only_what_a_platform_has_takes_factors(name):
    with pytest.raises(UsageError, match="takes no factors"):
        Axis.parse(f"{name}=1x,2x")
