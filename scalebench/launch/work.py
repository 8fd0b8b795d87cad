"""What a study has still to do: it follows from its plan and from what has ended, and is tried without a machine.

Trials of tuning come first; once all have ended, the runs get the values of the best ones. Virtual runs follow, then
real ones, each in blocks as the stopping rule asks for them. A command that resumes, retries, or goes on where another
was interrupted asks the same question of the rows that it finds.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING

from scalebench.launch.stopping_rule import StoppingRule
from scalebench.launch.sweep import Sweep
from scalebench.launch.trials import with_chosen
from scalebench.study.spec import Run

if TYPE_CHECKING:
    import pandas as pd

    from scalebench.launch.planning import StudyPlan

Seconds = Mapping[tuple[str, str], float | None]  # training times by run_id and config_hash


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

    `completed` are runs, `tried` trials with a result; `trials` reads the rows of trials. `numbered` are run_id and
    run_order of all rows, in theirs.
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
            self.plan = with_chosen(self.plan, self._before.trials())
        self.plan = replace(self.plan, sweep=self.plan.sweep.continued(self._before.numbered))
        return StoppingRule.of_sweep(self.plan.sweep, self.plan.study.until, self._before.completed)

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
