"""Standing of a submitted study: the records decide what is done, the scheduler only explains what is not.

All jobs are asked for by one query, whose answer is kept and used again for a while;
none is made where rows already say all. What is left without a job can be submitted
again, and so can the collection.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from scalebench.batch.collection import completed_runs
from scalebench.batch.job import BatchJob, JobState, Scheduler, SchedulerError, ask
from scalebench.batch.schedulers import SCHEDULERS
from scalebench.batch.shards import Shard, folder_of
from scalebench.batch.site import Site, site_for
from scalebench.batch.submission import (
    Submission,
    Submitter,
    read_submission,
    submitting,
)
from scalebench.errors import UsageError
from scalebench.formatting import counted
from scalebench.records.attempts import Attempts
from scalebench.records.folder import JOBS, RUNS
from scalebench.system.file_access import write_atomic

POLL_S = 30.0
_ANSWER = "queue.json"  # the scheduler's last answer
_TAIL = 4096  # bytes that are read from the end of a job's output


@dataclass(frozen=True)
class ShardStanding:
    """How far a shard is; `why` is the scheduler's explanation, or the error of a failed run."""

    shard: Shard
    job: str  # as the scheduler names it; empty: not submitted
    # done, running, pending, failed, stopped (runs are left, and no job), not
    # submitted, unknown
    state: str
    done: int
    failed: int
    why: str = ""

    @property
    def left(self) -> int:
        """Runs without a result."""
        return len(self.shard.run_ids) - self.done - self.failed


def standings(
    folder: Path, submission: Submission, *, poll_s: float = POLL_S
) -> list[ShardStanding]:
    """Return the standing of each shard; the scheduler is asked at most every `poll_s` seconds."""
    scheduler = SCHEDULERS[submission.scheduler]
    completed = completed_runs(folder, submission)
    unfinished = [
        shard
        for shard in submission.shards
        if len(completed[shard.number]) < len(shard.run_ids)
    ]
    # only of shards with runs left: nothing is asked of those that are done
    jobs = sorted(
        {job.job for shard in unfinished if (job := submission.job_of(shard.number))}
    )
    unknown = ""
    answers: Mapping[str, JobState] = {}
    try:
        answers = _answers(folder, scheduler, jobs, poll_s)
    # what the records say is shown all the same
    except SchedulerError as error:
        unknown = str(error)
    found = []
    for shard in submission.shards:
        done = completed[shard.number]
        failures = _failures(folder, shard, done)
        name = _name_of_job(submission, scheduler, shard)
        state, why = "done", ""
        if len(done) < len(shard.run_ids):
            state, why = _explained(answers.get(name), name, unknown, failures)
        if state == "stopped":
            why += _from_output(folder, scheduler, name, answers.get(name))
        found.append(ShardStanding(shard, name, state, len(done), len(failures), why))
    return found


def under_way(submission: Submission, found: Iterable[ShardStanding]) -> list[str]:
    """Return the jobs that run or wait."""
    queued = [
        each.shard.number for each in found if each.state in ("running", "pending")
    ]
    return sorted({job.job for number in queued if (job := submission.job_of(number))})


def jobs_left(
    folder: Path,
    scheduler: Scheduler,
    site: Site,
    say: Callable[[str], None],
    *,
    numbers: Sequence[int] = (),
    limit_s: int | None = None,
    anew: bool = False,
) -> tuple[Submitter, list[tuple[Sequence[Shard], BatchJob]], list[str]]:
    """Return what submits shards of the study in `folder` again, their jobs, and the jobs that are under way.

    The shards are those of `numbers`, by default all with runs left and no job. Their scripts are those of before,
    unless they have another time limit or are wanted `anew`.

    Raises:
        UsageError: there is no such shard, or nothing says whether one has a job.
    """
    submission = read_submission(folder).known_to(scheduler.name)
    chosen = [submission.shard(number).number for number in numbers]
    waited_for: list[str] = []
    if not chosen:
        known = standings(folder, submission, poll_s=0.0)
        waited_for = under_way(submission, known)
        idle = [
            each
            for each in known
            if each.state in ("failed", "stopped", "not submitted")
        ]
        # a job that is submitted twice would write the shard of the first
        if each := next((each for each in known if each.state == "unknown"), None):
            raise UsageError(
                f"{each.shard}: {each.why}; name what to submit again with --shard {each.shard.number}"
            )
        chosen = [each.shard.number for each in idle]
        if chosen:
            failed = sum(each.failed for each in idle)
            left = sum(each.left for each in idle)
            say(f"again: {counted(failed, 'run')} that failed, {left} without a result")
        else:
            say(f"nothing to submit of {folder}/: every shard is done or queued")
    submitter = Submitter(
        folder,
        scheduler,
        site,
        submission.limited(chosen, limit_s),
        anew=anew or limit_s is not None,
    )
    return submitter, submitter.jobs(chosen), waited_for


