"""The default study on a quiet machine and beside busy programs, and the error of what is calibrated beside these.

    python benchmarks/busy_machine.py [--busy 0 2 8] [--repeats 3] [--seconds 15]

First the calibration: steps and engines are measured beside so many processes that never sleep. Steps are taken from
processor times, as where no window is undisturbed, and compared with those of undisturbed windows on the quiet machine.
Then `scalebench run --workers 1..64` into a fresh folder, with data sets and quiet engine costs cached. Goals: 60 s on
quiet cores, 180 s beside 8 processes, equally many rows, and savings at 64 workers within 3 points of one another.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from default_study import SCALEBENCH, usage_of
from ratios import Finding, Goal, finding, show
from reproducibility import company

from scalebench.cluster.engine_costs import EngineCosts
from scalebench.data.catalog import prepare
from scalebench.launch.engine_costs import measure_engine_costs
from scalebench.study.spec import Component, Run, Study
from scalebench.system.parent_watch import start_forkserver
from scalebench.virtual.calibration import measure_windows
from scalebench.virtual.step_statistics import step_tables

LOADS = [1, 2]
LIMITS_S = {0: 60.0, 8: 180.0}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--busy", type=int, nargs="+", default=[0, 2, 8])
    parser.add_argument("--repeats", type=int, default=3, help="of each calibration")
    parser.add_argument("--seconds", type=float, default=15.0, help="of each calibration of steps, and of each engine")
    wanted = parser.parse_args()
    if wanted.repeats:
        start_forkserver()
        show_calibrations(wanted.busy, wanted.repeats, wanted.seconds)
    show(studies(wanted.busy))


def show_calibrations(busy: list[int], repeats: int, seconds: float) -> None:
    """Print the logs of steps and engine costs beside busy programs, relative to those of the quiet machine."""
    quiet_steps, quiet_engines = None, None
    for processes in busy:
        for _ in range(repeats):
            with company(processes):
                steps, units = calibrated_steps(seconds, disturbed=processes > 0)
                engines = calibrated_engines(seconds)
            if quiet_steps is None:
                quiet_steps, quiet_engines = steps, engines
            named = " ".join(f"{name} {math.log(steps[name] / quiet_steps[name]):+.3f}" for name in steps)
            print(f"beside {processes}: steps {named}; undisturbed {units:.0%} of the windows")
            assert quiet_engines is not None
            shared = sorted(engines.keys() & quiet_engines.keys())
            named = " ".join(f"{name} {math.log(engines[name] / quiet_engines[name]):+.2f}" for name in shared)
            print(f"beside {processes}: engines {named}", flush=True)


def calibrated_steps(seconds: float, *, disturbed: bool) -> tuple[dict[str, float], float]:
    """Return the step in reference steps by load and batch, and the share of undisturbed windows."""
    study = Study()
    folder = prepare(study, 64)
    run = Run.model_validate(
        study.model_dump(exclude={*(Study.model_fields.keys() - Run.model_fields.keys()), "execution", "engine"})
        | {"study": "benchmark", "run_id": "steps", "config_hash": "0" * 16, "execution": "virtual"}
        | {"engine": "virtual", "strategy": Component(name="serial"), "workers": 1, "repetition": 0}
    )
    found, others = measure_windows(run, folder, {8}, LOADS, seconds)
    share = sum(float(windows.undisturbed.sum()) for windows in found) / sum(len(one.undisturbed) for one in found)
    if disturbed:
        found = [windows._replace(undisturbed=windows.undisturbed & False) for windows in found]
    measured = step_tables(found, LOADS, others)
    return {
        f"load {table.busy_workers}": float(table.batches[0].blocks().sum(axis=0).mean()) / measured.reference_s
        for table in measured.tables
    }, share


def calibrated_engines(seconds: float) -> dict[str, float]:
    """Return some costs of each engine in seconds, measured afresh."""
    with tempfile.TemporaryDirectory(prefix="scalebench-benchmark-") as folder:
        costs: EngineCosts = measure_engine_costs(Path(folder), ["mpi", "horovod", "gloo"], seconds=seconds)
    named = {}
    for entry in costs.entries:
        if entry.engine in ("mpi", "horovod", "gloo"):
            mark = "*" if entry.disturbed else ""
            named[f"{entry.engine}-4B"] = entry.seconds(4)
            named[f"{entry.engine}-64KiB"] = entry.seconds(64 << 10)
            print(f"  {entry.engine}{mark} {entry.alpha_s:.3g} s; reference {costs.reference_s:.3g} s", file=sys.stderr)
    return named


def studies(busy: list[int]) -> Iterator[Finding]:
    from scalebench.analysis import load, ratios

    savings: dict[int, float] = {}
    for processes in busy:
        with tempfile.TemporaryDirectory(prefix="scalebench-benchmark-") as folder:
            with company(processes):
                usage = usage_of([*SCALEBENCH, "run", "--workers", "1..64", "--output", folder], codes=(0, 3))
            for moment, line in usage.phases:
                print(f"  {moment:6.1f} s  {line}", file=sys.stderr)
            results = load(next(path for path in Path(folder).iterdir() if path.is_dir()))
        where = f"beside {processes} busy processes" if processes else "quiet cores"
        goal = Goal("<=", LIMITS_S[processes], "s") if processes in LIMITS_S else None
        yield finding(
            f"default study, {where}", usage.wall_s, goal, f"{usage.wall_s:.0f} s", f"{usage.cpu_s:.0f} s CPU"
        )
        yield finding(f"rows, {where}", len(results.runs), Goal(">=", 141), f"{len(results.runs)} rows")
        table = ratios(results)
        largest = table[(table["execution"] == "virtual") & (table["workers"] == 64)]
        largest = largest[(largest["baseline"] == "allreduce") & (largest["label"] == "epoch_average")]
        savings[processes] = 100 * float(largest["reduction"].iloc[0])
        apart = max(savings.values()) - min(savings.values())
        said = f"{savings[processes]:.1f} %"
        yield finding(f"saving at 64 workers, {where}", apart, Goal("<=", 3, "points"), said)


if __name__ == "__main__":
    main()
