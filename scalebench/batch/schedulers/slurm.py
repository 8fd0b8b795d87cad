"""Slurm: sbatch, squeue and sinfo."""

from __future__ import annotations

import re
from collections.abc import Sequence

from scalebench.batch.job import (
    BatchJob,
    JobState,
    Partition,
    SchedulerError,
    call,
    clock,
)
from scalebench.study.validation import parse_duration

_RUNNING = {"RUNNING", "COMPLETING", "STOPPED", "SUSPENDED", "SIGNALING", "STAGE_OUT"}
_PENDING = {
    "PENDING",
    "CONFIGURING",
    "REQUEUED",
    "REQUEUE_HOLD",
    "REQUEUE_FED",
    "RESV_DEL_HOLD",
    "SPECIAL_EXIT",
}
_RANGE = re.compile(r"(\d+)_\[([^\]]+)\]")  # tasks of an array that wait: 12_[3-5,7%2]


class Slurm:
    """The scheduler of `sbatch`."""

    name, submits = "slurm", "sbatch"
    workplace, index = "SLURM_SUBMIT_DIR", "SLURM_ARRAY_TASK_ID"
    warns = True
    forgotten = "Invalid job id"
    unreachable: tuple[str, ...] = (
        "Unable to contact slurm controller",
        "Socket timed out",
        "Zero Bytes were transmitted or received",
        "Transport endpoint is not connected",
    )
    again = 'scontrol requeue "$SLURM_JOB_ID"'

    def directives(self, job: BatchJob) -> list[str]:
        """Return the lines at the top of the script."""
        site = job.site
        flags = [
            f"--job-name={job.name}",
            f"--nodes={job.nodes}",
            f"--ntasks-per-node={job.tasks_per_node}",
            f"--cpus-per-task={job.cpus_per_task}",
            f"--time={clock(job.limit_s)}",
            f"--output={job.folder}/%x.{'%A_%a' if job.tasks else '%j'}.txt",
            # a requeued job would overwrite what it printed before
            "--open-mode=append",
        ]
        flags += [f"--gpus-per-node={job.gpus_per_node}"] * bool(job.gpus_per_node)
        flags += [f"--account={site.account}"] * bool(site.account)
        flags += [f"--partition={site.partition}"] * bool(site.partition)
        if job.tasks:
            most = f"%{job.at_once}" if job.at_once else ""
            flags.append(f"--array={job.tasks[0]}-{job.tasks[-1]}{most}")
        if job.goes_on:
            # B: to the batch shell alone, as signalled ranks would end at once
            flags += [f"--signal=B:USR1@{job.warned_s}", "--requeue"]
        return [f"#SBATCH {flag}" for flag in (*flags, *site.options)]

    def submission(self, script: str, after: Sequence[str]) -> tuple[list[str], str]:
        """Return the command that submits `script` to run after the jobs `after` ended, and its standard input."""
        waits = [f"--dependency=afterany:{':'.join(after)}"] if after else []
        return ["sbatch", "--parsable", *waits, script], ""

    def job_id(self, printed: str) -> str:
        """Return the number in `17` or, of a federation, `17;cluster`."""
        found = re.match(
            r"\d+", printed.strip().splitlines()[-1] if printed.strip() else ""
        )
        return found[0] if found else ""

    def task_id(self, job: str, number: int) -> str:
        """Return `17_3`."""
        return f"{job}_{number}"

    def output_name(self, job: str) -> str:
        """Return `.17_3.txt`."""
        return f".{job}.txt"

    def query(self, jobs: Sequence[str]) -> list[str]:
        """Return one squeue for all jobs, a line for each task of an array."""
        return [
            "squeue",
            "--me",
            "--noheader",
            "--array",
            # ended jobs too, as long as Slurm remembers them
            "--states=all",
            f"--jobs={','.join(jobs)}",
            "--format=%i|%T|%S|%r",
        ]

    def states(self, printed: str) -> dict[str, JobState]:
        """Return the states of squeue's lines; an array that waits as a whole is one line for all its tasks."""
        found: dict[str, JobState] = {}
        for line in printed.splitlines():
            cells = line.strip().split("|")
            if len(cells) != 4:
                continue
            name, word, since, reason = cells
            reason = "" if reason in ("None", "") else reason
            if word in _RUNNING:
                state = JobState("running", since)
            elif word in _PENDING:
                state = JobState("pending", reason=reason)
            else:
                state = JobState("ended", reason=word)
            for each in _tasks(name):
                found[each] = state
        return found

    def partition(self, name: str | None) -> Partition | None:
        """Return the partition `name`, or the default one, by sinfo; of several kinds of nodes the smallest.

        Of several partitions (`fast,long`), in one of which a job begins, the most nodes
        and the shortest limit count.

        Raises:
            SchedulerError: there is no such partition.
        """
        done = call(["sinfo", "--noheader", "--format=%P|%D|%c|%G|%l"])
        lines = [line.strip().split("|") for line in done.stdout.splitlines()]
        rows = [cells for cells in lines if len(cells) == 5]
        names = list(dict.fromkeys(cells[0].rstrip("*") for cells in rows))
        default = [cells[0].rstrip("*") for cells in rows if cells[0].endswith("*")]
        wanted = name.split(",") if name else default[:1]
        missing = [each for each in wanted if each not in names]
        if missing and rows:
            raise SchedulerError(
                f"Slurm here has no partition {missing[0]!r}; known: {', '.join(names)}"
            )
        mine = [cells for cells in rows if cells[0].rstrip("*") in wanted]
        if not mine:
            return None
        nodes = dict.fromkeys(wanted, 0)
        for cells in mine:
            nodes[cells[0].rstrip("*")] += int(cells[1])
        limits = [limit for cells in mine if (limit := _limit(cells[4])) is not None]
        gpus = [
            int(found[1])
            for cells in mine
            if (found := re.search(r"gpu(?::[^:,(]+)?:(\d+)", cells[3]))
        ]
        return Partition(
            name=",".join(wanted),
            nodes=max(nodes.values()),
            # a job may get any of the partition's nodes; 64+ means 64 or more
            cores_per_node=min(int(cells[2].rstrip("+")) for cells in mine),
            # nodes without GPUs have no such entry
            gpus_per_node=min(gpus) if len(gpus) == len(mine) else 0,
            max_time_s=min(limits, default=None),
        )


SCHEDULER = Slurm()


def _tasks(name: str) -> list[str]:
    """Return the identifiers that one line of squeue is about: `12`, `12_3`, or those of `12_[3-5,7%2]`."""
    waiting = _RANGE.fullmatch(name)
    if not waiting:
        return [name]
    numbers: list[int] = []
    for part in waiting[2].partition("%")[0].split(","):
        first, _, last = part.partition("-")
        if first.isdecimal() and (last or first).isdecimal():
            numbers += range(int(first), int(last or first) + 1)
    return [f"{waiting[1]}_{number}" for number in numbers]


def _limit(text: str) -> int | None:
    """Return the seconds of a time limit as sinfo writes it: `30:00`, `2:00:00`, `1-00:00:00`, `infinite`."""
    # sinfo leaves out hours of zero
    written = f"0:{text}" if text.count(":") == 1 and "-" not in text else text
    try:
        return parse_duration(written)
    except ValueError:
        return None
