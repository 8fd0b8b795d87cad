"""A process that computes tasks: results in order, errors of any kind, its death before and during a task."""

from __future__ import annotations

import os
import signal
import time

import pytest

from scalebench.errors import EngineError, RunError
from scalebench.tasks.backends import DeadWorkerError, TaskProcess


@pytest.fixture
def process():
    made = TaskProcess()
    yield made
    made.close()


class UnsendableError(Exception):
    """An error that cannot be made again from its text, as those of some libraries."""

    def __init__(self, code, place):
        super().__init__(f"{code} at {place}")


def raises(kind, *arguments):
    raise kind(*arguments)


def computed(process, function, *arguments):
    process.submit("only", function, *arguments)
    ((ticket, result),) = process.ended()
    assert ticket == "only"
    return result


def test_results_come_in_the_order_of_tasks_of_any_size(process):
    sizes = [0, 10, 10_000_000, 3]
    for ticket, size in enumerate(sizes):
        process.submit(ticket, bytes, size)
    ended = [process.ended() for _ in sizes]
    assert [(ticket, len(result)) for ((ticket, result),) in ended] == list(
        enumerate(sizes)
    )
    assert not process.is_busy


def test_large_tasks_and_large_results_pass_each_other(process):
    """Neither side writes what fills the pipe while the other one writes too."""
    large = bytes(10_000_000)
    for ticket in range(3):
        process.submit(ticket, bytes, large)
    assert [process.ended() for _ in range(3)] == [
        [(ticket, large)] for ticket in range(3)
    ]


def test_tasks_are_computed_in_a_process_of_their_own(process):
    assert computed(process, os.getpid) == process.pid != os.getpid()


@pytest.mark.parametrize(
    ("error", "arrives"),
    [
        ((RunError, "no such thing"), RunError("no such thing")),
        ((SystemExit, 3), SystemExit(3)),
        ((UnsendableError, 7, "here"), EngineError("UnsendableError: 7 at here")),
    ],
)
def test_errors_arrive_and_the_process_goes_on(process, error, arrives):
    found = computed(process, raises, *error)
    assert type(found) is type(arrives)
    assert str(found).startswith(str(arrives))
    assert computed(process, abs, -2) == 2


def test_a_result_that_cannot_be_sent_is_an_error(process):
    assert isinstance(computed(process, eval, "lambda: 0"), Exception)
    assert computed(process, abs, -2) == 2


def test_the_death_of_a_process_ends_its_tasks(process):
    process.submit("under way", time.sleep, 60)
    process.submit("waiting", abs, -2)
    os.kill(process.pid, signal.SIGKILL)
    ended = process.ended()
    assert [ticket for ticket, _ in ended] == ["under way", "waiting"]
    assert all(
        isinstance(error, DeadWorkerError) and "exit code -9" in str(error)
        for _, error in ended
    )
    assert process.is_dead
    process.submit("late", abs, -2)
    ((_, error),) = process.ended()
    assert isinstance(error, DeadWorkerError)


def test_closing_ends_what_is_under_way(process):
    process.submit("under way", time.sleep, 60)
    process.close()
    process._process.join()
    assert process.is_dead
