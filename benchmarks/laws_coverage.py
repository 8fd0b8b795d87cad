"""How often the 95 % intervals of scaling laws hold the truth, by simulation: the table of docs/scaling-laws.md.

    python -m benchmarks.laws_coverage [--studies 500] [--counts 5]

Each study draws times around one of ten known laws (tests/law_factory.py), four of them
of weak scaling, fits all laws, and lets AICc choose: that the wrong one may be chosen
is part of what is covered. Takes some ten minutes.
"""

from __future__ import annotations

import argparse
import math
from collections import defaultdict
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from scalebench.analysis.laws.bands import curve, parameter_interval, reach
from scalebench.analysis.laws.candidates import (
    Array,
    Candidate,
    Law,
    candidates,
    fit,
    laws_for,
)
from scalebench.analysis.laws.worker_counts import STEP, advise
from tests.law_factory import TRUTHS, WEAK_TRUTHS, Noise, following, law_named, workload

SPREAD = 0.03
DESIGNS = ((5, 3), (6, 3), (7, 3), (7, 5))
NOISES: tuple[tuple[Noise, float], ...] = (
    ("lognormal", SPREAD),
    ("lognormal", 0.1),
    ("drift", SPREAD),
    ("outliers", SPREAD),
)
ALL = TRUTHS | WEAK_TRUTHS
LOSSES = (
    1.0,
    4.0,
)  # of knee and worth: most of them lie within five counts only where more is lost


class Coverage(NamedTuple):
    """Shares of the intervals that held the truth, and how wide they typically are.

    Widths are medians of upper / lower limit, those of parameters of (upper - lower
    limit) / truth.
    """

    curve: float  # at the measured worker counts, mean over them
    beyond: float  # the curve at twice the largest, NaN where that is not offered
    parameters: float  # of the true law
    # NaN where it lies below two workers or beyond the band, as at its end nothing can
    # be missed
    knee: float
    worth: float
    chosen: float  # how often AICc chose the true law
    curve_width: float
    beyond_width: float
    parameters_width: float
    # infinite where the band does not come back from one half in what is looked at
    knee_width: float
    worth_width: float


def coverage(
    truth: str,
    counts: int,
    repetitions: int,
    kind: Noise,
    studies: int,
    *,
    spread: float = SPREAD,
    losses: float = 1.0,
    advice: bool = True,
) -> Coverage:
    """Simulate `studies` studies of `truth`, `losses` times its own, at 1, 2, 4 ... workers, `counts` of them."""
    name, coefficients, every = ALL[truth]
    weak = truth in WEAK_TRUTHS
    measured = [2**power for power in range(counts)]
    load = workload(measured, every=every, weak=weak)
    law, x = (
        _remembering(law_named(name, load)),
        np.array(coefficients) * [1, *[losses] * (len(coefficients) - 1)],
    )
    at = np.array([*measured, 2 * measured[-1]], dtype=float)
    true = np.exp(law.log_seconds(at, x))
    exact = following(law, x, measured, load=load, weak=weak)
    best = advise([Candidate(fit(law, exact), exact, 0.0, 1.0)], exact, 0.5)
    laws = [_remembering(one) for one in laws_for(exact)[0]]
    random = np.random.default_rng(
        [
            counts,
            repetitions,
            list(ALL).index(truth),
            NOISES.index((kind, spread)),
            int(losses),
        ]
    )
    hits: dict[str, list[float]] = defaultdict(list)
    for _ in range(studies):
        series = following(
            law,
            x,
            measured,
            repetitions=repetitions,
            load=load,
            noise=spread,
            kind=kind,
            random=random,
            weak=weak,
        )
        found, _ = candidates(laws, series)
        band = curve(found, series, at)
        held = (band.low <= true) & (true <= band.high)
        width = band.high / band.low
        hits["curve"].append(float(held[:-1].mean()))
        hits["curve_width"].append(float(np.median(width[:-1])))
        if at[-1] <= reach(series):
            hits["beyond"].append(float(held[-1]))
            hits["beyond_width"].append(float(width[-1]))
        hits["chosen"].append(float(found[0].fit.law.name == law.name))
        if not advice:
            continue
        own = next(one.fit for one in found if one.fit.law.name == law.name)
        for parameter in law.parameters:
            low, high = parameter_interval(own, series, parameter)[1:3]
            hits["parameters"].append(float(low <= parameter.of(x) <= high))
            hits["parameters_width"].append((high - low) / parameter.of(x))
        told = advise(found, series, 0.5)
        for what, count, true_at in (
            ("knee", told.knee, best.knee.at.value),
            ("worth", told.worth, best.worth.at.value),
        ):
            if 2 <= true_at <= reach(series) / STEP:
                hits[what].append(float(count.at.low <= true_at <= count.at.high))
                hits[f"{what}_width"].append(count.at.high / count.at.low)
    return Coverage(*(_typical(name, hits[name]) for name in Coverage._fields))


def _remembering(law: Law) -> Law:
    """The same law, which works out its columns once for each set of worker counts: a simulation asks for few."""
    known: dict[bytes, Array] = {}

    def columns(n: Array) -> Array:
        key = n.tobytes()
        if key not in known:
            known[key] = law.columns(n)
        return known[key]

    return replace(law, columns=columns)


def _typical(name: str, of: list[float]) -> float:
    if not of:
        return math.nan
    return float(np.median(of) if name.endswith("width") else np.mean(of))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--studies",
        type=int,
        default=500,
        help="simulated studies for each law, noise and design",
    )
    parser.add_argument(
        "--counts", type=int, help="only the designs of so many worker counts"
    )
    wanted = parser.parse_args()
    heads = (
        "counts x repetitions",
        "noise",
        "curve",
        "one doubling beyond",
        "parameters",
        "knee",
        "worth",
        "chosen",
    )
    print(f"| {' | '.join(heads)} |")
    print("|---|---|---:|---:|---:|---:|---:|---:|")
    for counts, repetitions in DESIGNS:
        for kind, spread in NOISES:
            if wanted.counts in (None, counts):
                of, more = (
                    [
                        coverage(
                            one,
                            counts,
                            repetitions,
                            kind,
                            wanted.studies,
                            spread=spread,
                            losses=by,
                        )
                        for one in ALL
                    ]
                    for by in LOSSES
                )
                shares = [
                    _shares([getattr(one, name) for one in of])
                    for name in Coverage._fields[:3]
                ]
                shares += [
                    _shares([getattr(one, name) for one in [*of, *more]])
                    for name in Coverage._fields[3:5]
                ]
                chosen = 100 * np.mean([one.chosen for one in of])
                noise = f"{kind}, {100 * spread:.0f} %"
                print(
                    f"| {counts} x {repetitions} | {noise} | {' | '.join(shares)} | {chosen:.0f} % |",
                    flush=True,
                )


def _shares(of: list[float]) -> str:
    """Mean over the laws, and in brackets the law of the lowest and the one of the highest."""
    of = [one for one in of if not math.isnan(one)]
    if not of:
        return "not offered"
    return f"{100 * np.mean(of):.1f} ({100 * min(of):.0f}-{100 * max(of):.0f})"


if __name__ == "__main__":
    main()
