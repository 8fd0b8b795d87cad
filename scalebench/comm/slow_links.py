"""Slow links, injected into real communication: each operation is lengthened by what the network model says they add.

The real network moves the bytes at its own pace; then its users stay for the difference between the model's price with
the slow links and without them, n/B_slow - n/B along the way that the operation takes. Collectives are lengthened on
every member alike, messages where they are received, accesses to a shared model while the lock is held, and requests at
the server, whose link they hold up. What Horovod and DDP hide behind the backward pass is lengthened after it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from scalebench.cluster.network import Network
from scalebench.cluster.spec import Cluster
from scalebench.study.heterogeneity import SlowLinks as Factors
from scalebench.system.clock import sleep_until


class SlowLinks:
    """What links of `cluster` that are `slow` add, in seconds; worker i sits on node i // workers_per_node."""

    def __init__(self, cluster: Cluster, slow: Factors) -> None:
        self._plain, self._slow = Network(cluster), Network(cluster.with_slow_links(slow))

    def adds(self, operation: str, nbytes: int, ranks: Sequence[int]) -> float:
        """To a collective (a method of `Network`, such as `allreduce` or `linear_reduce`) of `nbytes` among `ranks`."""
        before, after = (getattr(network, operation)(nbytes, ranks) for network in (self._plain, self._slow))
        return float(after - before)

    def adds_to_message(self, nbytes: int, src: int, dst: int) -> float:
        """To `nbytes` from one worker to another."""
        return self._slow.message(nbytes, src, dst) - self._plain.message(nbytes, src, dst)


def linger(seconds: float) -> None:
    """Stay for so long."""
    if seconds > 0:
        sleep_until(time.perf_counter() + seconds)
