"""Timed windows of the engine probe: which of them count, and the cost that follows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from statistics import fmean
from typing import NamedTuple

import numpy as np
from scipy.optimize import isotonic_regression

from scalebench.calibration.quiet_rounds import Round, are_enough
from scalebench.cluster.engine_costs import EngineCost
from scalebench.system.stopwatch import typical

GRID = (4, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20)  # bytes
_LOWER = 0.1  # quantile of disturbed times
Key = tuple[str, int]  # an operation's name, and bytes


class Sample(NamedTuple):
    """Seconds of one operation in one window, and whether the window was undisturbed.

    `each` has the seconds of single operations where they were timed, `in_phases` if each began at another phase of a
    cycle, the same ones in every window.
    """

    key: Key
    seconds: float
    undisturbed: bool
    each: tuple[float, ...] = ()
    in_phases: bool = False


Samples = list[list[Sample]]  # of one round, by rank


class Found:
    """The windows of all rounds so far, and the reference step of each round, in seconds.

    Of each window the first rank's time counts; it is undisturbed if it was so on every rank.
    """

    def __init__(self, rounds: Sequence[Round[Samples]]) -> None:
        self.references = [each.reference_s for each in rounds]
        self._windows: dict[Key, list[tuple[int, Sample]]] = {}
        for number, each in enumerate(rounds):
            for sample in _together(each.found):
                self._windows.setdefault(sample.key, []).append((number, sample))

    @property
    def reference_s(self) -> float:
        """Mean reference step of all rounds, as for a run: a shared machine changes between two speeds."""
        return fmean(self.references)

    def values(self, key: Key, *, relative: bool) -> list[float]:
        """Seconds of the undisturbed windows, at the mean reference step if `relative`.

        If fewer than FEWEST were undisturbed, the lower decile of all takes their place, as other programs only add to
        a time: of single operations by their phase, where these were timed, and of windows elsewhere.
        """
        windows = self._windows[key]
        scales = [self.reference_s / self.references[number] if relative else 1.0 for number, _ in windows]
        kept = [scale * one.seconds for scale, (_, one) in zip(scales, windows, strict=True) if one.undisturbed]
        if are_enough(len(kept), len(windows)):
            return kept
        each = [one.each or (one.seconds,) for _, one in windows]
        table = np.array(scales)[:, None] * np.array(each)
        if len(windows) == 1 and not windows[0][1].in_phases:  # of one round the operations are all there is
            table = table.T
        return [float(np.quantile(table, _LOWER, axis=0).mean())]

    def seconds(self, key: Key, *, relative: bool = True) -> float:
        """Median cost of an operation; zero where the step before it, which is subtracted, was disturbed more."""
        return max(0.0, typical(self.values(key, relative=relative)).value)

    def least(self, key: Key, *, relative: bool = True) -> float:
        """10 % quantile of the windows: the cost without waits of the operation's own threads for a core."""
        return max(0.0, float(np.quantile(self.values(key, relative=relative), 0.1)))

    def curve(self, name: str, grid: Sequence[int], *, relative: bool = True) -> list[tuple[int, float]]:
        """(bytes, seconds) of an operation."""
        return [(nbytes, self.seconds((name, nbytes), relative=relative)) for nbytes in grid]

    def share_undisturbed(self) -> float:
        """Share of all windows that were undisturbed."""
        flags = [one.undisturbed for windows in self._windows.values() for _, one in windows]
        return sum(flags) / len(flags) if flags else 1.0

    def precise(self, *, relative: bool) -> bool:
        """Return True if each cost is known precisely and no larger message costs less than a smaller one."""
        if not all(typical(self.values(key, relative=relative)).precise for key in self._windows):
            return False
        curves: dict[str, list[float]] = {}
        for name, nbytes in sorted(self._windows):
            curves.setdefault(name, []).append(self.seconds((name, nbytes), relative=relative))
        return all(a <= b * 1.02 for curve in curves.values() for a, b in pairwise(curve))


def _together(samples: Samples) -> Iterator[Sample]:
    """Yield the windows of one round, of which each rank has a sample: those of one key in their order."""
    windows: dict[tuple[Key, int], list[Sample]] = {}
    for of_rank in samples:
        seen: Counter[Key] = Counter()
        for sample in of_rank:
            windows.setdefault((sample.key, seen[sample.key]), []).append(sample)
            seen[sample.key] += 1
    for own in windows.values():
        yield own[0]._replace(undisturbed=all(sample.undisturbed for sample in own))


def entry(
    name: str, points: Sequence[tuple[int, float]], *, ranks: int, source: str, nodes: int = 1, **others: float
) -> EngineCost:
    """The costs nearest to `points`, (bytes, seconds), among those that never fall with the bytes."""
    costs = isotonic_regression([seconds for _, seconds in points]).x.tolist()
    curve = [(nbytes, seconds) for (nbytes, _), seconds in zip(points, costs, strict=True)]
    return EngineCost(engine=name, ranks=ranks, nodes=nodes, alpha_s=costs[0], points=curve, source=source, **others)
