"""The task `train(block, weights) -> weights`: local steps of one worker, computed wherever a backend puts them.

A process that computes tasks keeps a model and the data set, and no state of any
worker: weights, buffers, optimizer and random generators come with a block and go back
with its result. Samples are read from the data set again, in the order of the plan, so
that any process can train any block with the same bits.
"""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import torch

from scalebench.comm.simulated import lone_communicator
from scalebench.data.batch_plan import BatchPlan
from scalebench.data.dataset import open_dataset
from scalebench.data.shard import Shard
from scalebench.errors import in_one_line
from scalebench.strategies.base import Batch
from scalebench.study.spec import Run
from scalebench.system.clock import WallClock
from scalebench.system.random_state import (
    drawn_since,
    put_back,
    random_state,
    seed_generators,
    worker_seed,
)
from scalebench.training.replica import Replica
from scalebench.training.state import Packed, State

# set low, memory goes back to the kernel after each step and is asked for again
TRIM = "MALLOC_TRIM_THRESHOLD_"


class Steps(NamedTuple):
    """The batches `first` to `last` of an epoch; `by_block`: those of `Worker.block_batches`."""

    epoch: int
    by_block: bool
    first: int
    last: int


RESET = None  # in a block: a new optimizer
Piece = Steps | None


@dataclass(frozen=True)
class Job:
    """The run whose blocks are trained: everything that a process has to know of it, pickled once, and its hash."""

    digest: str
    content: bytes

    @classmethod
    def of(cls, run: Run, folder: Path) -> Job:
        """Return the job of `run` on the data set in `folder`."""
        content = pickle.dumps((run, folder.absolute()))
        return cls(sha256(content).hexdigest(), content)


@dataclass(frozen=True)
class Trained:
    """The result of a block: state, losses and samples of its batches, and the seconds of each clock.Task."""

    state: State
    losses: Packed
    samples: list[int]
    seconds: list[float]
    began: float  # of time.perf_counter, which all processes of a machine share


@dataclass(frozen=True)
class Failed:
    """The error of a block that cannot be trained, which no other process could train either."""

    error: str


def train_block(
    job: Job, worker: int, pieces: tuple[Piece, ...], state: State
) -> Trained | Failed:
    """Train a block of `worker` from `state`."""
    try:
        return _trainer(job).train(worker, pieces, state)
    except (Exception, SystemExit) as error:  # of any kind, raised by a user's model
        return Failed(in_one_line(error))


def prepare(job: Job) -> int | None:
    """Build the model and take the warm-up steps, which belong to no time; return the bytes of TRIM, if it is set."""
    _trainer(job)
    threshold = os.environ.get(TRIM, "")
    return int(threshold) if threshold.isdecimal() else None


_known: dict[str, _Trainer] = {}  # of this process: the run that it trains blocks of


def _trainer(job: Job) -> _Trainer:
    if job.digest not in _known:
        _known.clear()
        run, folder = pickle.loads(job.content)  # noqa: S301  # of the process that submits the task
        _known[job.digest] = _Trainer(run, folder)
    return _known[job.digest]


class _Trainer:
    """A replica that is any worker of `run`, by the state that it is given."""

    def __init__(self, run: Run, folder: Path) -> None:
        torch.set_num_threads(run.threads_per_worker)
        self._run, self._dataset = run, open_dataset(folder)
        self._plan = BatchPlan.of(run, run.workers, run.seed, self._dataset)
        self._replica = Replica(
            run, self._dataset, self._plan, lone_communicator(run.workers), WallClock()
        )
        self._held = (0, -1)  # worker and epoch of the samples in memory
        self._warm_up()

    def _warm_up(self) -> None:
        replica, steps = self._replica, min(self._run.warmup_steps, self._plan.steps(0))
        with replica.rehearsal():
            replica.local_steps(replica.batches(0), steps)

    def train(self, worker: int, pieces: tuple[Piece, ...], state: State) -> Trained:
        # of this thread of the process
        torch.set_num_threads(self._run.threads_per_worker)
        replica, clock = self._replica, self._replica.clock
        replica.rank, replica.steps = worker, state.steps
        state.put_into(replica)
        if state.generators is None:
            seed_generators(worker_seed(self._run.seed, worker))
        else:
            put_back(state.generators)
        before = random_state()
        clock.start()
        began = time.perf_counter()
        at = (-1, False, -1)
        batches: Iterator[Batch] = iter(())
        for piece in pieces:
            if piece is RESET:
                replica.reset_optimizer()
                continue
            if at != piece[:3]:
                batches = self._batches(piece)
            replica.local_steps(batches, piece.last - piece.first)
            at = (piece.epoch, piece.by_block, piece.last)
        drawn = state.generators is not None or drawn_since(before)
        losses, samples = replica.take_losses()
        return Trained(
            State.of(replica, replica.steps, random_state() if drawn else None),
            Packed.of(losses),
            samples,
            list(clock.ledger.seconds),
            began,
        )

    def _batches(self, steps: Steps) -> Iterator[Batch]:
        """Return the batches from the first of `steps` on, with the samples of the worker in that epoch."""
        replica = self._replica
        if self._held != (replica.rank, steps.epoch):
            # A new shard reads its samples; one that went on would want them from the
            # shards of other workers.
            replica.shard = Shard(
                self._dataset, self._plan, replica.rank, replica.dtype, replica.device
            )
            self._held = (replica.rank, steps.epoch)
        batches = (
            replica.block_batches(steps.epoch)
            if steps.by_block
            else replica.batches(steps.epoch)
        )
        for _ in range(steps.first):
            next(batches)
        return batches
