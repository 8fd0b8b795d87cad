"""Keeps the row of each run as it ends, tells whoever watches, and counts."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from scalebench.launch.interruption import Interruption
from scalebench.launch.planning import is_oversubscribed
from scalebench.launch.rows import rows_of
from scalebench.launch.stopping_rule import StoppingRule
from scalebench.launch.traffic import TrafficCheck
from scalebench.records.provenance import redact
from scalebench.records.store import Store
from scalebench.study.spec import Run
from scalebench.training.outcome import Outcome

_PROVENANCE_COLUMNS = ("host_hash", "git_commit", "git_dirty", "packages_hash", "scheduler_job_id", "provenance")

_PATHS = ("error", "cluster", "model", "dataset", "strategy_options")  # may hold paths, which name their owner


class Reporter(Protocol):
    """Whoever watches a study."""

    def note(self, text: str) -> None:
        """Something the user should know."""

    def phase(self, name: str, runs: int) -> None:
        """A group of `runs` runs, or a preparation (0), begins."""

    def started(self, run: Run) -> None: ...

    def ended(self, run: Run, outcome: Outcome) -> None: ...


@dataclass
class Tally:
    """How a study went. `interrupted` is the signal that ended it early, None if none did."""

    folder: Path
    done_before: int = 0
    completed: int = 0
    failed: list[tuple[Run, Outcome]] = field(default_factory=list)
    remaining: int = 0
    interrupted: int | None = None


def redact_logs(folder: Path) -> None:
    """Take names and secrets out of everything that the processes of failed launches left in `folder`."""
    for path in sorted(folder.rglob("*")):
        with suppress(OSError):
            if path.is_file() and not path.is_symlink():
                text = path.read_bytes().decode(errors="surrogateescape")
                if (known := redact(text)) != text:
                    path.write_bytes(known.encode(errors="surrogateescape"))


class Keeper:
    """Writes the row of each run as it ends; of warm-up runs too, but they count nowhere."""

    def __init__(
        self,
        store: Store,
        reporter: Reporter,
        tally: Tally,
        provenance: dict[str, Any],
        interruption: Interruption,
        replication: StoppingRule,
        traffic: TrafficCheck,
    ) -> None:
        self._store, self._reporter, self._interruption = store, reporter, interruption
        self._replication, self.tally = replication, tally
        self._provenance, self._traffic = provenance, traffic
        self._elsewhere: dict[tuple[str, ...], str] = {}  # nodes of a run -> name of their provenance
        self._started: dict[str, str] = {}
        self._references: list[float] = []

    def started(self, run: Run) -> None:
        self._started[run.run_id] = datetime.now(UTC).isoformat(timespec="milliseconds")
        if not run.warmup:
            self._reporter.started(run)

    def ended(self, run: Run, outcome: Outcome) -> None:
        outcome = replace(outcome, error=redact(outcome.error, names=False))  # it is printed, too
        begun = self._started.get(run.run_id) or datetime.now(UTC).isoformat(timespec="milliseconds")
        row, epochs = rows_of(
            run,
            outcome,
            attempt=self._store.next_attempt(run.run_id),
            oversubscribed=is_oversubscribed(run),
            started_utc=begun,
            provenance=self._made_on(outcome.facts.machines),
        )
        row = row.model_copy(
            update={name: redact(text, names=False) for name in _PATHS if (text := getattr(row, name))}
        )
        if run.execution != "virtual" and row.reference_step_s is not None:
            self._references.append(row.reference_step_s)
        with self._interruption.shielded():
            self._store.append(row, epochs)
            if not run.warmup:
                self._count(run, outcome, row.train_s)
        if not run.warmup:
            self._reporter.ended(run, outcome)
            for difference in self._traffic.differences(run, row):
                self._reporter.note(difference)
        elif outcome.status != "completed":
            self._reporter.note(f"a warm-up run {outcome.status}: {outcome.error}")

    def references(self) -> list[float]:
        """Times of the reference step beside the real runs of this command, in seconds."""
        return self._references

    def _made_on(self, nodes: dict[str, Any] | None) -> dict[str, Any]:
        """The provenance columns of a run; where it used other nodes than this one, their facts are kept too."""
        row = {name: self._provenance.get(name) for name in _PROVENANCE_COLUMNS}
        if not nodes:
            return row
        if (names := tuple(nodes)) not in self._elsewhere:
            facts = {name: fact for name, fact in self._provenance.items() if name != "provenance"}
            self._elsewhere[names] = self._store.keep_provenance(facts | {"nodes": nodes})
        return row | {"provenance": self._elsewhere[names]}

    def _count(self, run: Run, outcome: Outcome, train_s: float | None) -> None:
        completed = outcome.status == "completed"
        self._replication.ended(run, train_s if completed else None)
        if completed:
            self.tally.completed += 1
        else:
            self.tally.failed.append((run, outcome))
