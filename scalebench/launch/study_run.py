"""Conducts a study: virtual runs first, then real ones; each row is on disk before its run counts.

So the first half a minute gives every worker count. Real runs, which check the virtual
ones, have a budget of time: past it no further one begins, and the same command goes on
with those that are left.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from scalebench.analysis.loading import read_trials
from scalebench.calibration import charging, cost_sources
from scalebench.cluster.engine_costs import EngineCosts
from scalebench.comm import engines
from scalebench.comm.launchers import own_job, using
from scalebench.errors import writing
from scalebench.formatting import Detail, counted, seconds
from scalebench.launch import calibrating, processes, real_runs, sweep, work
from scalebench.launch.model_check import look_at_model
from scalebench.launch.planning import StudyPlan
from scalebench.launch.traffic import TrafficCheck
from scalebench.launch.work import Ended, Reporter, Tally, Timed, Trial, Work
from scalebench.pricing.charges import carrier
from scalebench.records import folder as files
from scalebench.records import lock, progress, provenance, rows, study_file
from scalebench.records.attempts import Attempts
from scalebench.records.store import Store
from scalebench.study.choices import RESULTS_OF_A_TRIAL
from scalebench.study.spec import Run
from scalebench.system import disturbance, hardware, parent_watch
from scalebench.system.file_access import read_text, write_atomic
from scalebench.system.interruption import AbandonedError, Interruption
from scalebench.training.outcome import Outcome
from scalebench.virtual.pool import Simulator, run_virtual

_SAMPLING_S = 0.1  # of the background load, before anything is measured
_PROVENANCE_COLUMNS = (
    "host_hash",
    "git_commit",
    "git_dirty",
    "packages_hash",
    "scheduler_job_id",
    "provenance",
)


def run_study(
    plan: StudyPlan,
    output: Path,
    reporter: Reporter,
    *,
    jobs: int | None = None,
    fail_fast: bool = False,
    only_failed: bool = False,
) -> Tally:
    """Make the runs of `plan` that `output`/<study> lacks and keep their rows there; failed runs get rows too.

    SIGINT, SIGTERM and SIGUSR1 end it early (`system.interruption`), and so does the
    first failed run if `fail_fast`. With `only_failed`, runs without any attempt are
    left out.

    Raises:
        ResultsError: the folder cannot be written, is being written by another command, or holds another study of
            this name.
    """
    study, folder = plan.study, output / plan.study.name
    # now, while this command keeps no core busy itself
    busy = _cores_taken_by_others()
    # it imports torch in the background, while the model is looked at
    if plan.sweep.simulated:
        parent_watch.start_forkserver()
    # before the folder is touched: a model that cannot be built leaves nothing there
    plan = replace(plan, remarks=tuple(look_at_model(plan)))
    cost_sources.check_given_calibration(
        calibrating.request_of(plan, plan.sweep.simulated)
    )
    with (
        using(study.launcher),
        lock.folder_lock(folder),
        Interruption(in_job=provenance.in_job(os.environ)) as interruption,
    ):
        # before any row, so that a folder with rows says which study they are of
        study_file.keep_study(folder, study)
        with Store(folder) as store:
            study_run = StudyRun(
                plan,
                store,
                reporter,
                interruption,
                fail_fast=fail_fast,
                only_failed=only_failed,
            )
            measures = plan.measures and study_run.left()
            background = _background_notes(busy) if measures else []
            # the gravest first
            for note in [*_notes_of_a_kill(store), *background, *plan.notes]:
                reporter.note(note)
            return study_run.make(jobs or _jobs(busy))


def _notes_of_a_kill(store: Store) -> list[str]:
    """Return notes on what `store` set aside or has lost, as a command that wrote it was killed."""
    notes = [
        f"what a command that was killed left half-written is now in {path}"
        for path in store.set_aside
    ]
    if names := store.without_epochs:
        notes.append(f"{progress.lost_epochs(names)}: they are run again")
    return notes


@dataclass(frozen=True)
class Standing:
    """The runs and trials of a study that are left, those that are done, and how many may follow.

    `without_epochs` names runs that are left as their epochs were lost.
    """

    plan: StudyPlan
    left: list[Run]
    done: list[Run]
    most_to_come: int
    without_epochs: list[str]


def standing(plan: StudyPlan, folder: Path) -> Standing:
    """Return what `run_study` would make of `plan` in `folder`, which is only read.

    Raises:
        ClusterError, ResultsError: `run_study` would refuse it: another study of this name, damaged or incompatible
            records, a calibration that is lost or has changed, a folder that cannot be written or is being written.
    """
    cost_sources.check_given_calibration(
        calibrating.request_of(plan, plan.sweep.simulated)
    )
    files.require_writable(folder)
    if owner := lock.owner_of(folder):
        raise lock.LockedError(folder / lock.FILE, owner)
    study_file.require_same(folder, plan.study)
    completed: dict[tuple[str, str], float | None] = {}
    tried: dict[tuple[str, str], float | None] = {}
    without_epochs = []
    if (folder / files.RUNS).exists():
        attempts = Attempts(folder / files.RUNS)
        completed, tried = (
            attempts.seconds({"completed"}),
            attempts.seconds(RESULTS_OF_A_TRIAL),
        )
        # left, as `Store` leaves them to be made again
        for place in attempts.without_epochs(folder / files.EPOCHS):
            key = attempts.run_id[place], attempts.config_hash[place]
            del completed[key], tried[key]
            without_epochs.append(attempts.run_id[place])
    ended = Ended(completed, tried, partial(read_trials, folder))
    plan = work.settled(plan, ended)
    to_do = work.left(plan, ended)
    # Rows that exist were charged by the calibration beside them, and ratios allow no
    # second one.
    charged = any(sweep.is_simulated(run_id) for run_id, _ in tried)
    if charged and any(run.is_virtual for run in to_do):
        cost_sources.check_kept_calibration(
            calibrating.request_of(plan, plan.sweep.simulated), folder
        )
    ids = {run.run_id for run in to_do}
    done = [run for run in work.planned(plan, ended) if run.run_id not in ids]
    return Standing(
        plan, to_do, done, work.rule_of(plan, ended).most_to_come(), without_epochs
    )


class StudyRun:
    """The runs of a study that one command makes, their rows, and their tally.

    Warm-up runs get rows too, but are not counted.
    """

    def __init__(
        self,
        plan: StudyPlan,
        store: Store,
        reporter: Reporter,
        interruption: Interruption,
        *,
        fail_fast: bool = False,
        only_failed: bool = False,
    ) -> None:
        self.folder = store.folder
        self._store, self._reporter, self._interruption = store, reporter, interruption
        self._fail_fast, self._only_failed = fail_fast, only_failed
        self._in_vain: set[str] = set()
        self._ended = Ended(
            store.completed,
            store.tried,
            partial(read_trials, store.folder),
            # as it was before this command
            store.numbered,
            self._in_vain,
        )
        self._plan = work.settled(plan, self._ended)
        certain = work.planned(self._plan, self._ended)
        self.tally = Tally(self.folder, done_before=len(certain) - len(self.left()))
        if only_failed:
            self._plan = self._plan.only(frozenset(store.failed))
        self._calibration = ""  # content of calibration.json
        self._provenance: dict[str, Any] = {}
        self._started_utc: dict[str, str] = {}
        # hashes of other nodes -> name of their provenance
        self._provenance_of: dict[tuple[str, ...], str] = {}
        self._traffic = TrafficCheck(plan)
        # until the first real run: calibration and virtual runs are not in its budget
        self._real_until = math.inf

    @property
    def plan(self) -> StudyPlan:
        """The plan of the study, with the values that tuning chose once its trials have ended."""
        return self._plan

    def left(self) -> list[Run]:
        """Return the planned trials and runs that have not ended."""
        return work.left(self._plan, self._ended)

    def too_wide(self) -> list[str]:
        """Note the points whose interval is wider than asked although no run is left."""
        return work.rule_of(self._plan, self._ended).too_wide()

    def make(self, jobs: int) -> Tally:
        """Keep the plan, `execute` what is left, and return the tally."""
        # a retry plans the failed runs alone, and would leave the others out of the
        # study's plan
        if not self._only_failed:
            self.keep_plan()
        if self.left():
            self.execute(jobs)
        for note in self.too_wide():
            self._reporter.note(note)
        self.tally.interrupted = self._interruption.signum
        self.tally.remaining = len(self.left())
        return self.tally

    def execute(self, jobs: int) -> None:
        """Make the runs that are left, `jobs` virtual ones at a time, until all have ended or a signal asks to stop."""
        self.collect_provenance()
        # what was under way leaves no row; what has ended is on the disk
        with suppress(AbandonedError):
            simulators = self._simulators()
            if (self.folder / files.CALIBRATION).is_file():
                # kept, to be written again if the file is deleted meanwhile
                self._calibration = read_text(self.folder / files.CALIBRATION)
            with self._interruption.runs_under_way():
                before: Work | None = None
                while (due := self._next_work()) and not self._is_over():
                    self._begin(due, after=before)
                    before = due
                    self._announce(due.runs)
                    if due.runs[0].is_virtual:
                        simulator = simulators[type(due)]
                        run_virtual(
                            due.runs,
                            simulator,
                            jobs=jobs,
                            on_start=self.started,
                            on_outcome=self.ended,
                            stopping=self._stopping,
                        )
                    else:
                        self._launch(due.runs)
                if due is not None and not self._stopping():
                    budget = seconds(self.plan.native_budget_s)
                    self.tally.why_left = (
                        f"the {budget} for real runs are over (native_budget_s)"
                    )

    def _next_work(self) -> Work | None:
        # kept, as names of runs are hashes of their values
        self._plan = work.settled(self._plan, self._ended)
        return work.next_work(self._plan, self._ended)

    def _begin(self, due: Work, *, after: Work | None) -> None:
        """Say what is to be said between two kinds of work; the first real runs begin their budget of time."""
        # the runs have got the values of the best trials, and other names with them
        if isinstance(after, Trial):
            self.keep_plan()
        if not due.runs[0].is_virtual and (after is None or after.runs[0].is_virtual):
            self._real_until = time.monotonic() + self.plan.native_budget_s
            if after is not None:
                self._reporter.simulated(self.folder)

    def collect_provenance(self) -> None:
        """Collect what the rows say of this machine; it takes tenths of a second, so before anything is measured."""
        self._provenance = provenance.collect()
        self._provenance["provenance"] = self._store.keep_provenance(self._provenance)

    def keep_plan(self) -> None:
        """Write the runs of the study, as far as they are known by now."""
        progress.keep_planned(
            self.folder,
            map(progress.Planned.of, work.planned(self._plan, self._ended)),
            most_to_come=work.rule_of(self._plan, self._ended).most_to_come(),
            begun_in=Path.cwd(),
        )

    def _simulators(self) -> dict[type[Work], Simulator]:
        """What makes trials and virtual runs, on a machine that is measured or read now; empty if none is left."""
        to_do = [run for run in self.left() if run.is_virtual]
        if not to_do:
            return {}
        # step times of other machines are stated, not measured
        if self.plan.cluster.compute == "this-machine":
            self._reporter.phase("calibration", 0)
        runs = [*self.plan.sweep.simulated, *self.plan.trials]
        charged = any(sweep.is_simulated(run_id) for run_id, _ in self._store.tried)
        request = calibrating.request_of(self.plan, runs)
        machine = charging.machine_for(
            request, self.folder, charged=charged, note=self._reporter.note
        )
        self._note_unmeasured(to_do, machine.engines)
        return {
            # weights of trials are not kept
            Trial: Simulator(machine, self.plan.validation.folders, self.folder),
            Timed: Simulator(
                machine,
                self.plan.prepared.folders,
                self.folder / "weights",
                self._fail_fast,
            ),
        }

    def _launch(self, runs: Sequence[Run]) -> None:
        """Make `runs` in real processes; keep the logs of these if a run failed."""
        failed_before = len(self.tally.failed)
        logs = processes.new_logs(self.folder)
        try:
            real_runs.RealRuns(
                self.plan.prepared.folders,
                ranks=max(run.workers for run in runs),
                work_dir=logs,
                weights_folder=self.folder / "weights",
                on_start=self.started,
                on_outcome=self.ended,
                log=lambda text: self._reporter.note(
                    provenance.redact(text, names=False)
                ),
                patience_s=self.plan.study.patience,
                stopping=self._is_over,
                job_is_ending=self._job_is_ending,
                # a fixed number of runs is known to the ranks from the start
                more=self._next_block if self.plan.sweep.until else None,
                warmup_runs=self.plan.study.warmup_runs,
            ).launch(runs)
        finally:
            if len(self.tally.failed) == failed_before:
                processes.remove_logs(logs)
            else:
                processes.redact_logs(logs)

    def _note_unmeasured(self, runs: Sequence[Run], known: EngineCosts) -> None:
        """Name the engines of virtual runs on this machine of which no cost is known, beside others that are."""
        used = {carrier(run) for run in runs if run.workers > 1}
        for engine in sorted(used) if known.entries else []:
            # costs on this host, or on two nodes
            if not (known.has(engine) or known.has(engine, 2)):
                why = engines.available(engine)
                self._reporter.note(
                    f"nothing is measured of {engine}: virtual runs on it are charged by the network model alone"
                    + (f" ({why})" if why else "")
                )

    def _stopping(self) -> bool:
        return self._interruption.asked() or (
            self._fail_fast and bool(self.tally.failed)
        )

    def _is_over(self) -> bool:
        return self._stopping() or time.monotonic() > self._real_until

    def _job_is_ending(self) -> bool:
        """Return True if the job is ended, and then begin no other run; the batch shell alone may have been told."""
        if own_job().is_ending():
            self._interruption.end_with_job()
        return self._interruption.asked()

    def _next_block(self) -> Sequence[Run]:
        due = self._next_work()
        if due is None:
            return ()
        self._announce(due.runs)
        return due.runs

    def _announce(self, runs: Sequence[Run]) -> None:
        # the stopping rule may have added runs since the plan was kept
        if self.plan.sweep.until:
            self.keep_plan()
        block = (
            f", block {runs[0].repetition + 1}"
            if runs[0].repetition >= self.plan.study.repetitions
            else ""
        )
        name = (
            "trials of tuning"
            if runs[0].trial is not None
            else f"{_processes(runs)}{block}"
        )
        self._reporter.phase(name, len(runs))

    def started(self, run: Run) -> None:
        """Note the time at which `run` began."""
        self._started_utc[run.run_id] = _now()
        if not run.warmup:
            self._reporter.started(run)

    def ended(self, run: Run, outcome: Outcome) -> None:
        """Write the rows of `run`, count it, and report it."""
        # it is printed, too
        outcome = replace(outcome, error=provenance.redact(outcome.error, names=False))
        row, epochs = rows.rows_of(
            run,
            outcome,
            attempt=self._store.next_attempt(run.run_id),
            oversubscribed=sweep.is_oversubscribed(run, self.plan.allocation),
            started_utc=self._started_utc.get(run.run_id) or _now(),
            provenance=self._provenance_columns(outcome.facts.machines),
        )
        row = rows.without_owners(row)
        # a signal between the row and the count would have the run made, and counted as
        # left
        with self._interruption.shielded():
            # first: a row appended to a file without a name is lost
            self._write_deleted()
            self._store.append(row, epochs)
            if not run.warmup:
                if outcome.failed(run):
                    self._in_vain.add(run.run_id)
                self.tally.count(run, outcome)
        if not run.warmup:
            self._reporter.ended(run, outcome)
        if why := outcome.facts.why_single:
            self._reporter.note(
                Detail(
                    f"each of {run.workers} virtual workers computes its own gradients: {why}"
                )
            )
        # after the row is written, whatever a user's strategy does while it is recorded
        if not run.warmup and run.trial is None:
            for difference in self._traffic.differences(run, row):
                self._reporter.note(difference)
        elif run.warmup and outcome.status != "completed":
            self._reporter.note(f"a warm-up run {outcome.status}: {outcome.error}")

    def _write_deleted(self) -> None:
        """Write what was deleted in the folder during the study again, as far as it is known here."""
        if not (deleted := self._store.write_deleted()):
            return
        if self._calibration and not (self.folder / files.CALIBRATION).exists():
            with writing(self.folder / files.CALIBRATION, ""):
                write_atomic(self.folder / files.CALIBRATION, self._calibration)
        if not (self.folder / files.STUDY).exists():
            study_file.replace_study(self.folder, self.plan.study)
        if not self._only_failed and not (self.folder / files.PLANNED).exists():
            self.keep_plan()
        if self._provenance:
            facts = {
                name: fact
                for name, fact in self._provenance.items()
                if name != "provenance"
            }
            self._store.keep_provenance(facts)
        # that of other nodes is written again with their next row
        self._provenance_of.clear()
        names = " and ".join(path.name for path in deleted)
        self._reporter.note(
            f"{names} in {self.folder} were deleted by something else during the study, and written again with all "
            "rows; keep the folder where files are not purged (--output)"
        )

    def _provenance_columns(self, machines: dict[str, Any] | None) -> dict[str, Any]:
        """The provenance columns of a row; `machines` that are not this node have a provenance file of their own."""
        columns = {name: self._provenance.get(name) for name in _PROVENANCE_COLUMNS}
        # all ranks were on this node
        if not machines:
            return columns
        if (hashes := tuple(machines)) not in self._provenance_of:
            facts = {
                name: fact
                for name, fact in self._provenance.items()
                if name != "provenance"
            }
            self._provenance_of[hashes] = self._store.keep_provenance(
                facts | {"nodes": machines}
            )
        return columns | {"provenance": self._provenance_of[hashes]}


def _cores_taken_by_others() -> float:
    """Return how many cores other programs keep busy now."""
    background = disturbance.BackgroundLoad(disturbance.own_and_children_s)
    # processor time is counted in ticks of 10 ms
    time.sleep(_SAMPLING_S)
    return background.cores()


def _background_notes(busy: float) -> list[str]:
    """Note other programs that keep `busy` cores."""
    if not disturbance.disturbed(busy):
        return []
    return [
        f"other programs keep {busy:.1f} of {counted(hardware.cores(), 'core')} busy: native runs beside them are "
        "marked as disturbed, and compared with nothing"
    ]


def _jobs(busy: float) -> int:
    """Return the number of virtual runs at the same time: one a core, and another on cores that others keep `busy`.

    The system gives each process its share of a core, and virtual runs do not depend on
    when they are computed.
    """
    return hardware.cores() + (round(busy) if disturbance.disturbed(busy) else 0)


def _processes(runs: Sequence[Run]) -> str:
    """The workers of `runs` in words: `virtual workers`, `mpi, horovod and gloo processes`."""
    if runs[0].is_virtual:
        return f"{runs[0].execution} workers"
    *names, last = sorted({run.engine for run in runs}, key=engines.NAMES.index)
    return f"{', '.join(names)} and {last} processes" if names else f"{last} processes"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
