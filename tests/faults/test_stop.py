"""Signals that end a study: the first keeps the runs under way, the next abandons them; no process is left."""

from __future__ import annotations

import signal
import time

import pytest

from scalebench.comm import engines

LONG = ("--set", "epochs=8", "--set", "workers=4")


def rows(place, output="out"):
    return max(0, place.whole_lines(output).count(b"\n") - 1)


def begun(place, *more, output="out"):
    """A command that has written a row and has more to do, and its processes."""
    command = place.start("run", "study.yaml", "--output", output, *more)
    place.until(lambda: rows(place, output) > 0, "a row")
    return command, command.family()


def no_orphans(place, family):
    place.until(
        lambda: not any(process.is_running() for process in family),
        "the end of its processes",
    )


@pytest.mark.parametrize("jobs", [pytest.param("1", marks=pytest.mark.thorough), "2"])
@pytest.mark.parametrize(
    ("signum", "code", "line"),
    [
        (
            signal.SIGINT,
            130,
            "any run that has begun is finished and kept; Ctrl-C again abandons it",
        ),
        pytest.param(signal.SIGTERM, 143, "SIGTERM", marks=pytest.mark.thorough),
        pytest.param(signal.SIGUSR1, 138, "SIGUSR1", marks=pytest.mark.thorough),
    ],
    ids=["SIGINT", "SIGTERM", "SIGUSR1"],
)
def test_first_signal_keeps_the_runs_under_way_and_the_same_command_continues(
    place, signum, code, line, jobs
):
    command, family = begun(place, *LONG, "--jobs", jobs)
    command.send(signum)
    assert command.wait() == code, place.printed()
    no_orphans(place, family)
    assert line in place.printed()
    assert "the same command goes on with them" in place.printed()
    assert "Traceback" not in place.printed()
    kept = rows(place)
    assert 0 < kept < 12
    assert not (place.folder / "out" / "small" / "lock").exists()
    if (signum, jobs) == (signal.SIGINT, "2"):
        assert (
            place.start(
                "run", "study.yaml", "--output", "out", *LONG, "--jobs", "1"
            ).wait()
            == 0
        )
        assert (
            f"{kept} {'was' if kept == 1 else 'were'} there before" in place.printed()
        )
        assert place.run("whole", *LONG) == 0
        assert place.tables("out") == place.tables("whole")


@pytest.mark.parametrize("jobs", [pytest.param("1", marks=pytest.mark.thorough), "2"])
def test_second_ctrl_c_abandons_the_runs_under_way(place, jobs):
    endless = ("--output", "endless", "--set", "epochs=100000", "--set", "workers=4")
    command = place.start("run", "study.yaml", *endless, "--jobs", jobs, "--verbose")
    place.until(lambda: "start " in place.printed(), "the first run")
    # two workers, the process that forks them, the tracker of their resources
    processes = 4 if jobs == "2" else 0
    place.until(lambda: len(command.family()) >= processes, "the worker processes")
    family = command.family()
    command.send(signal.SIGINT)
    place.until(lambda: "Ctrl-C again" in place.printed(), "the promise")
    # a signal within 0.3 s would count as the first one delivered twice
    time.sleep(0.5)
    command.send(signal.SIGINT)
    assert command.wait() == 130, place.printed()
    no_orphans(place, family)
    assert "abandoning what is under way" in place.printed()
    assert "Traceback" not in place.printed()
    assert rows(place, "endless") == 0, "an abandoned run leaves no row"


def test_calibration_and_its_processes_end_at_the_first_signal(place):
    text = (
        (place.folder / "study.yaml")
        .read_text()
        .replace("calibration: given.json", "calibration_budget_s: 60")
    )
    (place.folder / "study.yaml").write_text(text)
    command = place.start("run", "study.yaml", "--output", "out", "--jobs", "1")
    place.until(lambda: len(command.family()) >= 2, "the measuring processes")
    family = command.family()
    command.send(signal.SIGINT)
    assert command.wait() == 130, place.printed()
    no_orphans(place, family)
    assert "Traceback" not in place.printed()
    command = place.start("run", "study.yaml", "--output", "out", "--jobs", "1")
    place.until(lambda: len(command.family()) >= 2, "the measuring processes")
    family = command.family()
    command.send(signal.SIGKILL)
    command.wait()
    no_orphans(place, family)


@pytest.mark.parametrize("signals", [1, pytest.param(2, marks=pytest.mark.thorough)])
def test_real_ranks_finish_their_run_at_the_first_signal_and_leave_it_at_the_second(
    place, signals
):
    if reason := engines.available("mpi"):
        pytest.skip(reason)
    epochs = 300 if signals == 1 else 100000
    arguments = (
        *(
            "run",
            "study.yaml",
            "--output",
            "out",
            "--execution",
            "native",
            "--engine",
            "mpi",
            "--workers",
            "2",
        ),
        *("--strategy", "allreduce", "--epochs", str(epochs), "--verbose"),
    )
    command = place.start(*arguments)
    place.until(lambda: "start allreduce" in place.printed(), "the first run")
    family = command.family()
    assert len(family) >= 3  # mpirun and its ranks
    command.send(signal.SIGINT)
    if signals == 2:
        place.until(lambda: "Ctrl-C again" in place.printed(), "the promise")
        # a signal within 0.3 s would count as the first one delivered twice
        time.sleep(0.5)
        command.send(signal.SIGINT)
    assert command.wait() == 130, place.printed()
    no_orphans(place, family)
    assert rows(place) == (1 if signals == 1 else 0)
    assert "Traceback" not in place.printed()


@pytest.mark.parametrize("jobs", [pytest.param(1, marks=pytest.mark.thorough), 2])
def test_fail_fast_begins_no_run_after_the_first_failure(place, jobs):
    """Every run fails, so that each process has one at most: it fails its first, and begins none after another's."""
    assert place.run("out", "--set", "lr=1e30", "--fail-fast", "--jobs", str(jobs)) == 1
    assert 1 <= rows(place) <= jobs
    assert place.run("all", "--set", "lr=1e30") == 1
    assert rows(place, "all") == 32


@pytest.mark.thorough
def test_fail_fast_begins_no_real_run_after_the_first_failure(place):
    """`--jobs` is of virtual runs: real ones come one after another, and the first that fails is the last."""
    if reason := engines.available("mpi"):
        pytest.skip(reason)
    native = (
        "--execution",
        "native",
        "--engine",
        "mpi",
        "--workers",
        "1,2",
        "--strategy",
        "allreduce",
    )
    words = (
        "run",
        "study.yaml",
        "--output",
        "out",
        *native,
        "--set",
        "lr=1e30",
        "--fail-fast",
        "--jobs",
        "2",
    )
    assert place.start(*words).wait() == 1, place.printed()
    assert rows(place) == 1, place.printed()
    assert "3 runs are left" in place.printed()
