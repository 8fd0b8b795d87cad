"""Whether the default study gives the same answer again, on a quiet machine and beside busy programs.

    python benchmarks/reproducibility.py [--runs 5] [--keep FOLDER]

Runs the default study several times in a row, each into a folder of its own; the second
and the fourth beside two processes that never sleep. Goals: speedups at every count and
virtual times in units of the study's own serial step within 10 % of the median of all
runs, the saving at the largest count within 5 points, its interval at most +-10 points
on the quiet runs and never holding zero there, virtual against native times within 10 %
in each quiet cell and 15 % in oversubscribed ones, at the machine speed of each run.
Engine costs are measured by the first run and then cached, as for any user; `--fresh`
measures them in each.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pandas as pd
from default_study import SCALEBENCH

BUSY_RUNS, BUSY = (1, 3), 2  # which of the runs have company, and how many processes
_KEY = ["label", "workers"]


@contextmanager
def company(processes: int) -> Iterator[None]:
    """So many processes that never sleep."""
    busy = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"])
        for _ in range(processes)
    ]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument(
        "--keep",
        type=Path,
        help="folder for the results; runs that are there are not repeated",
    )
    parser.add_argument(
        "--fresh", action="store_true", help="measure engine costs in each run"
    )
    wanted = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="scalebench-reproducibility-") as scratch:
        folder = wanted.keep or Path(scratch)
        found = []
        for number in range(wanted.runs):
            output = folder / f"run-{number}"
            environment = dict(os.environ)
            if wanted.fresh:
                environment["XDG_CACHE_HOME"] = str(folder / f"cache-{number}")
            if not output.exists():
                began = time.perf_counter()
                with company(BUSY if number in BUSY_RUNS else 0):
                    command = [
                        *SCALEBENCH,
                        "-q",
                        "run",
                        "--workers",
                        "1..64",
                        "--output",
                        str(output),
                    ]
                    subprocess.run(
                        command, check=True, env=environment, stdout=subprocess.DEVNULL
                    )
                print(f"run {number}: {time.perf_counter() - began:.0f} s", flush=True)
            found.append(output)
        show(found)


def show(outputs: list[Path]) -> None:
    """Print the largest deviations of the runs in `outputs` from their medians."""
    from scalebench.analysis import agreement, cells, load, ratios, virtual_error

    studies = [
        load(next(path for path in output.iterdir() if path.is_dir()))
        for output in outputs
    ]
    speedups, times, savings, errors = [], [], [], []
    for number, results in enumerate(studies):
        table = cells(results).query("execution == 'virtual'").set_index(_KEY)
        serial = float(table.loc[("serial", 1), "train_s"])
        compared = ratios(results).query("execution == 'virtual'")
        speedups.append(
            compared[compared["baseline"] == "serial"].set_index(_KEY)["speedup"]
        )
        times.append(table["train_s"] / serial)
        largest = compared[
            (compared["baseline"] == "allreduce")
            & (compared["workers"] == compared["workers"].max())
        ]
        savings.append(
            largest.set_index("label")[["reduction", "reduction_low", "reduction_high"]]
        )
        checked = agreement(results)
        checked["error"] = np.log(checked["ratio_at_speed"].astype(float))
        errors.append(checked.set_index(_KEY)[["error", "oversubscribed"]])
        busy = " (beside 2 busy processes)" if number in BUSY_RUNS else ""
        error = virtual_error(results)
        print(f"\nrun {number}{busy}: virtual-native error {error}")
        print((100 * savings[-1]).round(1).to_string())
        print((100 * errors[-1]["error"].astype(float)).round(1).to_string())
    for name, series in (
        ("speedups", speedups),
        ("virtual times in serial times", times),
    ):
        together = pd.concat(series, axis=1)
        apart = (np.log(together.T / together.median(axis=1))).abs().T
        print(f"\n{name}: largest deviation from the median by strategy, in %")
        print((100 * apart.groupby("label").max()).round(1).to_string())
    reduction = pd.concat([saving["reduction"] for saving in savings], axis=1)
    print("\nsaving at the largest count: points from the median")
    print((100 * reduction.sub(reduction.median(axis=1), axis=0)).round(1).to_string())


if __name__ == "__main__":
    main()
