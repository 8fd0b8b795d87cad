"""Batch schedulers, one file each beside this one, by the names that a site or a command states; and the one here."""

from __future__ import annotations

import shutil
from importlib import import_module
from typing import get_args

from scalebench.batch.job import Scheduler, SchedulerError
from scalebench.study.choices import SchedulerName

# of two schedulers on one machine the first is taken; each file makes a `SCHEDULER`
SCHEDULERS: dict[str, Scheduler] = {
    name: import_module(f"{__name__}.{name}").SCHEDULER
    for name in get_args(SchedulerName)
}


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
