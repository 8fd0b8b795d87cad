"""Starts real processes through a launcher and stays with them: one launch serves a whole sweep.

A run that exceeds its limit, or whose rank dies, ends its launch; it is recorded with
rank and cause and the rest is launched again. Nothing is left behind, whatever ends
this process.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from scalebench.cluster.mesh import Mesh
from scalebench.comm import engines
from scalebench.comm.launchers import chosen
from scalebench.errors import EngineError
from scalebench.launch.hosts import reachable, require_seen, require_there
from scalebench.launch.processes import environment, launch_command, start, stop
from scalebench.launch.work import in_new_processes
from scalebench.native import job_files
from scalebench.native.heartbeat import create_heartbeats, is_stopped, mark_over
from scalebench.native.postmortem import Pulse, cause_of_death, what_to_check
from scalebench.records.provenance import host_hash
from scalebench.study.spec import Run
from scalebench.training.outcome import Outcome

# between two looks at the ranks, whose cores this process shares
_POLL_S = 0.05
_ENDING_LIMIT_S = 20.0  # for processes to end after their last run
_BARREN_LAUNCHES = 2  # in a row: then it is not the runs' fault
PATIENCE_S = 60.0  # without a sign of life of any worker


@dataclass(frozen=True)
class RealRuns:
    """Starts real runs in launches of `ranks` processes, and passes on when each began and how it ended.

    `folders` are the prepared data sets by worker count; logs of the processes stay in
    `work_dir`. Once `stopping`, only the run under way ends. When all runs have an end,
    `more` is asked for others, which those processes then execute that are there
    already; what does not fit them is left. Each launch begins with `warmup_runs` extra
    runs on each engine, at its largest worker count; their outcomes are reported too.
    """

    folders: Mapping[int, Path]
    ranks: int
    work_dir: Path
    on_start: Callable[[Run], None]
    on_outcome: Callable[[Run, Outcome], None]
    log: Callable[[str], None]
    weights_folder: Path | None = None
    startup_limit_s: float | None = None
    patience_s: float = PATIENCE_S
    stopping: Callable[[], bool] = lambda: False
    job_is_ending: Callable[[], bool] = lambda: False
    more: Callable[[], Sequence[Run]] | None = None
    warmup_runs: int = 0

    def launch(self, runs: Sequence[Run]) -> None:
        """Execute `runs` in their order, each with its engine, in as few launches as they allow.

        A rank takes seconds to start, and runs of two engines compare best when they
        follow one another: engines share a launch. Failures end one, and settings that
        an engine reads only once want one of their own. Every run gets exactly one
        outcome: completed, diverged, failed or timeout.

        Raises:
            EngineError: an engine is not here, or another host does not see a folder.
        """
        # before anything starts: one line, not a failed row for each run
        for engine in dict.fromkeys(run.engine for run in runs):
            engines.require(engine)
        self._launch_tasks(
            [run for run in runs if not engines.named(run.engine).has_ranks]
        )
        runs = [run for run in runs if engines.named(run.engine).has_ranks]
        if not runs:
            return
        self.work_dir.mkdir(parents=True, exist_ok=True)
        # named by host and path here, before a rank fails on a file that it does not
        # see
        require_seen([self.work_dir, *dict.fromkeys(self.folders.values())])
        cold: set[str] = set()  # warm-up runs that failed: not tried again
        for part in _by_settings(runs, self.ranks):
            barren, left = 0, part.runs
            while left and not self.stopping():
                work = in_new_processes(left, self.warmup_runs, cold)
                watch = _Launch(self, part, [run for one in work for run in one.runs])
                # a first launch that came to nothing may have failed to bind
                watch.run(bind=barren == 0)
                left = [run for run in watch.left.values() if not run.warmup]
                cold |= watch.cold
                # only launches in a row that came to nothing count
                barren = 0 if watch.achieved else barren + 1
                if self.stopping():
                    return
                # runs without an outcome would be begun for ever
                if left and barren == _BARREN_LAUNCHES:
                    error = f"the launch failed before its runs: {watch.cause}"
                    for run in left:
                        self.on_outcome(run, Outcome(run.run_id, "failed", error))
                    break
                if left:
                    # without a host that has gone, each further launch would fail, and
                    # a run be blamed for it
                    require_there([self.work_dir])
                    self.log(
                        f"launching the remaining {len(left)} run{'s' * (len(left) > 1)} again ({watch.cause})"
                    )

    def _launch_tasks(self, runs: Sequence[Run]) -> None:
        """Execute runs whose blocks of steps are tasks: there are no ranks, and the workers' programs run here."""
        if not runs:
            return
        # imports torch, which launches of ranks do without
        from scalebench.tasks.run import TaskRuns

        with closing(TaskRuns(self.folders, self.ranks, self.weights_folder)) as tasks:
            for work in in_new_processes(runs, self.warmup_runs):
                for run in work.runs:
                    if self.stopping():
                        return
                    self.on_start(run)
                    self.on_outcome(run, tasks.execute(run))


