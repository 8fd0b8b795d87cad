"""What a command learns of a study that runs: its events, and the counts at its end."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from scalebench.study.spec import Run
from scalebench.training.outcome import Outcome


class Reporter(Protocol):
    """Receives the events of a study that runs, such as a progress bar."""

    def note(self, text: str) -> None:
        """Receive a fact that the user should know, or a `Detail`."""

    def phase(self, name: str, runs: int) -> None:
        """Begin a group of `runs` runs, or a preparation (0)."""

    def started(self, run: Run) -> None: ...

    def ended(self, run: Run, outcome: Outcome) -> None: ...

    def simulated(self, folder: Path) -> None:
        """Learn that the virtual runs in `folder` have been made, and real ones follow."""


@dataclass
class Tally:
    """Counts of a study's runs, and of trials with a result.

    `interrupted` is the signal that ended the command early, `why_left` any other
    reason for which runs remain.
    """

    folder: Path
    done_before: int = 0
    completed: int = 0
    trials: int = 0
    failed: list[tuple[Run, Outcome]] = field(default_factory=list)
    remaining: int = 0
    interrupted: int | None = None
    why_left: str = ""

    def count(self, run: Run, outcome: Outcome) -> None:
        """Add a run that ended."""
        if outcome.failed(run):
            self.failed.append((run, outcome))
        elif run.trial is not None:
            self.trials += 1
        else:
            self.completed += 1
