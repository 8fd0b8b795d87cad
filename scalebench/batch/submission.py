"""A study on its way through a scheduler: what was submitted, kept beside the results, and the scripts of its jobs."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from scalebench.batch.job import BatchJob, Scheduler, SchedulerError, script, submit
from scalebench.batch.shards import SHARDS, Shard, part_of, require_nodes
from scalebench.batch.site import Site
from scalebench.comm.launchers import using
from scalebench.errors import ResultsError, UsageError, reading, writing
from scalebench.formatting import counted
from scalebench.launch.hosts import Allocation, here_for
from scalebench.launch.planning import StudyPlan, plan_study
from scalebench.records.folder import JOBS, RUNS, STUDY, SUBMISSION, is_submitted
from scalebench.records.lock import FILE as LOCK
from scalebench.records.lock import folder_lock
from scalebench.records.progress import Planned, keep_planned
from scalebench.records.store import Store
from scalebench.records.study_file import keep_study, require_same
from scalebench.study.load import load_study, to_home
from scalebench.study.validation import StrictModel, explain
from scalebench.system.file_access import write_atomic

# keys that submissions of earlier versions have
_FORMER = ("study_sha256", "made_by")


class SubmittedJob(StrictModel):
    """A job that was submitted: of one shard, of the shards of an array, or, without shards, the collection."""

    job: str
    shards: list[int]
    array: bool = False
    script: str = ""  # name of its file
    submitted_utc: str = ""


class Submission(StrictModel):
    """What was submitted of a study, and for which allocation it was planned."""

    scheduler: str
    nodes: int
    slots: int
    cores: int
    gpus: int
    shards: list[Shard]
    jobs: list[SubmittedJob] = Field(default_factory=list)

    @classmethod
    def of(
        cls, shards: list[Shard], scheduler: str, allocation: Allocation
    ) -> Submission:
        """Return the submission of `shards`, without a job yet."""
        host = allocation.hosts[0]
        return cls(
            scheduler=scheduler,
            nodes=len(allocation.hosts),
            slots=host.slots,
            cores=host.cores,
            gpus=host.gpus,
            shards=shards,
        )

    @property
    def allocation(self) -> Allocation:
        """The stated allocation."""
        return Allocation.asked(
            self.nodes, self.slots, cores=self.cores, gpus=self.gpus
        )

    def has_nodes_of(self, other: Submission) -> bool:
        """Return True if both are for nodes of one kind, with equally many tasks."""
        return (self.slots, self.cores, self.gpus) == (
            other.slots,
            other.cores,
            other.gpus,
        )

    def shard(self, number: int) -> Shard:
        """Return the shard of this number.

        Raises:
            UsageError: there is none.
        """
        for shard in self.shards:
            if shard.number == number:
                return shard
        raise UsageError(
            f"--shard {number}: the study has the shards 1 to {len(self.shards)}"
        )

    def known_to(self, scheduler: str) -> Submission:
        """Return this submission for `scheduler`; another one does not know the jobs."""
        if scheduler == self.scheduler:
            return self
        return self.model_copy(update={"scheduler": scheduler, "jobs": []})

    def limited(self, numbers: Sequence[int], limit_s: int | None) -> Submission:
        """Return this submission with another time limit of these shards, if one is stated."""
        if limit_s is None:
            return self
        shards = [
            shard.model_copy(update={"limit_s": limit_s})
            if shard.number in numbers
            else shard
            for shard in self.shards
        ]
        return self.model_copy(update={"shards": shards})

    def job_of(self, number: int) -> SubmittedJob | None:
        """Return the last job that was submitted for a shard."""
        return next((job for job in reversed(self.jobs) if number in job.shards), None)


def read_submission(folder: Path) -> Submission:
    """Return what was submitted of the study in `folder`.

    Raises:
        ResultsError: nothing was, or the file is damaged.
    """
    path = folder / JOBS / SUBMISSION
    if not path.is_file():
        raise ResultsError(
            f"{folder} holds no submitted study; submit one with scalebench submit STUDY"
        )
    with reading(path):
        text = path.read_text(encoding="utf-8", errors="replace")
    try:
        content = json.loads(text)
        if isinstance(content, dict):
            content = {key: content[key] for key in content if key not in _FORMER}
        return Submission.model_validate(content)
    except (ValueError, RecursionError) as error:
        why = (
            explain(error, Submission, str(path))
            if isinstance(error, ValidationError)
            else f"{path}: not JSON"
        )
        raise ResultsError(
            f"{why}; put the file back, or submit the study under another --name"
        ) from None


def keep_submission(folder: Path, submission: Submission) -> None:
    """Write what was submitted."""
    path = folder / JOBS / SUBMISSION
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(
            path, json.dumps(submission.model_dump(mode="json"), indent=1) + "\n"
        )


@contextmanager
def submitting(folder: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Hold the record of what was submitted: of two commands at a time, the second sees the jobs of the first."""
    place = folder / JOBS

    def waits_for(owner: str) -> None:
        say(
            f"waiting for {owner}, which submits jobs of {folder}/; if it has ended, delete {place / LOCK}"
        )

    with folder_lock(place, waits_for):
        yield


