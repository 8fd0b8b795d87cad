"""Node-seconds of a sweep as one allocation, beside those of one job per run.

    python benchmarks/node_seconds.py [--repetitions 3]

`allreduce` at 1 to 6 workers on a Slurm of three nodes with two slots each (as root;
tests/hosts), submitted as `--group all`, one job on three nodes for all runs, and as
`--group count --array`, a job for each run on as many nodes as it needs. Node-seconds
are nodes x (end - start) of each job, as Slurm has them, in whole seconds; the
collection is left out. The nodes share the cores of this machine, so that jobs are
released one after another: none slows another. The one allocation is measured before
and after the jobs, and is the mean of both. Goal: 0.35.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from ratios import Finding, Goal, finding, show

sys.path.insert(0, str(Path(__file__).parents[1]))  # for the hosts of the tests

from tests.hosts.machines import Hosts
from tests.hosts.slurm import Slurm

GOAL = Goal("<=", 0.35)
COUNTS = [1, 2, 3, 4, 5, 6]
STUDY = """\
name: {name}
dataset: digits
workers: {counts}
strategies: [allreduce]
repetitions: {repetitions}
execution: native
engine: gloo
"""
# each job waits until it is released
SITE = "partition: p\nlauncher: srun\noptions: [--hold]\n"
ONE_JOB, JOB_PER_RUN = ["--group", "all"], ["--group", "count", "--array"]
SCALEBENCH = str(Path(sys.executable).with_name("scalebench"))


class Login:
    """The user's folder on the login node."""

    def __init__(self, cluster: Slurm, folder: Path, repetitions: int) -> None:
        self._cluster, self._folder, self._repetitions = cluster, folder, repetitions
        (folder / "site.yaml").write_text(SITE)

    def node_seconds(self, name: str, division: list[str]) -> tuple[int, float]:
        """Return the number of jobs of a sweep that is divided into jobs, and their node-seconds."""
        study = STUDY.format(name=name, counts=COUNTS, repetitions=self._repetitions)
        (self._folder / f"{name}.yaml").write_text(study)
        options = ["--tasks-per-node", "2", "--time", "00:30:00", "--no-collect"]
        self._call(SCALEBENCH, "submit", f"{name}.yaml", *options, *division)
        jobs = self._call("squeue", "--noheader", "--array", "--format=%i").split()
        taken = [self._taken_by(job) for job in sorted(jobs)]
        rows = sum(
            len(path.read_text().splitlines()) - 1
            for path in self._folder.glob(f"results/{name}/shards/*/*/runs.csv")
        )
        if rows != len(COUNTS) * self._repetitions:
            raise SystemExit(
                f"{rows} of {len(COUNTS) * self._repetitions} runs were made; see {self._folder}"
            )
        return len(jobs), sum(taken)

    def _taken_by(self, job: str) -> float:
        """Release a job, and wait for its end; return its node-seconds."""
        self._call("scontrol", "release", job)
        number = int(
            re.search(
                r"\bJobId=(\d+)", self._call("scontrol", "show", "job", "-o", job)
            )[1]
        )
        state = self._cluster.wait(number, 600)
        shown = self._cluster.shown(number)
        if state != "COMPLETED":
            raise SystemExit(f"job {job} ended as {state}: {shown}")
        facts = dict(word.partition("=")[::2] for word in shown.split())
        seconds = datetime.fromisoformat(facts["EndTime"]) - datetime.fromisoformat(
            facts["StartTime"]
        )
        return int(facts["NumNodes"]) * seconds.total_seconds()

    def _call(self, *command: str) -> str:
        return self._cluster.hosts.login.call(
            command, cwd=self._folder, env=self._cluster.environment, timeout=200
        )


def main(repetitions: int = 3) -> Iterator[Finding]:
    with tempfile.TemporaryDirectory(
        prefix="scalebench-hosts-", ignore_cleanup_errors=True
    ) as name:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "user").mkdir()
        hosts = Hosts(folder, 3)
        try:
            login = Login(Slurm(hosts), folder / "user", repetitions)
            _, before = login.node_seconds("before", ONE_JOB)
            jobs, separate = login.node_seconds("separate", JOB_PER_RUN)
            _, after = login.node_seconds("after", ONE_JOB)
        finally:
            hosts.close()
    together = (before + after) / 2
    ratio = together / separate
    said = f"{ratio:.2f} of the node-seconds ({before / separate:.2f}, {after / separate:.2f})"
    name = f"sweep 1..6 on 3 nodes, {repetitions} repetitions: 1 job / {jobs} jobs"
    yield finding(name, ratio, GOAL, said, f"{together:.0f} s", f"{separate:.0f} s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repetitions", type=int, default=3)
    show(main(parser.parse_args().repetitions))
