"""What a recording computes of a strategy's own operations."""

from __future__ import annotations

import pytest
import torch

from scalebench.pricing.recorders import RecordingClock
from scalebench.pricing.schedule import Schedule

META = torch.empty(8, device="meta")


class Operation:
    """Counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, *arguments: object) -> torch.Tensor:
        self.calls += 1
        return torch.empty(4, device="meta")


@pytest.mark.parametrize(
    ("first", "second", "calls"),
    [
        ((META,), (META.clone(),), 1),
        ((META, 0.5), (META, 0.25), 1),  # a factor changes no shape
        (([META, META],), ([META, META],), 1),
        ((META,), (META[:4],), 2),
        (([META],), ([META, META],), 2),
        (
            (torch.zeros(8),),
            (torch.zeros(8),),
            2,
        ),  # its values may say how long the result is
        ((META, 3), (META, 3), 2),
        ((META, object()), (META, object()), 2),  # whatever an object says
    ],
)
def test_an_operation_on_tensors_without_data_is_computed_once(first, second, calls):
    clock, operation = RecordingClock(Schedule(rank=0)), Operation()
    results = [clock.work(operation, *arguments) for arguments in (first, second)]
    assert [result.shape for result in results] == [(4,), (4,)]
    assert operation.calls == calls
