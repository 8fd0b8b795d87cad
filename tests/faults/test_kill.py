"""kill -9 at random moments of a sweep, each followed by a resume: nothing lost, nothing twice, the same numbers.

`SCALEBENCH_KILLS=100` makes a hundred of them.
"""

from __future__ import annotations

import os
import random
import signal
import time

KILLS = int(os.environ.get("SCALEBENCH_KILLS", "12"))
RUNS = 2 * (1 + 5 * 3)


def test_a_sweep_that_is_killed_again_and_again_ends_as_if_undisturbed(place):
    begun = time.monotonic()
    assert place.run("undisturbed") == 0
    whole = time.monotonic() - begun
    wanted = place.tables("undisturbed")
    assert len(wanted[0]) == RUNS

    draw, killed, in_the_sweep, folder = random.Random(20261120), 0, 0, 0
    while killed < KILLS:
        folder += 1
        output = f"disturbed-{folder}"
        while True:
            before = place.whole_lines(output)
            command = place.start("run", "study.yaml", "--output", output, "--jobs", "1")
            if draw.random() < 0.5:  # at any moment of the command
                time.sleep(draw.uniform(0.0, whole))
            else:  # at any moment of its runs, which take a small part of it
                place.until(lambda: place.whole_lines(output) != before or not command.is_alive(), "a row")  # noqa: B023
                time.sleep(draw.uniform(0.0, whole / 10))
            command.send(signal.SIGKILL)
            code = command.wait()
            now = place.whole_lines(output)
            assert now.startswith(before), "a completed row was lost or changed"
            assert code in (0, -signal.SIGKILL), place.said()
            if code == 0:
                break
            killed += 1
            in_the_sweep += 0 < now.count(b"\n") < 1 + RUNS
        assert place.tables(output) == wanted
    assert in_the_sweep >= KILLS // 4, "the kills hit the beginning only"


def test_a_kill_takes_the_worker_processes_with_it(place):
    command = place.start("run", "study.yaml", "--output", "out", "--jobs", "2", "--set", "epochs=40")
    place.until(lambda: place.whole_lines("out").count(b"\n") > 1, "a row")
    family = command.family()
    assert len(family) >= 2
    command.send(signal.SIGKILL)
    assert command.wait() == -signal.SIGKILL
    place.until(lambda: not any(process.is_running() for process in family), "the end of the worker processes", 15)


def test_a_study_that_repeats_until_times_are_known_goes_on_to_the_same_blocks(place):
    until = ("--set", "until.ci_width=4%", "--set", "until.at_most=5", "--set", "virtual.jitter=normal")
    assert place.run("undisturbed", *until) == 0
    wanted = place.tables("undisturbed")
    certain = 3 * (1 + 5 * 3)
    assert certain < len(wanted[0]) < certain // 3 * 5, "some points are repeated, and not all"
    for rows in (certain - 2, certain + 3, len(wanted[0]) - 2):
        command = place.start("run", "study.yaml", "--output", "disturbed", "--jobs", "1", *until)
        place.until(lambda rows=rows: place.whole_lines("disturbed").count(b"\n") > rows, "a row")
        command.send(signal.SIGKILL)
        assert command.wait() in (0, -signal.SIGKILL)
    assert place.run("disturbed", *until) == 0
    assert place.tables("disturbed") == wanted
