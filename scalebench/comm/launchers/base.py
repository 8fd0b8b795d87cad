"""The interface of launchers: programs that start the ranks of a launch, each in one file beside this one."""

from __future__ import annotations

import os
import shutil
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar


@dataclass(frozen=True)
class Placement:
    """The ranks of a launch: `hosts` are those of the ranks in their order, whose names may repeat."""

    hosts: tuple[str, ...]
    width: int = 0  # cores that each rank is bound to; 0: none
    cpus_per_core: int = 1  # hardware threads
    by_mpi: bool = True  # joined by an MPI
    beyond_slots: bool = False  # more ranks than slots
    per_host: int | None = (
        # ranks on each host, where it is the same number and not that of the slots
        None
    )
    passed: tuple[str, ...] = ()  # variables that ranks on other hosts need by name
    # ranks that may die before the launch fails; None: it is not elastic
    restarts: int | None = None

    @property
    def ranks(self) -> int:
        return len(self.hosts)


@dataclass(frozen=True)
class ReportedEnd:
    """The end of a rank that a launcher noticed; `signal` is None for one that exited."""

    rank: int
    signal: int | None = None


@dataclass(frozen=True)
class HostFacts:
    """The number and name of a host as its launcher has them, and the CPUs that it gives there, if it says so."""

    number: str
    name: str | None = None
    cpus: int | None = None


class Launcher(ABC):
    """A program that starts ranks; its output names the rank that ended first."""

    name: ClassVar[str]
    without_mpi: ClassVar[bool] = True  # can start ranks that no MPI joins
    # starts ranks by the names of hosts, on a single one too
    names_hosts: ClassVar[bool] = False
    binds: ClassVar[bool] = True  # can bind ranks to cores
    # the binding that is asked for is the one that ranks get
    binds_surely: ClassVar[bool] = True
    # of its own on other hosts, which can end before the ranks
    has_daemons: ClassVar[bool] = False
    # its exit code after a signal, of which it says nothing
    silent_code: ClassVar[int | None] = None
    # that of its scheduler in which this process is; it starts ranks in those alone
    job: ClassVar[OwnJob | None] = None

    @abstractmethod
    def lacks(self, *, by_mpi: bool, here: bool = True) -> str | None:
        """Return None if ranks can be started, else the reason and the next step.

        `by_mpi`: ranks whose engine needs an MPI. `here`: now, and not in a job that is
        still to be submitted.
        """

    @abstractmethod
    def command(self, placement: Placement) -> list[str]:
        """Return the command that starts the ranks, up to their program.

        Raises:
            EngineError: it cannot start them.
        """

    def serves(self) -> str:
        """Return the engines whose ranks it starts, in words."""
        return "all engines"

    def environment(self, variables: Mapping[str, str]) -> dict[str, str]:
        """Return the environment of the command; `variables` are what ranks need."""
        return dict(variables)

    def on_each_host(self) -> tuple[str, ...]:
        """Return the command that starts a process on each host, up to the program; empty: this host alone counts."""
        return ()

    def gpus_per_task(self) -> int:
        """Return the GPUs that each task has, where it sees none of its host's others; 0: it sees them all."""
        return 0

    def host_facts(self) -> HostFacts:
        """Return what the launcher says of this host, in a process that `on_each_host` started."""
        return HostFacts("0")

    def rank(self) -> int:
        """Return the number of this process, one of ranks that no MPI joins."""
        return int(os.environ["RANK"])

    def is_on_one_node(self) -> bool:
        """Return True if all ranks that no MPI joins are known to be on the node of this one."""
        return True

    @abstractmethod
    def reported_ends(self, output: str) -> Iterator[ReportedEnd]:
        """Yield the ends of ranks that the launcher reports in its output, the first one first.

        Of an elastic launch these are the ranks that died, one for each time that the
        others went on.
        """


class OwnJob:
    """The batch job of this process, by its scheduler; without one nothing is known, and nothing ends."""

    def slots(self) -> list[int]:
        """Return the ranks that each of its nodes holds; empty: it is not stated."""
        return []

    def is_ending(self) -> bool:
        """Return True if it is ending or has ended; False if unknown."""
        return False

    def start(self) -> tuple[str, int]:
        """Return its number, empty outside of one, and how often the scheduler has started it again."""
        return "", 0

    def has_ended(self, job: str, restarts: int) -> bool:
        """Return True if the start of `job` that followed on `restarts` others has no processes; False if unknown."""
        return False


def find_program(name: str) -> Path | None:
    """Return the program `name` of this interpreter's environment, else the first on PATH."""
    # An environment that is called by its path alone is not on PATH.
    own = Path(sys.executable).parent / name
    if os.access(own, os.X_OK):
        return own
    found = shutil.which(name)
    return Path(found) if found else None
