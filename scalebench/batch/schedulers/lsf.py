"""IBM Spectrum LSF: bsub and bjobs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from scalebench.batch.job import STOPPED, BatchJob, JobState, Partition

_PENDING = {"PEND", "PSUSP", "WAIT", "PROV"}
_ENDED = {"DONE", "EXIT", "ZOMBI"}


class Lsf:
    """The scheduler of `bsub`, which queues a job again by its exit code."""

    name, submits = "lsf", "bsub"
    workplace, index = "LS_SUBCWD", "LSB_JOBINDEX"
    warns = False
    forgotten = "is not found"
    unreachable: tuple[str, ...] = (
        "LIM is down",
        "Cannot connect to LSF",
        "daemon not responding",
    )
    again = ""

    def directives(self, job: BatchJob) -> list[str]:
        """Return the lines at the top of the script."""
        site = job.site
        name, file = job.name, f"{job.folder}/{job.name}.%J.txt"
        if job.tasks:
            most = f"%{job.at_once}" if job.at_once else ""
            name, file = (
                f"{job.name}[{job.tasks[0]}-{job.tasks[-1]}]{most}",
                f"{job.folder}/{job.name}.%J_%I.txt",
            )
        # LSF counts limits in minutes: rounded up
        minutes = -(-job.limit_s // 60)
        flags = [
            f'-J "{name}"',
            f"-n {job.nodes * job.tasks_per_node}",
            f'-R "span[ptile={job.tasks_per_node}] affinity[core({job.cpus_per_task})]"',
            f"-W {minutes // 60:02d}:{minutes % 60:02d}",
            f"-o {file}",
        ]
        flags += [f"-gpu num={job.gpus_per_node}"] * bool(job.gpus_per_node)
        flags += [f"-P {site.account}"] * bool(site.account)
        flags += [f"-q {site.partition}"] * bool(site.partition)
        # this exit code queues the job again
        flags += [f'-Q "{STOPPED}"'] * job.goes_on
        return [f"#BSUB {flag}" for flag in (*flags, *site.options)]

    def submission(self, script: str, after: Sequence[str]) -> tuple[list[str], str]:
        """Return the command that submits `script` to run after the jobs `after` ended, and its standard input.

        bsub reads the lines at the top of a script from its standard input only.
        """
        waits = ["-w", " && ".join(f"ended({job})" for job in after)] if after else []
        return ["bsub", *waits], Path(script).read_text(encoding="utf-8")

    def job_id(self, printed: str) -> str:
        """Return the number in `Job <17> is submitted to queue <normal>.`"""
        found = re.search(r"Job <(\d+)>", printed)
        return found[1] if found else ""

    def task_id(self, job: str, number: int) -> str:
        """Return `17[3]`."""
        return f"{job}[{number}]"

    def output_name(self, job: str) -> str:
        """Return `.17_3.txt`."""
        return f".{job.replace('[', '_').rstrip(']')}.txt"

    def query(self, jobs: Sequence[str]) -> list[str]:
        """Return one bjobs for all jobs, ended ones too."""
        return [
            "bjobs",
            "-noheader",
            "-a",
            "-o",
            "jobid jobindex stat start_time pend_reason delimiter='|'",
            *jobs,
        ]

    def states(self, printed: str) -> dict[str, JobState]:
        """Return the states of bjobs's lines."""
        found: dict[str, JobState] = {}
        for line in printed.splitlines():
            cells = [cell.strip() for cell in line.split("|", 4)]
            # messages stand between the lines of jobs
            if len(cells) != 5 or not cells[0].isdecimal():
                continue
            job, index, word, since, reason = cells
            name = (
                self.task_id(job, int(index))
                # index 0 is a job that is no array
                if index.isdecimal() and int(index)
                else job
            )
            if word in _PENDING:
                found[name] = JobState(
                    "pending", reason="" if reason == "-" else reason
                )
            elif word in _ENDED:
                found[name] = JobState("ended", reason=word)
            else:
                found[name] = JobState("running", since)
        return found

    def partition(self, name: str | None) -> Partition | None:
        """Return None: site.yaml has to state nodes and cores."""
        return None


SCHEDULER = Lsf()
