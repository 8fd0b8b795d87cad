"""The observer of a study while it runs, and the tally it is left with."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from scalebench.study.spec import Run
from scalebench.training.outcome import Outcome


class Reporter(Protocol):
    """Receives the events of a study that runs, such as a progress bar."""

    def note(self, text: str) -> None:
        """Receive a fact that the user should know."""

    def phase(self, name: str, runs: int) -> None:
        """Begin a group of `runs` runs, or a preparation (0)."""

    def started(self, run: Run) -> None: ...

    def ended(self, run: Run, outcome: Outcome) -> None: ...


@dataclass
class Tally:
    """Counts of a study's runs, and of trials with a result. `interrupted`: the signal that ended the command early."""

    folder: Path
    done_before: int = 0
    completed: int = 0
    trials: int = 0
    failed: list[tuple[Run, Outcome]] = field(default_factory=list)
    remaining: int = 0
    interrupted: int | None = None

    def count(self, run: Run, outcome: Outcome) -> None:
        """Add a run that ended."""
        if outcome.failed(run):
            self.failed.append((run, outcome))
        elif run.trial is not None:
            self.trials += 1
        else:
            self.completed += 1
