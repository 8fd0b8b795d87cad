"""Small studies on the hosts, and the rows they leave."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

SCALEBENCH = Path(sys.executable).with_name("scalebench")
Row = dict[str, str]


def study(workers: int, *strategies: str, **values: object) -> str:
    """The text of a study of real runs, one of each strategy."""
    keys = {
        "name": "nodes", "dataset": "wine", "model": "{mlp: {hidden: [4]}}", "epochs": 2, "repetitions": 1,
        "workers": [workers], "execution": "native", "warmup_steps": 2, "time_limit_s": 100,
        "strategies": f"[{', '.join(f'{{{name}}}' if ':' in name else name for name in strategies)}]",
    }  # fmt: skip
    return "".join(f"{name}: {value}\n" for name, value in (keys | values).items())


def rows_in(folder: Path) -> dict[str, Row]:
    """The last row of each strategy, without warm-up runs."""
    with (folder / "results" / "nodes" / "runs.csv").open(newline="") as file:
        return {row["strategy"]: row for row in csv.DictReader(file)}


def finished(process: subprocess.Popen[str], seconds: float) -> str:
    """What a process has printed when it ends."""
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        raise AssertionError(f"no end within {seconds:g} s: {out}{err}") from None
    return out + err
