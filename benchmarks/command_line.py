"""How long the command line takes to answer before it does anything: help, a list, a refusal.

    python benchmarks/command_line.py

Medians of 15 processes each; against them the same Python doing nothing, in turn. Goal:
`scalebench --help` in 60 ms of processor time, which other programs change less than
the time until the answer.
"""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from ratios import Finding, Goal, compare, finding, show

TIMES = 15
GOAL = Goal("<=", 0.06, "s")
COMMANDS = {
    "scalebench --help": (["--help"], 0, GOAL),
    "scalebench list strategies": (["list", "strategies"], 0, None),
    "scalebench run --worker 4 (refused)": (["run", "--worker", "4"], 2, None),
    "scalebench run --strategy horovd (refused)": (
        ["run", "--strategy", "horovd", "--output", "/dev/null/x"],
        2,
        None,
    ),
}


def main() -> Iterator[Finding]:
    program = Path(sys.executable).with_name("scalebench")
    for name, (arguments, code, goal) in COMMANDS.items():
        used: list[float] = []
        comparison = compare(
            lambda command=[str(program), *arguments], code=code, used=used: (
                used.append(_run(command, code))
            ),  # type: ignore[misc]
            lambda: _run([sys.executable, "-c", ""], 0),
            TIMES,
        )
        seconds, processor = statistics.median(comparison.a), statistics.median(used)
        said = f"{seconds * 1e3:.0f} ms ({processor * 1e3:.0f} ms CPU)"
        empty = f"{statistics.median(comparison.b) * 1e3:.0f} ms"
        yield finding(name, processor, goal, said, f"{seconds * 1e3:.0f} ms", empty)


def _run(command: Sequence[str], code: int) -> float:
    """The CPU seconds of `command`, which is to end with `code`."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    if done.returncode != code:
        raise SystemExit(
            f"{' '.join(command)} ended with {done.returncode}, expected {code}: {done.stderr}"
        )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    show(main())
