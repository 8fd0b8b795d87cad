"""Elastic runs of a study, `run --elastic`: a worker that dies costs an interruption, not the run.

Their time holds interruptions, so that they have a table of their own, and no row among
runs that are compared.
"""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psutil

from scalebench.cluster.mesh import Mesh
from scalebench.comm import engines
from scalebench.comm.launchers import AUTO, VARIABLE, chosen, named, using
from scalebench.errors import EngineError, StudyError
from scalebench.formatting import counted
from scalebench.launch import planning, processes, sweep
from scalebench.launch.work import Ended, Reporter, Tally, next_work
from scalebench.native import heartbeat, postmortem
from scalebench.native.job_files import CHECKPOINTS, Death, Job, JsonLines, settings_of
from scalebench.records import lock, provenance, rows, store, study_file
from scalebench.records.folder import require_writable
from scalebench.strategies import registry
from scalebench.study.spec import Run
from scalebench.system.interruption import AbandonedError, Interruption
from scalebench.training.outcome import Outcome

_POLL_S = 0.02  # between two looks at which ranks live
_ENDING_LIMIT_S = 20.0  # for processes to end after the run
_STARTUP_LIMIT_S, _STARTUP_OF_A_RANK_S = 120.0, 5.0


def elastic_runs(plan: planning.StudyPlan) -> list[Run]:
    """Return the native runs of `plan`, all of which can go on without a worker that died.

    Raises:
        StudyError, EngineError: one of them cannot, its launcher is missing or not the one that was named, or the study
            has no native runs.
    """
    if plan.trials:
        raise StudyError(
            "--elastic makes runs, not trials: leave tune out of the study, and state the values"
        )
    # virtual workers do not die
    runs = [run for run in plan.sweep.runs if run.execution == "native"]
    if not runs:
        raise StudyError(
            f"--elastic makes native runs, and this study has none ({plan.study.execution}); use --execution native"
        )
    # one of each kind: the worker count does not matter
    for run in {(str(run.strategy), run.engine): run for run in runs}.values():
        _require_elastic(run)
    for name in {engines.named(run.engine).elastic_launcher for run in runs}:
        _require_launcher(name, plan.study.launcher)
    hosts, most = plan.allocation.hosts, max(run.workers for run in runs)
    if len(hosts) > 1 and most > hosts[0].slots:
        raise EngineError(
            f"--elastic starts all ranks on this host, which has {counted(hosts[0].slots, 'slot')}, and the largest "
            f"run takes {most}; use --workers 1..{hosts[0].slots}"
        )
    return runs


def _require_elastic(run: Run) -> None:
    """Refuse a run that cannot go on without a worker that died."""
    able = [name for name in engines.NAMES if engines.named(name).elastic_launcher]
    if not engines.named(run.engine).elastic_launcher:
        raise EngineError(
            f"--elastic: strategy {run.strategy} on engine {run.engine} cannot go on without a rank that died; use "
            f"--engine {' or '.join(able)}"
        )
    if not registry.create(
        run.strategy.name, run.strategy.options, run.engine
    ).traits.resumes:
        others = [
            name
            for name in registry.names()
            if registry.create(name, {}).traits.resumes
        ]
        raise StudyError(
            f"--elastic: strategy {run.strategy} cannot go on from the weights and the optimizer at the end of an "
            f"epoch alone; use {', '.join(others)}"
        )


def _require_launcher(name: str, of_study: str) -> None:
    """Refuse another launcher than the elastic one called `name`, or that one where it is missing."""
    for where, stated in (
        (f"{VARIABLE} or --launcher", os.environ.get(VARIABLE)),
        ("the study's launcher", of_study),
    ):
        # a launcher that was named is never replaced in silence
        if stated not in (None, "", AUTO, name):
            raise EngineError(
                f"--elastic starts these runs by {name}, and {where} is {stated}; leave that out"
            )
    if reason := named(name).lacks(by_mpi=False):
        raise EngineError(f"--elastic: {reason}")


