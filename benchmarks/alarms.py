"""How often tests and warnings raise an alarm where there is nothing to find, by simulation.

    python -m benchmarks.alarms [--studies 20000]

Prints the last tables of docs/statistics.md, made like those of benchmarks/coverage.py.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from benchmarks.coverage import Claim, table
from benchmarks.noise import Array, Noise, Random
from scalebench.analysis.pairing import (
    holm,
    rank_sum_test,
    signed_rank_test,
    time_trend,
    two_groups_p,
)
from scalebench.analysis.rounds import CellRuns
from scalebench.study.cell import Cell


def drift_alarm(noise: Noise, n: int, studies: int, random: Random) -> float:
    """How often a study of ten cells that stand still is said to drift at 5 %."""
    alarms = []
    for _ in range(studies // 4):
        order = np.array([block * 10 + random.permutation(10) for block in range(n)])
        cells = [
            _cell(np.exp(noise.draw(random, n)), order[:, index]) for index in range(10)
        ]
        found = time_trend(cells)
        alarms.append(found is not None and found.p <= 0.05)
    return float(np.mean(alarms))


def _cell(seconds: Array, order: NDArray[np.int64]) -> CellRuns:
    return CellRuns(
        Cell("native", "mpi", "", 1), strategy="", weak=False, batch_policy="per_worker",
        metric_name="", seconds=dict(enumerate(seconds.tolist())), order=dict(enumerate(order.tolist())),
    )  # fmt: skip


def paired_test_alarm(noise: Noise, n: int, studies: int, random: Random) -> float:
    """How often any of four worker counts is called different at 5 % by Holm, where none is; by rounds."""
    return _family_alarm(lambda: signed_rank_test(*_two(noise, n, random)).p, studies)


def independent_test_alarm(noise: Noise, n: int, studies: int, random: Random) -> float:
    """The same for independent samples."""
    return _family_alarm(lambda: rank_sum_test(*_two(noise, n, random)).p, studies)


def _two(noise: Noise, n: int, random: Random) -> tuple[list[float], list[float]]:
    return np.exp(noise.draw(random, n)).tolist(), np.exp(
        noise.draw(random, n)
    ).tolist()


def _family_alarm(p: Callable[[], float], studies: int) -> float:
    return float(
        np.mean(
            [min(holm([p() for _ in range(4)])) <= 0.05 for _ in range(studies // 4)]
        )
    )


ALARMS = (
    Claim("drift, ten cells", drift_alarm, (3, 5)),
    Claim("signed-rank, Holm of 4", paired_test_alarm, (8, 10)),
    Claim("rank-sum, Holm of 4", independent_test_alarm, (5, 8)),
)
GROUPS: dict[str, Callable[[Random, tuple[int, int]], Array]] = {
    "normal": lambda random, shape: random.normal(size=shape),
    "uniform": lambda random, shape: random.random(shape),
    "exponential": lambda random, shape: random.exponential(size=shape),
    "Laplace": lambda random, shape: random.laplace(size=shape),
    "Student t(3)": lambda random, shape: random.standard_t(3, shape),
    "two states 20 % apart": lambda random, shape: (
        random.normal(0, 0.03, shape) + math.log(1.2) * (random.random(shape) < 0.5)
    ),
    "two states 30 % apart": lambda random, shape: (
        random.normal(0, 0.03, shape) + math.log(1.3) * (random.random(shape) < 0.5)
    ),
}


def taken_for_two(shape: str, n: int, studies: int) -> float:
    """How often `n` values on logs of this shape are taken for two groups at 5 %."""
    values = GROUPS[shape](np.random.default_rng(n), (studies, n))
    return float(
        np.mean([two_groups_p(np.exp(own).tolist()) <= 0.05 for own in values])
    )


def table_of_groups(studies: int, numbers: tuple[int, ...] = (5, 8, 10, 20)) -> str:
    lines = [
        f"| | {' | '.join(f'n = {n}' for n in numbers)} |",
        f"|---|{'---:|' * len(numbers)}",
    ]
    for shape in GROUPS:
        lines.append(
            f"| {shape} | {' | '.join(f'{100 * taken_for_two(shape, n, studies):.1f}' for n in numbers)} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--studies", type=int, default=20_000, help="simulated studies for each entry"
    )
    studies = parser.parse_args().studies
    print(f"False alarms (%)\n\n{table(ALARMS, studies)}\n", flush=True)
    print(
        f"Taken for two groups (%); one group but for the last two\n\n{table_of_groups(studies // 4)}"
    )


if __name__ == "__main__":
    main()
