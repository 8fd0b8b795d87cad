"""One command at a time writes a study: `lock` in its folder says which."""

from __future__ import annotations

import fcntl
import json
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from scalebench.errors import ResultsError

FILE = "lock"


@dataclass(frozen=True)
class Owner:
    """The process that writes a study; `born` tells it from a later process with its number."""

    host: str
    pid: int
    born: str
    since_utc: str

    @classmethod
    def this_process(cls) -> Owner:
        now = datetime.now(UTC).isoformat(timespec="seconds")
        return cls(platform.node(), os.getpid(), _born(os.getpid()), now)

    @property
    def may_live(self) -> bool:
        """False if it ran on this host and is gone; of other hosts nothing is known."""
        return self.host != platform.node() or _born(self.pid) == self.born != ""

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since_utc}"


@contextmanager
def study_lock(folder: Path) -> Iterator[None]:
    """Hold `folder`, which is made if need be. A lock whose owner is gone from this host is taken over.

    The file system's own lock (flock) is held too, where it has one: it ends with its process, whatever ends that.

    Raises:
        ResultsError: another command holds it (named by host and process), or the folder cannot be written.
    """
    path = folder / FILE
    descriptor = _take(path)
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink()
        os.close(descriptor)


def owner_of(folder: Path) -> Owner | None:
    """Who writes the study in `folder` at this moment, as far as can be told from here."""
    owner = _read(folder / FILE)
    return owner if owner is not None and owner.may_live else None


def _take(path: Path) -> int:
    while True:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise ResultsError(
                f"cannot write results to {path.parent}: {error.strerror}; choose another folder with --output"
            ) from None
        try:
            held = not _flock(descriptor)
            owner = _read(path)
            if held or (owner is not None and owner.may_live):
                raise ResultsError(_refusal(path, owner))
            if not _is_still(path, descriptor):  # its owner removed it in between
                os.close(descriptor)
                continue
            _write(path, descriptor)
        except BaseException:
            with suppress(OSError):
                os.close(descriptor)
            raise
        return descriptor


def _flock(descriptor: int) -> bool:
    """Whether the file is ours; file systems without flock leave it to what the file says."""
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


def _write(path: Path, descriptor: int) -> None:
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(asdict(Owner.this_process())).encode() + b"\n", 0)
    except OSError as error:
        raise ResultsError(f"cannot write {path}: {error.strerror}; choose another folder with --output") from None


def _read(path: Path) -> Owner | None:
    try:
        return Owner(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):  # not there, or torn by a kill: then nobody holds it
        return None


def _refusal(path: Path, owner: Owner | None) -> str:
    who = str(owner) if owner else "another command"
    if owner is not None and owner.host != platform.node():
        return f"{path.parent} is being written by {who}; if that command has ended, delete {path} and try again"
    return f"{path.parent} is being written by {who}; wait for it, or choose another folder with --output or --name"


def _born(pid: int) -> str:
    """When the process began, in the kernel's ticks since the machine's start and with that; empty if there is none."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""
    return "" if after_name[0] == "Z" else f"{boot}/{after_name[19]}"
