"""Every benchmark in turn, and one table of what they found.

    python benchmarks/all.py [--markdown FILE]

Takes about ten minutes on two idle cores, and writes nothing unless a file is named.
"""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

from ratios import Finding, markdown, show

BENCHMARKS = (
    "command_line",
    "native_step",
    "parts_of_models",
    "averaging_bandwidth",
    "task_overhead",
    "virtual_overhead",
    "many_workers",
    "tuning",
    "jobs",
    "submit",
    "records",
    "presenting",
    "default_study",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--markdown", type=Path, metavar="FILE", help="write the table to FILE as well"
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=BENCHMARKS,
        default=BENCHMARKS,
        help="these benchmarks only",
    )
    arguments = parser.parse_args()
    found: list[Finding] = []
    for name in arguments.only:
        found += show(importlib.import_module(name).main(), name)
    if arguments.markdown is not None:
        arguments.markdown.write_text(markdown(found))
    missed = [finding.name for finding in found if finding.verdict == "missed"]
    print(
        f"\n{len(found)} findings, {len(missed)} goals missed{': ' if missed else ''}{'; '.join(missed)}"
    )


if __name__ == "__main__":
    main()
