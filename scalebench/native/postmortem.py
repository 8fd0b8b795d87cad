"""The cause that ended a launch: from the error files of ranks, the messages of the launcher, and the heartbeats."""

from __future__ import annotations

import platform
import re
import signal
import socket
import textwrap
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import dropwhile, takewhile
from pathlib import Path

from scalebench.cluster.mesh import Mesh
from scalebench.comm.launchers import named
from scalebench.comm.launchers.base import Launcher
from scalebench.native.heartbeat import Beat, Phase, is_stopped, read_heartbeats
from scalebench.native.job_files import REFUSED, Death

_LOST = re.compile(
    r"daemon.*?(?:Remote host:|Remote daemon:.*? on node|daemon on node) (\S+)"
)
_HUNG_UP = re.compile(r"Local host: (\S+) Local PID: \d+ Peer host: (\S+)")
_EXCEPTION = re.compile(r"^[\w.]*(Error|Exception)\b")
# torch puts it before a traceback, once for each process group there was
_RANK = re.compile(r"^(\[rank\d+\]: ?)+")
_NOISE = re.compile(r"^(-+|\s*)$")
_SILENCE = "it said nothing"
_MOST_TOLD = 300  # characters
_REPORT_BYTES = 1 << 16  # of a run's outcome, about
_SERVER = ("a server", "servers")
_LONGER = 3.0  # times the longest silence that ended: then it is unusual
# without a sign of life for so long, of which a rank that computes gives one a second
_SILENCE_S = 2.5
# between two looks: then this process was stopped itself, and the ranks perhaps with it
_PAUSED_S = 5.0
_ANSWER_S = 3.0  # for a host to accept or refuse a connection
_SSH = 22  # a port: whether anything listens there does not matter


def cause_of_death(
    folder: Path,
    returncode: int,
    hosts: Sequence[str] = (),
    *,
    launcher: str,
    mesh: Mesh | None = None,
) -> Death:
    """Find the failure that ended the launch whose files are in `folder`; `hosts` are those of its ranks, if several.

    `mesh` is that of the run under way: ranks after its workers are servers. The launcher names the process that ended
    first: a rank that died without an error file precedes the errors of others, which report broken connections. Ranks
    wait before they abort, so that it notices (`processes`).
    """
    reported = Death.reported(folder)
    # mpirun writes of its daemons to its standard output.
    output, more = (
        (folder / name).read_text(encoding="utf-8", errors="replace")
        if (folder / name).exists()
        else ""
        for name in ("stderr.txt", "stdout.txt")
    )
    if reported is not None and reported.status == REFUSED:
        return reported
    ranks = _Names(hosts, mesh)
    starter, printed = named(launcher), f"{output}\n{more}"
    speaker = -1 if reported is None else reported.rank
    if error := _told_by(starter, printed, ranks, speaker):
        return Death("failed", error, reported.run_id if reported is not None else "")
    if reported is not None:
        return replace(
            reported, error=f"{ranks.named(reported.rank)}: {reported.error}"
        )
    if full := _not_writable(folder):
        return Death("failed", full)
    if match := _HUNG_UP.search(" ".join(output.split())):
        where = ranks.on(match[2], ", where {} ran")
        error = f"a process on {match[1]} lost its connection to {match[2]}{where}: check that host"
    elif returncode == 0:
        error = "the ranks exited before reporting"
    elif returncode < 0:
        error = f"{launcher} {_ended_by(-returncode)}"
    elif (
        starter.has_daemons
        and len(set(hosts)) > 1
        and returncode - 128 in set(signal.Signals)
    ):
        where = ", ".join(sorted(set(hosts)))
        ended = _ended_by(returncode - 128)
        error = f"a daemon of {launcher} {ended} on one of {where}: check these hosts, their memory and network"
    elif returncode == starter.silent_code and telling_line(printed) == _SILENCE:
        # It names every other end, of itself and of ranks.
        ended = _ended_by(signal.SIGTERM)
        error = f"{launcher} {ended}, or by 2 or 1, of which it says as little (exit code {returncode})"
    else:
        error = f"{launcher} exited with code {returncode}: {telling_line(output)}; see {folder / 'stderr.txt'}"
    return Death("failed", error)


