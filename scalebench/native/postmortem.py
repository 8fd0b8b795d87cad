"""The cause that ended a launch: from the error files of ranks, the messages of mpirun, and the heartbeats."""

from __future__ import annotations

import platform
import re
import signal
import textwrap
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import dropwhile, takewhile
from pathlib import Path

from scalebench.native.heartbeat import Beat, Phase, read_heartbeats
from scalebench.native.job import REFUSED, Death

_SIGNALLED = re.compile(r"process rank (\d+) with PID \d+ on node \S+ exited on signal (\d+)")
_TASK = re.compile(r"^srun: error: \S+: tasks? (\d+)[\d,-]*: (Exited|[A-Z][a-z ]+)", re.MULTILINE)
_IMPROPER = re.compile(r"process rank (\d+) with PID \d+ on node \S+ exiting improperly")
_LOST = re.compile(r"daemon.*?(?:Remote host:|Remote daemon:.*? on node|daemon on node) (\S+)")
_HUNG_UP = re.compile(r"Local host: (\S+) Local PID: \d+ Peer host: (\S+)")
_EXCEPTION = re.compile(r"^[\w.]*(Error|Exception)\b")
_RANK = re.compile(r"^(\[rank\d+\]: ?)+")  # torch puts it before a traceback, once for each process group there was
_NOISE = re.compile(r"^(-+|\s*)$")
_MOST_TOLD = 300  # characters
_SERVER = ("a server", "servers")
HUSH_S, HUSH_FACTOR = 60.0, 20.0  # all workers silent for so long, and for so many times the longest silence before
_SILENCE_S = 1.0  # without a beat for so long a rank has stopped, or computes a very long step


def cause_of_death(folder: Path, returncode: int, hosts: Sequence[str] = (), launcher: str = "mpirun") -> Death:
    """Find the failure that ended the launch whose files are in `folder`; `hosts` are those of its ranks, if several.

    mpirun names the process that ended first: a rank that died without an error file precedes the errors of others,
    which report broken connections. Ranks wait before they abort, so that mpirun notices it (`processes`).
    """
    reported = Death.reported(folder)
    output = (folder / "stderr.txt").read_text(encoding="utf-8", errors="replace")
    if reported is not None and reported.status == REFUSED:
        return reported
    if error := _told_by_launcher(output, hosts, -1 if reported is None else reported.rank):
        return Death("failed", error, reported.run_id if reported is not None else "")
    if reported is not None:
        return replace(reported, error=f"{_named(reported.rank, hosts)}: {reported.error}")
    if match := _HUNG_UP.search(" ".join(output.split())):
        ranks = _ranks_on(match[2], hosts, ", where {} ran")
        error = f"a process on {match[1]} lost its connection to {match[2]}{ranks}: check that host"
    elif returncode == 0:
        error = "the ranks exited before reporting"
    elif launcher == "mpirun" and len(set(hosts)) > 1 and returncode - 128 in set(signal.Signals):
        where = ", ".join(sorted(set(hosts)))
        ended = _ended_by(returncode - 128)
        error = f"a daemon of mpirun {ended} on one of {where}: check these hosts, their memory and network"
    else:
        error = f"{launcher} exited with code {returncode}: {telling_line(output)}; see {folder / 'stderr.txt'}"
    return Death("failed", error)


def _told_by_launcher(output: str, hosts: Sequence[str], speaker: int) -> str:
    """The end of the process that mpirun or srun names first, unless it is the `speaker`; empty without one."""
    flat = " ".join(output.split())
    if (task := _TASK.search(output)) and int(task[1]) != speaker:
        number = next((each.value for each in signal.Signals if signal.strsignal(each) == task[2].strip()), None)
        return f"{_named(int(task[1]), hosts)} {_ended_by(number) if number else 'exited before reporting'}"
    if (match := _SIGNALLED.search(flat)) and int(match[1]) != speaker:
        return f"{_named(int(match[1]), hosts)} {_ended_by(int(match[2]))}"
    if (match := _IMPROPER.search(flat)) and int(match[1]) != speaker:
        return f"{_named(int(match[1]), hosts)} exited before reporting"
    if match := _LOST.search(flat):
        ranks = _ranks_on(match[1], hosts, " with {}")
        return f"mpirun lost its daemon on {match[1]}{ranks}: check that host, its memory and its network"
    return ""


def _ended_by(number: int) -> str:
    memory = ", perhaps for want of memory" if number == signal.SIGKILL else ""
    return f"was ended by signal {number} ({signal.strsignal(number)}{memory})"


def _ranks_on(host: str, hosts: Sequence[str], text: str) -> str:
    """The ranks on `host`, in `text`; empty without any."""
    there = [rank for rank, name in enumerate(hosts) if name == host]
    return text.format(_ranks(there)) if there else ""


def telling_line(text: str) -> str:
    """The most informative part of a failed program's output: the line of an exception, else the first paragraph."""
    lines = [_RANK.sub("", line).strip() for line in text.splitlines()]
    if exception := next((line for line in lines if _EXCEPTION.match(line)), ""):
        return exception
    paragraph = takewhile(lambda line: not _NOISE.match(line), dropwhile(_NOISE.match, lines))
    text = " ".join(paragraph).rstrip(":")
    return textwrap.shorten(text, _MOST_TOLD, placeholder=" ...") or "it said nothing"


