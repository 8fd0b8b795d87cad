"""The work that a study has still to do, which follows from its plan and from what has ended alone.

Trials of tuning come first; once all have a result, the runs get the values of the best
ones. Virtual runs follow, then real ones, each in blocks as the stopping rule asks for
them. To resume, to retry, to grow and to charge anew is the same loop: ask for the
`next_work` of a plan, or of a part of it, by the rows there are, and make it. What
makes it reports events to a reporter, and has counts at the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from scalebench.launch.sweep import Sweep
from scalebench.launch.trials import with_chosen
from scalebench.study.cell import Cell, in_words
from scalebench.study.choices import SERIAL, baselines_of
from scalebench.study.spec import Run, Until
from scalebench.training.outcome import Outcome

if TYPE_CHECKING:
    import pandas as pd

    from scalebench.launch.planning import StudyPlan

# training times by run_id and config_hash
Seconds = Mapping[tuple[str, str], float | None]


def _no_trials() -> pd.DataFrame:
    raise AssertionError("no trial has ended")


@dataclass(frozen=True)
class Ended:
    """What has ended of a study, by its rows and by what a command has seen; its mappings may grow meanwhile.

    `completed` are runs, `tried` trials with a result; `trials` reads the rows of
    trials. `numbered` are run_id and run_order of the rows before this command, in
    theirs. Runs `in_vain` have ended in this command without a result, which does not
    make them again.
    """

    completed: Seconds
    tried: Seconds = field(default_factory=dict)
    trials: Callable[[], pd.DataFrame] = _no_trials
    numbered: Sequence[tuple[str, int]] = ()
    in_vain: Container[str] = frozenset()


@dataclass(frozen=True)
class Trial:
    """Trials of tuning, whose results the values of the runs follow from."""

    runs: tuple[Run, ...]


@dataclass(frozen=True)
class Warmup:
    """Runs that count for nothing, made by processes that have just started."""

    runs: tuple[Run, ...]


@dataclass(frozen=True)
class Timed:
    """Runs that the study is about, all of them virtual or all real."""

    runs: tuple[Run, ...]


Work = Trial | Warmup | Timed


def settled(plan: StudyPlan, ended: Ended) -> StudyPlan:
    """Return `plan` with the values of the best trials, numbered after earlier rows; as it is until all have a result.

    Raises:
        ResultsError: no trial of a cell was completed.
    """
    if plan.is_settled or any(not _has_result(run, ended) for run in plan.trials):
        return plan
    if plan.trials:
        # read only now: the rows of the last trials have to be there
        plan = with_chosen(plan, ended.trials())
    return replace(plan, sweep=plan.sweep.continued(ended.numbered), is_settled=True)


def next_work(plan: StudyPlan, ended: Ended) -> Work | None:
    """Return the work that can be made now; None if all is done, or a trial failed on which the rest depends.

    It holds no warm-ups: these depend on which processes start, which add them
    (`in_new_processes`).

    Raises:
        ResultsError: no trial of a cell was completed.
    """
    plan = settled(plan, ended)
    if trials := _trials_left(plan, ended):
        return Trial(trials)
    # the best of some trials is not the best of all
    if not plan.is_settled:
        return None
    runs = rule_of(plan, ended).left()
    # virtual runs first: they answer every worker count in seconds
    for virtual in (True, False):
        if found := tuple(run for run in runs if run.is_virtual == virtual):
            return Timed(found)
    return None


def in_new_processes(
    runs: Sequence[Run], warmups: int, in_vain: Container[str] = ()
) -> tuple[Warmup, Timed]:
    """Return the work of processes that start for `runs`: on each engine of these so many warm-ups come first.

    A warm-up is like the first of the engine's runs with most workers. Those `in_vain`
    are left out: they have failed already.
    """
    largest: dict[str, Run] = {}
    for run in runs:
        known = largest.setdefault(run.engine, run)
        if run.workers > known.workers:
            largest[run.engine] = run
    made = [
        run.model_copy(
            update={
                "run_id": f"warmup{number}-{run.run_id}",
                "warmup": True,
                "save_weights": False,
            }
        )
        for run in largest.values()
        for number in range(warmups)
    ]
    return (
        Warmup(tuple(run for run in made if run.run_id not in in_vain)),
        Timed(tuple(runs)),
    )


def planned(plan: StudyPlan, ended: Ended) -> list[Run]:
    """Return all trials and runs that are certain by now."""
    return [*plan.trials, *rule_of(plan, ended).planned()]


def left(plan: StudyPlan, ended: Ended) -> list[Run]:
    """Return the planned trials and runs that have not ended."""
    return [*_trials_left(plan, ended), *rule_of(plan, ended).left()]


def _trials_left(plan: StudyPlan, ended: Ended) -> tuple[Run, ...]:
    return tuple(
        run
        for run in plan.trials
        if not _has_result(run, ended) and run.run_id not in ended.in_vain
    )


def _has_result(trial: Run, ended: Ended) -> bool:
    return (trial.run_id, trial.config_hash) in ended.tried


def rule_of(plan: StudyPlan, ended: Ended) -> StoppingRule:
    """Return the stopping rule of the runs of `plan`, as far as they have ended."""
    done = ended.completed
    known = (
        (run.run_id, run.config_hash) for run in (*plan.sweep.runs, *plan.sweep.further)
    )
    seconds = {key[0]: done[key] for key in known if key in done}
    return StoppingRule(plan.sweep, seconds, ended.in_vain)


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
    ended; a block may add others. `seconds` are the training times of completed runs,
    by run_id; those `in_vain` have ended without one.
    """

    def __init__(
        self,
        sweep: Sweep,
        seconds: Mapping[str, float | None],
        in_vain: Container[str] = (),
    ) -> None:
        self._runs, self._until = sweep.runs, sweep.until
        self._completed, self._in_vain = seconds, in_vain
        self._further = sweep.further
        self._blocks: dict[int, dict[Cell, Run]] = {}
        for run in sweep.further:
            self._blocks.setdefault(run.repetition, {})[Cell.of(run)] = run

    @cached_property
    def _seconds(self) -> dict[Cell, dict[int, float]]:
        """The times of each point by repetition; of fixed numbers of runs none is asked for."""
        found: dict[Cell, dict[int, float]] = {Cell.of(run): {} for run in self._runs}
        for run in (*self._runs, *self._further):
            second = self._completed.get(run.run_id)
            # the interval is one of logarithms
            if second is not None and second > 0:
                found[Cell.of(run)][run.repetition] = second
        return found

    def planned(self) -> list[Run]:
        """All runs that are certain by now, in order of execution."""
        further = [run for block in self._due() for run in block]
        if not further:
            return list(self._runs)
        return sorted([*self._runs, *further], key=lambda run: run.run_order)

    def left(self) -> list[Run]:
        """The planned runs that have not ended."""
        return [
            run
            for run in self.planned()
            if run.run_id not in self._completed and run.run_id not in self._in_vain
        ]

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

    @cached_property
    def _baselines(self) -> dict[Cell, list[Cell]]:
        """The baselines of each point in its execution; serial, which is in every block, has none."""
        names = {Cell.of(run): run.strategy.name for run in self._runs}
        found: dict[Cell, list[Cell]] = {}
        for point, of in names.items():
            # those of serial would return after a gap
            wanted = baselines_of(of) if of != SERIAL else ()
            found[point] = [
                other
                for other, name in names.items()
                if other.execution == point.execution
                and name in wanted
                and other.workers == point.baseline(name).workers
            ]
        return found


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
