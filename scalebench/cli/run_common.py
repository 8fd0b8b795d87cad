"""Common part of `run` and `retry`: run a plan with progress on the screen, and print its summary."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from scalebench.cli.live_progress import watching
from scalebench.cli.options import verbosity
from scalebench.errors import ScalebenchError
from scalebench.formatting import counted

if TYPE_CHECKING:
    from scalebench.launch.planning import StudyPlan
    from scalebench.launch.reporting import Tally

RUNS_LEFT = 3  # exit code


def run_plan(
    plan: StudyPlan,
    output: Path,
    *,
    jobs: int | None = None,
    fail_fast: bool = False,
    only_failed: bool = False,
    against: Sequence[str] = (),
    full: bool = False,
) -> int:
    """Run `plan`, print the answer and return the exit code.

    0: every run was made; 1: a run failed; RUNS_LEFT: runs are left; 128 + the signal
    that ended it. A job that goes back into the queue after the signal of its time
    limit would do so for ever where no run ends in its time: then RUNS_LEFT.

    The table below the answer has reductions `against` baselines of the study; the
    `full` one has every point.
    """
    from scalebench.launch.study_run import run_study
    from scalebench.records.folder import timed
    from scalebench.system.interruption import AbandonedError

    try:
        with timed(output / plan.study.name, "run", added=True), watching() as watcher:
            tally = run_study(
                plan,
                output,
                watcher,
                jobs=jobs,
                fail_fast=fail_fast,
                only_failed=only_failed,
            )
    except AbandonedError as error:
        if error.signum != signal.SIGUSR1:
            raise
        raise TooShortError from None
    _summarise(tally, against, full)
    if (
        tally.interrupted == signal.SIGUSR1
        and tally.remaining
        and not (tally.completed or tally.trials or tally.failed)
    ):
        raise TooShortError
    return exit_code(tally)


def exit_code(tally: Tally) -> int:
    """Return the exit code of a command that made the runs of `tally`, as `run_plan` gives it."""
    if tally.interrupted is not None:
        return 128 + tally.interrupted
    if tally.failed:
        return 1
    return RUNS_LEFT if tally.remaining else 0


class TooShortError(ScalebenchError):
    """The time limit of a job left no time for a run; to queue the job again would change nothing."""

    exit_code = RUNS_LEFT

    def __init__(self) -> None:
        super().__init__(
            "no run ended before SIGUSR1, the signal of the time limit: the job is too short for one; give it more time"
        )


def refuse_early_signal() -> None:
    """Let SIGUSR1 end the command as too short from now on; while runs are made, they end first."""

    def too_early(signum: int, frame: FrameType | None) -> None:
        raise TooShortError

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGUSR1, too_early)


def enter_first_folder(folder: Path) -> Path:
    """Change to the folder in which the study in `folder` was begun, if known, and return `folder` from there.

    Relative paths in the study and in its own code start there.
    """
    from scalebench.records.progress import begun_in

    place = begun_in(folder)
    if place is None or place == Path.cwd():
        return folder
    folder = folder.resolve()
    os.chdir(place)
    return folder


def _summarise(tally: Tally, against: Sequence[str], full: bool) -> None:
    from scalebench.analysis.summary import answer_table, summary
    from scalebench.tables.screen import print_results

    if verbosity() >= 0 and (tally.completed or tally.done_before or tally.failed):
        from scalebench.analysis import load
        from scalebench.report.answer import spoken

        results = load(tally.folder)
        print_results(
            *spoken(results),
            summary(results) if full else answer_table(results, against),
        )
    done = f", {tally.done_before} were there before" if tally.done_before else ""
    failed = f", {len(tally.failed)} did not complete" if tally.failed else ""
    trials = f" and {counted(tally.trials, 'trial')}" if tally.trials else ""
    made = f"{counted(tally.completed, 'run')}{trials} completed{done}{failed}"
    print_results(f"{made}; results in {tally.folder}/")
    if tally.remaining:
        print_results(runs_left(tally))


def runs_left(tally: Tally) -> str:
    """The last line: which runs are left, why, and what makes them."""
    from scalebench.records.progress import progress_of

    groups = progress_of(tally.folder).remaining
    which = (
        f" ({', '.join(f'{number} {group}' for group, number in groups.items())})"
        if groups
        else ""
    )
    why = tally.why_left
    if tally.interrupted is not None:
        why = f"{signal.Signals(tally.interrupted).name} ended the command"
    elif tally.failed and not why:
        why = f"{counted(len(tally.failed), 'run')} failed"
    left = f"{counted(tally.remaining, 'run')} {'is' if tally.remaining == 1 else 'are'} left{which}"
    return f"{left}{f', as {why}' if why else ''}: the same command goes on with them"
