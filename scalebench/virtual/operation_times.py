"""How long a strategy's own operations take: compressing, merging, outer optimizers; nothing of a plain step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from pydantic import BaseModel, ConfigDict, NonNegativeFloat


class OperationTime(BaseModel):
    """Seconds of one call on two workers' messages, and what each further one's adds."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    seconds: NonNegativeFloat
    per_member_s: NonNegativeFloat = 0.0

    def scaled(self, factor: float) -> OperationTime:
        """The operation on a machine that takes `factor` times as long."""
        return OperationTime(seconds=self.seconds * factor, per_member_s=self.per_member_s * factor)

    def among(self, members: int) -> float:
        """Seconds of one call on the messages of `members` workers."""
        return self.seconds + self.per_member_s * max(0, members - 2)


OperationTimes = dict[str, dict[str, OperationTime]]  # of each strategy with its options, by the operation's name


def name_of(operation: Callable[..., Any]) -> str:
    """`TopK._select` of that method, also with some arguments given; of another object its class."""
    while isinstance(operation, partial):
        operation = operation.func
    return str(getattr(operation, "__qualname__", type(operation).__qualname__))
