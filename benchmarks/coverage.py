"""How often each interval holds what it is about, by simulation.

    python -m benchmarks.coverage [--studies 20000]

Prints the tables of docs/statistics.md. An entry is a simulation of so many studies,
with a fixed seed, through the functions that results go through; 20,000 of them leave a
standard error of 0.15 percentage points. Takes ten minutes. False alarms of tests are
in benchmarks/alarms.py, the bands of scaling laws in benchmarks/laws_coverage.py.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from functools import partial

import numpy as np

from benchmarks import scenes
from benchmarks.noise import NOISES, Noise
from benchmarks.scenes import Wrong

OTHER, ALIKE, THREE = "horovod", Wrong(engine=0.0), Wrong(checks=(("mpi", 3),))


@dataclass(frozen=True)
class Claim:
    """A line of a table: what is offered, and the numbers of values at which it is tried, from the smallest offered."""

    name: str
    scene: scenes.Scene
    numbers: tuple[int, ...]


INTERVALS = (
    Claim("time: mean, t", scenes.time_mean, (2, 3, 5, 10, 20)),
    Claim("time: median", scenes.time_median, (6, 10, 20)),
    Claim("time: bootstrap", scenes.time_bootstrap, (20,)),
    Claim("ratio by round: mean, t", scenes.ratio_paired, (2, 3, 5, 10)),
    Claim("ratio by round: median", scenes.ratio_median, (6, 10, 20)),
    Claim("ratio by round: bootstrap", scenes.ratio_bootstrap, (20,)),
    Claim("ratio, independent: Welch", scenes.ratio_independent, (2, 3, 5, 10)),
    Claim("the same, spread 3 to 1", scenes.ratio_unequal, (2, 3, 5, 10)),
    Claim(
        "the same, n and n + 2 runs",
        partial(scenes.ratio_independent, more=2),
        (2, 3, 5, 10),
    ),
    Claim("both", partial(scenes.ratio_unequal, more=2), (2, 3, 5, 10)),
    Claim("virtual time: calibration", scenes.virtual_time, (2, 3, 5, 20)),
    Claim("virtual ratio: calibration", scenes.virtual_ratio, (2, 3, 5, 20)),
    Claim(
        "virtual time: native 1 %",
        partial(scenes.virtual_time_of_its_own, wrong=Wrong(native=0.01)),
        (2, 3, 5),
    ),
    Claim(
        "virtual time: native 3 %",
        partial(scenes.virtual_time_of_its_own, wrong=Wrong(native=0.03)),
        (2, 3, 5),
    ),
    Claim(
        "virtual time: native 8 %",
        partial(scenes.virtual_time_of_its_own, wrong=Wrong(native=0.08)),
        (2, 3, 5),
    ),
    Claim("virtual time: whole error", scenes.virtual_time_checked, (2, 3, 5)),
    Claim(
        "the same, of two checks",
        partial(scenes.virtual_time_checked, checks=2),
        (2, 3, 5),
    ),
    Claim(
        "virtual ratio: native 1 %",
        partial(scenes.virtual_ratio_checked, wrong=Wrong(native=0.01)),
        (2, 3, 5),
    ),
    Claim(
        "virtual ratio: native 3 %",
        partial(scenes.virtual_ratio_checked, wrong=Wrong(native=0.03)),
        (2, 3, 5),
    ),
    Claim(
        "virtual ratio: native 8 %",
        partial(scenes.virtual_ratio_checked, wrong=Wrong(native=0.08)),
        (2, 3, 5),
    ),
    Claim(
        "the same, of three checks",
        partial(scenes.virtual_ratio_checked, wrong=THREE),
        (2, 3, 5),
    ),
    Claim("virtual / native", scenes.agreement_ratio, (2, 3, 5)),
    Claim("ratio of two calibrations", scenes.ratio_calibrations, (2, 3, 5)),
    Claim("metric: mean, t", scenes.metric_mean, (3, 5, 10)),
    Claim("metric: difference by seed", scenes.metric_difference, (3, 5, 10)),
    Claim("metric: independent, Welch", scenes.metric_independent, (3, 5, 10)),
)
UNTIL = (
    Claim("time, noise 0.5 %", partial(scenes.time_until, times=0.1), (3, 5)),
    Claim("time, noise 1 %", partial(scenes.time_until, times=0.2), (3, 5)),
    Claim("time, noise 2.5 %", partial(scenes.time_until, times=0.5), (3, 5)),
    Claim("time, noise 5 %", partial(scenes.time_until, times=1.0), (3, 5)),
    Claim("its median, noise 5 %", scenes.median_until, (3, 5)),
    Claim("ratio by round", scenes.ratio_until, (3, 5)),
    Claim("ratio, independent", scenes.independent_until, (3, 5)),
    Claim(
        "virtual time, blocks 5 %",
        partial(scenes.virtual_time_until, times=1.0),
        (3, 5),
    ),
    Claim(
        "virtual time, blocks 15 %",
        partial(scenes.virtual_time_until, times=3.0),
        (3, 5),
    ),
)
BESIDE = (
    Claim("time: t as mean of all runs", scenes.time_mean_of_all, (3, 5, 10, 20)),
    Claim(
        "never narrow: time, noise 15 %", partial(scenes.time_until, times=3.0), (3, 5)
    ),
    Claim(
        "virtual ratio: engines differ",
        partial(scenes.virtual_ratio_checked, wrong=Wrong(), other=OTHER),
        (2, 5),
    ),
    Claim(
        "virtual ratio: engines alike",
        partial(scenes.virtual_ratio_checked, wrong=ALIKE, other=OTHER),
        (2, 5),
    ),
    Claim(
        "virtual ratio: wrong by 5 %",
        partial(scenes.virtual_ratio_checked, wrong=Wrong(0, 0, 0.05, 0.08)),
        (2, 5),
    ),
    Claim(
        "virtual ratio: wrong by 1 %",
        partial(scenes.virtual_ratio_checked, wrong=Wrong(0, 0, 0.01, 0.08)),
        (2, 5),
    ),
    Claim(
        "virtual time: engines differ",
        partial(scenes.virtual_time_of_its_own, wrong=Wrong(), other=OTHER),
        (2, 5),
    ),
    Claim(
        "virtual time: wrong by 1 %",
        partial(scenes.virtual_time_checked, wrong=0.01),
        (2, 3, 5),
    ),
)


def share(claim: Claim, noise: Noise, n: int, studies: int) -> float:
    """One entry; its seed is its own, whatever else is simulated."""
    seed = [sum(map(ord, claim.name)), NOISES.index(noise), n]
    return claim.scene(noise, n, studies, np.random.default_rng(seed))


def table(claims: tuple[Claim, ...], studies: int) -> str:
    """Markdown, in percent."""
    lines = [
        f"| | n | {' | '.join(noise.name for noise in NOISES)} |",
        f"|---|---:|{'---:|' * len(NOISES)}",
    ]
    for claim in claims:
        for n in claim.numbers:
            entries = " | ".join(
                f"{100 * share(claim, noise, n, studies):.1f}" for noise in NOISES
            )
            lines.append(
                f"| {claim.name if n == claim.numbers[0] else ''} | {n} | {entries} |"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--studies", type=int, default=20_000, help="simulated studies for each entry"
    )
    studies = parser.parse_args().studies
    for title, claims in (
        ("Coverage", INTERVALS),
        ("With `until`", UNTIL),
        ("Beside the point", BESIDE),
    ):
        print(f"{title} (%)\n\n{table(claims, studies)}\n", flush=True)


if __name__ == "__main__":
    main()