@dataclass(frozen=True)
class _Names:
    """The names of ranks: by the hosts on which they are, if several; those after the workers of `mesh` are servers."""

    hosts: Sequence[str] = ()
    mesh: Mesh | None = None

    def named(self, rank: int) -> str:
        """Name a rank, with the stage of the model that it holds if that is not the whole one."""
        name, mesh = _named(rank, self.hosts), self.mesh
        if mesh is not None and rank >= mesh.workers:
            return f"{name} ({_SERVER[0]})"
        if mesh is None or mesh.pipeline == 1:
            return name
        replica, part = divmod(rank, mesh.parts)
        of_replica = f" of replica {replica}" if mesh.data > 1 else ""
        return f"{name} (stage {mesh.stage_of(part)}{of_replica})"

    def on(self, host: str, text: str) -> str:
        """The ranks on `host`, in `text`; empty without any."""
        short = host.partition(".")[0]
        there = [
            rank
            for rank, name in enumerate(self.hosts)
            if name.partition(".")[0] == short
        ]
        return text.format(_ranks(there)) if there else ""


def _not_writable(folder: Path) -> str:
    """The reason why nothing can be written into `folder`, which keeps ranks from reporting; empty if it can be."""
    path = folder / "written"
    try:
        path.write_bytes(bytes(_REPORT_BYTES))
    except OSError as error:
        return f"the ranks could not write their results and reports: {error.strerror or error}, in {folder}"
    finally:
        with suppress(OSError):
            path.unlink(missing_ok=True)
    return ""


def _told_by(launcher: Launcher, output: str, ranks: _Names, speaker: int) -> str:
    """The end of the process that `launcher` names first, unless it is the `speaker`; empty without one."""
    for end in launcher.reported_ends(output):
        if end.rank == speaker:
            continue
        if end.signal is not None:
            return f"{ranks.named(end.rank)} {_ended_by(end.signal)}"
        exception = exception_in(output)
        return f"{ranks.named(end.rank)} exited before reporting{f': {exception}' if exception else ''}"
    if lost := lost_daemon(output):
        there = ranks.on(lost, " with {}")
        return f"mpirun lost its daemon on {lost}{there}: check that host, its memory and its network"
    return ""


def lost_daemon(printed: str) -> str:
    """Return the host whose daemon mpirun missed, by what it printed; empty if it missed none."""
    match = _LOST.search(" ".join(printed.split()))
    return match[1] if match else ""


def _ended_by(number: int) -> str:
    memory = ", perhaps for want of memory" if number == signal.SIGKILL else ""
    return f"was ended by signal {number} ({signal.strsignal(number)}{memory})"


def exception_in(text: str) -> str:
    """Return the first line of a failed program's output that names an exception; empty if none does."""
    return next((line for line in _lines(text) if _EXCEPTION.match(line)), "")


def _lines(text: str) -> list[str]:
    return [_RANK.sub("", line).strip() for line in text.splitlines()]


