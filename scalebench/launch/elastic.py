"""Elastic runs of a study, `run --elastic`: a worker that dies costs an interruption, not the run.

Their time holds interruptions, so that they have a table of their own, and no row among
runs that are compared.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from scalebench.comm import engines
from scalebench.comm.launchers.choice import AUTO, VARIABLE, named, using
from scalebench.errors import EngineError, StudyError
from scalebench.formatting import counted
from scalebench.launch.elastic_launch import ElasticLaunch
from scalebench.launch.hosts import reachable
from scalebench.launch.logs import new_logs, redact_logs, remove_logs
from scalebench.launch.planning import StudyPlan
from scalebench.launch.reporting import Reporter, Tally
from scalebench.launch.sweep import is_oversubscribed
from scalebench.records.elastic import ElasticOutcome, ElasticTable, elastic_row
from scalebench.records.folder import require_writable
from scalebench.records.lock import folder_lock
from scalebench.records.provenance import collect, in_job, keep, redact
from scalebench.records.study_file import keep_study
from scalebench.strategies import registry
from scalebench.study.spec import Run
from scalebench.system.interruption import AbandonedError, Interruption

_MAY_HOLD_PATHS = ("error", "model", "dataset", "strategy_options")


def elastic_runs(plan: StudyPlan) -> list[Run]:
    """Return the native runs of `plan`, all of which can go on without a worker that died.

    Raises:
        StudyError, EngineError: one of them cannot, its launcher is missing or not the one that was named, or the study
            has no native runs.
    """
    if plan.trials:
        raise StudyError(
            "--elastic makes runs, not trials: leave tune out of the study, and state the values"
        )
    runs = [run for run in plan.sweep.runs if run.execution == "native"]
    if not runs:
        raise StudyError(
            f"--elastic makes native runs, and this study has none ({plan.study.execution}); use --execution native"
        )
    for run in {(str(run.strategy), run.engine): run for run in runs}.values():
        _require_elastic(run)
    for name in {engines.named(run.engine).elastic_launcher for run in runs}:
        _require_launcher(name, plan.study.launcher)
    hosts, most = reachable().hosts, max(run.workers for run in runs)
    if len(hosts) > 1 and most > hosts[0].slots:
        raise EngineError(
            f"--elastic starts all ranks on this host, which has {hosts[0].slots} slots, and the largest run takes "
            f"{most}; use --workers 1..{hosts[0].slots}"
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
        if stated not in (None, "", AUTO, name):
            raise EngineError(
                f"--elastic starts these runs by {name}, and {where} is {stated}; leave that out"
            )
    if reason := named(name).lacks(by_mpi=False):
        raise EngineError(f"--elastic: {reason}")


def run_elastic(
    plan: StudyPlan,
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
    with folder_lock(folder), Interruption(in_job=in_job(os.environ)) as interruption:
        keep_study(folder, plan.study)
        with ElasticTable(folder) as table:
            left = [
                run
                for run in runs
                if (run.run_id, run.config_hash) not in table.completed
            ]
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
        plan: StudyPlan,
        table: ElasticTable,
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
        facts = collect()
        self._provenance: dict[str, Any] = {
            "host_hash": facts["host_hash"],
            "provenance": keep(tally.folder, facts),
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
            with interruption.shielded():
                self._record(run, ended, started_utc)
            self._tally.remaining -= 1
            self._tally.count(run, ended.outcome)
            self._reporter.ended(run, ended.outcome)

    def _launch(self, run: Run) -> ElasticOutcome:
        """Make one run; its logs stay if it failed."""
        logs, failed = new_logs(self._tally.folder), False
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
                redact_logs(logs)
            else:
                remove_logs(logs)

    def _record(self, run: Run, ended: ElasticOutcome, started_utc: str) -> None:
        row = elastic_row(
            run,
            ended,
            attempt=self._table.next_attempt(run.run_id),
            launcher=engines.named(run.engine).elastic_launcher,
            oversubscribed=is_oversubscribed(run, self._plan.allocation),
            max_restarts=self._restarts,
            started_utc=started_utc,
            **self._provenance,
        )
        texts = {
            name: redact(text, names=False)
            for name in _MAY_HOLD_PATHS
            if (text := vars(row)[name])
        }
        self._table.append(row.model_copy(update=texts))
        if ended.deaths:
            self._reporter.note(
                f"{run.run_id} went on after {counted(len(ended.deaths), 'interruption')}, with {ended.workers_at_end} "
                f"of {run.workers} workers at its end"
            )