def begin(folder: Path, plan: StudyPlan, submission: Submission) -> None:
    """Write the study, its planned runs, empty tables and what is submitted of it into `folder`."""
    keep_study(folder, plan.study)
    if not (folder / RUNS).is_file():
        with Store(folder):
            pass  # headers of the tables: the study is there, and nothing of it is done
    keep_planned(
        folder,
        map(Planned.of, plan.sweep.runs),
        len(plan.sweep.further),
        begun_in=Path.cwd(),
    )
    keep_submission(folder, submission)


def joined(
    folder: Path, plan: StudyPlan, made: Submission, *, divides: bool
) -> tuple[Submission, list[int]]:
    """Return the submission in `folder` with the shards of `made`, and the numbers of those that are new.

    A submission of which no job was taken and no shard has begun makes way. Of another
    one the shards stay, and runs beyond theirs, as those of more repetitions or worker
    counts, are shards behind them. `divides`: the user has asked for a division.

    Raises:
        ResultsError: another study of this name is there, or was submitted otherwise.
    """
    require_same(folder, plan.study)
    before = read_submission(folder) if is_submitted(folder) else None
    if before is None or not (before.jobs or (folder / SHARDS).exists()):
        return made, [shard.number for shard in made.shards]
    known, planned = (
        {run_id for shard in each.shards for run_id in shard.run_ids}
        for each in (before, made)
    )
    if known == planned:
        is_as_asked = [shard.run_ids for shard in before.shards] == [
            shard.run_ids for shard in made.shards
        ]
        if is_as_asked or not divides:
            return before, []
    grows = known < planned and not (plan.study.until or plan.study.tune)
    # jobs that wait would make the runs of before, on the nodes of before
    if not grows or not made.has_nodes_of(before):
        raise ResultsError(
            f"{folder} was submitted with other runs, on other nodes or in other shards; use --name for this one, or "
            f"`scalebench submit {folder}` to submit again what is left"
        )
    shards = list(before.shards)
    for shard in made.shards:
        if new := [run_id for run_id in shard.run_ids if run_id not in known]:
            number = len(shards) + 1
            shards.append(shard.model_copy(update={"number": number, "run_ids": new}))
    numbers = [shard.number for shard in shards[len(before.shards) :]]
    return made.model_copy(update={"shards": shards, "jobs": before.jobs}), numbers


def plan_of_shard(folder: Path, number: int) -> StudyPlan:
    """Return the plan of one shard of the study in `folder`, to be run on the allocation that is here.

    Raises:
        ResultsError: nothing was submitted of the study.
        StudyError: this job has fewer nodes than the shard was planned for.
    """
    submission = read_submission(folder)
    shard = submission.shard(number)
    study = load_study(folder / STUDY, {}, [])
    # the launcher decides which nodes are reached
    with using(study.launcher):
        here = here_for(study.execution)
        require_nodes(shard, here)
    # planned as it was submitted, by which runs have their names
    return part_of(plan_study(study, submission.allocation), shard, here)


