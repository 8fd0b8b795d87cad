"""Small studies on the hosts, and their rows."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

from scalebench.native.heartbeat import Beat, Phase, read_heartbeats

SCALEBENCH = Path(sys.executable).with_name("scalebench")
Row = dict[str, str]


def study(workers: int, *strategies: str, **values: object) -> str:
    """Return the YAML of a study of real runs, one of each strategy."""
    keys = {
        "name": "nodes", "dataset": "wine", "model": "{mlp: {hidden: [4]}}", "epochs": 2, "repetitions": 1,
        "workers": [workers], "execution": "native", "warmup_steps": 2, "time_limit_s": 1000,
        "strategies": f"[{', '.join(f'{{{name}}}' if ':' in name else name for name in strategies)}]",
    }  # fmt: skip
    return "".join(f"{name}: {value}\n" for name, value in (keys | values).items())


def rows_in(folder: Path) -> dict[str, Row]:
    """Return the last row of each strategy, without warm-up runs."""
    with (folder / "results" / "nodes" / "runs.csv").open(newline="") as file:
        return {row["strategy"]: row for row in csv.DictReader(file)}


def finished(process: subprocess.Popen[str]) -> str:
    """Wait for the end of a process; return its output."""
    try:
        out, err = process.communicate()
    finally:
        process.kill()
    return out + err


def beats(folder: Path, launch: int) -> list[Beat]:
    """Return the heartbeats of a launch's ranks; empty before the launch."""
    files = list((folder / "results").glob(f"nodes/logs/*/launch-{launch}/heartbeats"))
    return read_heartbeats(files[0]) if files else []


def is_training(folder: Path, launch: int) -> bool:
    """Return True if all ranks of a launch are past their first batches."""
    found = beats(folder, launch)
    return bool(found) and all(
        beat.phase == Phase.TRAINING and beat.batches > 5 for beat in found
    )


def errors_in(folder: Path) -> list[str]:
    """Return the errors of all rows, in order."""
    path = folder / "results" / "nodes" / "runs.csv"
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [row["error"] for row in csv.DictReader(file)]
