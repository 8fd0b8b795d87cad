"""How long a reviewer has to wait, in whole minutes, rounded up: what was timed, and `None` for what never was.

Execution and analysis come from the records: `run`, `plot` and `report` time themselves (`durations.json`), and where
nobody has drawn the figures, packing does so. Set-up is
timed by reproduce.sh, which writes times.csv: run in the artifact once, it tells the next packing. Building Horovod is
timed when it is built, and kept beside the wheel.
"""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass
from pathlib import Path

from scalebench.analysis import Results
from scalebench.install.horovod import build_seconds
from scalebench.records.durations import durations_in
from scalebench.records.progress import group_of, progress_of

TIMES = "times.csv"
NOT_TIMED = "not timed"


@dataclass(frozen=True)
class Minutes:
    """What is expected of `reproduce.sh`, and of its `--rerun-virtual` and `--rerun`, which take longer to set up.

    `execution` is what the commands that ran the study took, all together; `virtual` and `native` what its runs took.
    """

    setup: int | None
    setup_rerun: int | None
    horovod: int | None  # of building it, which is part of `setup_rerun`; None: not needed, or not timed
    execution: int
    virtual: int  # 0: the study has no virtual runs
    native: int  # 0: no others
    analysis: int | None

    def said(self, part: str) -> str:
        """The minutes of `setup`, `setup_rerun` or `analysis`, or that nobody timed them."""
        minutes = getattr(self, part)
        if minutes is None and part == "setup_rerun" and self.horovod is not None:
            return f"{NOT_TIMED}, but for building Horovod: {self.horovod}"
        return NOT_TIMED if minutes is None else str(minutes)


def expected_minutes(results: Results, timings: Path | None = None) -> Minutes:
    """The minutes for the study `results`; `timings` is an artifact of it that reproduce.sh was run in.

    The pace of runs is wall time from the start of one to that of the next, as `scalebench status` tells it, so it
    includes starting processes and the number of jobs of the recorded command; where too few runs tell it, their
    training time.
    """
    seconds = {"virtual": 0.0, "native": 0.0}
    pace = progress_of(results.folder).seconds_per_run
    for (execution, engine), runs in results.runs.groupby(["execution", "engine"]):
        known = pace.get(group_of(str(execution), str(engine)))
        trained = float(runs["train_s"].sum() + runs["eval_s"].sum())
        spent = trained if known is None else known * len(runs)
        seconds["virtual" if execution == "virtual" else "native"] += spent
    took = durations_in(results.folder)
    steps = _steps(timings / TIMES) if timings is not None else {}
    install, install_more = steps.get("install"), steps.get("install to run")
    horovod = build_seconds() if (results.runs["engine"] == "horovod").any() else None
    virtual, native = (_minutes(seconds[name]) for name in ("virtual", "native"))
    drawing = steps.get("draw", took.get("plot"))
    return Minutes(
        setup=None if install is None else _minutes(install),
        setup_rerun=None if install is None or install_more is None else _minutes(install + install_more),
        horovod=None if horovod is None else _minutes(horovod),
        execution=max(_minutes(took.get("run", 0.0)), virtual + native),
        virtual=virtual,
        native=native,
        analysis=None if drawing is None else _minutes(drawing),
    )


def _steps(path: Path) -> dict[str, float]:
    """Seconds of each step in times.csv, the last time it was taken; those of a first installation stay."""
    try:
        rows = list(csv.DictReader(path.read_text(encoding="utf-8").splitlines()))
        return {row["step"]: float(row["seconds"]) for row in rows}
    except (OSError, KeyError, TypeError, ValueError):  # nobody ran it, or edited it
        return {}


def _minutes(seconds: float) -> int:
    return math.ceil(seconds / 60)