def what_to_check(hosts: Sequence[str]) -> str:
    """The next step for the user if ranks of `hosts`, or of this one if empty, do not connect."""
    if not hosts:
        return "check what else keeps the cores of this machine busy"
    return (
        "check that these hosts reach each other by TCP (routes, firewalls), or name the network that joins them: "
        "OMPI_MCA_btl_tcp_if_include=... for mpi and horovod, GLOO_SOCKET_IFNAME=... for gloo"
    )


class Pulse:
    """Watches the heartbeats of a launch: which ranks stopped, and when."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._beats: list[Beat] = read_heartbeats(path)
        self._changed = [time.monotonic()] * len(self._beats)
        self._watched, self._longest, self._hushed = 0, 0.0, False

    @property
    def pids(self) -> list[int]:
        """Process numbers of the ranks of this host that have started."""
        return [beat.pid for beat in read_heartbeats(self._path) if beat.pid and beat.host == platform.node()]

    @property
    def hosts(self) -> list[str]:
        """Host of each rank, empty if unknown; no hosts at all if every rank is on this one."""
        hosts = [beat.host for beat in read_heartbeats(self._path)]
        return hosts if set(hosts) - {"", platform.node()} else []

    def watch(self, workers: int) -> None:
        """Begin watching a run of the first `workers` ranks."""
        self._watched, self._longest, self._hushed = workers, 0.0, False
        self._changed[:workers] = [time.monotonic()] * workers

    def feel(self) -> None:
        """Read the file; call often."""
        now = time.monotonic()
        before = self._hush_s(now)
        for rank, beat in enumerate(read_heartbeats(self._path)):
            if beat != self._beats[rank]:
                self._beats[rank] = beat
                self._changed[rank] = now
        if self._hush_s(now) < before:
            self._longest = max(self._longest, before)

    def hush_s(self) -> float:
        """Seconds of silence of all workers, returned once, when it is unusually long; 0 otherwise."""
        seconds = self._hush_s(time.monotonic())
        if self._hushed or seconds <= max(HUSH_S, HUSH_FACTOR * self._longest):
            return 0.0
        self._hushed = True
        return seconds

    def connecting_s(self, ranks: int) -> float:
        """Seconds for which one of the first `ranks` ranks has been connecting while the others did so, or before."""
        beats = self._beats[:ranks]
        connecting = [rank for rank, beat in enumerate(beats) if beat.phase is Phase.CONNECTING]
        if not connecting or any(beat.phase < Phase.CONNECTING for beat in beats):
            return 0.0
        return time.monotonic() - max(self._changed[rank] for rank in connecting)

    def unconnected(self, ranks: int) -> str:
        """Name the first `ranks` ranks that wait while they connect, and those they wait for."""
        hosts, beats = self.hosts, self._beats[:ranks]
        waiting = [rank for rank, beat in enumerate(beats) if beat.phase is Phase.CONNECTING]
        pairs = [(rank, beats[rank].batches - 1) for rank in waiting if beats[rank].batches]
        if pairs:
            # A third rank waits for one of two that cannot connect: those wait for each other.
            stuck = [pair for pair in pairs if pair[1] not in waiting or pair[::-1] in pairs]
            rank, awaited = (stuck or pairs)[0]
            return f"{_named(rank, hosts)} waited for {_named(awaited, hosts)}"
        places = f" on {', '.join(sorted({hosts[rank] for rank in waiting}))}" if hosts else ""
        return f"{_ranks(waiting)}{places} waited for the others"

    def stopped(self, workers: int, servers: int = 0) -> str:
        """Name the first `workers` ranks, or the `servers` after them, that stopped first.

        A server beats while it waits: one that fell silent as early as any worker has stopped, and the workers with it;
        one that fell silent later was kept from the core. Workers that wait for a stopped one are silent too, but ahead
        of it: only the ones furthest behind are named.
        """
        now = time.monotonic()
        silent = [rank for rank in range(workers + servers) if now - self._changed[rank] > _SILENCE_S]
        if not silent:
            return "all ranks were still working"
        first = min(self._changed[rank] for rank in silent)
        if dumb := [rank for rank in silent if rank >= workers and self._changed[rank] < first + _SILENCE_S]:
            return f"{_ranks(dumb)} ({_SERVER[len(dumb) > 1]}) had stopped {self._silent_s(dumb, now):.1f} s before"
        silent = [rank for rank in silent if rank < workers]
        furthest_behind = min(self._beats[rank].progress for rank in silent)
        named = [rank for rank in silent if self._beats[rank].progress == furthest_behind]
        phase = self._beats[named[0]].phase.name.lower()
        return f"{_ranks(named)} had stopped {self._silent_s(named, now):.1f} s before, while {phase}"

    def _hush_s(self, now: float) -> float:
        return now - max(self._changed[: self._watched], default=now)

    def _silent_s(self, ranks: Sequence[int], now: float) -> float:
        return now - max(self._changed[rank] for rank in ranks)


def _named(rank: int, hosts: Sequence[str]) -> str:
    return f"rank {rank} on {hosts[rank]}" if hosts and hosts[rank] else f"rank {rank}"


def _ranks(ranks: Sequence[int]) -> str:
    names = ", ".join(map(str, ranks))
    return f"rank {names}" if len(ranks) == 1 else f"ranks {names}"
