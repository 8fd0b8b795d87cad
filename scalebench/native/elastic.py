"""The program of each rank of an elastic run: `python -m scalebench.native.elastic JOB.json`.

torchrun starts all ranks again when one has died: they meet anew, and go on from files.
Under horovodrun those that are left form a smaller Horovod, deal the data anew, and go
on from memory.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scalebench.comm.control import ObjectGroup
from scalebench.comm.launchers import named
from scalebench.errors import RunError, in_one_line
from scalebench.native.commits import Commits, FileCommits, MemoryCommits
from scalebench.native.heartbeat import Heartbeat, Phase
from scalebench.native.job_files import CHECKPOINTS, Death, Job, JsonLines
from scalebench.native.rank import collect_garbage, meet
from scalebench.native.session import Session
from scalebench.system.parent_watch import end_with_launcher

# in which the launcher notices, and names, the peer whose death broke a connection
_NOTICED_S = 1.0


def main(path: Path) -> None:
    """Take part in the only run of the job; a failure ends this rank, and the others go on as the launcher has them."""
    end_with_launcher()
    job = Job.load(path)
    rank = named(job.launcher).rank()
    heart = Heartbeat(job.heartbeats, rank)
    heart.watch()
    collect_garbage()
    try:
        _PROGRAMS[job.launcher](job, heart, rank)
    except BaseException as error:
        status = error.status if isinstance(error, RunError) else "failed"
        Death(status, in_one_line(error), job.runs[0].run_id, rank).save(job.folder)
        time.sleep(_NOTICED_S)
        os._exit(1)
    heart.enter(Phase.FINISHED)


def _under_torchrun(job: Job, heart: Heartbeat, rank: int) -> None:
    start = job.folder / f"start-{os.environ['TORCHELASTIC_RESTART_COUNT']}"
    start.mkdir(exist_ok=True)
    group = meet(start, heart, rank, job.ranks, one_node=True)
    _train(
        job,
        group,
        heart,
        FileCommits(group, JsonLines(job.events), job.folder / CHECKPOINTS),
    )
    group.close()


def _under_horovodrun(job: Job, heart: Heartbeat, rank: int) -> None:
    import horovod.torch as hvd
    from horovod.common.elastic import ObjectState

    from scalebench.comm.horovod_communicator import HorovodGroup

    hvd.init()

    def train(held: Any) -> None:
        group = HorovodGroup()
        _train(job, group, heart, MemoryCommits(group, JsonLines(job.events), held))

    hvd.elastic.run(train)(
        ObjectState(hvd.broadcast_object, hvd.rank, done=0, kept=None)
    )


_PROGRAMS: dict[str, Callable[[Job, Heartbeat, int], None]] = {
    "torchrun": _under_torchrun,
    "horovodrun": _under_horovodrun,
}


def _train(job: Job, group: ObjectGroup, heart: Heartbeat, commits: Commits) -> None:
    """Train with the ranks of `group`, which may be fewer than the run began with, to its end."""
    (run,) = job.runs
    (data,) = job.datasets.values()
    run = run.model_copy(update={"workers": group.size})
    job = job.model_copy(update={"datasets": {group.size: data}})
    outcome = Session(job, run, group, heart, commits=commits).execute()
    if outcome is not None:
        commits.finish(outcome)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
