"""A process that computes tasks: results in order, errors of any kind, its death before and during a task."""

from __future__ import annotations

import os
import signal
import time

import pytest

from scalebench.errors import EngineError, RunError
from scalebench.tasks.process import ProcessDied, TaskProcess


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


def test_results_come_in_the_order_of_tasks_of_any_size(process):
    sizes = [0, 10, 10_000_000, 3]
    futures = [process.submit(bytes, size) for size in sizes]
    assert [len(future.result(60)) for future in futures] == sizes


def test_tasks_are_computed_in_a_process_of_their_own(process):
    assert process.submit(os.getpid).result(60) == process.pid != os.getpid()


@pytest.mark.parametrize(
    ("error", "arrives"),
    [
        ((RunError, "no such thing"), RunError("no such thing")),
        ((SystemExit, 3), SystemExit(3)),
        ((UnsendableError, 7, "here"), EngineError("UnsendableError: 7 at here")),
    ],
)
def test_errors_arrive_and_the_process_goes_on(process, error, arrives):
    found = process.submit(raises, *error).exception(60)
    assert type(found) is type(arrives)
    assert str(found).startswith(str(arrives))
    assert process.submit(abs, -2).result(60) == 2


def test_a_result_that_cannot_be_sent_is_an_error(process):
    assert process.submit(eval, "lambda: 0").exception(60) is not None
    assert process.submit(abs, -2).result(60) == 2


def test_the_death_of_a_process_ends_its_tasks(process):
    under_way, waiting = process.submit(time.sleep, 60), process.submit(abs, -2)
    os.kill(process.pid, signal.SIGKILL)
    for future in (under_way, waiting):
        assert isinstance(future.exception(60), ProcessDied)
    assert process.is_dead
    assert isinstance(process.submit(abs, -2).exception(60), ProcessDied)


def test_closing_says_nothing_of_what_is_under_way(process):
    under_way = process.submit(time.sleep, 60)
    process.close()
    process._process.join(60)
    assert not under_way.done()
