"""What a study has still to do: it follows from its plan and from what has ended, and is tried without a machine.

Trials of tuning come first; once all have ended, the runs get the values of the best
ones. Virtual runs follow, then real ones, each in blocks as the stopping rule asks for
them. A command that resumes, retries, or goes on where another was interrupted asks the
same question of the rows that it finds. It learns of events by a reporter, and has
counts at the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from scalebench.launch.sweep import Sweep
from scalebench.launch.trials import with_chosen
from scalebench.study.cell import Cell, in_words
from scalebench.study.choices import baselines_of
from scalebench.study.spec import Run, Until
from scalebench.training.outcome import Outcome

if TYPE_CHECKING:
    import pandas as pd

    from scalebench.launch.planning import StudyPlan

# training times by run_id and config_hash
Seconds = Mapping[tuple[str, str], float | None]


class Stage(Enum):
    """Kinds of work, in the order in which a study makes them."""

    TRIALS = "trials of tuning"
    VIRTUAL = "virtual runs"
    REAL = "real runs"


@dataclass(frozen=True)
class Work:
    """Runs of one stage that can be made now."""

    stage: Stage
    runs: list[Run]


@dataclass(frozen=True)
class Ended:
    """What the rows of a study say has ended.

    `completed` are runs, `tried` trials with a result; `trials` reads the rows of
    trials. `numbered` are run_id and run_order of all rows, in theirs.
    """

    completed: Seconds
    tried: Seconds
    trials: Callable[[], pd.DataFrame]
    numbered: Sequence[tuple[str, int]] = ()


class WorkQueue:
    """The trials and runs of `plan`, of which some have `ended`, and the work that is next.

    `plan` has the values that tuning chose, once its trials have ended.

    Raises:
        ResultsError: no trial of a cell was completed.
    """

    def __init__(self, plan: StudyPlan, ended: Ended) -> None:
        self.plan, self._before = plan, ended
        self._trials = StoppingRule.of_sweep(Sweep(plan.trials), None, ended.tried)
        self._waits_for_trials = bool(self._trials.left())
        self._stops_after_trials = False
        self._runs = self._runs_of_plan()

    def _runs_of_plan(self) -> StoppingRule:
        if self.plan.trials and not self._waits_for_trials:
            # read only now: the rows of the last trials have to be there
            self.plan = with_chosen(self.plan, self._before.trials())
        self.plan = replace(
            self.plan, sweep=self.plan.sweep.continued(self._before.numbered)
        )
        return StoppingRule.of_sweep(
            self.plan.sweep, self.plan.study.until, self._before.completed
        )

    def only(self, run_ids: Container[str]) -> None:
        """Leave nothing but these trials and runs; no run follows from the trials."""
        self._trials, self._runs = self._trials.of(run_ids), self._runs.of(run_ids)
        self._stops_after_trials = bool(self._trials.left())
        self._waits_for_trials = False

    def next(self) -> Work | None:
        """Return the work that can be made now; None if all is done, or a trial failed on which the rest depends."""
        if trials := self._trials.left():
            return Work(Stage.TRIALS, trials)
        if self._stops_after_trials:
            return None
        if self._waits_for_trials:
            self._waits_for_trials = False
            self._runs = self._runs_of_plan()
        runs = self._runs.left()
        # virtual runs first: they answer every worker count in seconds
        for stage, virtual in ((Stage.VIRTUAL, True), (Stage.REAL, False)):
            if found := [run for run in runs if run.is_virtual == virtual]:
                return Work(stage, found)
        return None

    def ended(self, run: Run, seconds: float | None, *, failed: bool = False) -> None:
        """Record the end of a trial or run, with its training time if it was completed."""
        if run.trial is None:
            self._runs.ended(run, seconds)
            return
        self._trials.ended(run, None)
        # the best of some trials is not the best of all
        self._stops_after_trials |= failed

    @property
    def grows(self) -> bool:
        """Return True if further blocks of runs may follow."""
        return self._runs.grows

    def planned(self) -> list[Run]:
        """All trials and runs that are certain by now."""
        return [*self._trials.planned(), *self._runs.planned()]

    def left(self) -> list[Run]:
        """The planned trials and runs that have not ended."""
        return [*self._trials.left(), *self._runs.left()]

    def most_to_come(self) -> int:
        """Number of runs that may follow the planned ones."""
        return self._runs.most_to_come()

    def too_wide(self) -> list[str]:
        """Note the points whose interval is wider than asked although no run is left."""
        return self._runs.too_wide()


class StoppingRule:
    """Repeat each point a fixed number of times, or until its interval is narrow enough.

    A block is one run of each of its points, in a random order. With `until`, the first
    `at_least` blocks hold every point. Block b after them holds the open points, whose
    interval after their first b times is wider than asked, and with each of them its
    baselines (`study.choices.baselines_of`), at its worker count, and serial at one, of
    its execution. Ratios are paired by block, so a block without the baseline would not
    count. The serial run has no baselines, so that a closed point never opens again.

    Decisions follow from the rows alone: a command that continues a study decides as
    the interrupted one would have. A point with a failed run gets no further block
    until that run has been repeated.

    `planned` are the runs that are certain so far, `left` those of them that have not
    ended; a block may add others. `runs` are certain, `further` possible, both in order
    of execution. `seconds` are the training times of completed runs, by run_id.
    """

    def __init__(
        self,
        runs: Sequence[Run],
        further: Sequence[Run],
        until: Until | None,
        seconds: Mapping[str, float | None],
    ) -> None:
        self._runs, self._until = list(runs), until
        self._blocks: dict[int, dict[Cell, Run]] = {}
        # by repetition
        self._seconds: dict[Cell, dict[int, float]] = {Cell.of(run): {} for run in runs}
        self._ended: set[str] = set()
        for run in (*runs, *further):
            if run.run_id in seconds:
                self.ended(run, seconds[run.run_id])
        for run in further:
            self._blocks.setdefault(run.repetition, {})[Cell.of(run)] = run
        self._baselines = {point: self._compared_with(point) for point in self._seconds}

    @classmethod
    def of_sweep(
        cls,
        sweep: Sweep,
        until: Until | None,
        done: Mapping[tuple[str, str], float | None],
    ) -> StoppingRule:
        """The rule of a whole study; `done` has the training times of completed runs, by run_id and config_hash."""
        known = ((run.run_id, run.config_hash) for run in (*sweep.runs, *sweep.further))
        return cls(
            sweep.runs,
            sweep.further,
            until,
            {key[0]: done[key] for key in known if key in done},
        )

    def ended(self, run: Run, seconds: float | None) -> None:
        """Record the end of `run`, with its training time if it was completed."""
        self._ended.add(run.run_id)
        # the interval is one of logarithms
        if seconds is not None and seconds > 0:
            self._seconds[Cell.of(run)][run.repetition] = seconds

    @property
    def grows(self) -> bool:
        """Return True if further blocks may follow."""
        return self._until is not None

    def of(self, run_ids: Container[str]) -> StoppingRule:
        """A rule for these runs only, as far as they have not ended."""
        runs = [
            *self._runs,
            *(run for block in self._blocks.values() for run in block.values()),
        ]
        return StoppingRule(
            [
                run
                for run in runs
                if run.run_id in run_ids and run.run_id not in self._ended
            ],
            [],
            None,
            {},
        )

    def planned(self) -> list[Run]:
        """All runs that are certain by now, in order of execution."""
        further = [run for block in self._due() for run in block]
        return (
            sorted(self._runs + further, key=lambda run: run.run_order)
            if further
            else self._runs
        )

    def left(self) -> list[Run]:
        """The planned runs that have not ended."""
        return [run for run in self.planned() if run.run_id not in self._ended]

    def wide(self) -> list[Cell]:
        """The points whose interval is not known to be as narrow as asked."""
        until = self._until
        if until is None:
            return []
        return [
            point
            for point, seconds in self._seconds.items()
            if len(seconds) < until.at_least
            or relative_width(list(seconds.values()), until) > until.ci_width
        ]

    def too_wide(self) -> list[str]:
        """Note the points whose interval is wider than asked although no run is left."""
        wide = [] if self._until is None or self.left() else self.wide()
        if self._until is None or not wide:
            return []
        return [
            f"{len(wide)} point{'s are' if len(wide) > 1 else ' is'} still wider than "
            f"{100 * self._until.ci_width:.3g} % of the time: {in_words(wide)}"
        ]

    def most_to_come(self) -> int:
        """Number of runs that may follow the planned ones."""
        return (
            sum(map(len, self._blocks.values())) + len(self._runs) - len(self.planned())
            if self.left()
            else 0
        )

    def _due(self) -> list[list[Run]]:
        """The runs of each further block that follows from the times of the blocks before."""
        due = []
        for repetition, block in sorted(self._blocks.items()):
            members = set()
            for point in block:
                if self._is_open(point, repetition):
                    members |= {point, *self._baselines[point]}
            # blocks follow one another: without this one there is no next
            if not members:
                break
            due.append([run for point, run in block.items() if point in members])
        return due

    def _is_open(self, point: Cell, runs: int) -> bool:
        """Return True if the first `runs` runs of `point` are complete and their interval is wider than asked."""
        assert self._until is not None
        seconds = self._seconds[point]
        # a failed run leaves a gap, and a decision by fewer times would change when it
        # is made again
        if any(repetition not in seconds for repetition in range(runs)):
            return False
        return (
            relative_width(
                [seconds[repetition] for repetition in range(runs)], self._until
            )
            > self._until.ci_width
        )

    def _compared_with(self, point: Cell) -> list[Cell]:
        """Return the baselines of `point` in its execution; serial, which is in every block, has none."""
        names = {Cell.of(run): run.strategy.name for run in self._runs}
        if names[point] == "serial":  # its baselines would return after a gap
            return []
        wanted = baselines_of(names[point])
        return [
            other
            for other, name in names.items()
            if other.execution == point.execution
            and name in wanted
            and other.workers == (1 if name == "serial" else point.workers)
        ]


def relative_width(seconds: Sequence[float], until: Until) -> float:
    """(high - low) / centre of the interval of these times, at the level for so many runs of a study with `until`."""
    # pandas, which the plan of a study does without
    from scalebench.analysis import intervals

    # stopping at a narrow interval makes intervals too narrow: the level makes up for
    # that
    level = intervals.level_when_stopped(len(seconds), until.at_least, until.at_most)
    return float(
        intervals.relative_width([math.log(second) for second in seconds], level)
    )


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
