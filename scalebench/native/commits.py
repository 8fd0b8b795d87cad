"""States of an elastic run, committed at the end of epochs: it goes on from the last one when a rank has died.

Committing takes no training time: the clock is paused between epochs.
"""

from __future__ import annotations

import pickle
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from scalebench.comm.control import ObjectGroup
from scalebench.native.job_files import JsonLines
from scalebench.system.random_state import put_back, random_state
from scalebench.training.outcome import Outcome
from scalebench.training.replica import Replica
from scalebench.training.state import State


class Commits(ABC):
    """The committed states of the replicas of `group`, whose first rank tells the launcher by `events`.

    Times of events are seconds of `time.monotonic`, which all processes of a host
    share.
    """

    def __init__(self, group: ObjectGroup, events: JsonLines) -> None:
        self._group, self._events = group, events

    def resume(self, replica: Replica) -> None:
        """Give `replica` the last committed state, if there is one, and say that training begins. Collective."""
        replica.first_epoch = self._restore(replica)
        self._tell(
            began=time.monotonic(), workers=self._group.size, epoch=replica.first_epoch
        )

    def commit(self, replica: Replica, epoch: int, *, agreed: bool) -> None:
        """Keep the state of `replica` at the end of `epoch`, if possible; `agreed`: replicas are equal. Collective."""
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


class FileCommits(Commits):
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
        self._group.Barrier()
        self._path(done - 1).unlink(missing_ok=True)
        return True

    def _path(self, done: int) -> Path:
        return self._folder / f"epochs-{done}.{self._group.rank}"


class MemoryCommits(Commits):
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
        if agreed:
            self._held.kept, self._held.done = (
                State.of(replica, replica.steps, None),
                done,
            )
            self._held.commit()
        return agreed