def submit_again(
    folder: Path,
    scheduler: Scheduler,
    site: Site,
    say: Callable[[str], None],
    *,
    numbers: Sequence[int] = (),
    collects: bool = True,
    limit_s: int | None = None,
    anew: bool = False,
) -> None:
    """Submit shards of the study in `folder` again, as `jobs_left` finds them."""
    with submitting(folder, say):
        submitter, jobs, waited_for = jobs_left(
            folder, scheduler, site, say, numbers=numbers, limit_s=limit_s, anew=anew
        )
        if jobs:
            submitter.submit(jobs, collects=collects, say=say, under_way=waited_for)


def collect_again(folder: Path, say: Callable[[str], None]) -> bool:
    """Submit another collection behind the jobs that run or wait; return False if there are none.

    A job that went back into the queue has ended once already: Slurm may begin what
    waits for its end then.
    """
    with submitting(folder, say):
        submission = read_submission(folder)
        jobs = under_way(submission, standings(folder, submission, poll_s=0.0))
        submitter = Submitter(
            folder, SCHEDULERS[submission.scheduler], site_for(Path())[0], submission
        )
        submitter.submit([], collects=True, say=say, under_way=jobs)
    return bool(jobs)


def _explained(
    answer: JobState | None, job: str, unknown: str, failed: Mapping[str, str]
) -> tuple[str, str]:
    """Return the state of a shard with runs left, and why."""
    error = next(iter(failed.values()), "")
    if not job:
        return "not submitted", ""
    if unknown:
        return "unknown", unknown
    if answer is not None and answer.kind == "running":
        return "running", f"since {answer.since}" if answer.since else ""
    if answer is not None and answer.kind == "pending":
        return "pending", answer.reason
    # schedulers forget a job some minutes after its end
    ended = answer.reason if answer is not None else ""
    return ("failed", error) if failed else ("stopped", ended or "its job has ended")


def _from_output(
    folder: Path, scheduler: Scheduler, job: str, answer: JobState | None
) -> str:
    """Return what the output of an ended job adds to the scheduler's `answer`."""
    if printed := _last_line(folder, scheduler, job):
        return f": {printed}"
    # a job that was cancelled in the queue prints nothing either
    if answer is None or answer.reason in ("CANCELLED", "TIMEOUT"):
        return ""
    return f": it printed nothing; its nodes have to see and write {folder / JOBS}"


def _last_line(folder: Path, scheduler: Scheduler, job: str) -> str:
    """Return the last line that a job printed, by which it mostly says why it ended; empty if it printed nothing."""
    end = scheduler.output_name(job)
    lines: list[str] = []
    with suppress(OSError):
        for path in (folder / JOBS).iterdir():
            if path.name.endswith(end) and path.is_file():
                lines = _tail(path).split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def _tail(path: Path) -> str:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL))
        return file.read().decode("utf-8", errors="replace")


def _name_of_job(submission: Submission, scheduler: Scheduler, shard: Shard) -> str:
    job = submission.job_of(shard.number)
    if job is None:
        return ""
    return scheduler.task_id(job.job, shard.number) if job.array else job.job


def _failures(folder: Path, shard: Shard, completed: set[str]) -> dict[str, str]:
    """Return the errors of runs whose latest attempt was not completed, by name."""
    path = folder_of(folder, shard.number) / RUNS
    if not path.is_file():
        return {}
    attempts = Attempts(path)
    latest = attempts.latest()
    return {
        name: attempts.row(latest[name])["error"]
        for name in shard.run_ids
        if name in latest and name not in completed
    }


def _answers(
    folder: Path, scheduler: Scheduler, jobs: list[str], poll_s: float
) -> Mapping[str, JobState]:
    """Return what the scheduler says of `jobs`: its last answer to this question while that is young, else a new one.

    Raises:
        SchedulerError: it does not answer.
    """
    if not jobs:
        return {}
    path = folder / JOBS / _ANSWER
    # none was kept, or it is damaged
    with suppress(OSError, ValueError, KeyError, TypeError):
        kept = json.loads(path.read_text(encoding="utf-8"))
        # a clock that was set back makes an answer one from the future
        if kept["jobs"] == jobs and 0 <= time.time() - kept["asked_at"] < poll_s:
            return {name: JobState(**state) for name, state in kept["states"].items()}
    states = ask(scheduler, jobs)
    content = {
        "jobs": jobs,
        "asked_at": time.time(),
        "states": {name: asdict(state) for name, state in states.items()},
    }
    with suppress(OSError):  # the folder may be read only
        write_atomic(path, json.dumps(content) + "\n")
    return states
