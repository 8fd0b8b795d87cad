"""A study that is submitted to a Slurm cluster: its files, the cluster, and the user on the login node."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # for the hosts of the tests

from tests.hosts.machines import Host
from tests.hosts.slurm import Slurm

ROUNDS = 8  # in which a user submits what is left
IDLE_S = 400.0  # in which all jobs of a study end or are found waiting for good
SCALEBENCH = str(Path(sys.executable).with_name("scalebench"))

# Steps take time while the file `hold` is there, so that a fault can be made to hit a
# run.
MODEL = """
import time
from pathlib import Path
import torch

HOLD = Path(__file__).with_name("hold")

class Model(torch.nn.Linear):
    def forward(self, x):
        if self.training and HOLD.exists():
            time.sleep(0.1)
        return super().forward(x)

def build(input_shape, outputs):
    return Model(input_shape[0], outputs)
"""
COMMON = """\
name: faults
dataset: wine
epochs: {epochs}
repetitions: 2
workers: [1, 2, 3]
batch_per_worker: 16
strategies: [allreduce, epoch_average]
warmup_steps: 1
patience: 20
"""
STUDIES = {
    "real processes": COMMON.format(epochs=240)
    + "model: model.py:build\nexecution: native\nengine: gloo\n",
    "virtual workers": COMMON.format(epochs=400)
    + "model: model.py:build\nexecution: virtual\ncluster: juwels-booster\ndevice_step_time: 0.001\n",
}
ONE_EACH = ("--tasks-per-node", "1", "--time", "00:10:00")  # a worker on each node
Row = dict[str, str]


class Scene:
    """A submitted study, the cluster, and the user on its login node."""

    def __init__(self, cluster: Slurm, folder: Path, study: str) -> None:
        self.cluster, self.folder = cluster, folder
        self.results = folder / "results" / "faults"
        self.wrong: list[str] = []
        self.refusals: list[str] = []
        folder.mkdir(parents=True)
        (folder / "site.yaml").write_text("partition: p\nlauncher: srun\n")
        (folder / "model.py").write_text(MODEL)
        (folder / "study.yaml").write_text(study)

    # -- the user --

    def start(self, *words: str) -> subprocess.Popen[str]:
        """Start a command of the user."""
        pipes = {
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.STDOUT,
        }
        return self.cluster.hosts.login.start(
            [SCALEBENCH, *words], cwd=self.folder, env=self.cluster.environment, **pipes
        )

    def user(self, *words: str) -> str:
        """Run a command of the user; a traceback, or more than a line of refusal, is wrong."""
        process = self.start(*words)
        try:
            printed = process.communicate(timeout=300)[0]
        except subprocess.TimeoutExpired:
            process.kill()
            self.wrong.append(f"{' '.join(words)}: no end within 300 s")
            return ""
        with (self.folder / "commands.txt").open("a") as file:
            file.write(
                f"$ scalebench {' '.join(words)}\n{printed}exit code {process.returncode}\n"
            )
        last = next(reversed(printed.strip().splitlines()), "")
        if "Traceback" in printed:
            self.wrong.append(f"{words[0]}: {last}")
        elif process.returncode not in (0, 1, 3):
            self.refusals.append(f"{words[0]}: {last}")
        return printed

    def finish(self) -> int:
        """Go on with the study until it is collected; return how often something was submitted."""
        for submissions in range(ROUNDS):
            self.wait_until_idle()
            shards = self.shards()
            if shards and all(each["state"] == "done" for each in shards):
                if len(completed(self.rows())) < sum(
                    each["planned"] for each in shards
                ):
                    self.user("collect", str(self.results))
                return submissions
            if not shards:  # its submission did not come so far
                self.user("submit", "study.yaml", *ONE_EACH)
            elif any(each["state"] == "failed" for each in shards):
                self.user("retry", str(self.results), "--submit")
            else:
                self.user("submit", str(self.results))
        self.wrong.append(f"not complete after {ROUNDS} rounds: {self.shards()}")
        return ROUNDS

    def shards(self) -> list[dict[str, object]]:
        """Return the standing of each shard as `scalebench status` says it."""
        lines = self.user(
            "status", str(self.results), "--json", "--poll", "1"
        ).splitlines()
        found = next((line for line in lines if line.startswith("{")), "")
        return list(json.loads(found)["shards"]) if found else []

    def wait_until_idle(self) -> None:
        """Wait for the end of all jobs."""
        deadline = time.monotonic() + IDLE_S
        while (jobs := self.jobs()) is None or jobs:
            self.start_again()
            for job, (state, reason) in (jobs or {}).items():
                if state == "PENDING" and reason.startswith(
                    ("JobHeld", "launch_failed", "DependencyNever")
                ):
                    self.slurm("scancel", job)
            if time.monotonic() > deadline:
                self.wrong.append(f"jobs do not end: {jobs}")
                for job in jobs or {}:
                    self.slurm("scancel", job)
                return
            time.sleep(0.5)

    # -- the cluster --

    def slurm(self, *command: str) -> str | None:
        """Return what a client of Slurm prints; None if it fails, as while there is no controller."""
        try:
            return self.cluster.hosts.login.call(
                list(command), env=self.cluster.environment, timeout=20
            )
        except AssertionError:
            return None

    def jobs(self) -> dict[str, tuple[str, str]] | None:
        """Return state and reason of the jobs that run or wait."""
        printed = self.slurm("squeue", "--noheader", "--array", "--format=%i|%T|%r")
        if printed is None:
            return None
        lines = [line.strip().split("|") for line in printed.splitlines()]
        return {job: (state, reason) for job, state, reason in lines}

    def start_again(self) -> None:
        """Let jobs that went back into the queue start at once, not in two minutes."""
        for job, (state, reason) in (self.jobs() or {}).items():
            if state == "PENDING" and reason == "BeginTime":
                self.slurm("scontrol", "update", f"JobId={job}", "StartTime=now")

    def job_in(self, *states: str) -> str | None:
        """Return a job in one of `states`, the first in the order of numbers."""
        jobs = self.jobs() or {}
        return next((job for job in sorted(jobs) if jobs[job][0] in states), None)

    def left_processes(self) -> list[str]:
        """Return the processes of the study that are on a node long after its jobs."""
        deadline = time.monotonic() + 40
        while left := [
            line for node in self.cluster.hosts.nodes for line in _ours(node)
        ]:
            if time.monotonic() > deadline:
                return left
            time.sleep(1)
        return []

    # -- the records --

    def rows(self, table: str = "runs") -> list[Row]:
        path = self.results / f"{table}.csv"
        return _rows(path) if path.exists() else []

    def done(self) -> int:
        """Return the number of completed rows, collected or not."""
        tables = self.results.glob("shards/*/faults/runs.csv")
        return len({row["run_id"] for path in tables for row in completed(_rows(path))})


def _ours(node: Host) -> list[str]:
    listed = node.call(["ps", "-ww", "-eo", "pid=,args="]).splitlines()
    return [
        f"{node.name} {line.strip()}"[:160] for line in listed if "scalebench" in line
    ]


def _rows(path: Path) -> list[Row]:
    with path.open(newline="", errors="replace") as file:
        return [row for row in csv.DictReader(file) if None not in row.values()]


def completed(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row["status"] == "completed"]
