"""The default study and its figures as a user runs them: wall time, memory of all its processes, and agreement.

    python benchmarks/default_study.py

`scalebench run --workers 1..64` into a fresh folder, with data sets and engine costs
cached, then `scalebench plot`. Goals: 60 s on two idle cores, 180 s beside 8 processes
that never sleep, 2 GiB at the peak, 4 s for the figures, and virtual times within 15 %
of native ones.

Its virtual runs are also simulated here, with stated costs, in CPU seconds of one
thread; the goal is 8 s.

Memory is the sum of what every process of the command holds, pages that several share
counted once (PSS), read once a second. CPU seconds are the command's own: they tell a
busy machine from a slow command.
"""

from __future__ import annotations

import gc
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import psutil
from ratios import Finding, Goal, finding, show
from tuning import COUNTS, simulate_all
from virtual_overhead import DEFAULTS, make_run, stated_machine

from scalebench.data.catalog import prepare
from scalebench.data.dataset import open_dataset
from scalebench.study.spec import Study, Training

_LOOK_EVERY_S = 1.0  # a look takes some hundredths of a second of CPU
_MIB = 1 << 20
SCALEBENCH = (sys.executable, "-m", "scalebench")


@dataclass(frozen=True)
class Usage:
    """Times of one command, its children included."""

    wall_s: float
    cpu_s: float
    peak_mib: float
    # seconds since the start, and the line that was printed then
    phases: list[tuple[float, str]]


def main() -> Iterator[Finding]:
    with tempfile.TemporaryDirectory(prefix="scalebench-benchmark-") as folder:
        study = usage_of([*SCALEBENCH, "run", "--workers", "1..64", "--output", folder])
        for moment, line in study.phases:
            if not line.endswith((" runs", "...")):  # the summary begins
                break
            print(f"  {moment:6.1f} s  {line}", file=sys.stderr)
        yield finding(
            "default study, wall time",
            study.wall_s,
            Goal("<=", 60, "s"),
            f"{study.wall_s:.1f} s",
            *_cpu(study),
        )
        yield finding(
            "default study, peak memory",
            study.peak_mib,
            Goal("<=", 2048, "MiB"),
            f"{study.peak_mib:.0f} MiB",
        )
        results = next(path for path in Path(folder).iterdir() if path.is_dir())
        plots = usage_of(
            [*SCALEBENCH, "plot", str(results), "--output", str(Path(folder) / "plots")]
        )
        yield finding(
            "figures, wall time",
            plots.wall_s,
            Goal("<=", 4, "s"),
            f"{plots.wall_s:.1f} s",
            *_cpu(plots),
        )
        yield from agreement_of(results)
    yield virtual_part()


def virtual_part() -> Finding:
    """CPU seconds of the study's virtual runs, without calibration and start-up; the smaller of two times."""
    training = Training()
    datasets = {count: open_dataset(prepare(training, count)) for count in COUNTS}
    points = [("serial", 1), *product(DEFAULTS, COUNTS)]
    runs = [
        make_run(training, strategy).model_copy(
            update={
                "workers": workers,
                "run_id": f"{strategy}-{workers}-{seed}",
                "repetition": seed,
                "seed": seed,
            }
        )
        for strategy, workers in points
        for seed in range(Study.model_fields["repetitions"].default)
    ]
    gc.freeze()  # what imports have made, as in the processes of `--jobs`
    seconds = []
    for _ in range(2):
        began = time.process_time()
        simulate_all(runs, datasets, stated_machine())
        seconds.append(time.process_time() - began)
    goal = Goal("<=", 8, "s")
    name = f"default study, its {len(runs)} virtual runs"
    return finding(name, min(seconds), goal, f"{min(seconds):.1f} s CPU")


def agreement_of(results: Path) -> Iterator[Finding]:
    """T_virtual / T_native of every strategy and worker count that ran both ways, with the interval."""
    from scalebench.analysis.loading import load
    from scalebench.analysis.native_check import agreement

    for row in agreement(load(results)).to_dict("records"):
        name = f"virtual / native: {row['label']}, {row['workers']} workers"
        mark = " oversubscribed" if row["oversubscribed"] else ""
        said = f"{row['ratio']:.3f} ({row['ratio_low']:.3f} to {row['ratio_high']:.3f}){mark}"
        goal = Goal("<=", 0.15, "off")
        yield finding(
            name,
            abs(row["error"]),
            goal,
            said,
            f"{row['virtual_s']:.3f} s",
            f"{row['native_s']:.3f} s",
        )


def usage_of(command: Sequence[str], codes: Sequence[int] = (0,)) -> Usage:
    """Run `command` to its end.

    Raises:
        SystemExit: it ended with none of `codes`, with the last it said.
    """
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began, peak = time.perf_counter(), 0.0
    with tempfile.NamedTemporaryFile("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
        )
        tree = psutil.Process(process.pid)
        phases: list[tuple[float, str]] = []
        seen = 0
        while process.poll() is None:
            peak = max(peak, _memory_of(tree))
            lines = _lines(Path(output.name))
            phases += [(time.perf_counter() - began, line) for line in lines[seen:]]
            seen = len(lines)
            time.sleep(_LOOK_EVERY_S)
        wall = time.perf_counter() - began
        if process.returncode not in codes:
            said = "\n".join(_lines(Path(output.name))[-20:])
            raise SystemExit(
                f"{' '.join(command)} ended with {process.returncode}:\n{said}"
            )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Usage(wall, cpu, peak, phases)


def _memory_of(process: psutil.Process) -> float:
    """MiB of the process and all below it."""
    total = 0.0
    try:
        members = [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0.0
    for member in members:
        try:
            total += member.memory_full_info().pss
        except psutil.Error:  # it has just ended
            continue
    return total / _MIB


def _lines(path: Path) -> list[str]:
    return path.read_text(errors="replace").splitlines()


def _cpu(usage: Usage) -> tuple[str, str]:
    return f"{usage.wall_s:.1f} s", f"{usage.cpu_s:.1f} s CPU"


if __name__ == "__main__":
    show(main())
