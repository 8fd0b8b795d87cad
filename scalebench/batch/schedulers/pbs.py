"""PBS Professional and OpenPBS: qsub and qstat."""

from __future__ import annotations

import json
from collections.abc import Sequence

from scalebench.batch.job import BatchJob, JobState, Partition, clock

# letters of qstat: queued, held, waiting, in transit; finished, expired, exiting
_PENDING, _ENDED = "QHWT", "FXE"
_SIGNAL_BASE = 256  # exit status of a job that a signal ended


class Pbs:
    """The scheduler of PBS's `qsub`. A job cannot queue itself again: its script submits what is left."""

    name, submits = "pbs", "qsub"
    workplace, index = "PBS_O_WORKDIR", "PBS_ARRAY_INDEX"
    warns = False
    forgotten = "Unknown Job Id"
    unreachable: tuple[str, ...] = ("cannot connect to server", "Connection refused")
    again = "{again}"

    def directives(self, job: BatchJob) -> list[str]:
        """Return the lines at the top of the script."""
        site = job.site
        chunk = f"select={job.nodes}:ncpus={job.tasks_per_node * job.cpus_per_task}:mpiprocs={job.tasks_per_node}"
        chunk += f":ngpus={job.gpus_per_node}" if job.gpus_per_node else ""
        flags = [
            f"-N {job.name}",
            f"-l {chunk}",
            f"-l walltime={clock(job.limit_s)}",
            "-j oe",
            f"-o {job.folder}/",
        ]
        flags += [f"-A {site.account}"] * bool(site.account)
        flags += [f"-q {site.partition}"] * bool(site.partition)
        if job.tasks:
            most = f"%{job.at_once}" if job.at_once else ""
            flags.append(f"-J {job.tasks[0]}-{job.tasks[-1]}{most}")
        return [f"#PBS {flag}" for flag in (*flags, *site.options)]

    def submission(self, script: str, after: Sequence[str]) -> tuple[list[str], str]:
        """Return the command that submits `script` to run after the jobs `after` ended, and its standard input."""
        waits = ["-W", f"depend=afterany:{':'.join(after)}"] if after else []
        return ["qsub", *waits, script], ""

    def job_id(self, printed: str) -> str:
        """Return `17.server`, or `17[].server` of an array."""
        last = printed.strip().splitlines()[-1:] or [""]
        return last[0].strip() if last[0][:1].isdecimal() else ""

    def task_id(self, job: str, number: int) -> str:
        """Return `17[3].server`."""
        return job.replace("[]", f"[{number}]")

    def output_name(self, job: str) -> str:
        """Return `17[3].server.OU`."""
        return f"{job}.OU"

    def query(self, jobs: Sequence[str]) -> list[str]:
        """Return one qstat for all jobs, finished ones and tasks of arrays too."""
        return ["qstat", "-x", "-t", "-f", "-F", "json", *jobs]

    def states(self, printed: str) -> dict[str, JobState]:
        """Return the states of qstat's JSON."""
        try:
            jobs = json.loads(printed).get("Jobs", {})
        except (ValueError, AttributeError):
            return {}
        return {
            name: _state(facts)
            for name, facts in jobs.items()
            if isinstance(facts, dict)
        }

    def partition(self, name: str | None) -> Partition | None:
        """Return None: site.yaml has to state nodes and cores."""
        return None


SCHEDULER = Pbs()


def _state(facts: dict[str, object]) -> JobState:
    letter = str(facts.get("job_state", ""))
    # the empty text is in every text
    if letter in _PENDING and letter:
        return JobState("pending", reason=str(facts.get("comment", "")))
    if letter in _ENDED and letter:
        code = facts.get("Exit_status")
        killed = isinstance(code, int) and code >= _SIGNAL_BASE
        said = (
            f"signal {int(str(code)) - _SIGNAL_BASE}"
            if killed
            else f"exit status {code}"
        )
        return JobState(
            "ended", reason=said if code is not None else str(facts.get("comment", ""))
        )
    return JobState("running", str(facts.get("stime", "")))
