"""The schedule of a worker, its compute, collectives and messages in order without any time, and its graph of tasks."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from scalebench.cluster.operation import Kind, Members, Operation
from scalebench.comm.base import Overlap
from scalebench.training.outcome import WorkerReport
from scalebench.training.stage import StageFacts

Ints = NDArray[np.int64]
# their order, or their size, depends on time
_TIMED = frozenset({Kind.ACCESS, Kind.SERVE, Kind.ALLTOALL})
# Every event has an operation, so that nothing has to ask for None.
NO_EXCHANGE = Operation(Kind.BARRIER, 0, ())  # of no workers


class RankGroups:
    """Division of all workers into groups: `labels` (workers,) number the group of each worker."""

    def __init__(self, labels: Ints) -> None:
        self.labels = labels
        self.sizes = np.bincount(labels)
        # Stable: ranks ascend within a group, as after a split of MPI with equal keys.
        self._order = np.argsort(labels, kind="stable")
        self._ends = np.cumsum(self.sizes)
        # Recordings of all workers ask for the same splits, and collectives meet by the
        # identity of their partition.
        self._parts: dict[int, RankGroups] = {}

    @classmethod
    def of_all(cls, workers: int) -> RankGroups:
        """Return the partition whose only group has all workers."""
        return cls(np.zeros(workers, dtype=np.int64))

    def members(self, label: int) -> Members:
        """Return the workers of a group in ascending order, as a range where they are evenly spaced."""
        ranks = self._order[self._ends[label] - self.sizes[label] : self._ends[label]]
        # Without a difference to its neighbour there is no step.
        if len(ranks) == 1:
            return (int(ranks[0]),)
        steps = np.diff(ranks)
        if (steps == steps[0]).all():
            # Of 65,536 ranks a range takes no memory, and hashes at once.
            return range(int(ranks[0]), int(ranks[-1]) + 1, int(steps[0]))
        return tuple(ranks.tolist())

    def part(self, split: int, color: Callable[[int], int]) -> RankGroups:
        """Return the partition after the `split`-th split of each group by `color` of the rank in the group."""
        if split not in self._parts:
            places = np.empty_like(self.labels)
            starts = np.repeat(self._ends - self.sizes, self.sizes)
            places[self._order] = np.arange(len(self.labels)) - starts
            # The color depends on the rank in the group: one array serves all groups.
            colors = _numbered(_colors(color, int(self.sizes.max())))
            # One number for a group and a color, so that equal pairs are the new
            # groups.
            pairs = self.labels * (int(colors.max()) + 1) + colors[places]
            self._parts[split] = RankGroups(_numbered(pairs))
        return self._parts[split]


def _numbered(values: Ints) -> Ints:
    """Return the place of each value among the distinct ones, ascending; without sorting where they are small."""
    # An array of flags as long as the largest value would cost more than a sort.
    if values.min() < 0 or values.max() > 4 * len(values):
        return np.asarray(np.unique(values, return_inverse=True)[1])
    occurs = np.zeros(int(values.max()) + 1, dtype=bool)
    occurs[values] = True
    return np.asarray((np.cumsum(occurs) - 1)[values])


def _colors(color: Callable[[int], int], ranks: int) -> Ints:
    """Return the color of each rank, at once if it is computed by operators that arrays have too."""
    # Most colors are a quotient or a remainder of the rank: one call for an array in
    # place of one for each of 65,536 ranks.
    every: Any = np.arange(ranks)
    with suppress(Exception):  # of whatever arrays do not have
        if isinstance(colors := color(every), np.ndarray):
            return colors
    return np.fromiter(map(color, range(ranks)), dtype=np.int64)


class Event(NamedTuple):
    """One entry of a schedule: a communication, or else compute, a wait or the end of an epoch.

    `kind` is that of the `operation`, or `receive` of a message at its receiver.
    `amount`: samples of compute (`data`, `shuffle`, `forward`, `backward`, `update`),
    messages that the strategy's `other` work is on, position in the schedule of the
    event that a `wait` waits for, number of an `epoch` that ended.
    """

    kind: str
    amount: int = 0
    # a message is the same at its sender and its receiver
    operation: Operation = NO_EXCHANGE
    # of which the members of a collective are a group
    partition: RankGroups | None = None
    blocking: bool = True
    # of the strategy's work; `add` of a message that is added to a vector
    name: str = ""
    tag: int = 0  # of a message
    overlap: Overlap | None = None
    share: float = 1.0  # of the model's work in a task of compute

    @classmethod
    def of(
        cls, operation: Operation, partition: RankGroups | None = None, **others: Any
    ) -> Event:
        """Return the event of a communication with `others` of the fields."""
        return cls(operation.kind, operation=operation, partition=partition, **others)

    @property
    def exchanges(self) -> bool:
        """True for a collective of several workers."""
        return self.partition is not None and len(self.operation.members) > 1


class Kept(NamedTuple):
    """Elements of one sample that a stage keeps: from its forward to its backward pass, and while it computes again."""

    between: float
    again: float


class PartMemory(NamedTuple):
    """Numbers that a worker keeps of a model that it does not hold whole.

    `samples` are those of each chunk of layers that are between their forward and their
    backward pass at the same time, of which the most count; `piece` are those of a
    micro-batch.
    """

    stage: StageFacts | None  # the first chunk; None: shards of all layers
    parameters: int
    gradients: int
    updated: int  # of which the optimizer keeps its vectors
    samples: Sequence[tuple[int, ...]]
    piece: int
    kept: tuple[Kept, ...] | None  # of each chunk

    @property
    def activations(self) -> float:
        """Elements of the samples that are kept at the same time."""
        assert self.kept is not None, "recorded by a layer table"
        between = [each.between for each in self.kept]
        most: float = max(
            sum(map(operator.mul, samples, between)) for samples in self.samples
        )
        return most + self.piece * max(each.again for each in self.kept)


@dataclass
class Schedule:
    """Everything that worker `rank` does in a training.

    Workers that do the same share the list of events. Messages in it name the workers
    of the one whose program was recorded, which comes `moved` workers before this one:
    theirs are as many workers further.
    """

    rank: int
    events: list[Event] = field(default_factory=list)
    # The same events at another rank: only messages name ranks.
    moved: int = 0
    # counts of synchronisations, bytes and steps, without times
    report: WorkerReport | None = None
    reads_loss: bool = False  # its order depends on the training loss
    reads_seed: bool = False  # its events depend on the seed
    reads_placement: bool = False  # its groups depend on the workers of a node
    reads_rank: bool = False  # what it does, or counts, depends on which worker it is
    part: PartMemory | None = None  # of the model, which others hold parts of
    # parameters, gradients, optimizer state and the strategy's own tensors
    memory_bytes: int = 0

    @cached_property
    def is_lock_step(self) -> bool:
        """True if the order of the operations of a whole schedule does not depend on time."""
        return _TIMED.isdisjoint(event.kind for event in self.events)

    @cached_property
    def overlaps(self) -> bool:
        """True if averages of gradients overlap backward passes of a whole schedule."""
        return any(event.overlap is not None for event in self.events)

    @property
    def syncs(self) -> int:
        """Synchronisations in which the worker takes part."""
        assert self.report is not None
        return self.report.syncs

    @property
    def bytes_sent(self) -> int:
        """Payload that the worker hands over."""
        assert self.report is not None
        return self.report.bytes_sent


@dataclass
class TaskNode:
    """One task: `train` of a worker's block, `merge` of its weights into a shared model, `average` of several workers'.

    `after` are the names of the tasks whose results it takes; merges of different
    workers may come in any order.
    """

    name: str
    kind: Literal["train", "merge", "average"]
    epoch: int
    workers: list[int]
    after: list[str] = field(default_factory=list)
    depth: int = 0  # tasks before it on the longest way from the beginning


def task_graph(schedules: Sequence[Schedule]) -> list[TaskNode]:
    """Return the tasks of a training, each behind those that it takes results from.

    Steps of a worker between two exchanges are one task; exchanges of a group that
    follow one another are one average.
    """
    nodes: dict[str, TaskNode] = {}
    for schedule in schedules:
        _follow(schedule, nodes)
    for node in nodes.values():
        # Unknown yet: 0 is the depth of a task that waits for none.
        node.depth = -1
    for node in nodes.values():
        _place(node, nodes)
    return sorted(nodes.values(), key=lambda node: (node.depth, node.workers))


def _follow(schedule: Schedule, nodes: dict[str, TaskNode]) -> None:
    """Add the tasks of one worker, in their order."""
    rank, last, epoch = schedule.rank, "", 0
    trains = exchanges = False
    averages: dict[int, int] = {}  # of each epoch so far
    for event in schedule.events:
        # Whatever the number of steps, they are one task until the next exchange.
        if event.kind == "forward":
            trains, exchanges = True, False
            continue
        # A collective of a lone worker is no task.
        is_exchange = event.kind == Kind.ACCESS or event.exchanges
        if trains and (is_exchange or event.kind == "epoch"):
            last = _add(
                nodes, TaskNode(f"train-e{epoch}-w{rank}", "train", epoch, [rank]), last
            )
            trains = False
        if event.kind == Kind.ACCESS:
            last = _add(
                nodes, TaskNode(f"merge-e{epoch}-w{rank}", "merge", epoch, [rank]), last
            )
        # Buckets, buffers and weights that follow one another are one average.
        elif is_exchange and not exchanges:
            number = averages[epoch] = averages.get(epoch, 0) + 1
            first = min(event.operation.members)
            last = _add(
                nodes,
                TaskNode(
                    f"average-e{epoch}-{number}-of-w{first}", "average", epoch, [rank]
                ),
                last,
            )
            exchanges = True
        if event.kind == "epoch":
            epoch += 1


def _add(nodes: dict[str, TaskNode], node: TaskNode, last: str) -> str:
    """Add a task behind the worker's last one, or the worker to the average that others have added."""
    known = nodes.setdefault(node.name, node)
    if known is not node:
        known.workers += node.workers
    # Workers of an average name the same task before it when they had met there.
    if last and last not in known.after:
        known.after.append(last)
    return known.name


def _place(node: TaskNode, nodes: dict[str, TaskNode]) -> int:
    """Return the depth of a task, after those before it; each chain is as long as a training has epochs."""
    # A stack of its own: Python's recursion ends before a training of many epochs does.
    waiting = [node]
    while waiting:
        each = waiting[-1]
        unknown = [nodes[name] for name in each.after if nodes[name].depth < 0]
        if unknown:
            waiting += unknown
            continue
        each.depth = 1 + max((nodes[name].depth for name in each.after), default=-1)
        waiting.pop()
    return node.depth
