"""A batch job, its script, and the protocol of the schedulers that take it."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from scalebench.batch.site import Site
from scalebench.errors import UsageError

# a controller that is down would hold `status` for minutes
ANSWER_S = 10.0  # in which a scheduler's client has to answer
STOPPED = 138  # exit code of a study that SIGUSR1 ended with runs left
_WARNING_S = 300  # before the limit, at most a quarter of it


class SchedulerError(UsageError):
    """A scheduler is not here, does not answer, or refused a job."""


@dataclass(frozen=True)
class BatchJob:
    """One job, or an array of jobs that differ in their number only.

    `command` is a line of shell, in which `{number}` is the number of the task of an
    array.
    """

    name: str
    command: str
    folder: str  # of the files of what it prints, as seen from where it is submitted
    nodes: int = 1
    tasks_per_node: int = 1
    cpus_per_task: int = 1
    gpus_per_node: int = 0
    limit_s: int = 600
    goes_on: bool = False  # warned before the limit, and queued again with what is left
    tasks: tuple[int, ...] = ()  # consecutive numbers of an array; empty: one job
    at_once: int = 0  # tasks of an array that run at the same time; 0: all
    # command that submits what is left, for schedulers whose jobs cannot queue
    # themselves again
    again: str = ""
    site: Site = field(default_factory=Site)
    path: str = ""  # folder of the programs of the environment that submits

    @property
    def warned_s(self) -> int:
        """Seconds before the limit at which the runs under way are to end."""
        # a short job would otherwise be warned as soon as it begins
        return min(_WARNING_S, self.limit_s // 4)


@dataclass(frozen=True)
class JobState:
    """What a scheduler says of a job: `since` when it runs, and the `reason` why it waits or how it ended."""

    kind: Literal["pending", "running", "ended"]
    since: str = ""
    reason: str = ""


@dataclass(frozen=True)
class Partition:
    """A partition or queue, as its scheduler describes it; None where it does not say."""

    name: str
    nodes: int | None = None
    cores_per_node: int | None = None
    gpus_per_node: int = 0
    max_time_s: int | None = None


class Scheduler(Protocol):
    """A batch scheduler: how its scripts begin, and how its clients are called and read."""

    name: str
    submits: str  # the client that submits, by which the scheduler is found
    workplace: str  # variable of the folder from which a job was submitted
    index: str  # variable of the number of a task of an array
    warns: bool  # it sends SIGUSR1 to the script before the limit
    forgotten: str  # in its client's error message: it no longer knows a job
    # one of these in its clients' error messages: its server cannot be reached
    unreachable: tuple[str, ...]
    # line of shell that queues what is left again, {again} of the job; empty: it does
    # so by the exit code
    again: str

    def directives(self, job: BatchJob) -> list[str]:
        """Return the lines at the top of the script."""

    def submission(self, script: str, after: Sequence[str]) -> tuple[list[str], str]:
        """Return the command that submits `script` to run after the jobs `after` ended, and its standard input."""

    def job_id(self, printed: str) -> str:
        """Return the identifier in what that command printed; empty if there is none."""

    def task_id(self, job: str, number: int) -> str:
        """Return the identifier of one task of an array."""

    def output_name(self, job: str) -> str:
        """Return the suffix of the output file of a job or task."""

    def query(self, jobs: Sequence[str]) -> list[str]:
        """Return the one command that asks for the states of `jobs`."""

    def states(self, printed: str) -> dict[str, JobState]:
        """Return the states in what it printed, by identifiers of jobs and of tasks."""

    def partition(self, name: str | None) -> Partition | None:
        """Return the partition `name`, or the default one; None if it cannot be said."""


def script(scheduler: Scheduler, job: BatchJob) -> str:
    """Return the batch script of `job`: directives, environment, and a body that ends in time."""
    number = f"${{{scheduler.index}}}" if job.tasks else ""
    command = job.command.replace("{number}", number)
    if job.site.container:
        command = f"{job.site.container} {command}"
    # schedulers read directives up to the first command
    lines = ["#!/bin/bash", *scheduler.directives(job), ""]
    if job.site.modules:
        # without them another MPI might be measured
        lines.append(f"module load {' '.join(job.site.modules)} || exit 2")
    lines += job.site.setup
    # what the site states knows better where scalebench is
    if not (job.site.setup or job.site.container):
        lines.append(f'export PATH="{job.path}:$PATH"')
    if job.site.launcher:
        lines.append(f"export SCALEBENCH_LAUNCHER={job.site.launcher}")
    # PBS starts jobs in the home folder
    lines += [f'cd "${{{scheduler.workplace}:-.}}" || exit 2', ""]
    if not job.goes_on:
        return "\n".join([*lines, command, ""])
    # bash runs a trap only once its foreground command has ended, so that the study
    # runs in the background
    lines += ["trap 'kill -USR1 ${study:-$!}' USR1", f"{command} &", "study=$!"]
    if not scheduler.warns:
        before = job.limit_s - job.warned_s
        lines += [f"(sleep {before}; kill -USR1 $study) > /dev/null 2>&1 &", "clock=$!"]
    lines += [
        "wait $study",
        "while kill -0 $study 2>/dev/null; do wait $study; done",
        "wait $study",
        "status=$?",
    ]
    if not scheduler.warns:
        # the sleep would outlive the script
        lines.append("kill $clock 2>/dev/null")
    again = scheduler.again.replace("{again}", job.again).replace("{number}", number)
    if again:
        lines += [
            f"if [ $status -eq {STOPPED} ]; then   # stopped in time, with runs left",
            f"    {again}",
            "fi",
        ]
    return "\n".join([*lines, "exit $status", ""])


def call(
    command: Sequence[str], text: str = "", *, limit_s: float = ANSWER_S
) -> subprocess.CompletedProcess[str]:
    """Run a scheduler's client.

    Raises:
        SchedulerError: it is not here, or does not answer in time.
    """
    if shutil.which(command[0]) is None:
        raise SchedulerError(
            f"no {command[0]} on PATH: the scheduler's commands are on its login nodes"
        )
    try:
        return subprocess.run(
            command,
            input=text,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise SchedulerError(
            f"{command[0]} did not answer within {limit_s:g} s; try again later"
        ) from None
    except OSError as error:
        raise SchedulerError(f"cannot start {command[0]}: {error.strerror}") from None


def submit(scheduler: Scheduler, path: str, after: Sequence[str] = ()) -> str:
    """Submit the script in the file `path`; return the identifier of the job.

    Raises:
        SchedulerError: it was refused, or its scheduler cannot be reached; in the scheduler's own words.
    """
    command, text = scheduler.submission(path, after)
    # a submission that was cut off may have been taken: longer than a query
    done = call(command, text, limit_s=3 * ANSWER_S)
    job = scheduler.job_id(done.stdout) if done.returncode == 0 else ""
    if job:
        return job
    said = " ".join(
        (
            done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}"
        ).split()
    )
    # to edit site.yaml would not help
    if any(words in said for words in scheduler.unreachable):
        raise SchedulerError(
            f"{command[0]} could not reach its scheduler with {path}: {said}; submit the study again once it answers"
        )
    raise SchedulerError(
        f"{command[0]} refused {path}: {said}; edit site.yaml, and submit the study again with --site site.yaml"
    )


def ask(scheduler: Scheduler, jobs: Sequence[str]) -> Mapping[str, JobState]:
    """Return the states of `jobs` by one query; jobs that the scheduler no longer knows are missing.

    Raises:
        SchedulerError: it is not here, does not answer in time, or cannot answer; in its own words.
    """
    if not jobs:
        return {}
    command = scheduler.query(jobs)
    done = call(command)
    said = " ".join(done.stderr.split())
    # one job that is forgotten fails the query of all, whose other answers are printed
    if done.returncode != 0 and said and scheduler.forgotten not in said:
        raise SchedulerError(f"{command[0]} failed: {said}; try again later")
    return scheduler.states(done.stdout)


def clock(seconds: int) -> str:
    """Return seconds as `HH:MM:SS`."""
    return f"{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"
