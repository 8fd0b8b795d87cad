"""The allocation over whose hosts a launcher spreads ranks: their cores, slots and GPUs, read or stated.

Each is asked, in a launch of one process a host: a scheduler's variables name hosts, a
hostfile does, or neither; their cores only they know. Where nothing speaks of other
hosts, this one is taken without asking.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from scalebench.comm import engines
from scalebench.comm.launchers import chosen, own_job
from scalebench.errors import EngineError
from scalebench.records.provenance import JOB_IDS
from scalebench.study.spec import SIMULATED
from scalebench.system import hardware
from scalebench.system.parent_watch import end_with_parent

# variables that name other hosts; where none is set, no launch is spent on asking
SPEAK_OF_HOSTS = (
    *JOB_IDS,
    "PBS_NODEFILE",
    "PE_HOSTFILE",
    "PRTE_MCA_prte_default_hostfile",
    "OMPI_MCA_prte_default_hostfile",
    "OMPI_MCA_orte_default_hostfile",
)
# srun waits without an end for a node that is down
_LIMIT_S = 60.0
# a daemon can be lost while it starts on a busy host; twice is no accident
_TRIES = 2
_LATE_S = 5.0  # a shared file system may show a new folder so late
_MARK = "scalebench-host "  # begins a host's line: mpirun prints others
_SLOTS = re.compile(r'<host name="([^"]+)" slots="(\d+)"')


@dataclass(frozen=True)
class Host:
    """A host that holds `slots` ranks by right, on `cores` cores, of which `physical_cores` can be bound to."""

    name: str
    slots: int
    cores: int
    physical_cores: int
    gpus: int = 0


@dataclass(frozen=True)
class Allocation:
    """The hosts of an allocation, in the order in which their slots are filled.

    Read from where this process runs (`reachable`), or stated for a job that is still
    to be submitted (`asked`).
    """

    hosts: tuple[Host, ...]
    is_here: bool = True  # False: it is stated, and nothing can be started on it now

    @classmethod
    def asked(
        cls, nodes: int, slots: int, *, cores: int | None = None, gpus: int = 0
    ) -> Allocation:
        """State `nodes` equal nodes of `slots` ranks each, on as many cores unless `cores` says another number."""
        cores = slots if cores is None else cores
        hosts = tuple(
            Host(f"node{number}", slots, cores, cores, gpus) for number in range(nodes)
        )
        return cls(hosts, is_here=False)

    @property
    def cores(self) -> int:
        return sum(host.cores for host in self.hosts)

    @property
    def slots(self) -> int:
        return sum(host.slots for host in self.hosts)

    @property
    def gpus(self) -> int:
        return sum(host.gpus for host in self.hosts)

    def with_at_most(self, ranks: int) -> Allocation:
        """The same hosts with equally many slots each, `ranks` at most and no more than cores."""
        each = min(ranks, *(max(1, min(host.slots, host.cores)) for host in self.hosts))
        return replace(
            self, hosts=tuple(replace(host, slots=each) for host in self.hosts)
        )

    def ranks_on(self, ranks: int) -> list[int]:
        """Number of the first `ranks` ranks on each host: slot by slot, ranks beyond the slots evenly."""
        held, left = [], ranks
        for host in self.hosts:
            held.append(min(host.slots, left))
            left -= held[-1]
        share, rest = divmod(left, len(held))
        return [count + share + (place < rest) for place, count in enumerate(held)]

    def can_bind(self, ranks: int, width: int) -> bool:
        """Return True if every host has `width` cores for each of its ranks."""
        held = zip(self.hosts, self.ranks_on(ranks), strict=True)
        return all(count * width <= host.physical_cores for host, count in held)

    def is_oversubscribed(self, engine: str, ranks: int, threads: int) -> bool:
        """Return True if on some host the ranks keep more threads busy than it has cores."""
        return self._exceeds_cores(
            ranks, engines.named(engine).busy_threads(ranks, threads)
        )

    def _exceeds_cores(self, ranks: int, busy: int) -> bool:
        return any(
            n * busy > host.cores
            for host, n in zip(self.hosts, self.ranks_on(ranks), strict=True)
        )

    def most(self, threads: int, counts: Sequence[int]) -> list[int]:
        """Return the `counts` whose workers, of `threads` threads, have cores of their own, and slots."""
        return [
            count
            for count in counts
            if count <= self.slots and not self._exceeds_cores(count, threads)
        ]


def this_host() -> Allocation:
    """The host of this process alone."""
    cores = hardware.cores()
    return Allocation(
        (
            Host(
                platform.node(),
                cores,
                cores,
                hardware.physical_cores(),
                hardware.gpus(),
            ),
        )
    )


def reachable() -> Allocation:
    """The hosts of this allocation; queried once for each environment.

    Raises:
        EngineError: a host cannot be reached; says which.
    """
    spoken = tuple(os.environ.get(name, "") for name in SPEAK_OF_HOSTS)
    asking = chosen().on_each_host()
    if not any(spoken) or not asking:
        return this_host()
    return _asked(asking, spoken)


def here_for(execution: str) -> Allocation:
    """Return the allocation of this process for the real runs of `execution`; without any, this host alone.

    Raises:
        EngineError: a host cannot be reached; says which.
    """
    # other hosts are asked in a launch, which virtual runs do without
    return this_host() if execution in SIMULATED else reachable()


def require_seen(paths: Sequence[Path]) -> None:
    """Refuse `paths` that another host of the allocation does not see.

    Raises:
        EngineError: names host and path.
    """
    asking = chosen().on_each_host()
    if not asking or len(reachable().hosts) == 1:
        return
    for facts in _ask(asking, [path.resolve() for path in paths])[0]:
        if facts["unseen"]:
            raise EngineError(
                f"node {facts['name']} does not see {facts['unseen'][0]}: real runs need it on a file system that all "
                "nodes share; use --output for results, and XDG_CACHE_HOME for prepared data, on one that they share"
            )


def require_there(paths: Sequence[Path]) -> None:
    """Refuse to go on without a host of the allocation, after a launch that failed, or `paths` that one does not see.

    Raises:
        EngineError: names the hosts that do not answer.
    """
    try:
        require_seen(paths)
    except EngineError as error:
        # the hosts that no longer answer are the cause, not the path that one of them
        # misses
        from scalebench.native.postmortem import unanswering

        gone = ", ".join(unanswering(host.name for host in reachable().hosts))
        raise EngineError(
            f"{gone} no longer answers: {error}" if gone else str(error)
        ) from None


# The second argument is part of the key alone: a changed environment may name other
# hosts.
@cache
def _asked(asking: tuple[str, ...], _: tuple[str, ...]) -> Allocation:
    answers, counted = _ask(asking, [])
    # mpirun prints the slots that it counts; for launchers that print none, those of the
    # job count
    slots = list(counted.values()) or own_job().slots()
    given = (
        # counts of other hosts than those that answered say nothing of these
        slots if len(slots) == len(answers) else [facts["cores"] for facts in answers]
    )
    # a task that gets GPUs of its own sees none of the others on its host
    share = chosen().gpus_per_task()
    return Allocation(
        tuple(
            Host(
                facts["name"],
                count,
                facts["cores"],
                facts["physical_cores"],
                share * count or facts["gpus"],
            )
            for facts, count in zip(answers, given, strict=True)
        )
    )


def _ask(
    command: Sequence[str], paths: Sequence[Path]
) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """Return the answer of each host, in the order of ranks, and the slots that mpirun counts.

    A launch that fails at once is tried again, as a daemon may be lost while it starts
    on a busy host.
    """
    for _ in range(_TRIES):
        said, error, ended, within = _started(command, paths)
        answers = [
            json.loads(line.partition(_MARK)[2])
            for line in said.splitlines()
            if _MARK in line
        ]
        slots = {name: int(count) for name, count in _SLOTS.findall(said + error)}
        if ended and answers:
            return sorted(answers, key=lambda facts: int(facts["rank"])), slots
        if within:
            break
    # only after a failure: this module is the program of each host, too
    from scalebench.native.postmortem import lost_daemon, telling_line

    known = {facts["name"].partition(".")[0] for facts in answers}
    silent = [name for name in slots if name.partition(".")[0] not in known]
    told = [
        line
        for line in said.splitlines()
        if _MARK not in line and not line.startswith("<")
    ]
    if lost := lost_daemon(f"{said} {error}"):  # mpirun says so in its standard output
        silent, why = silent or [lost], "check that host and its network"
    else:
        why = telling_line(error if error.strip() else "\n".join(told))
    who = f"node {', '.join(silent)} did" if silent else "a node did"
    raise EngineError(
        f"{who} not answer{within} as {chosen().name} started a process on each node: {why}"
    )


def _started(
    command: Sequence[str], paths: Sequence[Path]
) -> tuple[str, str, bool, str]:
    """Start a process on each host; return outputs, whether all ended well, and ` within N s` if the time was over."""
    try:
        done = subprocess.run(
            [
                *command,
                sys.executable,
                "-m",
                "scalebench.launch.hosts",
                *map(str, paths),
            ],
            env=chosen().environment(os.environ),
            # mpirun would hand the terminal's lines to rank 0
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_LIMIT_S,
            preexec_fn=end_with_parent,
        )
    except subprocess.TimeoutExpired as late:
        return _text(late.stdout), _text(late.stderr), False, f" within {_LIMIT_S:g} s"
    return done.stdout, done.stderr, done.returncode == 0, ""


def _text(said: str | bytes | None) -> str:
    return said.decode(errors="replace") if isinstance(said, bytes) else said or ""


def _answer(paths: Sequence[str]) -> None:
    """Print this host's name and cores, and those of `paths` that it does not see."""
    # the launching host has just made these folders
    deadline = time.monotonic() + _LATE_S
    while (
        unseen := [path for path in paths if not Path(path).exists()]
    ) and time.monotonic() < deadline:
        time.sleep(0.1)
    told = chosen().host_facts()
    given = hardware.cores() if told.cpus is None else told.cpus
    facts = {
        "rank": told.number,
        "name": told.name or platform.node(),
        "gpus": hardware.gpus(),
        # a scheduler may give a job fewer cores than its processes can see
        "cores": min(hardware.cores(), given),
        "physical_cores": min(hardware.physical_cores(), given),
        "unseen": unseen,
    }
    sys.stdout.write(f"{_MARK}{json.dumps(facts)}\n")


if __name__ == "__main__":
    _answer(sys.argv[1:])
