from __future__ import annotations

import pytest
import torch

from scalebench.errors import RunError
from scalebench.virtual.scheduler import Scheduler


def test_workers_run_in_order_of_virtual_time():
    scheduler = Scheduler(seed=0)
    seen: list[tuple[float, int]] = []

    def program(rank: int):
        def body():
            for step in range(4):
                now = step * (rank + 1.0)
                scheduler.turn(rank, now)
                seen.append((now, rank))

        return body

    scheduler.run({rank: program(rank) for rank in range(3)})
    assert len(seen) == 12
    assert [now for now, _ in seen] == sorted(now for now, _ in seen)


def _order_of_ties(seed: int, ties: str, rounds: int) -> list[int]:
    scheduler = Scheduler(seed=seed, ties=ties)
    order: list[int] = []

    def program(rank: int):
        def body():
            for step in range(rounds):
                scheduler.turn(rank, float(step + 1))
                order.append(rank)

        return body

    scheduler.run({rank: program(rank) for rank in range(4)})
    return order


def test_ties_by_rank_are_in_rank_order():
    assert _order_of_ties(0, "rank", 3) == [0, 1, 2, 3] * 3


def test_seeded_ties_are_reproducible_and_fair():
    order = _order_of_ties(5, "seeded", 40)
    assert order == _order_of_ties(5, "seeded", 40)
    assert order != _order_of_ties(6, "seeded", 40)
    last = [order[4 * step + 3] for step in range(40)]
    assert set(last) == {0, 1, 2, 3}


def test_deadlocked_workers_are_named():
    scheduler = Scheduler(seed=0)
    with pytest.raises(RunError, match="worker 0 in the post; worker 1 in the post"):
        scheduler.run(
            {
                rank: lambda rank=rank: scheduler.block(rank, "the post")
                for rank in range(2)
            }
        )


def test_an_exception_of_one_worker_ends_the_others():
    scheduler = Scheduler(seed=0)
    ended: list[int] = []

    def waits():
        try:
            scheduler.block(1, "ever")
        finally:
            ended.append(1)

    def fails():
        scheduler.turn(0, 1.0)
        raise ValueError("of worker 0")

    with pytest.raises(ValueError, match="of worker 0"):
        scheduler.run({0: fails, 1: waits})
    assert ended == [1]


def test_grad_mode_of_one_worker_does_not_leak_into_another():
    scheduler = Scheduler(seed=0)
    modes: dict[int, list[bool]] = {0: [], 1: []}

    def without_gradients():
        with torch.no_grad():
            scheduler.turn(0, 1.0)
            modes[0].append(torch.is_grad_enabled())
        modes[0].append(torch.is_grad_enabled())

    def with_gradients():
        scheduler.turn(1, 0.5)
        modes[1].append(torch.is_grad_enabled())
        scheduler.turn(1, 2.0)
        modes[1].append(torch.is_grad_enabled())

    scheduler.run({0: without_gradients, 1: with_gradients})
    assert modes == {0: [False, True], 1: [True, True]}
    assert torch.is_grad_enabled()


def test_workers_have_separate_generator_states():
    def draws(workers: int) -> dict[int, list[float]]:
        scheduler = Scheduler(seed=0, drawn={"torch"})

        def program(rank: int):
            def body():
                torch.manual_seed(rank)
                numbers = []
                for step in range(3):
                    scheduler.turn(rank, float(step))
                    numbers.append(torch.rand(()).item())
                return numbers

            return body

        return scheduler.run({rank: program(rank) for rank in range(workers)})

    together = draws(3)
    for rank in range(3):
        torch.manual_seed(rank)
        assert together[rank] == [torch.rand(()).item() for _ in range(3)]