def run_elastic(
    plan: planning.StudyPlan,
    output: Path,
    reporter: Reporter,
    *,
    restarts: int,
    fail_fast: bool = False,
) -> Tally:
    """Make the native runs of `plan`, elastic, that `output`/<study> lacks, and keep their rows in its elastic.csv.

    Signals end it early as they do `run_study`.

    Raises:
        StudyError, EngineError: a run cannot be elastic.
        ResultsError: the folder cannot be written, or holds another study of this name.
    """
    runs, folder = elastic_runs(plan), output / plan.study.name
    require_writable(folder)
    with (
        lock.folder_lock(folder),
        Interruption(in_job=provenance.in_job(os.environ)) as interruption,
    ):
        study_file.keep_study(folder, plan.study)
        with store.ElasticTable(folder) as table:
            work = next_work(
                plan.only({run.run_id for run in runs}),
                Ended(dict.fromkeys(table.completed)),
            )
            left = work.runs if work is not None else ()
            tally = Tally(
                folder, done_before=len(runs) - len(left), remaining=len(left)
            )
            for note in plan.notes:
                reporter.note(note)
            if left:
                elastic = _ElasticStudy(plan, table, reporter, tally, restarts)
                with suppress(AbandonedError), interruption.runs_under_way():
                    elastic.make(left, interruption, fail_fast)
            tally.interrupted = interruption.signum
            return tally


class _ElasticStudy:
    """The elastic runs that one command makes, one after another."""

    def __init__(
        self,
        plan: planning.StudyPlan,
        table: store.ElasticTable,
        reporter: Reporter,
        tally: Tally,
        restarts: int,
    ) -> None:
        self._plan, self._table, self._reporter, self._tally = (
            plan,
            table,
            reporter,
            tally,
        )
        self._restarts = restarts
        facts = provenance.collect()
        self._provenance: dict[str, Any] = {
            "host_hash": facts["host_hash"],
            "provenance": provenance.keep(tally.folder, facts),
        }

    def make(
        self, runs: Sequence[Run], interruption: Interruption, fail_fast: bool
    ) -> None:
        """Make `runs` until all have ended, or a signal or a failure asks to stop."""
        self._reporter.phase("elastic processes", len(runs))
        for run in runs:
            if interruption.asked() or (fail_fast and self._tally.failed):
                return
            self._reporter.started(run)
            started_utc = datetime.now(UTC).isoformat(timespec="milliseconds")
            ended = self._launch(run)
            # a row and its count belong together
            with interruption.shielded():
                self._record(run, ended, started_utc)
            self._tally.remaining -= 1
            self._tally.count(run, ended.outcome)
            self._reporter.ended(run, ended.outcome)

    def _launch(self, run: Run) -> rows.ElasticOutcome:
        """Make one run; its logs stay if it failed."""
        logs, failed = processes.new_logs(self._tally.folder), False
        weights = self._tally.folder / "weights" / "elastic"
        data, patience_s = (
            self._plan.prepared.folders[run.workers],
            self._plan.study.patience,
        )
        try:
            with using(engines.named(run.engine).elastic_launcher):
                ended = ElasticLaunch(
                    run, data, logs, weights, self._restarts, patience_s
                ).execute()
            failed = ended.outcome.status != "completed"
            return ended
        finally:
            if failed:
                processes.redact_logs(logs)
            else:
                processes.remove_logs(logs)

    def _record(self, run: Run, ended: rows.ElasticOutcome, started_utc: str) -> None:
        row = rows.elastic_row(
            run,
            ended,
            attempt=self._table.next_attempt(run.run_id),
            launcher=engines.named(run.engine).elastic_launcher,
            oversubscribed=sweep.is_oversubscribed(run, self._plan.allocation),
            max_restarts=self._restarts,
            started_utc=started_utc,
            **self._provenance,
        )
        self._table.append(rows.without_owners(row))
        if ended.deaths:
            self._reporter.note(
                f"{run.run_id} went on after {counted(len(ended.deaths), 'interruption')}, with {ended.workers_at_end} "
                f"of {counted(run.workers, 'worker')} at its end"
            )


