from __future__ import annotations

import pytest

from scalebench.pricing.machine import BatchTimes, StepTable, StepTimes
from scalebench.system.clock import Task


def table(jitter=(0.9, 1.1), blocks=(1e-3, 3e-3)) -> StepTable:
    def batch(samples: int, scale: float) -> BatchTimes:
        seconds = [scale * value for value in blocks]
        return BatchTimes(
            samples=samples,
            data_s=seconds,
            forward_s=seconds,
            backward_s=seconds,
            update_s=seconds,
        )

    return StepTable(
        source="test",
        busy_workers=1,
        batches=[batch(4, 1.0), batch(8, 2.0)],
        shuffle_s_per_sample=1e-6,
        jitter=list(jitter),
    )


def test_draw_of_a_repetition_is_reproducible():
    first, again = (
        StepTimes(table(), seed=1, repetition=2).task_seconds(Task.FORWARD, 4)
        for _ in range(2)
    )
    assert first == again
    drawn = {
        StepTimes(table(), seed=1, repetition=r).task_seconds(Task.FORWARD, 4)
        for r in range(20)
    }
    assert len(drawn) > 1
    assert drawn <= {1e-3, 2e-3, 3e-3}


def test_delayed_blocks_are_trimmed():
    """17 of 20 blocks take 1 ms: the trimmed upper fifth contains the other three in almost any draw."""
    odd = table(blocks=(*[1e-3] * 17, 2e-3, 3e-3, 30e-3))
    drawn = [
        StepTimes(odd, seed=1, repetition=r).task_seconds(Task.FORWARD, 4)
        for r in range(200)
    ]
    assert sum(seconds == pytest.approx(1e-3) for seconds in drawn) > 150
    assert max(drawn) < 10e-3, "the mean of all 20 would be 2.6 ms, and 30 ms at worst"


def test_blocks_are_trimmed_by_whole_steps():
    """Three kinds of blocks take 8 ms each, with other shares; the middle of each task alone would add up to 6 ms."""
    kinds = ([1e-3, 2e-3, 5e-3], [2e-3, 5e-3, 1e-3], [5e-3, 1e-3, 2e-3])
    data, forward, backward = (
        [kind[task] for kind in kinds for _ in range(5)] for task in range(3)
    )
    batch = BatchTimes(
        samples=8,
        data_s=data,
        forward_s=forward,
        backward_s=backward,
        update_s=[0.0] * 15,
    )
    for repetition in range(10):
        times = StepTimes(
            table().model_copy(update={"batches": [batch]}),
            seed=0,
            repetition=repetition,
        )
        whole = sum(
            times.task_seconds(task, 8)
            for task in (Task.DATA, Task.FORWARD, Task.BACKWARD)
        )
        assert whole == pytest.approx(8e-3)


def test_times_are_interpolated_between_batches_and_proportional_beyond():
    times = StepTimes(table(blocks=(1e-3,)), seed=0, repetition=0)
    assert times.task_seconds(Task.BACKWARD, 6) == pytest.approx(1.5e-3)
    assert times.task_seconds(Task.BACKWARD, 16) == pytest.approx(4e-3)
    assert times.task_seconds(Task.BACKWARD, 1) == pytest.approx(1e-3)
    assert times.task_seconds(Task.SHUFFLE, 1000) == pytest.approx(1e-3)
    assert times.task_seconds(Task.OTHER, 1) == 0.0


@pytest.mark.parametrize("samples", [0, 1, 6, 8, 16])
def test_an_update_does_not_depend_on_the_batch(samples):
    assert StepTimes(table(blocks=(1e-3,))).task_seconds(
        Task.UPDATE, samples
    ) == pytest.approx(1e-3)
