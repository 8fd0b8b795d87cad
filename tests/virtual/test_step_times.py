from __future__ import annotations

import pytest

from scalebench.clock import Task
from scalebench.virtual.step_times import BatchTimes, StepTable, StepTimes


def table(jitter=(0.9, 1.1), blocks=(1e-3, 3e-3)) -> StepTable:
    def batch(samples: int, scale: float) -> BatchTimes:
        seconds = [scale * value for value in blocks]
        return BatchTimes(samples=samples, data_s=seconds, forward_s=seconds, backward_s=seconds, update_s=seconds)

    return StepTable(
        source="test",
        busy_workers=1,
        batches=[batch(4, 1.0), batch(8, 2.0)],
        shuffle_s_per_sample=1e-6,
        release=[1.0],
        jitter=list(jitter),
    )


def test_a_repetition_draws_once_and_always_the_same():
    first, again = (StepTimes(table(), seed=1, repetition=2).task_seconds(Task.FORWARD, 4) for _ in range(2))
    assert first == again
    drawn = {StepTimes(table(), seed=1, repetition=r).task_seconds(Task.FORWARD, 4) for r in range(20)}
    assert len(drawn) > 1
    assert drawn <= {1e-3, 2e-3, 3e-3}


def test_between_measured_batches_times_are_interpolated_and_beyond_them_proportional():
    times = StepTimes(table(blocks=(1e-3,)), seed=0, repetition=0)
    assert times.task_seconds(Task.BACKWARD, 6) == pytest.approx(1.5e-3)
    assert times.task_seconds(Task.BACKWARD, 16) == pytest.approx(4e-3)
    assert times.task_seconds(Task.BACKWARD, 1) == pytest.approx(1e-3)
    assert times.task_seconds(Task.SHUFFLE, 1000) == pytest.approx(1e-3)
    assert times.task_seconds(Task.OTHER, 1) == 0.0
