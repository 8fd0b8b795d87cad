"""How often the scheduler is asked while a study is watched: a clock that a test moves on, a squeue that counts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from scalebench.batch.submission import read_submission
from tests.batch.conftest import make, scalebench, submitted
from tests.conftest import needs_mpi

pytestmark = needs_mpi

HOUR_S = 3600
MOST_QUERIES = 120  # in an hour, of all commands together
STUDY = """\
name: mine
dataset: digits
model: {mlp: {hidden: [4]}}
workers: [1, 2, 4, 8, 16, 32, 64]
strategies: [allreduce, ddp, local_sgd, epoch_average]
epochs: 1
repetitions: 3
execution: native
engine: gloo
"""


class Clock:
    """Seconds since the watch began; who sleeps moves it on. `every_minute` is called for each that has passed."""

    def __init__(self, every_minute) -> None:
        self.now = 0.0
        self._every_minute = every_minute

    def time(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        before, self.now = self.now, self.now + seconds
        for minute in range(int(before // 60) + 1, int(self.now // 60) + 1):
            self._every_minute(minute)


@pytest.fixture
def hour(clients, place, monkeypatch):
    """`hour(on_minute)` submits 4 strategies at 7 worker counts, 3 times each, and watches them for an hour."""

    def watch(*options: str, on_minute=lambda minute: None) -> int:
        (place / "study.yaml").write_text(STUDY)
        (place / "site.yaml").write_text(
            "scheduler: slurm\ncores_per_node: 2\nnodes: 32\n"
        )
        made = submitted(*options)
        assert sum(len(shard.run_ids) for shard in made.shards) == 4 * 7 * 3
        jobs = [job for job in made.jobs if job.shards]
        clients.answer(*(f"{job.job}|RUNNING|2026-11-26T08:00:00|None" for job in jobs))

        def every_minute(minute: int) -> None:
            if minute < HOUR_S // 60:
                on_minute(minute)
                return
            for shard in read_submission(Path("results/mine")).shards:
                make(shard.number)

        clock = Clock(every_minute)
        for module in ("scalebench.batch.standing", "scalebench.cli.status"):
            monkeypatch.setattr(
                f"{module}.time", SimpleNamespace(time=clock.time, sleep=clock.sleep)
            )
        assert scalebench("status", "results/mine", "--watch") == 0
        assert HOUR_S <= clock.now < HOUR_S + 60
        return len(clients.calls("squeue"))

    return watch


def test_a_watched_study_asks_the_scheduler_twice_a_minute(hour):
    queries = hour()
    assert MOST_QUERIES / 2 < queries <= MOST_QUERIES


def test_other_commands_beside_the_watch_ask_no_more(hour):
    def looks(minute: int) -> None:
        for _ in range(3):
            assert scalebench("status", "results/mine", "--json") == 0

    assert hour(on_minute=looks) <= MOST_QUERIES


def test_jobs_that_rows_say_are_done_are_not_asked_for(hour, clients):
    def half_is_done(minute: int) -> None:
        if minute == HOUR_S // 120:
            first, *_ = read_submission(Path("results/mine")).shards
            make(first.number)

    hour(on_minute=half_is_done)
    first, *_, last = clients.calls("squeue")
    asked = [
        set(query.partition("--jobs=")[2].split()[0].split(","))
        for query in (first, last)
    ]
    assert asked[1] < asked[0]
