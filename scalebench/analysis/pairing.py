"""The ratio of two cells' times, with the interval that suits how their times were obtained."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from scalebench.analysis.blocks import Cell, paired_blocks, paired_times
from scalebench.analysis.environment import states_steps
from scalebench.analysis.intervals import (
    LEVEL,
    NO_INTERVAL,
    Interval,
    Part,
    calibration_interval,
    interval_name,
    level_of_ratios,
    median_ratio,
    paired_ratio,
    unpaired_ratio,
)
from scalebench.analysis.loading import Results
from scalebench.analysis.validation import VirtualError, virtual_error
from scalebench.formatting import is_interval


@dataclass(frozen=True)
class Ratio:
    """`mean` of top / bottom is a ratio of geometric means, the `median` one of pairs (without an interval below six).

    `top_s` and `bottom_s` are what they are made of: times of common blocks where `paired`, else all. `left_out` are
    common blocks in which the two did not run side by side.
    """

    mean: Interval
    median: Interval
    top_s: list[float]
    bottom_s: list[float]
    paired: bool
    interval: str
    left_out: int = 0


NO_RATIO = Ratio(NO_INTERVAL, NO_INTERVAL, [], [], False, "")


def ratio_by_draw(top: list[float], bottom: list[float], error: Part | None, level: float = LEVEL) -> Interval:
    """Ratio of virtual times of one calibration, draw by draw; `error` as in `calibration_interval`.

    Times that are equal in every draw, to the last bit, are those of one computation made twice (such as averaging once
    an epoch and serial, at one worker): nothing varies, and whatever the simulation's error is, it cancels.
    """
    if top == bottom:
        return Interval(1.0, 1.0, 1.0, len(top))
    return calibration_interval(np.log(top) - np.log(bottom), error, level).exp()


class Ratios:
    """Ratios of one study, with what is known of its virtual times.

    Their level is not that of times where the study stopped when these were known well enough: no run waits for a ratio
    to be narrow.
    """

    def __init__(self, results: Results) -> None:
        self.level = level_of_ratios(results.study)
        self.error: VirtualError | None = virtual_error(results)
        self.stated = states_steps(results)

    def of(self, top: Cell, bottom: Cell) -> Ratio:
        """T(top) / T(bottom). The noise of both is inside the interval, whichever of them is the baseline.

        Paired by block where the run order put their repetitions side by side; else two independent samples. Virtual
        times are paired by their draw from the calibration.
        """
        paired = bool(paired_blocks(top, bottom))
        above, below = paired_times(top, bottom)
        mean, median = self._mean(top, bottom, above, below, paired), NO_INTERVAL
        if paired and above:
            median = median_ratio(above, below)
        if top.execution == "virtual":
            median = median._replace(low=math.nan, high=math.nan)
        varies = is_interval(mean.low, mean.high)
        name = interval_name(top.execution, checked=self.error is not None, varies=varies, stated=self.stated)
        left_out = len(top.seconds.keys() & bottom.seconds.keys()) - len(above) if paired else 0
        return Ratio(mean, median, above, below, paired, name if math.isfinite(mean.low) else "", left_out)

    def _mean(self, top: Cell, bottom: Cell, above: list[float], below: list[float], paired: bool) -> Interval:
        if not (above and below):
            return NO_INTERVAL
        if top.execution == "virtual":
            return ratio_by_draw(above, below, self.error.ratio(top.label, bottom.label) if self.error else None)
        return paired_ratio(above, below, self.level) if paired else unpaired_ratio(above, below, self.level)
