"""Rules that release workers at a parameter server: pure state machines, the same in virtual and in real runs.

A gate knows how often each worker has pushed and when; `on_push` returns the released
workers. It sees no gradient, no weight and no clock of its own. Vocabulary: t_p is the
number of pushes of worker p, its lead t_p - min_q t_q over the workers that still have
pushes to make. A lead is what a worker has when it is released; at the push it may be
one more (SSP(3) meets leads of 4).
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import Literal

Bound = Literal["strict", "paper"]
# moments, and distances between them, that differ by less are equal: rounding must not
# decide
_TIE_S = 1e-9


class Counts:
    """A growing count of each worker, and the `least` of them.

    Kept up to date, as every push asks for the slowest worker: a look at all of a
    thousand takes as long as the push itself.
    """

    def __init__(self, workers: int) -> None:
        self.of = [0] * workers
        self.least = 0
        self._workers_at = Counter({0: workers})

    def raise_to(self, worker: int, count: int) -> None:
        self._workers_at[count] += 1
        self._workers_at[self.of[worker]] -= 1
        self.of[worker] = count
        while not self._workers_at[self.least]:
            del self._workers_at[self.least]
            self.least += 1


class Gate:
    """ASP, which never waits, and the base of all rules: counts, leads, waiting workers.

    `workers` push `total` times each; a worker that has done so holds no other up.
    """

    # pushes are gathered and applied as one step when the round is over, not one by one
    in_rounds = False

    def __init__(self, workers: int, total: int) -> None:
        self.workers, self.total = workers, total
        self._counts = Counts(workers)
        self.pushes = self._counts.of
        self.waiting: list[int] = []  # in the order of their pushes
        self._pushed = 0

    def on_push(self, worker: int, now: float) -> list[int]:
        """Count a push of `worker` at `now` (seconds); return the released workers, in order."""
        self._count(worker)
        return [worker]

    def _count(self, worker: int) -> None:
        self._pushed += 1
        self._counts.raise_to(worker, self.pushes[worker] + 1)

    def accepts(self, worker: int) -> bool:
        """Return True if a push of `worker` that comes now is applied."""
        return True

    def lead(self, worker: int) -> int:
        """Pushes of `worker` beyond those of the slowest worker that is not done."""
        return self.pushes[worker] - self._slowest()

    @property
    def rounds(self) -> int:
        """Mean number of pushes per worker, rounded down."""
        return self._pushed // self.workers

    def _slowest(self) -> int:
        return self._counts.least  # a worker that is done has the most

    def _racing(self, until: int) -> list[int]:
        """The workers with fewer than `until` pushes."""
        return [worker for worker in range(self.workers) if self.pushes[worker] < until]

    def _release(self, workers: Iterable[int]) -> list[int]:
        wanted = set(workers)
        released = [worker for worker in self.waiting if worker in wanted]
        self.waiting = [worker for worker in self.waiting if worker not in wanted]
        return released


class Lockstep(Gate):
    """BSP: a barrier each iteration. With `backup` = b, a round is over when K - b of its pushes have come.

    Chen et al., 2016, arXiv 1604.00981: a push that comes after its round is dropped,
    and its worker continues with the round that is under way. Then `rounds`, not the
    pushes of one worker, says how far training is.
    """

    in_rounds = True

    def __init__(self, workers: int, total: int, backup: int = 0) -> None:
        super().__init__(workers, total)
        self._needed = workers - backup
        self._round = 0
        self._done = Counts(workers)  # rounds each has a share in, or has missed

    @property
    def rounds(self) -> int:
        return self._round

    def accepts(self, worker: int) -> bool:
        return self._done.of[worker] == self._round

    def on_push(self, worker: int, now: float) -> list[int]:
        self._count(worker)
        if not self.accepts(worker):
            self._done.raise_to(worker, self._round)
            return [worker]
        self._done.raise_to(worker, self._round + 1)
        self.waiting.append(worker)
        if len(self.waiting) < self._needed:
            return []
        self._round += 1
        return self._release(self.waiting)

    def lead(self, worker: int) -> int:
        return self._done.of[worker] - self._done.least


class Bounded(Gate):
    """SSP(s): a worker waits while its lead exceeds s. Ho et al., NeurIPS 2013."""

    def __init__(self, workers: int, total: int, staleness: int) -> None:
        super().__init__(workers, total)
        self.staleness = staleness
        # no worker sees the weights between two barriers: that is BSP
        self.in_rounds = staleness == 0

    def on_push(self, worker: int, now: float) -> list[int]:
        self._count(worker)
        self.waiting.append(worker)
        limit = self._slowest() + self.staleness
        free = [
            each
            for each in self.waiting
            if each != worker and self.pushes[each] <= limit
        ]
        return self._release([*free, worker] if self._may_go(worker, now) else free)

    def _may_go(self, worker: int, now: float) -> bool:
        """Return True if the worker that has just pushed need not wait."""
        return self.lead(worker) <= self.staleness


class Dynamic(Bounded):
    """DSSP(s_L, s_U), Zhao et al., ICDCS 2019: the fastest may exceed s_L by a few pushes if that shortens its wait.

    At lead > s_L the controller predicts when the fastest and the slowest will push,
    from their last intervals, and returns after how many more pushes r in 0..s_U - s_L
    the fastest would meet a push of the slowest most closely. The published rule never
    enforces s_U and grants r + 1 pushes: with exactly steady intervals its lead grows
    without bound, as in ASP. `bound` = strict cuts r so that the lead stays <= s_U;
    `paper` is the literal rule.
    """

    def __init__(
        self, workers: int, total: int, lower: int, upper: int, bound: Bound = "strict"
    ) -> None:
        super().__init__(workers, total, lower)
        self.in_rounds = upper == 0
        self._upper, self._strict = upper, bound == "strict"
        self._credits = [0] * workers
        self._last = [math.nan] * workers
        self._interval = [math.nan] * workers  # nan until two pushes exist

    def on_push(self, worker: int, now: float) -> list[int]:
        self._interval[worker] = now - self._last[worker]
        self._last[worker] = now
        return super().on_push(worker, now)

    def _may_go(self, worker: int, now: float) -> bool:
        lead = self.lead(worker)
        if self._credits[worker] > 0:
            self._credits[worker] -= 1
            return True
        if lead <= self.staleness:
            return True
        if self.pushes[worker] < max(self.pushes):
            return False
        credits = self._more_pushes(worker, now)
        if self._strict:
            credits = min(credits, self._upper - lead)
        if credits > 0:
            self._credits[worker] = credits - 1 if self._strict else credits
        return credits > 0

    def _more_pushes(self, worker: int, now: float) -> int:
        """The controller: the smallest r whose predicted push is nearest to one of the slowest worker's, within _TIE_S.

        Both ascend, so that one walk along them meets every neighbour: O(s_U - s_L) a
        push.
        """
        slowest = min(
            self._racing(self.total) or range(self.workers),
            key=lambda q: (self.pushes[q], q),
        )
        own, other = self._interval[worker], self._interval[slowest]
        if math.isnan(own) or math.isnan(other):
            return 0
        most, last = self._upper - self.staleness, self._last[slowest]
        before, after, k = (
            -math.inf,
            last + other,
            0,
        )  # the slowest worker's pushes around that of r
        distances = []
        for r in range(most + 1):
            push = now + r * own
            while after <= push:
                k += 1
                before, after = after, last + (k + 1) * other if k <= most else math.inf
            distances.append(min(push - before, after - push))
        nearest = min(distances) + _TIE_S
        return next(r for r, distance in enumerate(distances) if distance <= nearest)


class Elastic(Gate):
    """ElasticBSP, Zhao et al., ICDM 2019: barriers where the workers are predicted to arrive together.

    After a barrier each worker's next R = `lookahead` pushes are predicted from its
    last iteration; of the sets of one push per worker, the one with the least spread is
    the next barrier, the earliest of equals. Each worker runs to its own point without
    waiting. Until every worker was timed, the barrier is the next push.

    `meetings` are the pushes, ascending, after which the workers meet outside the
    server: before rows move, and at the end. No barrier lies beyond the next one: a
    worker that waits there for the others would never push again.
    """

    def __init__(self, workers: int, meetings: Sequence[int], lookahead: int) -> None:
        super().__init__(workers, meetings[-1])
        self._lookahead = lookahead
        self._meetings = deque(meetings)
        # of the last iteration, from release to push
        self._duration = [math.nan] * workers
        self._released_at = [0.0] * workers
        # the push after which each worker waits at the barrier
        self._points = [1] * workers
        self._on_the_way = workers  # to these points

    def on_push(self, worker: int, now: float) -> list[int]:
        self._count(worker)
        self._duration[worker] = now - self._released_at[worker]
        self.waiting.append(worker)
        if self.pushes[worker] < self._points[worker]:
            self._released_at[worker] = now
            return self._release([worker])
        self._on_the_way -= 1
        if self._on_the_way:
            return []
        self._released_at = [now] * self.workers
        meeting = self._next_meeting()
        racing = self._racing(meeting)
        steps = least_spread(
            [
                [(i + 1) * self._duration[q] for i in range(self._lookahead)]
                for q in racing
            ]
        )
        for q, step in zip(racing, steps, strict=True):
            self._points[q] = min(meeting, self.pushes[q] + step + 1)
        self._on_the_way = len(racing)
        return self._release(self.waiting)

    def _next_meeting(self) -> int:
        """Pushes of a worker before the next meeting; the last one stays."""
        while len(self._meetings) > 1 and self._counts.least >= self._meetings[0]:
            self._meetings.popleft()
        return self._meetings[0]


def least_spread(times: list[list[float]]) -> list[int]:
    """One index into each ascending list so that max - min of the chosen times is least; of equals the earliest."""
    chosen = [0] * len(times)
    if not times:
        return chosen
    heap = [(each[0], row) for row, each in enumerate(times)]
    heapq.heapify(heap)
    latest = max(each[0] for each in times)
    best, spread = list(chosen), latest - heap[0][0]
    while True:
        earliest, row = heap[0]
        if latest - earliest < spread * (1 - 1e-12):
            best, spread = list(chosen), latest - earliest
        chosen[row] += 1
        if chosen[row] == len(times[row]):
            return best
        latest = max(latest, times[row][chosen[row]])
        heapq.heapreplace(heap, (times[row][chosen[row]], row))
