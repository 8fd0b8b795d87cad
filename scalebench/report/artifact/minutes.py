"""How long a reviewer has to wait, in whole minutes, rounded up, from the records."""

from __future__ import annotations

import math
from dataclasses import dataclass

from scalebench.analysis import Results
from scalebench.records.progress import group_of, progress_of

# Measured on two cores of an AMD EPYC virtual machine, shared with other work.
INSTALL_LIGHT_S = 120.0  # what reading records and drawing figures needs
INSTALL_ALL_S = 240.0  # PyTorch comes on top
BUILD_HOROVOD_S = 180.0
START_S = 5.0  # of each command
DRAW_S = 3.0  # a figure, in three formats
EPOCH_ROWS_PER_S = 100_000.0


@dataclass(frozen=True)
class Minutes:
    """What is expected of `reproduce.sh`, and of its `--rerun-virtual` and `--rerun`, which take longer to set up."""

    setup: int
    setup_rerun: int
    virtual: int  # 0: the study has no virtual runs
    native: int  # 0: no others
    analysis: int

    @property
    def execution(self) -> int:
        """Everything that the study ran."""
        return self.virtual + self.native


def expected_minutes(results: Results, figures: int) -> Minutes:
    """Set-up from what has to be installed and built, execution from the pace of the runs, analysis from the rows.

    The pace is wall time from the start of a run to that of the next, as `scalebench status` tells it, so it includes
    starting processes and the number of jobs of the recorded command; where too few runs tell it, their training time.
    """
    horovod = bool((results.runs["engine"] == "horovod").any())
    seconds = {"virtual": 0.0, "native": 0.0}
    pace = progress_of(results.folder).seconds_per_run
    for (execution, engine), runs in results.runs.groupby(["execution", "engine"]):
        known = pace.get(group_of(str(execution), str(engine)))
        trained = float(runs["train_s"].sum() + runs["eval_s"].sum())
        spent = trained if known is None else known * len(runs)
        seconds["virtual" if execution == "virtual" else "native"] += spent
    drawing = 2 * START_S + DRAW_S * figures + len(results.epochs) / EPOCH_ROWS_PER_S
    return Minutes(
        setup=_minutes(INSTALL_LIGHT_S),
        setup_rerun=_minutes(INSTALL_ALL_S + (BUILD_HOROVOD_S if horovod else 0.0)),
        virtual=_minutes(seconds["virtual"]),
        native=_minutes(seconds["native"]),
        analysis=_minutes(drawing),
    )


def _minutes(seconds: float) -> int:
    return math.ceil(seconds / 60)
