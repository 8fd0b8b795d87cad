"""Probes of the engines run on one host of an allocation, and end with the command that started them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.hosts.machines import until
from tests.hosts.studies import finished

PIPES = {
    "stdin": subprocess.DEVNULL,
    "stdout": subprocess.PIPE,
    "stderr": subprocess.PIPE,
}
PROBE = """
import sys

import pytest
from pathlib import Path
from scalebench.calibration.engine_measurement import measure_engine_costs
from scalebench.launch.calibrating import ranks_on_this_host
costs = measure_engine_costs(Path(sys.argv[1]), ["mpi", "gloo"], ranks_on_this_host, seconds=1.0)
print(sorted({entry.ranks for entry in costs.entries}))
"""


@pytest.mark.thorough
def test_probe_of_hosts_with_one_slot_each_runs_on_one_host(hosts, by_name, tmp_path):
    command = [sys.executable, "-c", PROBE, str(tmp_path)]
    printed = finished(
        hosts.nodes[0].start(command, cwd=tmp_path, env=by_name, **PIPES)
    )
    assert printed.splitlines()[-1:] == ["[2]"], printed


def test_probe_ends_with_the_command_that_started_it(hosts, by_name, tmp_path):
    node = hosts.nodes[0]

    def ranks():
        listed = node.call(["ps", "-ww", "-eo", "args"]).splitlines()
        return [
            line
            for line in listed
            if "engine_probe" in line and not line.startswith("/bin/sh")
        ]

    command = [
        "bash",
        "-c",
        'echo $$ >pid; exec "$@"',
        "-",
        sys.executable,
        "-c",
        PROBE,
        str(tmp_path / "cache"),
    ]
    process = node.start(command, cwd=tmp_path, env=by_name, **PIPES)
    until(lambda: len(ranks()) >= 3, "mpirun and two ranks are there")
    node.call(["kill", "-KILL", (tmp_path / "pid").read_text().strip()])
    process.communicate()
    until(lambda: not ranks(), "all of them are gone")
