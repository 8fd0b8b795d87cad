"""The program of each rank of an elastic run: `python -m scalebench.native.elastic JOB.json`.

torchrun starts all ranks again when one has died: they meet anew, and go on from files.
Under horovodrun those that are left form a smaller Horovod, deal the data anew, and go
on from memory.

States are committed at the end of epochs, which takes no training time: the clock is
paused between them.
"""

from __future__ import annotations

import os
import pickle
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scalebench.comm.control import ObjectGroup
from scalebench.comm.launchers import named
from scalebench.errors import RunError, in_one_line
from scalebench.native.heartbeat import Heartbeat, Phase
from scalebench.native.job_files import CHECKPOINTS, Death, Job, JsonLines
from scalebench.native.rank import collect_garbage, meet
from scalebench.native.session import Session
from scalebench.system.parent_watch import end_with_launcher
from scalebench.system.random_state import put_back, random_state
from scalebench.training.outcome import Outcome
from scalebench.training.replica import Replica
from scalebench.training.state import State

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
    # Ranks that are started again must not find the address of the last rank 0.
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

    # Called again after a death, with rank 0's state, by the ranks that are left.
    hvd.elastic.run(train)(
        ObjectState(hvd.broadcast_object, hvd.rank, done=0, kept=None)
    )


_PROGRAMS: dict[str, Callable[[Job, Heartbeat, int], None]] = {
    "torchrun": _under_torchrun,
    "horovodrun": _under_horovodrun,
}


def _train(job: Job, group: ObjectGroup, heart: Heartbeat, commits: _Commits) -> None:
    """Train with the ranks of `group`, which may be fewer than the run began with, to its end."""
    (run,) = job.runs
    (data,) = job.datasets.values()
    # Horovod's ranks may be fewer than the run began with; the data are dealt anew.
    run = run.model_copy(update={"workers": group.size})
    job = job.model_copy(update={"datasets": {group.size: data}})
    outcome = Session(job, run, group, heart, commits=commits).execute()
    if outcome is not None:
        commits.finish(outcome)


class _Commits(ABC):
    """The committed states of the replicas of `group`, whose first rank tells the launcher by `events`.

    Implements `session.Commits`. Times of events are seconds of `time.monotonic`, which
    all processes of a host share.
    """

    def __init__(self, group: ObjectGroup, events: JsonLines) -> None:
        self._group, self._events = group, events

    def resume(self, replica: Replica) -> None:
        replica.first_epoch = self._restore(replica)
        self._tell(
            began=time.monotonic(), workers=self._group.size, epoch=replica.first_epoch
        )

    def commit(self, replica: Replica, epoch: int, *, agreed: bool) -> None:
        ended = time.monotonic()
        kept = self._keep(replica, epoch + 1, agreed)
        self._tell(ended=ended, epoch=epoch, kept=kept)

    def finish(self, outcome: Outcome) -> None:
        """Tell the launcher what came of the run."""
        self._tell(outcome=outcome.to_json())

    @abstractmethod
    def _restore(self, replica: Replica) -> int:
        """Return the epochs that are done in the state that `replica` gets; 0 without any."""

    @abstractmethod
    def _keep(self, replica: Replica, done: int, agreed: bool) -> bool:
        """Keep the state of `replica` after `done` epochs; return False if it cannot be kept now."""

    def _tell(self, **facts: float | str) -> None:
        if self._group.rank == 0:
            self._events.append(facts)


class FileCommits(_Commits):
    """States in files of `folder`, one for each rank: replicas may differ. All ranks are started again to go on.

    Random generators go on, too, so that the weights are those of a run without
    interruption, bit for bit.
    """

    def __init__(self, group: ObjectGroup, events: JsonLines, folder: Path) -> None:
        super().__init__(group, events)
        self._folder = folder
        folder.mkdir(exist_ok=True)

    def _restore(self, replica: Replica) -> int:
        own = [
            int(path.stem.removeprefix("epochs-"))
            for path in self._folder.glob(f"epochs-*.{self._group.rank}")
        ]
        # One may have died before it wrote its last: all go on from what all have.
        done: int = min(self._group.allgather(max(own, default=0)))
        if done:
            state: State = pickle.loads(self._path(done).read_bytes())  # noqa: S301 - written by a rank of this run
            state.put_into(replica)
            put_back(state.generators or {})
            replica.steps = state.steps
        return done

    def _keep(self, replica: Replica, done: int, agreed: bool) -> bool:
        """Write the state; the previous one is there until all ranks have theirs."""
        path = self._path(done)
        part = path.with_name(f"{path.name}.part")
        part.write_bytes(pickle.dumps(State.of(replica, replica.steps, random_state())))
        part.replace(path)
        # The previous state goes once all have this one.
        self._group.Barrier()
        self._path(done - 1).unlink(missing_ok=True)
        return True

    def _path(self, done: int) -> Path:
        return self._folder / f"epochs-{done}.{self._group.rank}"


class MemoryCommits(_Commits):
    """States in the memory of the ranks that are left, in `held`, an `hvd.elastic.ObjectState` with `done` and `kept`.

    Horovod gives all of them that of rank 0, so that only an epoch after which replicas
    agree can be committed.
    """

    def __init__(self, group: ObjectGroup, events: JsonLines, held: Any) -> None:
        super().__init__(group, events)
        self._held = held

    def _restore(self, replica: Replica) -> int:
        state: State | None = self._held.kept
        if state is not None:
            state.put_into(replica)
            replica.steps = state.steps
        return int(self._held.done)

    def _keep(self, replica: Replica, done: int, agreed: bool) -> bool:
        # Horovod broadcasts rank 0's: states that differ would be lost.
        if agreed:
            self._held.kept, self._held.done = (
                State.of(replica, replica.steps, None),
                done,
            )
            self._held.commit()
        return agreed


if __name__ == "__main__":
    main(Path(sys.argv[1]))
