"""Allreduce between three hosts on slow links: measured, charged, and compared with a ring."""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path

import pytest

from scalebench.launch import engines
from tests.hosts import machines
from tests.hosts.conftest import reached_by_name
from tests.hosts.machines import Hosts
from tests.hosts.studies import SCALEBENCH, finished

PIPES = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
STUDY = """\
name: nodes
dataset: wine
model: {mlp: {hidden: [512, 512]}}
epochs: 4
repetitions: 1
workers: [1, 3]
warmup_steps: 2
calibration_budget_s: 10
time_limit_s: 200
noisy: true
"""


@pytest.fixture(scope="module")
def slow():
    """Three hosts on links of 100 Mbit/s, and the environment of mpirun on n0."""
    if reason := machines.why_not() or engines.available("mpi"):
        pytest.skip(reason)
    with tempfile.TemporaryDirectory(prefix="scalebench-slow-", ignore_cleanup_errors=True) as folder:
        Path(folder).chmod(0o755)
        hosts = Hosts(Path(folder), 3, "100mbit")
        yield hosts, reached_by_name(hosts)
        hosts.close()


def scalebench(slow, folder, *words, **more):
    hosts, environment = slow
    return finished(hosts.nodes[0].start([SCALEBENCH, *words], cwd=folder, env=environment | more, **PIPES), 300)


def compared(slow, folder, **settings):
    """The finding of `scalebench doctor` about allreduce, in words."""
    findings = json.loads(scalebench(slow, folder, "doctor", "--json", **settings))
    return next(finding for finding in findings if finding["part"] == "allreduce")


def test_doctor_says_that_the_choice_of_mpi_is_slower_than_a_ring(slow, tmp_path):
    """Open MPI 5 among three ranks; by the setting that doctor names, both are rings."""
    slower = compared(slow, tmp_path)
    print(slower["detail"])
    assert not slower["present"]
    assert "1 MiB among 3 ranks on 3 nodes: " in slower["detail"]
    settings = slower["detail"].partition("force the ring with: export ")[2].split()
    assert len(settings) == 2, slower["detail"]
    alike = compared(slow, tmp_path, **dict(setting.split("=") for setting in settings))
    print(alike["detail"])
    assert alike["present"], alike["detail"]
