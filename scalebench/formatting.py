"""Formatting of seconds, ratios, percentages and counts."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

EMPTY = "–"
BETWEEN = ".."  # between the bounds that stand in place of a number
BETWEEN_MEANS = f"a{BETWEEN}b: the bounds of an interval so wide that it leaves no digit of the number"
ROUGH = "~"  # before numbers
ROUGH_MEANS = f"{ROUGH}: an interval wider than the number itself leaves its order of magnitude only"
OVERSUBSCRIBED, DISTURBED = "×", "†"  # behind numbers of cells that are no baseline
_NUMBER = re.compile(r"(\d+(?:\.\d+)?)")
_LEAST_S = 5e-10  # shorter times are none
_FORMULA = re.compile(r"'*[=+\-@]")
_CONTROL = re.compile(r"[\x00-\x1f\x7f\x85\u2028\u2029]+")
_LEAST_GIB = 0.1  # below this, memory is in MiB
_HUGE = 1e9  # numbers from here on have an exponent


class Detail(str):
    """A note on how something is computed, without a consequence for the reader of the results: shown if asked for."""


def is_interval(low: float, high: float) -> bool:
    """Return True if the bounds are finite and differ."""
    return (
        math.isfinite(low)
        and math.isfinite(high)
        and abs(high - low) > 1e-12 * max(abs(low), abs(high))
    )


def is_rough(value: float, low: float, high: float) -> bool:
    """Return True if half of the interval of a positive number, such as a time or a ratio of times, exceeds the number.

    That is from a factor of 2.4 to either side on.
    """
    return math.isfinite(value) and is_interval(low, high) and high - low > 2 * value


def is_supported(value: float, low: float, high: float) -> bool:
    """Return False if the interval of a positive number does not even leave its order of magnitude.

    That is from a factor of 10 to either side on.
    """
    return not (is_rough(value, low, high) and not 0 < high <= 100 * low)


def is_reduction_supported(reduction: float, low: float, high: float) -> bool:
    """Return False if the interval of the ratio of times 1 - `reduction` leaves no digit of it."""
    return not is_rough(1 - reduction, 1 - high, 1 - low)


def is_equal(difference: float, low: float, high: float) -> bool:
    """Return True if times or a metric were equal in all runs, as of one repeated computation; one has no bounds."""
    return abs(difference) <= 1e-9 and abs(high - low) <= 1e-9


def seconds(value: float, significant: int = 3) -> str:
    """Return seconds with `significant` digits: `812 us`, `12.3 ms`, `1.23 s`, `12.3 min`, `2.50 h`."""
    if not math.isfinite(value):
        return "never" if value == math.inf else EMPTY
    if abs(value) < _LEAST_S:
        return "0 s"
    factor, unit = _unit(value)
    return f"{digits(value * factor, significant)} {unit}"


def _unit(value: float) -> tuple[float, str]:
    """Return the unit in which a number of seconds is written, and how many of it a second has."""
    for limit, factor, unit in (
        (1e-3, 1e6, "µs"),
        (1, 1e3, "ms"),
        (600, 1, "s"),
        (36000, 1 / 60, "min"),
    ):
        # 999.7 ms would be written as 1,000 ms
        if abs(value) < limit * (1 - 5e-4):
            return factor, unit
    return 1 / 3600, "h"


def seconds_as_known(value: float, low: float, high: float) -> str:
    """Return seconds with the digits that their interval leaves: `1.23 s`, `~4 s`, or its bounds, `0.3..90 s`.

    A lower bound of less than a tenth of the upper one's unit has a unit of its own,
    `40 ms..20 min`.
    """
    if not is_supported(value, low, high):
        factor, unit = _unit(high)
        if 0 < factor * low < 0.1:
            smaller, own = _unit(low)
            return f"{digits(_one_digit(smaller * low), 1)} {own}{BETWEEN}{digits(_one_digit(factor * high), 1)} {unit}"
        return f"{bounds_alone(factor * low, factor * high)} {unit}"
    return (
        f"{ROUGH}{seconds(_one_digit(value), 1)}"
        if is_rough(value, low, high)
        else seconds(value)
    )


def digits_as_known(value: float, low: float, high: float, unit: str = "") -> str:
    """Return a ratio with the digits that its interval leaves: `1.23`, `~4`, or its bounds, `0.3..90`."""
    if not is_supported(value, low, high):
        return f"{bounds_alone(low, high)}{unit}"
    return (
        f"{ROUGH}{digits(_one_digit(value), 1)}{unit}"
        if is_rough(value, low, high)
        else f"{digits(value)}{unit}"
    )


def bounds_alone(low: float, high: float) -> str:
    """Return the bounds of a positive number, which stand in its place: `0.03..8`."""
    return (
        f"{digits(_one_digit(max(0.0, low)), 1)}{BETWEEN}{digits(_one_digit(high), 1)}"
    )


def reduction_bounds_alone(low: float, high: float) -> str:
    """Return the bounds of a reduction, which stand in its place: `-520..+85 %`."""
    return f"{percent(low).removesuffix(' %')}{BETWEEN}{percent(high)}"


def _one_digit(value: float) -> float:
    return float(f"{value:.0e}")


def tell_marks(texts: Iterable[str]) -> list[str]:
    """Return what stands for numbers that an interval leaves little or nothing of, as far as it is in cells."""
    found = list(texts)
    meanings = {ROUGH: ROUGH_MEANS, BETWEEN: BETWEEN_MEANS}
    return [
        meaning
        for mark, meaning in meanings.items()
        if any(mark in text for text in found)
    ]


def seconds_with_interval(value: float, low: float, high: float) -> str:
    """Return seconds with an interval in the same unit, `1.23 s [1.20, 1.26]`; only the value without an interval.

    An interval without an upper end is `[from 1.20 s]`.
    """
    if math.isfinite(value) and math.isfinite(low) and high == math.inf:
        return f"{seconds(value)} [from {seconds(low)}]"
    text, (factor, _) = seconds_as_known(value, low, high), _unit(value)
    return text + _bounds(text, low * factor, high * factor)


def percent(share: float) -> str:
    """Return a signed percentage: `+47 %`, `-3.1 %`."""
    number = 100 * share
    if not math.isfinite(number):
        return EMPTY
    if abs(number) >= _HUGE:
        return f"{number:+.1e} %"
    rounded = round(number, 0 if abs(number) >= 9.95 else 1) + 0.0  # no negative zero
    return f"{rounded:+.0f} %" if abs(number) >= 9.95 else f"{rounded:+.1f} %"


def share(value: float) -> str:
    """`54 %`, unsigned."""
    return percent(abs(value)).lstrip("+")


def reduction_range(low: float, high: float) -> str:
    """`51 to 57 % less`, `3.1 to 5.0 % more`, around zero `from 3.1 % more to 12 % less`.

    From twice the time on `from 2.5 times the time to 12 % less`.
    """
    if low < 0 <= high:
        most = (
            f"{digits(1 - low, 2)} times the time"
            if low <= -1
            else f"{share(-low)} more"
        )
        return f"from {most} to {share(high)} less"
    word, (low, high) = ("more", (-high, -low)) if high < 0 else ("less", (low, high))
    return f"{share(low).removesuffix(' %')} to {share(high)} {word}"


def deviation(log_ratio: float) -> str:
    """Return the unsigned deviation of two times: `12 %`; above 50 % `a factor of 3.1`."""
    size = math.exp(abs(log_ratio))
    return share(size - 1) if size <= 1.5 else f"a factor of {digits(size, 2)}"


def percent_with_interval(share: float, low: float, high: float) -> str:
    """Return a reduction with its interval, `+54 % [51, 57]`; only the share without one, `equal` for equal times."""
    if is_equal(share, low, high):
        return "equal"
    if not is_reduction_supported(share, low, high):
        return reduction_bounds_alone(low, high)
    if not is_interval(low, high):
        return percent(share)
    bounds = (percent(bound).removesuffix(" %").lstrip("+") for bound in (low, high))
    return f"{percent(share)} [{', '.join(bounds)}]"


def digits(value: float, significant: int = 3) -> str:
    """Return `value` with three significant digits: `0.0123`, `1.23`, `1,230`; an exponent beyond 1e9."""
    if not math.isfinite(value):
        return EMPTY
    if value == 0:
        return "0"
    if not 1 / _HUGE <= abs(value) < _HUGE:
        return f"{value:.{significant - 1}e}"
    # of the rounded number: 9.996 has the digits of 10.0
    magnitude = math.floor(math.log10(abs(float(f"{value:.{significant - 1}e}"))))
    return f"{value:,.{max(0, significant - 1 - magnitude)}f}"


def memory_size(nbytes: float) -> str:
    """Return bytes in a suitable unit: `1.23 GiB`, `45.6 MiB`, `12.0 TiB`."""
    if nbytes >= 2**40:
        return f"{digits(nbytes / 2**40)} TiB"
    unit, name = (2**30, "GiB") if nbytes >= _LEAST_GIB * 2**30 else (2**20, "MiB")
    return f"{digits(nbytes / unit)} {name}"


def digits_with_interval(value: float, low: float, high: float) -> str:
    """Return a ratio with its interval, `1.30 [1.21, 1.40]`; only the value without an interval."""
    text = digits_as_known(value, low, high)
    return text + _bounds(text, low, high)


def _bounds(text: str, low: float, high: float) -> str:
    """Return the interval that stands behind the number `text`, with as many digits: ` [1.21, 1.40]`, or nothing."""
    if BETWEEN in text or not is_interval(low, high):
        return ""
    if text.startswith(ROUGH):
        return f" [{digits(_one_digit(low), 1)}, {digits(_one_digit(high), 1)}]"
    return f" [{digits(low)}, {digits(high)}]"


def metric_word(name: str) -> str:
    """Return the name of a metric as it stands in a sentence: `accuracy`, `R²`."""
    return {"r2": "R²"}.get(name, name)


def metric_change(value: float, metric: str, until: float | None = None) -> str:
    """`3.8 points` of accuracy, `0.012` of R²; with `until` a signed range: `-1.2 to +0.3 points`.

    An end that is not zero gets as many digits as show its sign.
    """
    if not math.isfinite(value):
        return EMPTY
    # points of a per cent: a change of a percentage in per cent would be read as
    # relative
    scale, places, unit = (100, 1, " points") if metric == "accuracy" else (1, 3, "")
    if until is None:
        return f"{scale * value:.{places}f}{unit}"
    ends = [scale * end for end in (value, until)]
    places = next(
        (
            n
            for n in range(places, places + 3)
            if all(round(end, n) or not end for end in ends)
        ),
        places,
    )
    low, high = (round(end, places) + 0.0 for end in ends)  # no negative zero
    return f"{low:+.{places}f} to {high:+.{places}f}{unit}"


def metric_with_interval(
    value: float, low: float, high: float, *, signed: bool = False
) -> str:
    """`0.907 [0.899, 0.915]`; without an interval only the value; `equal` for a `signed` difference of zero."""
    sign = "+" if signed else ""
    if not math.isfinite(value):
        return EMPTY
    if signed and is_equal(value, low, high):
        return "equal"
    if not (math.isfinite(low) and math.isfinite(high)):
        return f"{value:{sign}.3f}"
    return f"{value:{sign}.3f} [{low:{sign}.3f}, {high:{sign}.3f}]"


def time_of_cell_alone(cell: Mapping[Any, Any]) -> str:
    """Return the time of a cell with the digits that its interval leaves; all of them where the cell is marked."""
    if marks(cell):
        return seconds(cell["train_s"])
    return seconds_as_known(cell["train_s"], cell["low_s"], cell["high_s"])


def marks(cell: Mapping[Any, Any]) -> str:
    """Return the signs of an oversubscribed or disturbed cell, to stand behind a number: ` ×`, ` †`, ` ×†` or none."""
    signs = OVERSUBSCRIBED * bool(cell["oversubscribed"]) + DISTURBED * bool(
        cell["disturbed"]
    )
    return f" {signs}" if signs else ""


def in_cell(text: str) -> str:
    """Return a text for a cell of a CSV file: on one line, and with an apostrophe before what starts like a formula."""
    # a spreadsheet would compute what begins like a formula, and a line break would end
    # the row
    plain = _CONTROL.sub(" ", text).strip()
    return f"'{plain}" if _FORMULA.match(plain) else plain


def natural(text: str) -> tuple[tuple[str, float], ...]:
    """Return a sort key that compares numbers by value: `steps=4` before `steps=16`."""
    # texts and numbers take turns, so that keys of two texts compare part by part
    parts = _NUMBER.split(text)
    return tuple(zip(parts[::2], [*map(float, parts[1::2]), 0.0], strict=True))


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: `1 run`, `3 runs`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def listed(items: Iterable[object], most: int = 8) -> str:
    """Join items as `a, b, c`, or `a, b and 7 more` if there are more than `most`."""
    texts = [str(item) for item in items]
    if len(texts) <= most:
        return ", ".join(texts)
    return f"{', '.join(texts[: most - 1])} and {len(texts) - most + 1} more"


def roughly(seconds: float) -> str:
    """Return a duration in a suitable unit, at least `1 s` and within a quarter of what it is."""
    if seconds < 120:
        return f"{max(1, seconds):.0f} s"
    minutes = seconds / 60
    if minutes < 90:
        return f"{minutes:.0f} min"
    hours = minutes / 60
    return (
        f"{hours:.1f} h"
        if hours < 10
        else f"{hours:.0f} h"
        if hours < 48
        else f"{hours / 24:.0f} days"
    )