def telling_line(text: str) -> str:
    """The most informative part of a failed program's output: the line of an exception, else the first paragraph."""
    if exception := exception_in(text):
        return exception
    lines = _lines(text)
    paragraph = takewhile(
        lambda line: not _NOISE.match(line), dropwhile(_NOISE.match, lines)
    )
    text = " ".join(paragraph).rstrip(":")
    return textwrap.shorten(text, _MOST_TOLD, placeholder=" ...") or _SILENCE


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
        # when the thread of each rank was last seen to look
        self._looked = list(self._changed)
        self._watched, self._longest = 0, 0.0
        self._felt = time.monotonic()

    @property
    def pids(self) -> list[int]:
        """Process numbers of the ranks of this host that have started."""
        return [
            beat.pid
            for beat in self._last_known()
            if beat.pid and beat.host == platform.node()
        ]

    def _last_known(self) -> list[Beat]:
        try:
            return read_heartbeats(self._path)
        except OSError:  # deleted with the folder of the launch
            return self._beats

    @property
    def hosts(self) -> list[str]:
        """Host of each rank, empty if unknown; no hosts at all if every rank is on this one."""
        hosts = [beat.host for beat in read_heartbeats(self._path)]
        return hosts if set(hosts) - {"", platform.node()} else []

    def watch(self, workers: int) -> None:
        """Begin watching a run of the first `workers` ranks."""
        self._watched, self._longest = workers, 0.0
        self._changed[:workers] = [time.monotonic()] * workers

    def feel(self) -> None:
        """Read the file; call often. The time in which this process itself was stopped is no silence."""
        now = time.monotonic()
        if (paused := now - self._felt) > _PAUSED_S:
            self._changed = [moment + paused for moment in self._changed]
            self._looked = [moment + paused for moment in self._looked]
        self._felt = now
        before = self._hush_s(now)
        for rank, beat in enumerate(read_heartbeats(self._path)):
            known, self._beats[rank] = self._beats[rank], beat
            if beat != known:
                self._changed[rank] = now
            if beat.looks != known.looks:
                self._looked[rank] = now
        if self._hush_s(now) < before:
            self._longest = max(self._longest, before)

    def hush_s(self, patience: float) -> float:
        """Seconds of silence of all watched ranks, if they exceed `patience` and what was usual; 0 otherwise."""
        seconds = self._hush_s(time.monotonic())
        return seconds if seconds > max(patience, _LONGER * self._longest) else 0.0

    def silent(self, mesh: Mesh, servers: int = 0) -> str:
        """Name the rank for which all others wait and their operation, and the hosts that do not answer."""
        workers = mesh.workers
        beats = self._beats[: workers + servers]
        waiting = [rank for rank, beat in enumerate(beats[:workers]) if beat.operation]
        behind = self._behind(workers, servers)
        names = _Names(self.hosts, mesh)
        phase = beats[behind[0]].phase.name.lower() if behind else ""
        text = f"{', '.join(map(names.named, behind)) or 'no rank'} had stopped while {phase}"
        if behind and (own := beats[behind[0]].operation):
            text += f", in {own}"
        if operations := Counter(
            beats[rank].operation for rank in waiting if rank not in behind
        ):
            text += f", and the others waited in {operations.most_common(1)[0][0]}"
        for host in unanswering(dict.fromkeys(filter(None, names.hosts))):
            text += f"; {host}{names.on(host, ' with {}')} does not answer: check that host and its network"
        return text

    def connecting_s(self, ranks: int) -> float:
        """Seconds for which one of the first `ranks` ranks has been connecting while the others did so, or before."""
        beats = self._beats[:ranks]
        connecting = [
            rank for rank, beat in enumerate(beats) if beat.phase is Phase.CONNECTING
        ]
        if not connecting or any(beat.phase < Phase.CONNECTING for beat in beats):
            return 0.0
        return time.monotonic() - max(self._changed[rank] for rank in connecting)

    def unconnected(self, ranks: int) -> str:
        """Name the first `ranks` ranks that wait while they connect, and those they wait for."""
        hosts, beats = self.hosts, self._beats[:ranks]
        waiting = [
            rank for rank, beat in enumerate(beats) if beat.phase is Phase.CONNECTING
        ]
        pairs = [
            (rank, beats[rank].batches - 1) for rank in waiting if beats[rank].batches
        ]
        if pairs:
            # A third rank waits for one of two that cannot connect: those wait for each
            # other.
            stuck = [
                pair for pair in pairs if pair[1] not in waiting or pair[::-1] in pairs
            ]
            rank, awaited = (stuck or pairs)[0]
            return f"{_named(rank, hosts)} waited for {_named(awaited, hosts)}"
        places = (
            f" on {', '.join(sorted({hosts[rank] for rank in waiting}))}"
            if hosts
            else ""
        )
        return f"{_ranks(waiting)}{places} waited for the others"

    def stopped(self, workers: int, servers: int = 0) -> str:
        """Name the first `workers` ranks, or the `servers` after them, that stopped first.

        A server beats while it waits: one that fell silent as early as any worker has
        stopped, and the workers with it; one that fell silent later was kept from the
        core. Workers that wait for a stopped one are silent too, but ahead of it: only
        the ones furthest behind are named.
        """
        now = time.monotonic()
        named = self._behind(workers, servers)
        if not named:
            return "all ranks were still working"
        if named[0] >= workers:
            return f"{_ranks(named)} ({_SERVER[len(named) > 1]}) had stopped {self._silent_s(named, now):.1f} s before"
        phase = self._beats[named[0]].phase.name.lower()
        return f"{_ranks(named)} had stopped {self._silent_s(named, now):.1f} s before, while {phase}"

    def _behind(self, workers: int, servers: int) -> list[int]:
        """The silent ranks for which the others wait."""
        now = time.monotonic()
        silent = [
            rank
            for rank in range(workers + servers)
            if now - self._changed[rank] > _SILENCE_S
        ]
        if not silent:
            return []
        first = min(self._changed[rank] for rank in silent)
        if dumb := [
            rank
            for rank in silent
            if rank >= workers and self._changed[rank] < first + _SILENCE_S
        ]:
            return dumb
        # Servers that fell silent later than the first worker were kept from the core.
        silent = [rank for rank in silent if rank < workers]
        furthest_behind = min(self._beats[rank].progress for rank in silent)
        behind = [
            rank for rank in silent if self._beats[rank].progress == furthest_behind
        ]
        # Others share their place where no clock is read between their work and their
        # wait, as in DDP's backward pass.
        stopped = [
            rank
            for rank in behind
            if now - self._looked[rank] > max(_SILENCE_S, (now - first) / 2)
        ]
        return stopped or behind

    def not_ended(self, launcher: str, pid: int) -> str:
        """Name what keeps a launch, whose `launcher` has this process id, from its end after its last run."""
        hosts = self.hosts
        if is_stopped(pid):
            return f"{launcher} is stopped"
        for rank, beat in enumerate(self._beats):
            if beat.host == platform.node() and is_stopped(beat.pid):
                return f"{_named(rank, hosts)} is stopped"
        if running := [
            rank
            for rank, beat in enumerate(self._beats)
            if beat.phase is Phase.FINISHED
        ]:
            return f"a thread of {', '.join(_named(rank, hosts) for rank in running)} does not end"
        return (
            "a process on another host is stopped"
            if hosts
            else f"{launcher} does not end"
        )

    def _hush_s(self, now: float) -> float:
        return now - max(self._changed[: self._watched], default=now)

    def _silent_s(self, ranks: Sequence[int], now: float) -> float:
        return now - max(self._changed[rank] for rank in ranks)


def unanswering(hosts: Iterable[str]) -> list[str]:
    """Those of the other `hosts` that neither accept nor refuse a connection."""
    others = [host for host in hosts if host != platform.node()]
    if not others:
        return []
    with ThreadPoolExecutor(min(32, len(others))) as pool:
        return [
            host
            for host, answers in zip(others, pool.map(_answers, others), strict=True)
            if not answers
        ]


def _answers(host: str) -> bool:
    try:
        socket.create_connection((host, _SSH), _ANSWER_S).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return True


def _named(rank: int, hosts: Sequence[str]) -> str:
    return f"rank {rank} on {hosts[rank]}" if hosts and hosts[rank] else f"rank {rank}"


def _ranks(ranks: Sequence[int]) -> str:
    names = ", ".join(map(str, ranks))
    return f"rank {names}" if len(ranks) == 1 else f"ranks {names}"
