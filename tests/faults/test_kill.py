"""kill -9 at random moments of a sweep, each followed by a resume: nothing lost, nothing twice, the same numbers.

`SCALEBENCH_KILLS=100` makes a hundred of them; `pytest -s` shows what each was doing
when it was hit.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from contextlib import suppress

import pytest

KILLS = int(os.environ.get("SCALEBENCH_KILLS", "12"))
RUNS, EPOCHS = 2 * (1 + 5 * 3), 2
AIMS = ("any moment", "a run", "a run", "a row")
# what stands in the stack of a command that is killed -> what it was doing; the first
# that is found
PHASES = {
    "calibrating": ("in machine_for",),
    "writing": ("in append", "in _write", "in write_atomic"),
    "in a run": ("in simulate_alike",),
    "between runs": ("in run_virtual",),
    "done": ("in _summarise",),
    "starting": ("in main",),
}


def kill(place, command, output):
    """SIGKILL; what the command was doing at that moment, as its stack and the tables tell."""
    command.send(signal.SIGUSR2)
    stack, deadline = place.folder / "stack.txt", time.monotonic() + 0.05
    while (
        not stack.read_text().endswith("in <module>\n")
        and command.is_alive()
        and time.monotonic() < deadline
    ):
        time.sleep(0.0001)
    command.send(signal.SIGKILL)
    code = command.wait()
    assert code in (0, -signal.SIGKILL), place.printed()
    if code == 0:
        return "missed"
    committed, epochs = (
        place.whole_lines(output),
        place.runs_csv(output).with_name("epochs.csv"),
    )
    with suppress(FileNotFoundError):
        uncommitted = epochs.read_bytes().count(b"\n") - 1 > EPOCHS * (
            committed.count(b"\n") - 1
        )
        if uncommitted or place.runs_csv(output).read_bytes() != committed:
            return "writing"
    printed = stack.read_text()
    return next(
        (
            phase
            for phase, names in PHASES.items()
            if any(name in printed for name in names)
        ),
        "starting",
    )


def amid(phases):
    """How many kills hit the command at its runs and rows; which of them do is decided by the machine."""
    return phases["in a run"] + phases["between runs"] + phases["writing"]


def wait_for(place, command, output, aim, draw, whole):
    """Return at a moment of the kind that `aim` says, or when the command has ended."""
    if aim == "any moment":
        time.sleep(draw.uniform(0.0, whole))
        return
    runs = place.runs_csv(output)
    watched = runs if aim == "a run" else runs.with_name("epochs.csv")
    nth = draw.randrange(1, 6)
    size = watched.stat().st_size if watched.exists() else 0
    while nth and command.is_alive():
        with suppress(FileNotFoundError):
            if (now := watched.stat().st_size) != size:
                size, nth = now, nth - 1
        time.sleep(0.0005)  # the command needs the core
    if aim == "a run":
        time.sleep(draw.uniform(0.0, whole / 50))


@pytest.mark.thorough
@pytest.mark.timeout(max(1800, 120 * KILLS))
def test_sweep_killed_at_random_moments_ends_with_the_rows_of_an_undisturbed_one(place):
    """Sweeps charged by a given calibration; every third one measures its own, and is killed while it does."""
    begun = time.monotonic()
    assert place.run("undisturbed") == 0
    whole = time.monotonic() - begun
    wanted = place.tables("undisturbed")
    assert len(wanted[0]) == RUNS
    study = place.folder / "study.yaml"
    own = study.read_text().replace("calibration: given.json\n", "")
    (place.folder / "measured.yaml").write_text(own)

    draw, phases, sweeps = random.Random(20261120), Counter(), 0
    while phases.total() < KILLS or (
        amid(phases) < KILLS // 4 and phases.total() < 4 * KILLS
    ):
        sweeps += 1
        output = f"disturbed-{sweeps}"
        measures = sweeps % 3 == 2
        arguments = (
            "run",
            "measured.yaml" if measures else "study.yaml",
            "--output",
            output,
            "--jobs",
            "1",
        )
        while True:
            before = place.whole_lines(output)
            command = place.start(*arguments)
            if (
                measures
                and not (place.folder / output / "small" / "calibration.json").exists()
                and draw.random() < 0.7
            ):
                kept = place.folder / output / "small" / "provenance"
                place.until(lambda kept=kept: kept.exists(), "the calibration")
                time.sleep(draw.uniform(0.0, whole))
            else:
                wait_for(place, command, output, draw.choice(AIMS), draw, whole)
            phase = kill(place, command, output)
            assert place.whole_lines(output).startswith(before), (
                "a completed row was lost or changed"
            )
            if phase == "missed":
                break
            phases[phase] += 1
        if measures:
            given = f"{output}/small/calibration.json"
            assert place.run(f"undisturbed-{sweeps}", "--calibration", given) == 0
            assert place.tables(output) == place.tables(f"undisturbed-{sweeps}")
        else:
            assert place.tables(output) == wanted
    print(f"\n{phases.total()} kills in {sweeps} sweeps: {dict(phases)}")
    assert amid(phases), f"of {4 * KILLS} kills none hit a run: {phases}"


def test_killed_command_leaves_no_worker_processes(place):
    command = place.start(
        "run", "study.yaml", "--output", "out", "--jobs", "2", "--set", "epochs=40"
    )
    place.until(lambda: place.whole_lines("out").count(b"\n") > 1, "a row")
    family = command.family()
    assert len(family) >= 2
    command.send(signal.SIGKILL)
    assert command.wait() == -signal.SIGKILL
    place.until(
        lambda: not any(process.is_running() for process in family),
        "the end of the worker processes",
    )


@pytest.mark.thorough
def test_killed_study_with_a_stopping_rule_resumes_to_the_same_rows(place):
    until = (
        "--set",
        "until.ci_width=4%",
        "--set",
        "until.at_most=5",
        "--set",
        "virtual.jitter=normal",
    )
    assert place.run("undisturbed", *until) == 0
    wanted = place.tables("undisturbed")
    certain = 3 * (1 + 5 * 3)
    assert certain < len(wanted[0]) < certain // 3 * 5, (
        "some points are repeated, and not all"
    )
    for rows in (certain - 2, certain + 3, len(wanted[0]) - 2):
        command = place.start(
            "run", "study.yaml", "--output", "disturbed", "--jobs", "1", *until
        )
        place.until(
            lambda rows=rows: place.whole_lines("disturbed").count(b"\n") > rows,
            "a row",
        )
        command.send(signal.SIGKILL)
        assert command.wait() in (0, -signal.SIGKILL)
    assert place.run("disturbed", *until) == 0
    assert place.tables("disturbed") == wanted


def test_study_killed_amid_its_trials_ends_with_the_rows_of_an_undisturbed_one(place):
    study = place.folder / "study.yaml"
    text = (
        study.read_text()
        .replace("workers: 1,2,4", "workers: 1,2")
        .replace("horovod, ddp, ", "")
    )
    study.write_text(
        f"{text}target_metric: 0.8\ntune: {{over: {{lr: [0.003, 0.3]}}, trials: 4}}\n"
    )
    assert place.run("undisturbed") == 0
    wanted = place.tables("undisturbed")
    trials = 4 * 7
    assert len(wanted[0]) == trials + 2 * 7
    for rows in (3, trials - 2, trials + 2):
        command = place.start(
            "run", "study.yaml", "--output", "disturbed", "--jobs", "1"
        )
        place.until(
            lambda rows=rows: place.whole_lines("disturbed").count(b"\n") > rows,
            "a row",
        )
        command.send(signal.SIGKILL)
        assert command.wait() in (0, -signal.SIGKILL)
    assert place.run("disturbed") == 0
    assert place.tables("disturbed") == wanted
