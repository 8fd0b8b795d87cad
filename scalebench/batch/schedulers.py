"""The schedulers by name, and the one that is here."""

from __future__ import annotations

import shutil

from scalebench.batch.job import Scheduler, SchedulerError
from scalebench.batch.lsf import Lsf
from scalebench.batch.pbs import Pbs
from scalebench.batch.sbatch import Slurm

SCHEDULERS: dict[str, Scheduler] = {each.name: each for each in (Slurm(), Pbs(), Lsf())}


def found_here() -> Scheduler | None:
    """Return the first scheduler whose client is on PATH."""
    return next(
        (each for each in SCHEDULERS.values() if shutil.which(each.submits)), None
    )


def scheduler_for(name: str | None, *, submits: bool = True) -> Scheduler:
    """Return the scheduler `name`, by default the one that is here; unless it `submits`, its client may be missing.

    Raises:
        SchedulerError: there is none here, or its client is not on PATH.
    """
    clients = ", ".join(each.submits for each in SCHEDULERS.values())
    if name is None:
        found = found_here()
        if found is None:
            raise SchedulerError(
                f"no scheduler here: none of {clients} is on PATH; submit from a login node, run the study here with "
                "scalebench run, or look at the scripts with --scheduler slurm --dry-run"
            )
        return found
    scheduler = SCHEDULERS[name]
    if submits and shutil.which(scheduler.submits) is None:
        raise SchedulerError(
            f"scheduler {name}: no {scheduler.submits} on PATH; submit from a login node, or look at the scripts with "
            "--dry-run"
        )
    return scheduler
