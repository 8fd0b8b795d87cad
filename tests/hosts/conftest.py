"""Three hosts, and a Slurm on them, brought up once for all tests that want them."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hosts import machines, slurm
from tests.hosts.machines import Hosts
from tests.hosts.slurm import Slurm


@pytest.fixture(scope="session")
def hosts() -> Iterator[Hosts]:
    if reason := machines.why_not():
        pytest.skip(reason)
    with tempfile.TemporaryDirectory(prefix="scalebench-hosts-", ignore_cleanup_errors=True) as folder:
        Path(folder).chmod(0o755)
        made = Hosts(Path(folder), 3)
        yield made
        made.close()


@pytest.fixture(scope="session")
def cluster(hosts: Hosts) -> Slurm:
    if reason := slurm.why_not():
        pytest.skip(reason)
    return Slurm(hosts)
