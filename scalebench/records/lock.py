"""Exclusive access to a folder, of a study or of a build: the file `lock` names the process that writes it."""

from __future__ import annotations

import fcntl
import json
import os
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from scalebench.comm.launchers import jobs, own_job
from scalebench.errors import ResultsError, writing
from scalebench.system.file_access import descriptor_of_own, read_text

FILE = "lock"
_POLL_S = 0.2
_POLL_ELSEWHERE_S = 10.0  # where each look may ask a scheduler


class LockedError(ResultsError):
    """Raised if another command holds the folder. `owner` names it; None where the lock file is empty."""

    def __init__(self, path: Path, owner: Owner | None) -> None:
        super().__init__(_refusal(path, owner))
        self.owner = owner


@dataclass(frozen=True)
class Owner:
    """The process that writes a study; `born` distinguishes it from a later process of the same number.

    `job` and `restarts` are those of a scheduler that knows whether a process on
    another host may be there still.
    """

    host: str
    pid: int
    born: str
    since_utc: str
    job: str = ""
    restarts: int = 0

    @classmethod
    def this_process(cls) -> Owner:
        now = datetime.now(UTC).isoformat(timespec="seconds")
        pid = os.getpid()
        # a requeued job has the same number, and its earlier start has ended
        job, restarts = own_job().start()
        return cls(platform.node(), pid, _born(pid), now, job, restarts)

    @property
    def is_here(self) -> bool:
        """True if it runs, or ran, on this host."""
        return self.host == platform.node()

    @property
    def may_live(self) -> bool:
        """False if it ran on this host, or elsewhere in a job, and has ended; else True."""
        # a process number alone may have been given to another process since
        if self.is_here:
            return _born(self.pid) == self.born != ""
        # of another host nothing but its scheduler can tell: without that it may live
        ended = (job.has_ended(self.job, self.restarts) for job in jobs())
        return not (self.job and any(ended))

    def __str__(self) -> str:
        job = f" in job {self.job}" if self.job else ""
        return f"process {self.pid} on {self.host}{job}, since {self.since_utc}"


@contextmanager
def folder_lock(
    folder: Path, waits_for: Callable[[str], None] | None = None
) -> Iterator[None]:
    """Hold `folder`, created if missing. A lock whose owner has ended, on this host or with its job, is taken over.

    The file system's own lock (flock) is held too, where available: it ends with its
    process in any case. With `waits_for` the folder is held after its holder, with
    which that is called once.

    Raises:
        ResultsError: another command holds it (named by host and process), or the folder cannot be written.
    """
    path = folder / FILE
    waits = False
    descriptor = None
    while descriptor is None:
        try:
            descriptor = _take(path)
        except LockedError as error:
            if waits_for is None:
                raise
            if not waits:
                waits_for(str(error.owner or "another command"))
            waits = True
            time.sleep(
                _POLL_S
                if error.owner is None or error.owner.is_here
                else _POLL_ELSEWHERE_S
            )
    try:
        yield
    finally:
        # not the lock of another command, if this one was deleted
        if _is_still(path, descriptor):
            with suppress(OSError):
                path.unlink()
        os.close(descriptor)


def owner_of(folder: Path) -> Owner | None:
    """The process that writes the study in `folder` now, or may do so on another host."""
    owner = _read(folder / FILE)
    return owner if owner is not None and owner.may_live else None


def _take(path: Path) -> int | None:
    """Return the descriptor of the lock; None if its owner removed it meanwhile."""
    with writing(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = descriptor_of_own(path, os.O_RDWR | os.O_CREAT)
    try:
        # flock ends with its process, but some network file systems have none: the
        # owner in the file counts, too
        held = not _flock(descriptor)
        owner = _read(path)
        if held or (owner is not None and owner.may_live):
            raise LockedError(path, owner)
        # its owner removed the file between our opening and locking it: what we hold
        # has no name
        if not _is_still(path, descriptor):
            os.close(descriptor)
            return None
        with writing(path):
            # written in place: another name for the file would be another lock
            os.ftruncate(descriptor, 0)
            os.pwrite(
                descriptor, json.dumps(asdict(Owner.this_process())).encode() + b"\n", 0
            )
    except BaseException:
        with suppress(OSError):
            os.close(descriptor)
        raise
    return descriptor


def _flock(descriptor: int) -> bool:
    """Lock the file; True if it is locked, or if the file system has no flock."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _is_still(path: Path, descriptor: int) -> bool:
    try:
        return path.stat().st_ino == os.fstat(descriptor).st_ino
    except OSError:
        return False


def _read(path: Path) -> Owner | None:
    try:
        return Owner(**json.loads(read_text(path)))
    except (
        OSError,
        ValueError,
        TypeError,
    ):  # missing, or incomplete after a kill: no owner
        return None


def _refusal(path: Path, owner: Owner | None) -> str:
    who = str(owner) if owner else "another command"
    if owner is not None and not owner.is_here:
        return f"{path.parent} is being written by {who}; if that command has ended, delete {path} and try again"
    return f"{path.parent} is being written by {who}; wait for it, or choose another folder with --output or --name"


def _born(pid: int) -> str:
    """Boot identifier and start time of the process in kernel ticks since then; empty if there is no such process."""
    try:
        # The second field, the name of the program, may hold spaces and brackets.
        after_name = (
            Path(f"/proc/{pid}/stat")
            .read_text(encoding="ascii", errors="replace")
            .rpartition(")")[2]
            .split()
        )
        boot = (
            Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        )
    except OSError:
        return ""
    # a zombie writes no more; field 22, the start, is the twentieth behind the name
    return "" if after_name[0] == "Z" else f"{boot}/{after_name[19]}"
