"""Completion of gradient averages overlapped with the backward pass, by the rules of Horovod and DDP.

Both have one serial communication stream. A tensor is ready when the slowest worker has
computed it.

Horovod's loop turns on each worker by a timer of that worker: a cycle after its last
turn began, or when that ended if it took longer (RunLoopOnce, Horovod 0.28.1). Turns of
equal number meet in a negotiation, which begins when the last worker's turn does and
takes the tensors that were ready on every worker when its own turn began. Timers
overshoot by random amounts, so that the turns of p workers drift apart, to any moment
of the window that a turn leaves of a cycle. Relative to the last worker's turn, the
first of the other p - 1 is ahead by a share u^(1/(p - 1)) of the window, u uniform.
Successive steps have u evenly distributed (multiples of the golden ratio), so that
their mean is a continuous function of the time for which a step computes.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from scalebench.cluster.operation import Kind, Members, Operation
from scalebench.comm.base import Overlap
from scalebench.pricing.costs import Costs, GradientTensor, Prices

Floats = NDArray[np.float64]
# begin and seconds of each worker's backward pass, (workers,)
Passes = tuple[Floats, Floats]
NOMINAL_CYCLE_S = 1e-3  # cycle time at which the period of Horovod's loop was measured
# bytes of the negotiation: one bit for each tensor known to all workers
_READY_BITS = 16
_ROUNDING = 1e-9  # relative to the training time
_GOLDEN = (math.sqrt(5) - 1) / 2


def hidden_s(transfer_s: float, exposed_s: float, train_s: float) -> float:
    """Return what compute hides of communication that costs `transfer_s`, of which `exposed_s` is not hidden."""
    hidden = transfer_s - exposed_s
    # A difference of two sums: what is left by rounding hides nothing.
    return hidden if hidden > _ROUNDING * train_s else 0.0


class _Loop(NamedTuple):
    """Horovod's loop in a group: seconds of its parts, and release and bytes on the wire of tensors as they come."""

    period: float
    spread: float  # width of a uniform distribution
    negotiation: float
    per_step: float
    releases: Floats
    sizes: list[int]
    before: list[int]  # bytes of all tensors before each one, and of all
    seconds: dict[int, float]  # of the allreduces so far, by their bytes

    @classmethod
    def of(cls, overlap: Overlap, costs: Costs, ranks: Members) -> _Loop:
        measured = costs.cost_of(overlap.engine)
        overshoot = (
            # Timers overshoot by a time of their own, whatever cycle is asked for.
            max(0.0, measured.cycle_s - NOMINAL_CYCLE_S)
            if measured and measured.cycle_s
            else 0.0
        )
        software = measured.negotiation_s if measured else 0.0
        tensors = sorted(
            (tensor.release, _travelling(tensor.nbytes, overlap))
            for tensor in costs.gradients
        )
        sizes = [nbytes for _, nbytes in tensors]
        return cls(
            costs.cycle * (overlap.cycle_s + overshoot),
            # A uniform distribution of width w has the standard deviation w / sqrt(12).
            math.sqrt(12) * measured.cycle_spread_s if measured else 0.0,
            software
            + costs.time(
                Operation(Kind.ALLREDUCE, _READY_BITS, ranks, engine=overlap.engine)
            ),
            measured.per_step_s if measured else 0.0,
            np.array([release for release, _ in tensors]),
            sizes,
            list(accumulate(sizes, initial=0)),
            {},
        )


