"""The launch of one elastic run: starts its ranks, notes which die and when the run goes on, and ends them."""

from __future__ import annotations

import math
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psutil

from scalebench.cluster.mesh import Mesh
from scalebench.comm.launchers.choice import chosen, named
from scalebench.formatting import counted
from scalebench.launch.processes import environment, launch_command, stop
from scalebench.native.heartbeat import create_heartbeats, mark_over, read_heartbeats
from scalebench.native.job_files import CHECKPOINTS, Death, Job, JsonLines, settings_of
from scalebench.native.postmortem import Pulse, cause_of_death
from scalebench.records.elastic import ElasticOutcome, RankDeath
from scalebench.records.provenance import host_hash
from scalebench.study.spec import Run
from scalebench.system.parent_watch import end_with_parent
from scalebench.training.outcome import Outcome

_POLL_S = 0.02  # between two looks at which ranks live
_ENDING_LIMIT_S = 20.0  # for processes to end after the run
_STARTUP_LIMIT_S, _STARTUP_OF_A_RANK_S = 120.0, 5.0


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
            host=host_hash(),
        )
        self._lives = _Lives(self._job.heartbeats)
        self._began: list[dict[str, Any]] = []  # events of trainings that began
        self._deaths: list[RankDeath] = []
        self._last_kept_s = self._last_epoch_s = 0.0  # of time.monotonic
        self._outcome: Outcome | None = None
        self._told_s = math.inf  # when the outcome was told

    def execute(self) -> ElasticOutcome:
        """Start the ranks and stay with them until the run has ended."""
        run, job = self._run, self._job
        self._folder.mkdir(parents=True)
        create_heartbeats(job.heartbeats, run.workers)
        command, _ = launch_command(
            run.workers,
            run.threads_per_worker,
            alone=True,
            mpi=False,
            restarts=self._restarts,
        )
        pulse, events = Pulse(job.heartbeats), JsonLines(job.events)
        variables = (
            environment(run.threads_per_worker, oversubscribed=True, alone=True)
            | job.settings
        )
        with (
            (self._folder / "stdout.txt").open("wb") as out,
            (self._folder / "stderr.txt").open("wb") as err,
        ):
            process = subprocess.Popen(
                [
                    *command,
                    sys.executable,
                    "-m",
                    "scalebench.native.elastic",
                    str(job.save().absolute()),
                ],
                env=variables
                | {
                    "PYTHONUNBUFFERED": "1"
                },  # a launcher's line about a rank is read while it runs
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
                preexec_fn=end_with_parent,
            )
        try:
            death = self._attend(process, events, pulse)
        finally:
            stop(process, pulse.pids)
            mark_over(job.heartbeats)
            shutil.rmtree(self._folder / CHECKPOINTS, ignore_errors=True)
        self._hear(events)
        return self._ended(death, process.returncode)

    def _attend(
        self, process: subprocess.Popen[bytes], events: JsonLines, pulse: Pulse
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
                    self._note_death(event["began"], event["epoch"])
                self._began.append(event)
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
            RankDeath(
                utc, self._lives.rank, host_hash(), epoch, lost_s, began_s - died_s
            )
        )
        # of ranks that lost their peer: no cause of a later end
        for path in self._folder.glob("rank-*.error"):
            path.unlink()

    def _ended(self, death: Death | None, returncode: int) -> ElasticOutcome:
        deaths = self._deaths_named()
        if self._outcome is not None:
            total_s = (
                self._last_epoch_s - self._began[0]["began"]
                if self._outcome.status == "completed"
                else None
            )
            return ElasticOutcome(
                self._outcome, deaths, self._began[-1]["workers"], total_s
            )
        if death is None:
            death = cause_of_death(
                self._folder, returncode, launcher=self._job.launcher
            )
            if self._began:
                times = counted(len(deaths), "interruption")
                death = replace(
                    death,
                    error=f"{death.error}; after {times} of at most {self._restarts} (--max-restarts)",
                )
        at_end = self._began[-1]["workers"] if self._began else None
        return ElasticOutcome(
            Outcome(self._run.run_id, death.status, death.error), deaths, at_end
        )

    def _deaths_named(self) -> list[RankDeath]:
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
        self.forget_dead()

    def forget_dead(self) -> None:
        """Wait for the next death."""
        self.rank: int | None = None
        self.died_s = math.inf  # of time.monotonic

    def look(self) -> None:
        """Find processes that have started or died since the last look."""
        for rank, beat in enumerate(read_heartbeats(self._path)):
            if beat.pid and beat.pid not in self._dead:
                self._rank_of[beat.pid] = rank
        for pid in [pid for pid in self._rank_of if not _lives(pid)]:
            rank = self._rank_of.pop(pid)
            self._dead.add(pid)
            if self.rank is None:
                self.rank, self.died_s = rank, time.monotonic()


def _lives(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
