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
    """Counts of a study's runs. `interrupted`: the signal that ended the command early."""

    folder: Path
    done_before: int = 0
    completed: int = 0
    failed: list[tuple[Run, Outcome]] = field(default_factory=list)
    remaining: int = 0
    interrupted: int | None = None

    def count(self, run: Run, outcome: Outcome) -> None:
        """Add a run that ended."""
        if outcome.status == "completed":
            self.completed += 1
        else:
            self.failed.append((run, outcome))