@dataclass
class Stream:
    """Communication stream of one group.

    `next_cycle` is the next turn of Horovod's loop on the last worker, `turn_s` the
    length of the last one with allreduces, `steps` the number of ends so far,
    `transferred_s` the cost of all allreduces so far.
    """

    next_cycle: float = 0.0
    turn_s: float = 0.0
    steps: int = 0
    transferred_s: float = 0.0
    _loop: _Loop | None = None

    def end(
        self, passes: Passes, overlap: Overlap, costs: Costs, ranks: Members
    ) -> float:
        """Return the moment at which every worker has the mean of all gradients."""
        if overlap.cycle_s > 0:
            return self._cycles(passes, overlap, costs, ranks)
        begins, seconds = passes
        ends, cost = buckets_end(
            (begins[None], seconds[None]), overlap, Prices([costs]), ranks
        )
        self.transferred_s += float(cost[0])
        return float(ends[0])

    def _cycles(
        self, passes: Passes, overlap: Overlap, costs: Costs, ranks: Members
    ) -> float:
        """Horovod: at each cycle, tensors that are ready on every worker are fused up to the threshold and reduced."""
        # Parameters and their order are the same in every step.
        loop = self._loop = self._loop or _Loop.of(overlap, costs, ranks)
        share = self._next_share(len(ranks))
        ready, first, moment = _all_ready(passes, loop.releases), 0, self.next_cycle
        while first < len(ready):
            # A long turn leaves less of the cycle in which timers can drift apart.
            ahead = share * max(loop.period - self.turn_s, loop.spread)
            # No tensor is ready yet: empty turns pass until one is.
            if (late := ready[first] + ahead - moment) > 0:
                moment += loop.period * math.ceil(late / loop.period)
            taken = bisect_right(ready, moment, first, key=ahead.__add__)
            finished = moment + loop.negotiation
            together = loop.before[taken] - loop.before[first]
            # Most turns fuse all that is ready into one buffer: a difference of running
            # sums says so without a loop.
            fits = together <= overlap.bucket_bytes
            for nbytes in (
                (together,)
                if fits
                else _fused(loop.sizes[first:taken], overlap.bucket_bytes)
            ):
                if nbytes not in loop.seconds:
                    loop.seconds[nbytes] = costs.time(
                        Operation(Kind.ALLREDUCE, nbytes, ranks, engine=overlap.engine)
                    )
                finished += loop.seconds[nbytes]
                self.transferred_s += loop.seconds[nbytes]
            self.turn_s = finished - moment
            # A turn that took longer than a cycle is followed by the next one at once.
            first, moment = taken, max(moment + loop.period, finished)
        self.next_cycle = moment
        # What the library does once for each step, as hooks and copies.
        return finished + loop.per_step

    def _next_share(self, workers: int) -> float:
        """Return by what share of the window the first worker's turns are ahead of the last one's in this step."""
        self.steps += 1
        # The largest of p - 1 uniform numbers, by its distribution.
        return float((self.steps * _GOLDEN % 1.0) ** (1 / max(1, workers - 1)))


def buckets_end(
    passes: Passes, overlap: Overlap, prices: Prices, ranks: Members
) -> tuple[Floats, Floats]:
    """Return the end of DDP's averages on each machine and their cost, (..., M), of `passes` (..., M, workers).

    Buckets are fixed in backward order, each reduced when it is complete and the stream
    is free.
    """
    begins, seconds = passes
    free, cost = np.full(len(prices), -np.inf), np.zeros(len(prices))
    # Machines of one call train one model: buckets are the same.
    for nbytes, release in bucket_plan(tuple(prices.distinct[0].gradients), overlap):
        each = prices.time(
            Operation(Kind.ALLREDUCE, nbytes, ranks, engine=overlap.engine)
        )
        free = np.maximum(free, (begins + release * seconds).max(axis=-1)) + each
        cost = cost + each
    return np.maximum(free, (begins + seconds).max(axis=-1)) + prices.of_engine(
        overlap.engine, "per_step_s"
    ), cost


@lru_cache(maxsize=64)
def bucket_plan(
    gradients: tuple[GradientTensor, ...], overlap: Overlap
) -> list[tuple[int, float]]:
    """Return (bytes, share of the backward pass after which it is complete) of each bucket."""
    plan: list[tuple[int, float]] = []
    size, release = 0, 0.0
    for tensor in sorted(gradients, key=lambda tensor: tensor.release):
        size += _travelling(tensor.nbytes, overlap)
        release = tensor.release
        # DDP makes the first bucket small, so that communication begins early.
        if size >= (overlap.bucket_bytes if plan else overlap.first_bucket_bytes):
            plan.append((size, release))
            size = 0
    return [*plan, (size, release)] if size else plan


def _fused(sizes: list[int], threshold: int) -> list[int]:
    """Return the sizes of groups of consecutive tensors up to the threshold."""
    groups: list[int] = []
    for nbytes in sizes:
        if groups and groups[-1] + nbytes <= threshold:
            groups[-1] += nbytes
        else:
            groups.append(nbytes)
    return groups


def _all_ready(passes: Passes, shares: Floats) -> list[float]:
    """Return the moment at which the slowest worker has done each of the `shares` of its pass."""
    begins, seconds = passes
    ready: list[float] = (begins + shares[:, None] * seconds).max(axis=1).tolist()
    return ready


def _travelling(nbytes: int, overlap: Overlap) -> int:
    # A wire format is a half-precision one, for gradients in float32.
    return nbytes // 2 if overlap.wire else nbytes
