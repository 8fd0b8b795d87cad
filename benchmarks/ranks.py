"""Starts a benchmark's own ranks as scalebench starts its own: the same mpirun, the same binding, the same environment.

A benchmark module that needs ranks has `measure_here(engine)`, which every rank calls;
rank 0's findings come back.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from ratios import Finding

from scalebench.comm import engines
from scalebench.launch.processes import environment, launch_command

_LIMIT_S = 300.0


def findings_of_ranks(module: str, engine: str, ranks: int = 2) -> list[Finding]:
    """Return the results of `measure_here(engine)` of the benchmark `module` on `ranks` processes."""
    reason = engines.available(engine)
    if reason is not None:
        return [
            Finding(
                f"{module}: {engine}", "", "", f"not measured: {reason}", "", "", ""
            )
        ]
    command, binding = launch_command(ranks, 1, engines.named(engine).progress_threads)
    with tempfile.TemporaryDirectory(prefix="scalebench-benchmark-") as folder:
        result = Path(folder) / "findings.json"
        subprocess.run(
            [
                *command,
                sys.executable,
                str(Path(__file__).resolve()),
                module,
                engine,
                str(result),
            ],
            env=environment(1, oversubscribed=binding == "none"),
            stdin=subprocess.DEVNULL,
            timeout=_LIMIT_S,
            check=True,
        )
        return [Finding(**entry) for entry in json.loads(result.read_text())]


def main(module: str, engine: str, result: Path) -> None:
    """One rank's life."""
    found = importlib.import_module(module).measure_here(engine)
    if int(os.environ["OMPI_COMM_WORLD_RANK"]) == 0:
        result.write_text(json.dumps([asdict(entry) for entry in found]))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
