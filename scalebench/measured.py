"""A value with its interval, of times, ratios, metrics, counts and fitted numbers alike."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple


class Measured(NamedTuple):
    """A value in its SI unit with its interval from `n` values; bounds are NaN where no interval is offered.

    Numbers for one sample, arrays for many. `kind` names the interval, empty without
    one or where it goes without saying.
    """

    value: Any
    low: Any = math.nan
    high: Any = math.nan
    n: int = 0
    kind: str = ""

    def map(self, function: Callable[[float], float]) -> Measured:
        """Return a monotone `function` of one value with its interval; the bounds change places where it falls."""
        low, high = function(self.low), function(self.high)
        # False of bounds that are NaN, which stay
        if low > high:
            low, high = high, low
        return self._replace(value=function(self.value), low=low, high=high)

    def within(self, least: float, most: float) -> Measured:
        """Return the value with an interval that ends at `least` and `most`, beyond which there are no values."""
        import numpy as np  # commands that only print numbers do without

        return self._replace(
            low=np.maximum(self.low, least), high=np.minimum(self.high, most)
        )

    def named(self, name: str, low: str = "", high: str = "") -> dict[str, Any]:
        """Return the columns of a table under these names, by default `name`, `name`_low and `name`_high."""
        return {
            name: self.value,
            low or f"{name}_low": self.low,
            high or f"{name}_high": self.high,
        }


UNKNOWN = Measured(math.nan)