@dataclass(frozen=True)
class _LaunchPart:
    """Runs that one launch of `ranks` processes can serve."""

    settings: dict[str, str]
    runs: list[Run]
    ranks: int

    def takes(self, run: Run) -> bool:
        """Return True if these processes can serve `run` too."""
        needed = run.workers + job_files.server_ranks(run)
        return job_files.settings_of(run) == self.settings and (
            needed == self.ranks if self.settings else needed <= self.ranks
        )


def _by_settings(runs: Sequence[Run], ranks: int) -> Iterator[_LaunchPart]:
    """All runs without settings together, others by settings and number of workers.

    Runs whose servers exceed the slots of several hosts have a launch of their own:
    there ranks lie otherwise.
    """
    hosts = reachable()
    parts: dict[tuple[str, int], list[Run]] = {}
    for run in runs:
        # An engine reads its settings once, when it is initialised: other ones need
        # other processes.
        settings = job_files.settings_of(run)
        needed = run.workers + job_files.server_ranks(run)
        exceeds = len(hosts.hosts) > 1 and run.workers <= hosts.slots < needed
        key = (
            json.dumps(settings, sort_keys=True),
            needed if settings or exceeds else 0,
        )
        parts.setdefault(key, []).append(run)
    for (settings_text, exactly), part in parts.items():
        at_least = max(run.workers + job_files.server_ranks(run) for run in part)
        yield _LaunchPart(
            json.loads(settings_text), part, exactly or max(ranks, at_least)
        )


def _new_folder(work_dir: Path) -> Path:
    for number in count(1):
        folder = work_dir / f"launch-{number}"
        with suppress(FileExistsError):
            folder.mkdir(parents=True)
            return folder
    raise AssertionError("unreachable")


