"""The pool of processes that simulate runs: what it ends where its runs are interrupted."""

from __future__ import annotations

from concurrent.futures.process import BrokenProcessPool

from scalebench.virtual import pool


class Child:
    ended = False

    def terminate(self):
        self.ended = True


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
