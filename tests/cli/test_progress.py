"""Progress lines and bars of a running study."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.progress import Progress, TextColumn

from scalebench.cli.progress import Watcher
from scalebench.training.outcome import Outcome


class Now:
    time = 0.0

    def __call__(self):
        return self.time


@pytest.fixture
def watched(make_run):
    """End runs at given seconds, `watched(100.0, 10, [...])`, and return the printed text."""

    def play(total, moments, bars=False):
        now, out = Now(), io.StringIO()
        console = Console(file=out, width=200)
        progress = Progress(TextColumn("{task.completed} {task.fields[left]}"), console=console) if bars else None
        watcher = Watcher(console, progress, clock=now)
        watcher.phase("virtual workers", total)
        shown = []
        for moment in moments:
            now.time = moment
            watcher.started(make_run())
            watcher.ended(make_run(), Outcome("r", "completed"))
            shown.append(progress.tasks[0].fields["left"] if progress else "")
        return shown if bars else out.getvalue().splitlines()

    return play


def test_lines_show_the_time_left(watched):
    """30 s until the first end, of which most was the start of processes; then 2 s a run."""
    said = watched(10, [30 + 2 * n for n in range(10)])
    assert said == [
        "virtual workers: 10 runs",
        *(f"virtual workers: {n} of 10 runs, about {2 * (10 - n)} s left" for n in (2, 4, 6, 8)),
        "virtual workers: 10 of 10 runs",
    ]


def test_bars_show_the_time_left_after_every_run(watched):
    assert watched(4, [28.0, 29.0, 32.0, 33.0], bars=True) == [
        "about 84 s left",
        "about 2 s left",
        "about 2 s left",
        "",
    ]


def test_single_run_has_no_time_left(watched):
    assert watched(1, [5.0]) == ["virtual workers: 1 run", "virtual workers: 1 of 1 run"]


def test_equal_notes_of_several_studies_are_printed_once():
    out = io.StringIO()
    watcher = Watcher(Console(file=out, width=200), None)
    for text in ("one", "two", "one"):
        watcher.note(text)
    assert out.getvalue() == "note: one\nnote: two\n"
