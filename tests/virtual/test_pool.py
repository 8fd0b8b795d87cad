"""The pool of processes that simulate runs: what it ends where its runs are interrupted."""

from __future__ import annotations

import gc
import weakref
from concurrent.futures.process import BrokenProcessPool

from scalebench.virtual import pool


class Child:
    ended = False

    def terminate(self):
        self.ended = True


class Model:
    """One that refers to itself, as a layer that knows its model makes it do."""

    def __init__(self):
        self.owner = self


def test_models_of_a_run_are_gone_before_the_next_one():
    """Also where Python searches for unused objects seldom, as in commands."""
    made, alive = [], []

    class Simulator:
        def piece_of(self, run):
            return run

        def outcomes(self, runs, stopping):
            alive.append(sum(model() is not None for model in made))
            made.append(weakref.ref(Model()))
            return runs

        def ends_with(self, run, outcomes):
            return False

    gc.disable()
    try:
        pool.run_virtual(
            ["a", "b", "c"],
            Simulator(),
            jobs=1,
            on_start=lambda run: None,
            on_outcome=lambda run, outcome: None,
        )
    finally:
        gc.enable()
    assert alive == [0, 0, 0]


def test_only_processes_of_the_pool_are_ended_with_it(monkeypatch):
    """Other children of the process, as those of a notebook, go on."""
    other, own = Child(), Child()
    children = [other]

    class Pool:
        def __init__(self, *arguments):
            children.append(own)

        def submit(self, *arguments):
            raise BrokenProcessPool

        def shutdown(self, **options):
            pass

    monkeypatch.setattr(pool, "ProcessPoolExecutor", Pool)
    monkeypatch.setattr(pool.multiprocessing, "active_children", lambda: list(children))
    left = pool._run_in_processes(
        [["run"]], None, 1, lambda run: None, lambda *of: None, lambda: False
    )
    assert left == [["run"]], "nothing was made"
    assert own.ended
    assert not other.ended
