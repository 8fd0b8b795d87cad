"""Progress of a running study: bars on a terminal, plain lines elsewhere, with the time left."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from scalebench.cli.options import verbosity
from scalebench.formatting import Detail, counted, roughly

if TYPE_CHECKING:
    from pathlib import Path

    from rich.progress import Progress, TaskID

    from scalebench.study.spec import Run
    from scalebench.training.outcome import Outcome

_MOST_NOTES = 3  # before the first run
# the time left follows from the pace of the runs that ended in this time
_PACE_S = 3600


class Watcher:
    """A `launch.work.Reporter`: `--quiet` shows failures only, `--verbose` every run and every note.

    Before the first run there are _MOST_NOTES notes at most, without details; the last
    says how many more there are. A disabled `progress` shows no bars, but keeps count.
    """

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._study = ""
        self._task: TaskID | None = None
        self._noted: set[str] = set()
        self._level = verbosity()
        # notes until the first phase, of which the number is known then
        self._waiting: list[str] = []
        self._shown, self._before = 0, True

    def begin(self, study: str) -> None:
        """Name the study of the following phases, where one command runs several."""
        self._study = study

    def note(self, text: str) -> None:
        """Print a note, the same one only once, and details if asked for; before the first run as there is room."""
        # each study of a paper makes the same remarks
        if self._level < 0 or text in self._noted:
            return
        self._noted.add(text)
        if self._level <= 0 and isinstance(text, Detail):
            return
        if self._level > 0 or not self._before:
            self._print(f"note: {text}")
        else:
            self._waiting.append(text)

    def show_notes(self) -> None:
        """Print the notes that wait, and how many there is no room for."""
        room = _MOST_NOTES - self._shown
        shown = self._waiting[:room]
        left = self._waiting[room:]
        for text in shown:
            more = (
                f" ({counted(len(left), 'more note')} with --verbose)"
                if left and text is shown[-1]
                else ""
            )
            self._print(f"note: {text}{more}")
        self._shown += len(shown)
        self._waiting.clear()

    def phase(self, name: str, runs: int) -> None:
        self.show_notes()
        # a phase with runs: notes are no longer in the way of the first one
        self._before = self._before and not runs
        name = f"{self._study}: {name}" if self._study else name
        if self._task is not None:
            self._progress.remove_task(self._task)
        self._task = self._progress.add_task(name, total=runs or None, run="")
        if self._progress.disable and self._level >= 0:
            self._print(f"{name}: {counted(runs, 'run')}" if runs else f"{name} ...")

    def started(self, run: Run) -> None:
        if self._task is not None:
            self._progress.update(
                self._task, run=f"{run.strategy}, {counted(run.workers, 'worker')}"
            )
        if self._level > 0:
            self._print(f"start {run.run_id}")

    def ended(self, run: Run, outcome: Outcome) -> None:
        if self._task is not None:
            self._progress.advance(self._task)
        # without bars, as in a log, progress is told in lines
        for task in (
            self._progress.tasks if self._progress.disable and self._level >= 0 else []
        ):
            done = int(task.completed)
            total = int(task.total or 0)
            left = task.time_remaining
            # in a log a line for each fifth: thousands of runs would bury what matters
            if done in {total, *range(0, total, max(1, total // 5))}:
                expected = f", about {roughly(left)} left" if left else ""
                self._print(
                    f"{task.description}: {done} of {counted(total, 'run')}{expected}"
                )
        # a failure is printed under --quiet, too
        if outcome.failed(run) or (outcome.status != "completed" and self._level > 0):
            self._print(f"{outcome.status}: {run.run_id}: {outcome.error}")
        elif self._level > 0:
            self._print(f"done {run.run_id}: {outcome.train_s:.3f} s")

    def simulated(self, folder: Path) -> None:
        """Print what the virtual runs answer: real ones, which check it, take longer."""
        if self._level < 0:
            return
        from scalebench.analysis import load
        from scalebench.report.answer import headline_so_far

        if answer := headline_so_far(load(folder)):
            self._print(f"so far: {answer}")

    def _print(self, text: str) -> None:
        console = self._progress.console
        # A path in brackets is no markup. A terminal would break words, and lines of a
        # log are those of a program that reads it.
        console.print(
            text, highlight=False, markup=False, soft_wrap=not console.is_terminal
        )


@contextmanager
def watching() -> Iterator[Watcher]:
    """Provide a watcher on standard error, with bars if that is a terminal."""
    from rich import progress as bars
    from rich.console import Console
    from rich.constrain import Constrain

    class Bars(bars.Progress):
        """Bars that leave room for the ^C of a terminal, which else begins a line below them."""

        def get_renderable(self) -> Constrain:
            return Constrain(super().get_renderable(), console.width - len("^C "))

    console = Console(stderr=True)
    columns = (
        bars.SpinnerColumn(),
        bars.TextColumn("{task.description}"),
        bars.BarColumn(),
        bars.MofNCompleteColumn(),
        bars.TimeElapsedColumn(),
        bars.TimeRemainingColumn(),
        bars.TextColumn("[dim]{task.fields[run]}"),
    )
    with Bars(
        *columns,
        console=console,
        # bars go, and the answer is what stays on the screen
        transient=True,
        # rich's own 30 s may pass without the end of a run
        speed_estimate_period=_PACE_S,
        # disabled, it counts on: lines are made of the same numbers
        disable=verbosity() < 0 or not console.is_terminal,
    ) as progress:
        watcher = Watcher(progress)
        try:
            yield watcher
        finally:
            # a study that ends before its first run still has something to say
            watcher.show_notes()
