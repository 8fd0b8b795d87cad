"""How long `scalebench submit` takes until a study's jobs are in the queue, and what it asks of the scheduler.

    python benchmarks/submit.py

4 strategies at 7 worker counts with 3 repetitions, a job for each number of nodes and
one that collects. Clients of Slurm that answer at once stand for the scheduler, so that
the time is the command's own. With `--time` nothing is estimated; without it the step
behind the time limits is measured once and kept, which the first command pays. Medians
of 7. Goal: 3 seconds.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from ratios import Finding, Goal, finding, show

TIMES = 7
GOAL = Goal("<=", 3.0, "s")
STUDY = """\
name: scaling
dataset: digits
workers: [1, 2, 4, 8, 16, 32, 64]
strategies: [allreduce, ddp, local_sgd, epoch_average]
repetitions: 3
execution: native
engine: gloo
"""
SITE = "scheduler: slurm\ncores_per_node: 2\nnodes: 32\n"
CLIENTS = {
    "sbatch": "n=$(($(cat N 2>/dev/null || echo 10) + 1)); echo $n > N; echo $n",
    "squeue": "true",
    "sinfo": 'echo "p*|32|2|(null)|1-00:00:00"',
}


def main() -> Iterator[Finding]:
    with tempfile.TemporaryDirectory(prefix="scalebench-benchmark-") as name:
        folder = Path(name)
        (folder / "study.yaml").write_text(STUDY)
        (folder / "site.yaml").write_text(SITE)
        for client, body in CLIENTS.items():
            path = folder / "clients" / client
            path.parent.mkdir(exist_ok=True)
            path.write_text(f"#!/bin/sh\ncd {folder}\n{body}\n")
            path.chmod(0o755)
        for said, options in (
            ("--time stated", ["--time", "01:00:00"]),
            ("time estimated", []),
        ):
            first, *seconds = [submitted(folder, options) for _ in range(TIMES + 1)]
            middle = statistics.median(seconds)
            yield finding(
                f"submit, {said}", middle, GOAL, f"{middle:.2f} s (first {first:.2f} s)"
            )


def submitted(folder: Path, options: list[str]) -> float:
    """Seconds of a `scalebench submit` of the study."""
    shutil.rmtree(folder / "results", ignore_errors=True)
    own = {
        "PATH": f"{folder / 'clients'}:{os.environ['PATH']}",
        "XDG_CONFIG_HOME": str(folder / "config"),
        "XDG_CACHE_HOME": str(folder / "cache"),
    }
    command = [
        str(Path(sys.executable).with_name("scalebench")),
        "submit",
        "study.yaml",
        "--quiet",
        *options,
    ]
    began = time.perf_counter()
    done = subprocess.run(
        command, cwd=folder, env=os.environ | own, capture_output=True, text=True
    )
    seconds = time.perf_counter() - began
    if done.returncode != 0:
        raise SystemExit(
            f"{' '.join(command)} ended with {done.returncode}: {done.stderr}"
        )
    return seconds


if __name__ == "__main__":
    show(main())
