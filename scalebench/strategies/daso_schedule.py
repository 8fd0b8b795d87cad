"""DASO's schedule: the skips of each epoch, and the calls that follow each batch. Nothing here communicates.

Coquelin et al., J. Big Data 2022, as heat 1.8.0 does it. All divisions are integer divisions.
"""

from __future__ import annotations

import math
from typing import NamedTuple


class Skips(NamedTuple):
    """Intervals of one epoch, in batches."""

    global_skip: int  # between two sums over the nodes; 0: after every batch, blocking
    local_skip: int  # between two gradient means inside a node; up to 1: after every batch
    wait: int  # from the sending of a sum to its merge


BLOCKING = Skips(0, 0, 0)


class Plateau:
    """Fires at the (`patience` + 1)-th loss in a row that is not `stability` (relative) better than the best.

    Firing resets the count; the best stays.
    """

    def __init__(self, stability: float, patience: int) -> None:
        self._stability, self._patience = stability, patience
        self._best = math.inf
        self._poor = 0

    def saw(self, loss: float) -> bool:
        """Add one epoch's loss; return True if the plateau fires."""
        if loss < self._best * (1.0 - self._stability):
            self._best, self._poor = loss, 0
        else:
            self._poor += 1
        if self._poor <= self._patience:
            return False
        self._poor = 0
        return True


class SkipSchedule:
    """The skips of `epochs` epochs. With e = epochs completed, cool-down before all else:

        e >= epochs - cool_down: blocking;  e < warm_up: blocking;  e = warm_up: `first`;
        later, at a plateau of the loss:  gs > 1: gs/2, ls/2, wait - 1, not below 1;  gs = 1: max, max/4, max/4.

    `plateau` None keeps `first` until the cool-down. `skips` are those of the epoch to come.
    """

    def __init__(
        self,
        epochs: int,
        warm_up: int,
        cool_down: int,
        first: Skips,
        max_skip: int = 0,
        plateau: Plateau | None = None,
    ) -> None:
        self._warm_up, self._cooling = warm_up, epochs - cool_down
        self._max_skip, self.first, self._plateau = max_skip, first, plateau
        self._completed = 0
        self.skips = first if warm_up == 0 and self._cooling > 0 else BLOCKING

    @property
    def judges(self) -> bool:
        """True if the loss of the current epoch will be used."""
        return self._plateau is not None and self._warm_up <= self._completed + 1 < self._cooling

    def epoch_over(self, loss: float | None = None) -> None:
        """Complete an epoch, with its `loss` if the schedule `judges` it."""
        fired = self.judges and self._plateau is not None and loss is not None and self._plateau.saw(loss)
        self._completed += 1
        if self._completed >= self._cooling or self._completed < self._warm_up:
            self.skips = BLOCKING
        elif self._completed == self._warm_up:
            self.skips = self.first
        elif fired:
            self.skips = self._next(self.skips)

    def _next(self, skips: Skips) -> Skips:
        if skips.global_skip > 1:
            return Skips(max(1, skips.global_skip // 2), max(1, skips.local_skip // 2), max(1, skips.wait - 1))
        return Skips(self._max_skip, self._max_skip // 4, self._max_skip // 4)


class Calls(NamedTuple):
    """Calls that follow the optimizer step of one batch."""

    send: bool = False  # the current group sums its parameters
    wait: int = 0  # S of the sum that is sent here: batches until it is merged
    blocking: bool = False  # the sum is waited for at once, and replaces the parameters
    merge: bool = False  # the sum in flight is due
    local_sync: bool | None = None  # gradients are averaged inside the node from now on; None: as before


def calls_of(batch: int, last: int, skips: Skips) -> Calls:
    """Calls of batch `batch` of 0..`last`. `local_sync` applies to the batches after it."""
    gs, ls, wait = skips
    # As heat does it: a merge weighs by the wait of its sending, but is due by that of the batch at hand, which shrinks
    # towards an epoch's end. So a sum may find no batch that is its own: it is lost in the last, blocking one.
    due = min(wait, last - batch)
    if batch == last or gs == 0 or batch % gs == 0:
        return Calls(send=True, wait=due, blocking=batch == last or wait == 0, merge=wait > 0)
    ends = batch + 1 == last
    if (batch + 1) % gs == 0:
        return Calls(local_sync=True)
    if batch % gs < due:
        return Calls(local_sync=True if ends else None)
    merge = batch % gs == due
    if ls <= 1:
        return Calls(merge=merge, local_sync=True if ls == 1 else None)
    return Calls(merge=merge, local_sync=(batch + 1) % ls == 0 or ends)
