"""The graph of tasks that a strategy of whole epochs is, from the recorded schedules of its workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from scalebench.cluster.operation import Kind
from scalebench.pricing.schedule import Schedule


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
        if event.kind == "forward":
            trains, exchanges = True, False
            continue
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
    if last and last not in known.after:
        known.after.append(last)
    return known.name


def _place(node: TaskNode, nodes: dict[str, TaskNode]) -> int:
    """Return the depth of a task, after those before it; each chain is as long as a training has epochs."""
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