@dataclass(frozen=True)
class Submitter:
    """Writes the scripts of a study's jobs and submits them; `folder` is that of its results.

    Scripts that were submitted before stay as they are there, edited perhaps, unless
    they are wanted `anew`.
    """

    folder: Path
    scheduler: Scheduler
    site: Site
    submission: Submission
    anew: bool = False

    def jobs(
        self, numbers: Sequence[int], *, array: bool = False, at_once: int = 0
    ) -> list[Any]:
        """Return (shards, job) of each job that these shards take; of an array, one for all of equal shape."""
        shards = [self.submission.shard(number) for number in numbers]
        groups: dict[tuple[int, ...], list[Shard]] = {}
        for shard in shards:
            key = (
                (shard.nodes,)
                if array and not shard.is_simulated
                else (shard.nodes, shard.number)
            )
            groups.setdefault(key, []).append(shard)
        return [(group, self._job(group, at_once)) for group in groups.values()]

    def _job(self, shards: Sequence[Shard], at_once: int) -> BatchJob:
        first = shards[0]
        several = len(shards) > 1
        number = "{number}" if several else str(first.number)
        # as seen from where it is submitted, to which the script changes first
        name = shlex.quote(str(self.folder))
        made, slots = self.submission, self.submission.slots
        return BatchJob(
            name=f"{self.folder.name}-{'array' if several else 'shard'}-{first.number}",
            command=f"scalebench run {name} --shard {number}",
            folder=str(self.folder / JOBS),
            nodes=first.nodes,
            tasks_per_node=slots,
            cpus_per_task=max(1, made.cores // slots),
            gpus_per_node=made.gpus,
            limit_s=max(shard.limit_s for shard in shards),
            goes_on=True,
            tasks=tuple(shard.number for shard in shards) if several else (),
            at_once=at_once,
            again=f"scalebench submit {name} --shard {number}",
            site=self.site,
            path=programs(),
        )

    def collection(self) -> BatchJob:
        """Return the job that collects the shards."""
        return BatchJob(
            name=f"{self.folder.name}-collect",
            command=f"scalebench collect {shlex.quote(str(self.folder))} --again",
            folder=str(self.folder / JOBS),
            site=self.site,
            path=programs(),
        )

    def script(self, job: BatchJob) -> tuple[Path, str]:
        """Return the file of a job's script, and its text."""
        path = (
            self.folder / JOBS / f"{job.name.removeprefix(f'{self.folder.name}-')}.sh"
        )
        if (
            not self.anew
            and path.name in {known.script for known in self.submission.jobs}
            and path.is_file()
        ):
            with reading(path):
                return path, path.read_text(encoding="utf-8", errors="replace")
        return path, script(self.scheduler, job)

    def submit(
        self,
        jobs: Iterable[tuple[Sequence[Shard], BatchJob]],
        *,
        collects: bool,
        say: Callable[[str], None],
        under_way: Sequence[str] = (),
    ) -> Submission:
        """Write and submit the scripts, keeping each job as soon as it has its number.

        The collection waits for them, and for the jobs that are `under_way`.

        Raises:
            SchedulerError: a job was refused; those before it are submitted and known.
        """
        submission = self.submission
        submitted: list[str] = []
        for shards, job in jobs:
            path = self._write(job)
            try:
                identifier = submit(self.scheduler, str(path))
            except SchedulerError as error:
                if not submitted:
                    raise
                # a limit on jobs lets the rest in once these have ended
                raise SchedulerError(
                    f"{error}; {counted(len(submitted), 'job')} of it taken: scalebench submit {self.folder} submits "
                    "the others, later too"
                ) from None
            submitted.append(identifier)
            of = SubmittedJob(
                job=identifier,
                shards=[shard.number for shard in shards],
                array=bool(job.tasks),
                script=path.name,
                submitted_utc=_now(),
            )
            submission = submission.model_copy(update={"jobs": [*submission.jobs, of]})
            keep_submission(self.folder, submission)
            say(f"job {identifier}: {'; '.join(map(str, shards))}")
        if collects and (after := [*submitted, *under_way]):
            path = self._write(self.collection())
            identifier = submit(self.scheduler, str(path), after)
            last = SubmittedJob(
                job=identifier, shards=[], script=path.name, submitted_utc=_now()
            )
            submission = submission.model_copy(
                update={"jobs": [*submission.jobs, last]}
            )
            keep_submission(self.folder, submission)
            say(f"job {identifier}: collects them when they have ended")
        return submission

    def _write(self, job: BatchJob) -> Path:
        path, text = self.script(job)
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            if self.anew and path.is_file():
                # it may have been edited
                path.replace(path.with_name(f"{path.name}.old"))
            write_atomic(path, text)
        return path


def programs() -> str:
    """Return the folder of this environment's programs, of one in the user's home as $HOME/..."""
    # scripts are kept with the results, and name no user
    written = str(to_home(f"{Path(sys.executable).parent}/."))[:-2]
    return f"$HOME/{written[2:]}" if written.startswith("~/") else written


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
