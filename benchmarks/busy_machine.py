"""The default study on a quiet machine and beside busy programs, and the error of what is calibrated beside these.

    python benchmarks/busy_machine.py [--busy 0 2 8] [--repeats 3] [--keep FOLDER]

First virtual times: the default study is simulated with everything measured afresh,
steps and engines, beside so many processes that never sleep. Of each study the log of
virtual times over those of the quiet machine has a mean, the factor common to all its
times, and a deviation of its strategies from this mean: what times and savings that
were calibrated beside programs have as their error (`analysis/native_check.py`).

Then `scalebench run --workers 1..64` as a user runs it, with data sets and engine costs
of the quiet machine cached. Goals: 60 s on quiet cores, 180 s beside 8 processes,
equally many rows, and savings at 64 workers within 3 points of one another.
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
from default_study import SCALEBENCH, usage_of
from ratios import Finding, Goal, finding, show
from reproducibility import company

LIMITS_S = {0: 60.0, 8: 180.0}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--busy", type=int, nargs="+", default=[0, 2, 8])
    parser.add_argument("--repeats", type=int, default=3, help="of each simulation")
    parser.add_argument(
        "--keep",
        type=Path,
        help="folder for the simulations; those that are there are not repeated",
    )
    wanted = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="scalebench-benchmark-") as scratch:
        show_errors(wanted.keep or Path(scratch), wanted.busy, wanted.repeats)
    show(studies(wanted.busy))


def show_errors(folder: Path, busy: list[int], repeats: int) -> None:
    """Print the errors of virtual times beside busy programs against the mean of those of the quiet machine."""
    quiet: pd.Series[float] | None = None
    for processes in busy:
        logs, marks = zip(
            *(simulated(folder, processes, number) for number in range(repeats)),
            strict=True,
        )
        if quiet is None:
            quiet = sum(logs) / len(logs)
        variances, freedom = [], 0
        for number, (own, mark) in enumerate(zip(logs, marks, strict=True)):
            error = own - quiet
            common = float(error.mean())
            of_strategies = error.groupby("label").mean() - common
            within = error - error.groupby("label").transform("mean")
            variances.append(
                float((of_strategies**2).sum()) / (len(of_strategies) - 1)
                + float(within.var())
            )
            freedom += len(of_strategies) - 1
            words = " ".join(
                f"{label} {value:+.3f}" for label, value in of_strategies.items()
            )
            print(
                f"beside {processes}, {number}, {mark}: common {common:+.3f}; {words}; within {within.std():.3f}"
            )
        print(
            f"beside {processes}: deviation {math.sqrt(np.mean(variances)):.3f}, {freedom} degrees",
            flush=True,
        )


def simulated(
    folder: Path, processes: int, number: int
) -> tuple[pd.Series[float], str]:
    """Return the log of each cell's virtual time, and whether it was calibrated quietly, of a study of its own."""
    output = folder / f"beside-{processes}-{number}"
    if not output.exists():
        command = [
            *SCALEBENCH,
            "run",
            "--workers",
            "1..64",
            "--execution",
            "virtual",
            "--output",
            str(output),
        ]
        with (
            company(processes),
            tempfile.TemporaryDirectory(prefix="scalebench-benchmark-") as cache,
        ):
            subprocess.run(
                command,
                check=True,
                env=os.environ | {"XDG_CACHE_HOME": cache},
                stdout=subprocess.DEVNULL,
            )
    from scalebench.analysis import load

    runs = load(next(path for path in output.iterdir() if path.is_dir())).completed
    logs = (
        np.log(runs.set_index(["label", "workers"])["train_s"].astype(float))
        .groupby(level=[0, 1])
        .mean()
    )
    return logs, "/".join(sorted(runs["calibration"].dropna().unique()))


def studies(busy: list[int]) -> Iterator[Finding]:
    from scalebench.analysis import load, ratios

    savings: dict[int, float] = {}
    for processes in busy:
        with tempfile.TemporaryDirectory(prefix="scalebench-benchmark-") as folder:
            with company(processes):
                usage = usage_of(
                    [*SCALEBENCH, "run", "--workers", "1..64", "--output", folder],
                    codes=(0, 3),
                )
            for moment, line in usage.phases:
                print(f"  {moment:6.1f} s  {line}", file=sys.stderr)
            results = load(
                next(path for path in Path(folder).iterdir() if path.is_dir())
            )
        where = f"beside {processes} busy processes" if processes else "quiet cores"
        goal = Goal("<=", LIMITS_S[processes], "s") if processes in LIMITS_S else None
        yield finding(
            f"default study, {where}",
            usage.wall_s,
            goal,
            f"{usage.wall_s:.0f} s",
            f"{usage.cpu_s:.0f} s CPU",
        )
        yield finding(
            f"rows, {where}",
            len(results.runs),
            Goal(">=", 141),
            f"{len(results.runs)} rows",
        )
        table = ratios(results)
        largest = table[(table["execution"] == "virtual") & (table["workers"] == 64)]
        largest = largest[
            (largest["baseline"] == "allreduce") & (largest["label"] == "epoch_average")
        ]
        savings[processes] = 100 * float(largest["reduction"].iloc[0])
        apart = max(savings.values()) - min(savings.values())
        said = f"{savings[processes]:.1f} %"
        yield finding(
            f"saving at 64 workers, {where}", apart, Goal("<=", 3, "points"), said
        )


if __name__ == "__main__":
    main()
