"""Seconds of an allreduce by the tuning model with which NCCL chooses its algorithm and protocol.

ring: base + 2(p-m) intra + 2(m-1) inter + 2 (p-1)/p n/(f B)
tree: base + 2(p/m-1) intra + 2 floor(lg m) inter + 2 n/(0.92 f B)

with m nodes, B the bandwidth of all channels, f the protocol's share of it, and latencies of a hop by kind of link.
Constants are those of NCCL's src/graph/tuning.cc. B is min(link inside a node, all cards of a node). Where the latency
stated for the cluster's link is longer than a hop of LL's ring, the excess is added to every hop. LL128 is chosen on
NVLink only, as in NCCL.
"""

from __future__ import annotations

from typing import NamedTuple

from scalebench.cluster.collectives import Levels, ranks_of

NVLINK_FROM = 64e9  # bytes/s; assumption: PCIe 5.0 x16 has 63e9, the NVLinks of a P100 have 80e9
_TREE_SHARE = 0.92


class _Latency(NamedTuple):
    """Seconds of the start, and of a hop over NVLink, PCIe and the network."""

    start: float
    hops: tuple[float, float, float]


class _Protocol(NamedTuple):
    """Share of the bandwidth, and latencies of ring and tree."""

    share: float
    ring: _Latency
    tree: _Latency


_PROTOCOLS = {
    "LL": _Protocol(0.5, _Latency(6.6e-6, (0.6e-6, 1.0e-6, 2.7e-6)), _Latency(6.8e-6, (0.6e-6, 1.0e-6, 5.0e-6))),
    "LL128": _Protocol(0.92, _Latency(14.0e-6, (1.9e-6, 2.5e-6, 4.0e-6)), _Latency(14.0e-6, (1.25e-6, 1.9e-6, 8.5e-6))),
    "Simple": _Protocol(1.0, _Latency(8.4e-6, (3.4e-6, 5.7e-6, 14.0e-6)), _Latency(0.0, (4.0e-6, 4.0e-6, 14.0e-6))),
}


def nccl(n: float, levels: Levels, gamma: float) -> float:
    """Return the least seconds among ring and tree with the protocols LL, LL128 and Simple; sums are included."""
    return min(_times(n, levels).values())


def nccl_choice(n: float, levels: Levels) -> tuple[str, str]:
    """Return the algorithm (ring or tree) and the protocol (LL, LL128 or Simple) that NCCL takes for n bytes."""
    times = _times(n, levels)
    return min(times, key=lambda choice: times[choice])


def _times(n: float, levels: Levels) -> dict[tuple[str, str], float]:
    inside = next((level for level in levels if not level.across), None)
    between = next((level for level in levels if level.across), None)
    p, g, m = ranks_of(levels), inside.ranks if inside else 1, between.ranks if between else 1
    bandwidth = min(level.shared * (g if level.across else 1) for level in levels)
    nvlink = inside is not None and inside.bandwidth >= NVLINK_FROM
    kind = 0 if nvlink else 1
    quickest = _PROTOCOLS["LL"].ring.hops
    slower_hop = max(0.0, inside.latency_s - quickest[kind]) if inside else 0.0
    slower_far = max(0.0, between.latency_s - quickest[2]) if between else 0.0
    times = {}
    for name, protocol in _PROTOCOLS.items():
        if name == "LL128" and not nvlink:
            continue
        rate = protocol.share * bandwidth
        hop, far = protocol.ring.hops[kind] + slower_hop, protocol.ring.hops[2] + slower_far
        latency = protocol.ring.start + 2 * (p - m) * hop + 2 * (m - 1) * far
        times["ring", name] = latency + 2 * (p - 1) / p * n / rate
        hop, far = protocol.tree.hops[kind] + slower_hop, protocol.tree.hops[2] + slower_far
        latency = protocol.tree.start + 2 * (g - 1) * hop + 2 * (m.bit_length() - 1) * far
        times["tree", name] = latency + 2 * n / (_TREE_SHARE * rate)
    return times
