"""Scaling laws as text, as JSON values and as files for Extra-P.

Extra-P (A. Calotoiu et al., SC 2013, doi:10.1145/2503210.2503277) reads JSON Lines:
`params`, the parameters of the measurement; `callpath`, what was measured; `metric`;
and `value`, the repetitions. It refuses a file in which a callpath lacks a point that
another one has, so series with different worker counts get separate files. It takes a
file of one line for another format and models from five points on, so series without a
law are left out. Its models grow by default, so the file also has the worker-seconds N
T, which do not fall.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scalebench.analysis.laws.bands import band_name, no_band
from scalebench.analysis.laws.candidates import Candidate, Parameter
from scalebench.analysis.laws.series import FEWEST_COUNTS, Series
from scalebench.analysis.laws.worker_counts import Count, Scaling
from scalebench.errors import ResultsError, writing
from scalebench.formatting import EMPTY, counted, digits, percent, seconds
from scalebench.measured import Measured
from scalebench.study.choices import SERIAL
from scalebench.study.spec import slug

AT_LEAST = "At least: the lower end of an interval whose upper end lies beyond the band of the curve."
LAWS = ("law", "weight", "ΔAICc", "misfit", "leave-out", "parameters")


def name_of(scaling: Scaling) -> str:
    """`epoch_average, native mpi`, with the batch where the study has several."""
    key = scaling.series.key
    engine = "" if key.engine == key.execution else f" {key.engine}"
    return f"{scaling.series.name}, {key.execution}{engine}"


def title(scaling: Scaling) -> str:
    """`epoch_average, native mpi: 7 worker counts (1-64), 21 runs`."""
    counts, runs = scaling.series.counts, counted(len(scaling.series.at), "run")
    places = counted(len(counts), "worker count")
    return f"{name_of(scaling)}: {places} ({counts[0]:.0f}-{counts[-1]:.0f}), {runs}"


def law_rows(scaling: Scaling) -> list[tuple[str, ...]]:
    """One row of text per law under `LAWS`, best first; only the best has its parameters with intervals."""
    rows: list[tuple[str, ...]] = []
    for place, one in enumerate(scaling.candidates):
        law, x = one.fit.law, one.fit.coefficients
        shown = (
            [(kind, Measured(kind.of(x))) for kind in law.parameters]
            if place
            else scaling.parameters
        )
        rows.append(
            (
                law.name,
                f"{100 * one.weight:.0f} %",
                f"{one.aicc - scaling.best.aicc:.1f}",
                percent(one.fit.misfit).removeprefix("+"),
                percent(one.leave_out_error),
                "  ".join(parameter(kind, estimate) for kind, estimate in shown),
            )
        )
    return rows


def advice(scaling: Scaling) -> str:
    """Knee, largest N worth running and fastest N."""
    found = scaling.advice
    assert found is not None
    level = f"{100 * found.efficiency:.0f} % or more"
    return (
        f"knee {count_text(found.knee)}, largest N at an efficiency of {level} "
        f"{count_text(found.worth)}, fastest {count_text(found.fastest)} (measured up to "
        f"{scaling.best.fit.counts[-1]:.0f})"
    )


def parameter(kind: Parameter, estimate: Measured) -> str:
    """`c 241 µs [238, 244]`, `s 0.00695 [0.0062, 0.0077]`."""
    if kind.unit == "s" and 0 < estimate.value < math.inf:
        number, word = seconds(estimate.value).split()
        factor = float(number.replace(",", "")) / estimate.value
        unit = f" {word}"
    elif kind.unit == "B/s" and estimate.value < math.inf:
        factor, unit = next(
            (1 / size, f" {name}")
            for size, name in ((1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s"), (1, "B/s"))
            if estimate.value >= size or size == 1
        )
    elif kind.unit == "B/s":
        low = (
            f", above {digits(estimate.low / 1e6)} MB/s"
            if math.isfinite(estimate.low)
            else ""
        )
        return f"{kind.name} not seen{low}"
    else:
        factor, unit = 1.0, ""
    text = f"{kind.name} {_number(estimate.value * factor)}{unit}"
    if math.isnan(estimate.low):
        return text
    return (
        f"{text} [{_number(estimate.low * factor)}, {_number(estimate.high * factor)}]"
    )


def as_values(scaling: Scaling) -> dict[str, Any]:
    """A law as JSON values: numbers in SI units, null for missing ones."""
    series = scaling.series
    values: dict[str, Any] = {
        "execution": series.key.execution,
        "engine": series.key.engine,
        "strategy": series.key.label,
        "scaling": "weak" if series.weak else "strong",
        "batch_policy": series.batch_policy,
        "batch": series.batch,
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
                "name": kind.name,
                "meaning": kind.meaning,
                "unit": kind.unit,
                **{
                    name: _finite(end)
                    for name, end in estimate.named("value", "low", "high").items()
                },
            }
            for kind, estimate in scaling.parameters
        ],
        "laws": [_candidate_values(one) for one in scaling.candidates],
        "knee": _count_values(advice.knee),
        "worth": {
            "efficiency": advice.efficiency,
            "base": SERIAL if series.base else "own law",
            **_count_values(advice.worth),
        },
        "fastest": {
            name: value
            for name, value in _count_values(advice.fastest).items()
            if name not in ("low", "high")
        },
        "followed_up_to": advice.limit,
    }


def _candidate_values(one: Candidate) -> dict[str, Any]:
    return {
        "law": one.fit.law.name,
        "aicc": one.aicc,
        "weight": one.weight,
        "misfit": one.fit.misfit,
        "leave_out_error": one.leave_out_error,
        "parameters": {
            each.name: _finite(each.of(one.fit.coefficients))
            for each in one.fit.law.parameters
        },
    }


def count_text(count: Count) -> str:
    """`28 (28.3 [23.1, 36.4])`: integer, number and interval; `146 (at least 79.0)` without upper end.

    `beyond the data` for a number beyond the data without an interval, `beyond 898 (at
    least 53.2)` at the end of the search, `none` where no worker count is worth
    running.
    """
    if not count.workers:
        return "none"
    # A number without an interval, beyond all data, would look like a result.
    if count.is_guessed:
        return "beyond the data"
    named = f"beyond {count.workers:,}" if count.reaches_end else f"{count.workers:,}"
    at, low, high = count.at[:3]
    if math.isnan(low):
        return named
    exact = (
        "" if count.reaches_end or digits(at) == f"{count.workers:,}" else digits(at)
    )
    if math.isinf(high):
        return f"{named} ({exact}{', ' if exact else ''}at least {digits(low)})"
    interval = f"[{digits(low)}, {digits(high)}]"
    return f"{named} ({exact} {interval})" if exact else f"{named} {interval}"


def write_extrap(found: Sequence[Series], file: Path) -> list[Path]:
    """Write the fitted runs of `found` (see `Series.refusal`) to `file`; returns the files written.

    One file per execution, engine and set of worker counts: `file` itself if there is
    one only, else `file` with these in its name, because Extra-P would fit one model
    over all of them.

    Raises:
        ResultsError: there is nothing to write, or the file cannot be written.
    """
    groups: dict[tuple[str, str, tuple[int, ...]], list[Series]] = {}
    for series in found:
        if not series.refusal:
            counts = tuple(int(count) for count in series.counts)
            groups.setdefault(
                (series.key.execution, series.key.engine, counts), []
            ).append(series)
    if not groups:
        raise ResultsError(
            f"nothing to export to Extra-P: no strategy ran at {FEWEST_COUNTS} worker counts"
        )
    files = []
    for (execution, engine, counts), members in groups.items():
        name = execution if execution == engine else f"{execution}-{engine}"
        others = [key for key in groups if key[:2] == (execution, engine)]
        # Names stay short where the counts tell nothing apart.
        points = f"-at-{'-'.join(map(str, counts))}" if len(others) > 1 else ""
        target = (
            file
            if len(groups) == 1
            else file.with_name(slug(f"{file.stem}-{name}{points}") + file.suffix)
        )
        with writing(target, "give another file to --extrap"):
            target.write_text("".join(_extrap_lines(members)), encoding="utf-8")
        files.append(target)
    return files


def _count_values(count: Count) -> dict[str, Any]:
    return {
        "workers": count.workers,
        **{
            name: _finite(end)
            for name, end in count.at.named("at", "low", "high").items()
        },
        "search_ended_here": count.reaches_end,
        "beyond_the_data": count.workers > count.measured,
    }


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _number(value: float) -> str:
    if not math.isfinite(value):
        return "∞" if value > 0 else EMPTY
    # Contention and crosstalk are small numbers whose digits matter.
    return f"{value:.2e}" if 0 < abs(value) < 1e-3 else digits(value)


def _extrap_lines(members: Sequence[Series]) -> list[str]:
    return [
        json.dumps(
            {
                "params": {"workers": int(count)},
                "callpath": series.name.replace(
                    "->", "-"
                ),  # Extra-P reads -> as a call
                "metric": metric,
                "value": (factor * series.seconds[series.at == count]).tolist(),
            }
        )
        + "\n"
        for series in members
        for count in series.counts
        for metric, factor in (("train_s", 1.0), ("worker_s", count))
    ]
