"""Prices of a schedule: the cluster, costs of engines, times of steps and of strategies' operations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from pydantic import BaseModel, ConfigDict, NonNegativeFloat

from scalebench.cluster.cluster_file import Cluster
from scalebench.cluster.engine_costs import EngineCosts
from scalebench.pricing.step_times import StepTable, table_under


class OperationTime(BaseModel):
    """Seconds of an operation of a strategy besides steps: on the messages of two workers, and per further one."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    seconds: NonNegativeFloat
    per_member_s: NonNegativeFloat = 0.0

    def scaled(self, factor: float) -> OperationTime:
        """Return the time on a machine that takes `factor` times as long."""
        return OperationTime(
            seconds=self.seconds * factor, per_member_s=self.per_member_s * factor
        )

    def among(self, members: int) -> float:
        """Return seconds of one call on the messages of `members` workers."""
        return self.seconds + self.per_member_s * max(0, members - 2)


# by strategy with options, then by operation
OperationTimes = dict[str, dict[str, OperationTime]]


def name_of(operation: Callable[..., Any]) -> str:
    """Return the qualified name of a function or method, also in a partial; of other objects that of the class."""
    while isinstance(operation, partial):
        operation = operation.func
    return str(getattr(operation, "__qualname__", type(operation).__qualname__))


@dataclass(frozen=True)
class Machine:
    """Prices of a virtual run: the cluster, the engines' costs, the step times by load of a node, and the
    operations of strategies."""

    cluster: Cluster
    engines: EngineCosts
    tables: list[StepTable]
    operations: OperationTimes = field(default_factory=dict)
    # the machine speed of both, as the time of the reference step
    reference_s: float | None = None

    def table_for(self, workers: int) -> StepTable:
        """The step times measured under the load that `workers` put on a node."""
        return table_under(
            self.tables, min(workers, self.cluster.node.workers_per_node)
        )


def loads_up_to(node_workers: int) -> list[int]:
    """Return the measured numbers of workers that compute at the same time on a node: 1, 2, 4, ... and all."""
    return sorted(
        {
            min(1 << power, node_workers)
            for power in range(node_workers.bit_length() + 1)
        }
    )