class ElasticLaunch:
    """One elastic run, on this host, of which `restarts` workers may die; its files are in `folder`.

    `data` is its prepared data set. Weights go to `weights`, if the run keeps them.
    """

    def __init__(
        self,
        run: Run,
        data: Path,
        folder: Path,
        weights: Path,
        restarts: int,
        patience_s: float,
    ) -> None:
        # What an interruption would lose of earlier epochs is not kept: the model is
        # evaluated at the end.
        self._run = run.model_copy(update={"evaluate_every": 0})
        self._restarts, self._patience_s, self._folder = restarts, patience_s, folder
        self._job = Job(
            runs=[self._run],
            datasets={run.workers: data},
            folder=folder,
            weights=weights,
            settings=settings_of(self._run),
            ranks=run.workers,
            launcher=chosen().name,
            rendezvous=True,
            host=provenance.host_hash(),
        )
        self._lives = _Lives(self._job.heartbeats)
        self._began: list[dict[str, Any]] = []  # events of trainings that began
        self._deaths: list[rows.RankDeath] = []
        self._last_kept_s = self._last_epoch_s = 0.0  # of time.monotonic
        self._outcome: Outcome | None = None
        self._told_s = math.inf  # when the outcome was told

    def execute(self) -> rows.ElasticOutcome:
        """Start the ranks and stay with them until the run has ended."""
        run, job = self._run, self._job
        self._folder.mkdir(parents=True)
        heartbeat.create_heartbeats(job.heartbeats, run.workers)
        command, _ = processes.launch_command(
            run.workers,
            run.threads_per_worker,
            # on this host, whose slots `elastic_runs` has checked
            alone=True,
            # MPI ends all ranks with the first that dies
            mpi=False,
            restarts=self._restarts,
        )
        pulse, events = postmortem.Pulse(job.heartbeats), JsonLines(job.events)
        variables = (
            processes.environment(
                run.threads_per_worker, oversubscribed=True, alone=True
            )
            | job.settings
        )
        program = [sys.executable, "-m", "scalebench.native.elastic"]
        process = processes.start(
            [*command, *program, str(job.save().absolute())],
            # unbuffered, as a launcher's line about a rank is read while it runs
            variables | {"PYTHONUNBUFFERED": "1"},
            self._folder,
        )
        try:
            death = self._attend(process, events, pulse)
        finally:
            processes.stop(process, pulse.pids)
            heartbeat.mark_over(job.heartbeats)
            shutil.rmtree(self._folder / CHECKPOINTS, ignore_errors=True)
        self._hear(events)
        return self._ended(death, process.returncode)

    def _attend(
        self,
        process: subprocess.Popen[bytes],
        events: JsonLines,
        pulse: postmortem.Pulse,
    ) -> Death | None:
        """Note deaths and the beginnings of trainings until the ranks have ended, or have to be ended."""
        run, since = self._run, time.monotonic()
        pulse.watch(run.workers)
        while process.poll() is None:
            self._lives.look()
            self._hear(events)
            pulse.feel()
            now = time.monotonic()
            if self._outcome is not None:
                # the outcome counts, however the processes end
                if now - self._told_s > _ENDING_LIMIT_S:
                    return None
            elif now - since > run.time_limit_s:
                stopped = pulse.stopped(run.workers)
                return Death(
                    "timeout",
                    f"exceeded the time limit of {run.time_limit_s:g} s; {stopped}",
                )
            elif (
                not self._began
                and now - since > _STARTUP_LIMIT_S + _STARTUP_OF_A_RANK_S * run.workers
            ):
                stopped = pulse.stopped(run.workers)
                return Death(
                    "failed",
                    f"training did not begin within {now - since:.0f} s; {stopped}",
                )
            elif self._began and (silent_s := pulse.hush_s(self._patience_s)):
                who = pulse.silent(Mesh(run.workers))
                return Death(
                    "failed",
                    f"no worker showed a sign of life for {silent_s:.0f} s (patience): {who}",
                )
            time.sleep(_POLL_S)
        return None

    def _hear(self, events: JsonLines) -> None:
        for event in events.new():
            if "outcome" in event:
                self._outcome, self._told_s = (
                    Outcome.from_json(event["outcome"]),
                    time.monotonic(),
                )
            elif "began" in event:
                if self._began:
                    # The last look may have come before the death.
                    self._lives.look()
                    self._note_death(event["began"], event["epoch"])
                self._began.append(event)
                # training went on from the last epoch that was kept
                self._last_kept_s = self._last_epoch_s = event["began"]
                self._lives.forget_dead()
            else:
                self._last_epoch_s = event["ended"]
                if event["kept"]:
                    self._last_kept_s = event["ended"]

    def _note_death(self, began_s: float, epoch: int) -> None:
        """Note the death of a rank behind which training began again at `began_s`, in `epoch`."""
        died_s = min(self._lives.died_s, began_s)
        moment = datetime.now(UTC) - timedelta(seconds=time.monotonic() - died_s)
        lost_s = max(0.0, died_s - self._last_kept_s)
        utc = moment.isoformat(timespec="milliseconds")
        self._deaths.append(
            rows.RankDeath(
                utc,
                self._lives.rank,
                provenance.host_hash(),
                epoch,
                lost_s,
                began_s - died_s,
            )
        )
        # of ranks that lost their peer: no cause of a later end
        for path in self._folder.glob("rank-*.error"):
            path.unlink()

    def _ended(self, death: Death | None, returncode: int) -> rows.ElasticOutcome:
        deaths = self._deaths_named()
        if self._outcome is not None:
            total_s = (
                self._last_epoch_s - self._began[0]["began"]
                if self._outcome.status == "completed"
                else None
            )
            return rows.ElasticOutcome(
                self._outcome, deaths, self._began[-1]["workers"], total_s
            )
        if death is None:
            death = postmortem.cause_of_death(
                self._folder, returncode, launcher=self._job.launcher
            )
            if self._began:
                times = counted(len(deaths), "interruption")
                death = replace(
                    death,
                    error=f"{death.error}; after {times} of at most {self._restarts} (--max-restarts)",
                )
        at_end = self._began[-1]["workers"] if self._began else None
        return rows.ElasticOutcome(
            Outcome(self._run.run_id, death.status, death.error), deaths, at_end
        )

    def _deaths_named(self) -> list[rows.RankDeath]:
        """The deaths, of the ranks that the launcher named in this order."""
        output = "\n".join(
            (self._folder / name).read_text(encoding="utf-8", errors="replace")
            for name in ("stderr.txt", "stdout.txt")
        )
        ranks: list[int | None] = [
            end.rank for end in named(self._job.launcher).reported_ends(output)
        ]
        ranks += [death.rank for death in self._deaths[len(ranks) :]]
        return [
            replace(death, rank=rank)
            for death, rank in zip(self._deaths, ranks, strict=False)
        ]


class _Lives:
    """Which processes of a file of heartbeats live, and the first that died since the last training began."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rank_of: dict[int, int] = {}  # by process that lives
        self._dead: set[int] = set()
        # On a busy machine a look may come seconds after a death, behind which training
        # has begun again: a death is dated by the last look at which the rank lived.
        self.died_s = math.inf  # of time.monotonic
        self.forget_dead()

    def forget_dead(self) -> None:
        """Wait for the next death."""
        self.rank: int | None = None

    def look(self) -> None:
        """Find processes that have started or died since the last look."""
        looked_s = time.monotonic()
        # a rank writes its process here when it starts, also the one that replaces
        # another
        for rank, beat in enumerate(heartbeat.read_heartbeats(self._path)):
            if beat.pid and beat.pid not in self._dead:
                self._rank_of[beat.pid] = rank
        for pid in [pid for pid in self._rank_of if not _lives(pid)]:
            rank = self._rank_of.pop(pid)
            self._dead.add(pid)
            if self.rank is None:
                self.rank = rank
        if self.rank is None:
            self.died_s = looked_s


def _lives(pid: int) -> bool:
    try:
        # a zombie has died, and its launcher has not read that yet
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
