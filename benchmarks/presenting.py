"""How long studies take to be drawn, reported, compared, checked and bootstrapped.

    python benchmarks/presenting.py

Synthetic records of six strategies: virtual at 1 to 64 workers, native at 1, 2 and 4,
20 repetitions of each native point, as a bootstrap wants; then 20,000 virtual runs of
50 epochs, a million rows. Goals on two idle cores: `plot` in 4 s, `report` in 3 s,
10,000 resamples of every cell in 5 s; of the million rows `status`, `table`, `check`
and `plot` in 5 s and 1 GiB each. Each command is a process of its own; the least wall
time of three, beside it the CPU time, with that of the processes that draw, which tells
more on a shared machine.
"""

from __future__ import annotations

import resource
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ratios import Finding, Goal, finding, show
from records import STRATEGIES, WORKERS, command, epochs_of, run_of

from scalebench.records.progress import Planned, keep_planned
from scalebench.records.schema import RunRow
from scalebench.records.store import Store

DRAWS, REPETITIONS, NATIVE = 3, 20, (1, 2, 4)
MANY, LONG = 20_000, 50  # runs, and the epochs of each
REAL = len(NATIVE) * len(STRATEGIES)
_BOOTSTRAP = "from scalebench.analysis import load, bootstrap_cells; bootstrap_cells(load({!r}), resamples=10_000)"


def main() -> Iterator[Finding]:
    with tempfile.TemporaryDirectory(prefix="scalebench-presenting-") as name:
        folder = Path(name) / "large"
        points = _write(folder)
        program, where, into = (
            str(Path(sys.executable).with_name("scalebench")),
            str(folder),
            str(Path(name) / "plots"),
        )
        said = f"{points} points"
        yield command(
            "scalebench plot",
            [program, "plot", where, "--output", into],
            Goal("<=", 4, "s"),
            said,
        )
        page = str(Path(name) / "report.html")
        yield command(
            "scalebench report",
            [program, "report", where, "-o", page],
            Goal("<=", 3, "s"),
            said,
        )
        yield command(
            "scalebench compare", [program, "compare", where, where], None, said
        )
        bootstrap = [sys.executable, "-c", _BOOTSTRAP.format(where)]
        yield command(
            "bootstrap, 10,000 resamples",
            bootstrap,
            Goal("<=", 5, "s"),
            f"{REAL} points",
        )
        many = str(Path(name) / "many")
        _write_many(Path(many))
        for task, flags in (
            ("status", []),
            ("table", []),
            ("check", []),
            ("plot", ["--output", into]),
        ):
            words = [program, task, many, *flags]
            yield command(
                f"scalebench {task}",
                words,
                Goal("<=", 5, "s"),
                f"{MANY * LONG:,} epochs",
            )
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
        yield finding(
            "memory of the largest process",
            peak,
            Goal("<=", 1, "GiB"),
            f"{peak:.2f} GiB",
        )


def _write_many(folder: Path) -> None:
    runs = [
        run_of(number).model_copy(update={"epochs": LONG}) for number in range(MANY)
    ]
    with Store(folder, fsync=False) as store:
        for run in runs:
            store.append(run, epochs_of(run))
    keep_planned(
        folder, [Planned(run.run_id, run.config_hash, "virtual", LONG) for run in runs]
    )


def _write(folder: Path) -> int:
    """The study; how many points it has."""
    block = len(WORKERS) * len(STRATEGIES)
    with Store(folder, fsync=False) as store:
        for number in range(REPETITIONS * block):
            row = run_of(number)
            if row.repetition < DRAWS:
                store.append(row, epochs_of(row))
            if row.workers in NATIVE:
                real = _native(row)
                store.append(real, epochs_of(real))
    return block + REAL


def _native(row: RunRow) -> RunRow:
    seconds = (row.train_s or 0.0) * (1 + 5e-4 * (row.run_order * 7919 % 101))
    real = {
        "run_id": f"native-{row.run_id}",
        "execution": "native",
        "engine": "mpi",
        "train_s": seconds,
    }
    return row.model_copy(update=real)


if __name__ == "__main__":
    show(main())
