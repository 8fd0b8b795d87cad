"""Progress lines and bars of a running study."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console
from rich.progress import Progress

from scalebench.cli.live_progress import Watcher, watching
from scalebench.formatting import Detail
from scalebench.training.outcome import Outcome


class Now:
    time = 0.0

    def __call__(self):
        return self.time


def watcher(out, now=None):
    return Watcher(
        Progress(
            console=Console(file=out, width=200),
            get_time=now,
            disable=True,
            speed_estimate_period=99,
        )
    )


@pytest.fixture
def watched(make_run):
    """End runs at given seconds, `watched(10, [...])`, and return the printed lines."""

    def play(total, moments):
        now, out = Now(), io.StringIO()
        own = watcher(out, now)
        own.phase("virtual workers", total)
        for moment in moments:
            now.time = moment
            own.started(make_run())
            own.ended(make_run(), Outcome("r", "completed"))
        return out.getvalue().splitlines()

    return play


def test_lines_show_the_time_left(watched):
    """30 s until the first end, of which most was the start of processes; then 2 s a run."""
    said = watched(10, [30 + 2 * n for n in range(10)])
    assert said == [
        "virtual workers: 10 runs",
        *(
            f"virtual workers: {n} of 10 runs, about {2 * (10 - n)} s left"
            for n in (2, 4, 6, 8)
        ),
        "virtual workers: 10 of 10 runs",
    ]


def test_single_run_has_no_time_left(watched):
    assert watched(1, [5.0]) == [
        "virtual workers: 1 run",
        "virtual workers: 1 of 1 run",
    ]


def test_equal_notes_of_several_studies_are_printed_once():
    out = io.StringIO()
    own = watcher(out)
    for text in ("one", "two", "one"):
        own.note(text)
    own.show_notes()
    assert out.getvalue() == "note: one\nnote: two\n"


def notes_of(texts, before=True):
    out = io.StringIO()
    own = watcher(out)
    if not before:
        own.phase("virtual workers", 1)
    for text in texts:
        own.note(text)
    own.phase("virtual workers", 1)
    return [line for line in out.getvalue().splitlines() if line.startswith("note")]


def test_three_notes_stand_before_the_first_run():
    texts = ["one", Detail("how"), "two", "three", "four", "five"]
    assert notes_of(texts) == [
        "note: one",
        "note: two",
        "note: three (2 more notes with --verbose)",
    ]
    assert notes_of(texts[:4]) == ["note: one", "note: two", "note: three"]
    assert notes_of(texts, before=False) == [
        f"note: {text}" for text in texts if text != "how"
    ], "each is news"


def test_verbose_shows_every_note(monkeypatch):
    monkeypatch.setattr("scalebench.cli.live_progress.verbosity", lambda: 1)
    assert notes_of(["one", Detail("how"), "two", "three", "four"])[1] == "note: how"


def test_notes_after_the_calibration_have_the_room_that_is_left():
    out = io.StringIO()
    own = watcher(out)
    for texts in (("one", "two"), ("three", "four")):
        for text in texts:
            own.note(text)
        own.phase("calibration", 0)
    said = out.getvalue().splitlines()
    assert [line for line in said if line.startswith("note")] == [
        "note: one",
        "note: two",
        "note: three (1 more note with --verbose)",
    ]


def test_terminal_breaks_no_words_and_keeps_room_for_ctrl_c(monkeypatch, capsys):
    """The ^C of a terminal stands behind the bar, not on a line that would leave the bar above it."""
    for name, value in (("FORCE_COLOR", "1"), ("TERM", "xterm"), ("COLUMNS", "80")):
        monkeypatch.setenv(name, value)
    note = "other programs keep 1.0 of 2 cores busy: native runs beside them are marked as disturbed"
    with watching() as own:
        own.note(note)
        own.phase("mpi and gloo processes", 1000)
    printed = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().err)
    lines = [line.rstrip() for line in re.split(r"[\r\n]+", printed)]
    (bar, *_) = [line for line in lines if "0/1000" in line]
    assert len(bar) <= 77
    at = next(place for place, line in enumerate(lines) if line.startswith("note:"))
    assert " ".join(lines[at : at + 2]) == f"note: {note}"
