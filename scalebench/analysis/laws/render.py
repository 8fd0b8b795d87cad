"""Scaling laws as text and as plain values: what the command line prints, and what it gives to programs."""

from __future__ import annotations

import math
from typing import Any

from scalebench.analysis.laws.advice import Count
from scalebench.analysis.laws.bands import band_name, no_band
from scalebench.analysis.laws.scaling import Estimated, Scaling
from scalebench.formatting import EMPTY, digits, percent, seconds

AT_LEAST = "At least: the lower end of an interval whose upper end lies beyond the band of the curve."
LAWS = ("law", "weight", "ΔAICc", "misfit", "leave-out", "parameters")


def title(scaling: Scaling) -> str:
    """`epoch_average, native mpi: 7 worker counts (1-64), 21 runs`."""
    series = scaling.series
    engine = "" if series.engine == series.execution else f" {series.engine}"
    name, counts = f"{series.label}, {series.execution}{engine}", series.counts
    if scaling.refusal:
        return name
    return f"{name}: {len(counts)} worker counts ({counts[0]:.0f}-{counts[-1]:.0f}), {len(series.at)} runs"


def law_rows(scaling: Scaling) -> list[tuple[str, ...]]:
    """One row of text per law under `LAWS`, best first; only the best has its parameters with intervals."""
    rows: list[tuple[str, ...]] = []
    for place, one in enumerate(scaling.candidates):
        law, x = one.fit.law, one.fit.coefficients
        told = scaling.parameters if place == 0 else [Estimated(p, p.of(x), math.nan, math.nan) for p in law.parameters]
        rows.append(
            (
                law.name,
                f"{100 * one.weight:.0f} %",
                f"{one.aicc - scaling.best.aicc:.1f}",
                percent(one.fit.misfit).removeprefix("+"),
                percent(one.leave_out_error),
                "  ".join(parameter(estimate) for estimate in told),
            )
        )
    return rows


def advice_lines(scaling: Scaling) -> list[str]:
    """Formula, knee, largest N worth running and fastest N."""
    advice = scaling.advice
    assert advice is not None
    best, level = scaling.best.fit, f"{100 * advice.efficiency:.0f} % or more"
    return [
        f"T(N) = {best.law.formula}",
        f"knee {count_text(advice.knee)}, largest N at an efficiency of {level} "
        f"{count_text(advice.worth)}, fastest {count_text(advice.fastest)} (measured up to {best.counts[-1]:.0f})",
    ]


def parameter(estimate: Estimated) -> str:
    """`c 241 µs [238, 244]`, `s 0.00695 [0.0062, 0.0077]`."""
    kind = estimate.parameter
    if kind.unit == "s" and 0 < estimate.value < math.inf:
        shown = seconds(estimate.value)
        factor, unit = float(shown.split()[0].replace(",", "")) / estimate.value, f" {shown.split()[1]}"
    elif kind.unit == "B/s" and estimate.value < math.inf:
        factor, unit = next(
            (1 / size, f" {name}")
            for size, name in ((1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s"), (1, "B/s"))
            if estimate.value >= size or size == 1
        )
    elif kind.unit == "B/s":
        low = f", above {digits(estimate.low / 1e6)} MB/s" if math.isfinite(estimate.low) else ""
        return f"{kind.name} not seen{low}"
    else:
        factor, unit = 1.0, ""
    text = f"{kind.name} {_number(estimate.value * factor)}{unit}"
    if math.isnan(estimate.low):
        return text
    return f"{text} [{_number(estimate.low * factor)}, {_number(estimate.high * factor)}]"


def as_values(scaling: Scaling) -> dict[str, Any]:
    """What JSON can hold: numbers in SI units, null where there is none."""
    series = scaling.series
    values: dict[str, Any] = {
        "execution": series.execution,
        "engine": series.engine,
        "strategy": series.label,
        "scaling": "weak" if series.weak else "strong",
        "workers": [int(count) for count in series.counts],
        "runs": len(series.at),
        "refusal": scaling.refusal or None,
        "notes": list(scaling.notes),
    }
    advice = scaling.advice
    if advice is None:
        return values
    return values | {
        "interval": None if no_band(series) else band_name(series),
        "law": scaling.best.fit.law.name,
        "formula": scaling.best.fit.law.formula,
        "parameters": [
            {
                "name": one.parameter.name,
                "meaning": one.parameter.meaning,
                "unit": one.parameter.unit,
                **{name: _finite(getattr(one, name)) for name in ("value", "low", "high")},
            }
            for one in scaling.parameters
        ],
        "laws": [
            {
                "law": one.fit.law.name,
                "aicc": one.aicc,
                "weight": one.weight,
                "misfit": one.fit.misfit,
                "leave_out_error": one.leave_out_error,
                "parameters": {p.name: _finite(p.of(one.fit.coefficients)) for p in one.fit.law.parameters},
            }
            for one in scaling.candidates
        ],
        "knee": _count_values(advice.knee),
        "worth": {
            "efficiency": advice.efficiency,
            "base": "serial" if series.base else "own law",
            **_count_values(advice.worth),
        },
        "fastest": {
            name: value for name, value in _count_values(advice.fastest).items() if name not in ("low", "high")
        },
        "followed_up_to": advice.limit,
    }


def count_text(count: Count) -> str:
    """`28 (28.3 [23.1, 36.4])`: the number to run, the law's and its interval; `146 (at least 79.0)` without upper end.

    What lies beyond the data without an interval is no number that anybody should run: `beyond the data`. Where the
    search ended it is `beyond 898 (at least 53.2)`; `none` where not even one worker is worth running.
    """
    if not count.workers:
        return "none"
    if count.is_guessed:
        return "beyond the data"
    named = f"beyond {count.workers:,}" if count.reaches_end else f"{count.workers:,}"
    if math.isnan(count.low):
        return named
    exact = "" if count.reaches_end or digits(count.at) == f"{count.workers:,}" else digits(count.at)
    if math.isinf(count.high):
        return f"{named} ({exact}{', ' if exact else ''}at least {digits(count.low)})"
    interval = f"[{digits(count.low)}, {digits(count.high)}]"
    return f"{named} ({exact} {interval})" if exact else f"{named} {interval}"


def _count_values(count: Count) -> dict[str, Any]:
    return {
        "workers": count.workers,
        "at": _finite(count.at),
        "low": _finite(count.low),
        "high": _finite(count.high),
        "search_ended_here": count.reaches_end,
        "beyond_the_data": count.workers > count.measured,
    }


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _number(value: float) -> str:
    if not math.isfinite(value):
        return "∞" if value > 0 else EMPTY
    return f"{value:.2e}" if 0 < abs(value) < 1e-3 else digits(value)
