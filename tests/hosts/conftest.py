"""Three hosts, started once for all tests: a Slurm cluster, or hosts that only a hostfile names."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from scalebench.comm import engines
from tests.hosts import machines, slurm
from tests.hosts.machines import Hosts, until
from tests.hosts.slurm import Slurm

DISK = "size=32m"
AGENT = Path(__file__).with_name("agent.py")


@pytest.fixture(scope="session")
def hosts() -> Iterator[Hosts]:
    if reason := machines.why_not() or engines.available("mpi"):
        pytest.skip(reason)
    with tempfile.TemporaryDirectory(
        prefix="scalebench-hosts-", ignore_cleanup_errors=True
    ) as folder:
        Path(folder).chmod(0o755)
        disk = Path(folder) / "disk"
        disk.mkdir()
        # Hosts that are started behind it have it in common.
        subprocess.run(["mount", "-t", "tmpfs", "-o", DISK, "tmpfs", disk], check=True)
        made = Hosts(Path(folder), 3)
        yield made
        made.close()
        subprocess.run(["umount", "--lazy", disk], check=True)


@pytest.fixture
def disk(hosts: Hosts) -> Iterator[Path]:
    """An empty folder of a small file system that all hosts have in common."""
    with tempfile.TemporaryDirectory(dir=hosts.folder / "disk") as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def cluster(hosts: Hosts) -> Slurm:
    if reason := slurm.why_not():
        pytest.skip(reason)
    return Slurm(hosts)


@pytest.fixture(scope="session")
def by_name(hosts: Hosts) -> dict[str, str]:
    return reached_by_name(hosts)


def reached_by_name(hosts: Hosts) -> dict[str, str]:
    """The environment in which mpirun, on n0, starts daemons on the hosts of a hostfile, of one slot each."""
    sockets = hosts.folder / "agents"
    sockets.mkdir()
    for node in hosts.nodes:
        node.daemon([sys.executable, AGENT, "serve", sockets, node.name])
        until((sockets / node.name).exists, f"the agent of {node.name} listens")
    agent = hosts.folder / "agent"
    agent.write_text(f'#!/bin/sh\nexec {sys.executable} {AGENT} {sockets} "$@"\n')
    agent.chmod(0o755)
    hostfile = hosts.folder / "hostfile"
    hostfile.write_text("".join(f"{node.name} slots=1\n" for node in hosts.nodes))
    named = {
        "PRTE_MCA_plm_ssh_agent": str(agent),
        "PRTE_MCA_prte_default_hostfile": str(hostfile),
    }
    return slurm.on_a_host(os.environ) | named
