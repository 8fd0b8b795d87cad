"""Progress of a running study: bars on a terminal, plain lines elsewhere, with the time left."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from scalebench.cli.options import verbosity
from scalebench.formatting import counted, roughly

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

    from scalebench.study.spec import Run
    from scalebench.training.outcome import Outcome


class Watcher:
    """A `launch.reporter.Reporter`: `--quiet` shows failures only, `--verbose` every run.

    The time left of a phase is its remaining runs times the mean time of those that ended, without the time before the
    first end, in which processes start.
    """

    def __init__(
        self, console: Console, progress: Progress | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._console, self._progress, self._clock = console, progress, clock
        self._task: TaskID | None = None
        self._noted: set[str] = set()
        self._level = verbosity()
        self._phase, self._done, self._total = "", 0, 0
        self._since, self._counted = clock(), 0  # a moment, and how many runs have ended from there on

    def note(self, text: str) -> None:
        """Print a note, the same one only once."""
        if self._level >= 0 and text not in self._noted:
            self._noted.add(text)
            self._print(f"note: {text}")

    def phase(self, name: str, runs: int) -> None:
        self._phase, self._done, self._total = name, 0, runs
        self._since, self._counted = self._clock(), 0
        if self._progress is not None:
            if self._task is not None:
                self._progress.remove_task(self._task)
            self._task = self._progress.add_task(name, total=runs or None, run="", left="")
        elif self._level >= 0:
            self._print(f"{name}: {counted(runs, 'run')}" if runs else f"{name} ...")

    def started(self, run: Run) -> None:
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, run=f"{run.strategy}, {counted(run.workers, 'worker')}")
        if self._level > 0:
            self._print(f"start {run.run_id}")

    def ended(self, run: Run, outcome: Outcome) -> None:
        self._done += 1
        left = self._left()
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, advance=1, left=left)
        elif self._level >= 0 and self._done in {self._total, *range(0, self._total, max(1, self._total // 5))}:
            self._print(f"{self._phase}: {self._done} of {counted(self._total, 'run')}{left and ', '}{left}")
        if outcome.failed(run) or (outcome.status != "completed" and self._level > 0):
            self._print(f"{outcome.status}: {run.run_id}: {outcome.error}")
        elif self._level > 0:
            self._print(f"done {run.run_id}: {max(worker.train_s for worker in outcome.workers):.3f} s")

    def _left(self) -> str:
        """`about 40 s left`; empty after the last run."""
        now = self._clock()
        self._counted += 1
        if self._done >= self._total:
            return ""
        pace = (now - self._since) / self._counted
        if self._done == 1:
            self._since, self._counted = now, 0
        return f"about {roughly(pace * (self._total - self._done))} left"

    def _print(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)


@contextmanager
def watching() -> Iterator[Watcher]:
    """Provide a watcher on standard error, with bars if that is a terminal."""
    from rich.console import Console

    console = Console(stderr=True)
    if verbosity() < 0 or not console.is_terminal:
        yield Watcher(console, None)
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[left]}"),
        TextColumn("[dim]{task.fields[run]}"),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        yield Watcher(console, progress)