class _Launch:
    """One launch and the runs it serves."""

    def __init__(self, owner: RealRuns, part: _LaunchPart, runs: Sequence[Run]) -> None:
        # without an outcome, in their order
        self.left = {run.run_id: run for run in runs}
        self.cold: set[str] = set()  # warm-up runs that failed
        self.achieved = False  # whether a run was started, or brought to an end
        self.cause = ""
        self._owner, self._part, self._ranks, self._settings = (
            owner,
            part,
            part.ranks,
            part.settings,
        )
        self._more = owner.more
        self._folder = _new_folder(owner.work_dir)
        # a rank imports for some 2.5 s of a core, and many ranks may share one
        self._startup_limit_s = owner.startup_limit_s or 120.0 + 5.0 * owner.ranks
        # the run that was under way at the request to stop
        self._last: Run | None = None
        self._under_way: Run | None = None
        self._since = 0.0  # when the run under way, or the waiting for one, began

    def run(self, *, bind: bool) -> None:
        """Start, attend and clean up; afterwards `left` holds the runs that are still to be done."""
        runs = list(self.left.values())
        # one binding serves all runs of a launch
        threads = max(run.threads_per_worker for run in runs)
        used = [engines.named(run.engine) for run in runs]
        # all engines get the same cores
        progress = max(engine.progress_threads for engine in used)
        # one engine on MPI decides how all ranks are joined; without any they meet by
        # files
        mpi = any(engine.starts_by_mpi() for engine in used)
        command, binding = launch_command(
            self._ranks, threads, progress, bind=bind, mpi=mpi, settings=self._settings
        )
        job = job_files.Job(
            runs=runs,
            datasets=dict(self._owner.folders),
            stays_open=self._more is not None,
            folder=self._folder,
            weights=self._owner.weights_folder,
            settings=self._settings,
            ranks=self._ranks,
            launcher=chosen().name,
            rendezvous=not mpi,
            binding=binding,
            host=host_hash(),
        )
        create_heartbeats(job.heartbeats, self._ranks)
        pulse, events = Pulse(job.heartbeats), job_files.JsonLines(job.events)
        process = start(
            [*command, sys.executable, "-m", "scalebench.native", str(job.save())],
            environment(threads, oversubscribed=binding == "none") | self._settings,
            self._folder,
        )
        try:
            death = self._attend(
                process, events, pulse, job_files.JsonLines(job.further)
            )
        # the folder of a launch that was deleted is the end of its ranks, not a bug of
        # ours
        except FileNotFoundError:
            if not self._is_deleted():
                raise
            death = self._deleted()
        finally:
            stop(process, pulse.pids)
            mark_over(job.heartbeats)
        if death is None:  # stopped: what began after the last run does not count
            return
        # no run is to blame, and another launch would be refused as well
        if death.status == job_files.REFUSED:
            raise EngineError(death.error)
        self._hear(events)
        if self.left:
            self._record(death)

    def _attend(
        self,
        process: subprocess.Popen[bytes],
        events: job_files.JsonLines,
        pulse: Pulse,
        further: job_files.JsonLines,
    ) -> job_files.Death | None:
        """Pass on the events of the ranks until they end or have to be ended; None after a request to stop."""
        self._since = time.monotonic()
        watched: Run | None = None
        while process.poll() is None:
            self._hear(events)
            if self._owner.stopping():
                # ranks begin the next run by themselves: only the one under way at the
                # request is waited for
                self._last = self._last or self._under_way
                if self._under_way is None or self._under_way is not self._last:
                    return None
            # the processes are there already: further runs cost no start
            if not self.left and self._more is not None:
                self._go_on(further)
            run = self._under_way
            if run is not watched:
                watched = run
                # ranks beyond the workers of a run sleep, and their silence says
                # nothing
                pulse.watch(run.workers if run is not None else self._ranks)
            if self._is_deleted():
                return self._deleted()
            pulse.feel()
            if (overdue := self._overdue(process.pid, pulse)) is not None:
                return overdue
            time.sleep(_POLL_S)
        # A scheduler tells the ranks too, or them alone: whatever they died of then, no
        # run is to blame.
        if self._owner.stopping() or self._owner.job_is_ending():
            self._hear(events)
            return None
        mesh = (
            job_files.mesh_of(self._under_way) if self._under_way is not None else None
        )
        return cause_of_death(
            self._folder,
            process.returncode,
            pulse.hosts,
            launcher=chosen().name,
            mesh=mesh,
        )

    def _overdue(self, launcher: int, pulse: Pulse) -> job_files.Death | None:
        """Return why the ranks have to be ended, as a limit has passed; None if they may go on."""
        run, elapsed = self._under_way, time.monotonic() - self._since
        # every run has its outcome: a hang is of no run now
        if not self.left and self._more is None:
            if elapsed <= _ENDING_LIMIT_S:
                return None
            why = pulse.not_ended(chosen().name, launcher)
            ending = f"the processes had not ended {elapsed:.0f} s after their last run: {why}"
            self._owner.log(f"{ending}; they are killed")
            return job_files.Death("failed", ending)
        if (silence := self._silence(launcher, pulse, elapsed)) is not None:
            return job_files.Death(
                "failed", silence, run.run_id if run is not None else ""
            )
        if run is not None and elapsed > run.time_limit_s:
            stopped = pulse.stopped(run.workers, job_files.server_ranks(run))
            return job_files.Death(
                "timeout",
                f"exceeded the time limit of {run.time_limit_s:g} s; {stopped}",
                run.run_id,
            )
        if run is None and self.left and elapsed > self._startup_limit_s:
            stopped = pulse.stopped(self._ranks)
            return job_files.Death(
                "failed",
                f"no run began within {self._startup_limit_s:g} s; {stopped}",
            )
        return None

    def _silence(self, launcher: int, pulse: Pulse, elapsed: float) -> str | None:
        """Return which ranks have been connecting, or without a sign of life, beyond the patience; None if none has.

        Ranks that share a core connect more slowly, so that the patience with them is
        longer.
        """
        run, patience_s = self._under_way, self._owner.patience_s
        servers = job_files.server_ranks(run) if run is not None else 0
        processes = run.workers + servers if run is not None else self._ranks
        # eight ranks on a core connect in time; beyond that the wait grows with them
        limit_s = patience_s * max(1.0, processes / reachable().cores / 8)
        if (waited_s := pulse.connecting_s(processes)) > limit_s:
            return (
                f"{pulse.unconnected(processes)} {waited_s:.0f} s while connecting; "
                f"{what_to_check(pulse.hosts)}"
            )
        if not self.achieved or waited_s:
            return None
        # silence from before this run is not held against it
        silent_s = min(elapsed, pulse.hush_s(patience_s))
        if silent_s <= patience_s:
            return None
        who = pulse.silent(
            job_files.mesh_of(run) if run is not None else Mesh(self._ranks), servers
        )
        if is_stopped(launcher):  # ranks ask it where the others are
            who = f"{chosen().name} is stopped; {who}"
        return f"no worker showed a sign of life for {silent_s:.0f} s (patience): {who}"

    def _is_deleted(self) -> bool:
        return not all(
            (self._folder / name).exists()
            for name in (job_files.HEARTBEATS, "stdout.txt", "stderr.txt")
        )

    def _deleted(self) -> job_files.Death:
        error = (
            f"{self._folder} was deleted by something else while the ranks wrote to it; "
            "keep the results where files are not purged (--output)"
        )
        return job_files.Death("failed", error)

    def _go_on(self, further: job_files.JsonLines) -> None:
        assert self._more is not None
        runs = [run for run in self._more() if self._part.takes(run)]
        self.left = {run.run_id: run for run in runs}
        self._since = time.monotonic()
        further.append([run.model_dump(mode="json") for run in runs])
        if not runs:
            self._more = None

    def _hear(self, events: job_files.JsonLines) -> None:
        for event in events.new():
            run = self.left.get(event["run_id"])
            if run is None:
                continue
            self.achieved = True
            self._since = time.monotonic()
            if "outcome" in event:
                self._end(run, Outcome.from_json(event["outcome"]))
            else:
                self._under_way = run
                self._owner.on_start(run)

    def _record(self, death: job_files.Death) -> None:
        """Blame the run under way, or the one in which a rank failed before rank 0 could say that it began."""
        self.cause = death.error
        run = self._under_way or self.left.get(death.run_id)
        if run is not None:
            self.achieved = True
            self._end(run, Outcome(run.run_id, death.status, death.error))

    def _end(self, run: Run, outcome: Outcome) -> None:
        del self.left[run.run_id]
        self._under_way = None
        if run.warmup and outcome.status != "completed":
            self.cold.add(run.run_id)
        if nodes := job_files.Nodes.of_launch(self._folder):
            outcome.add_facts(
                machines=nodes.of(run.workers + job_files.server_ranks(run))
            )
        self._owner.on_outcome(run, outcome)
        # the ranks may have begun the next already
        if outcome.status != "completed" and self._owner.stopping():
            self._last = self._last or run
