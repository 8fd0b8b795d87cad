"""How often the 95 % intervals of scaling laws hold the truth, by simulation: the table of docs/scaling-laws.md.

    python -m benchmarks.laws_coverage [--studies 200]

Each study draws times around one of ten known laws (tests/law_factory.py), four of them of weak scaling, fits all laws,
and lets AICc choose: that the wrong one may be chosen is part of what is covered. Takes some minutes.
"""

from __future__ import annotations

import argparse
import math
from collections import defaultdict
from typing import NamedTuple

import numpy as np

from scalebench.analysis.laws.advice import advise
from scalebench.analysis.laws.bands import curve, parameter_interval
from scalebench.analysis.laws.choosing import Candidate, candidates
from scalebench.analysis.laws.fitting import fit
from scalebench.analysis.laws.forms import laws_for
from tests.law_factory import TRUTHS, WEAK_TRUTHS, Noise, following, law_named, workload

SPREAD = 0.03
DESIGNS = ((5, 3), (7, 3), (7, 5))
KINDS: tuple[Noise, ...] = ("lognormal", "drift", "outliers")


class Coverage(NamedTuple):
    """Shares of the intervals that held the truth, and how wide they typically are.

    Widths are medians of upper / lower limit, those of parameters of (upper - lower limit) / truth.
    """

    curve: float  # at the measured worker counts, mean over them
    beyond: float  # the curve at twice the largest
    parameters: float  # of the true law
    knee: float
    worth: float
    chosen: float  # how often AICc chose the true law
    curve_width: float
    beyond_width: float
    parameters_width: float
    knee_width: float  # infinite where the band does not come back from one half in what is looked at
    worth_width: float


def coverage(truth: str, counts: int, repetitions: int, kind: Noise, studies: int, *, advice: bool = True) -> Coverage:
    """Simulate `studies` studies of `truth` at 1, 2, 4 ... workers, `counts` of them."""
    name, coefficients, every = (TRUTHS | WEAK_TRUTHS)[truth]
    weak = truth in WEAK_TRUTHS
    measured = [2**power for power in range(counts)]
    load = workload(measured, every=every, weak=weak)
    law, x = law_named(name, load), np.array(coefficients)
    at = np.array([*measured, 2 * measured[-1]], dtype=float)
    true = np.exp(law.log_seconds(at, x))
    exact = following(law, x, measured, load=load, weak=weak)
    best = advise([Candidate(fit(law, exact), exact, 0.0, 1.0)], exact, 0.5)
    laws = laws_for(exact)[0]
    random = np.random.default_rng([counts, repetitions, len(truth), KINDS.index(kind)])
    hits: dict[str, list[float]] = defaultdict(list)
    for _ in range(studies):
        series = following(
            law, x, measured, repetitions=repetitions, load=load, noise=SPREAD, kind=kind, random=random, weak=weak
        )
        found, _ = candidates(laws, series)
        band = curve(found, series, at)
        held = (band.low <= true) & (true <= band.high)
        hits["curve"].append(float(held[:-1].mean()))
        hits["beyond"].append(float(held[-1]))
        width = band.high / band.low
        hits["curve_width"].append(float(np.median(width[:-1])))
        hits["beyond_width"].append(float(width[-1]))
        hits["chosen"].append(float(found[0].fit.law.name == law.name))
        if not advice:
            continue
        own = next(one.fit for one in found if one.fit.law.name == law.name)
        for parameter in law.parameters:
            low, high = parameter_interval(own, series, parameter)
            hits["parameters"].append(float(low <= parameter.of(x) <= high))
            hits["parameters_width"].append((high - low) / parameter.of(x))
        told = advise(found, series, 0.5)
        hits["knee"].append(float(told.knee.low - 0.5 <= best.knee.workers <= told.knee.high + 0.5))
        hits["worth"].append(float(told.worth.low - 1 <= best.worth.workers <= told.worth.high + 1))
        hits["knee_width"].append(told.knee.high / told.knee.low)
        hits["worth_width"].append(told.worth.high / told.worth.low)
    return Coverage(*(_typical(name, hits[name]) for name in Coverage._fields))


def _typical(name: str, of: list[float]) -> float:
    if not of:
        return math.nan
    return float(np.median(of) if name.endswith("width") else np.mean(of))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--studies", type=int, default=200, help="simulated studies for each law, noise and design")
    studies = parser.parse_args().studies
    heads = ("counts x repetitions", "noise", "curve (lowest law)", "twice beyond (lowest law)", "parameters")
    print(f"| {' | '.join((*heads, 'knee', 'worth running', 'true law chosen'))} |")
    print("|---|---|---:|---:|---:|---:|---:|---:|")
    for counts, repetitions in DESIGNS:
        for kind in KINDS:
            of = [coverage(truth, counts, repetitions, kind, studies) for truth in (*TRUTHS, *WEAK_TRUTHS)]
            mean = Coverage(*np.mean(of, axis=0))
            least = Coverage(*np.min(of, axis=0))
            print(
                f"| {counts} x {repetitions} | {kind} | {100 * mean.curve:.1f} % ({100 * least.curve:.0f} %) "
                f"| {100 * mean.beyond:.1f} % ({100 * least.beyond:.0f} %) | {100 * mean.parameters:.1f} % "
                f"| {100 * mean.knee:.1f} % | {100 * mean.worth:.1f} % | {100 * mean.chosen:.0f} % |",
                flush=True,
            )


if __name__ == "__main__":
    main()
