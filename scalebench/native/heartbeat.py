"""Heartbeats: a small file that all ranks of a launch write and the launcher reads.

A hung run shows no other sign. A stopped worker is behind those that wait for it: in
batches, else in beats. One clock reading is one beat; beats of earlier batches are not
compared, as not every worker takes the snapshots.

A long computation reads no clock. A thread of each rank looks at it once a second:
while the rank computes, which uses processor time outside of communication, that is a
sign of life, too. A rank that waits for others gives none. A rank whose thread looks no
more, though it is as far as the others, is the one that was stopped.
"""

from __future__ import annotations

import mmap
import os
import platform
import signal
import struct
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from types import FrameType

# process id, phase, batches, beats, looks at which it computed, all looks
_NUMBERS = "=6q"
# the host name, and the function in which it waits
_FIELDS = struct.Struct(f"{_NUMBERS}64s32s")
_HOST, _OPERATION = struct.calcsize(_NUMBERS), struct.calcsize(f"{_NUMBERS}64s")
_LOOK_S = 1.0
_LOOKS_AT_FILE = 10  # looks between two at the launcher's mark
_OVER = b"over"
# Parts of the paths of files whose functions wait for other ranks.
_COMMUNICATION = ("/mpi4py/", "/horovod/", "/torch/distributed/", "/scalebench/comm/")
_CONTROL = "/scalebench/native/"
# ends the names of functions in which DDP communicates, torch's and that of a replica
_BACKWARD = "run_backward"


class Phase(IntEnum):
    """The last known activity of a rank."""

    STARTING = 0
    IDLE = 1
    PREPARING = 2
    CONNECTING = 3
    TRAINING = 4
    EVALUATING = 5
    REPORTING = 6
    FINISHED = 7
    LEAVING = 8  # its threads have ended


@dataclass(frozen=True)
class Beat:
    """The last heartbeat of one rank; `batches` counts within the phase, `beats` within the batch.

    While a rank connects, `batches` is the rank that it waits for, plus one; 0 if it waits for several. `operation` is
    the function in which it waited when its thread looked, empty if it computed. The number of `looks` is no sign of
    life: it grows while a rank waits.
    """

    pid: int
    phase: Phase
    batches: int
    beats: int
    computed: int = 0
    host: str = ""
    operation: str = ""
    looks: int = field(default=0, compare=False)

    @property
    def progress(self) -> tuple[Phase, int, int]:
        """Progress, to be compared with that of another rank of the same run."""
        return self.phase, self.batches, self.beats


class Heartbeat:
    """The row of one rank in the file."""

    def __init__(self, path: Path, rank: int) -> None:
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)
        self._text = memoryview(self._memory)[
            rank * _FIELDS.size : (rank + 1) * _FIELDS.size
        ]
        _FIELDS.pack_into(
            self._text,
            0,
            os.getpid(),
            Phase.STARTING,
            0,
            0,
            0,
            0,
            platform.node().encode()[:64],
            b"",
        )
        self._row = self._text[:_HOST].cast("q")
        self._path = path

    def enter(self, phase: Phase) -> None:
        """Begin a new phase."""
        self._row[3] = self._row[2] = 0
        self._row[1] = phase

    def wait_for(self, rank: int | None) -> None:
        """Begin connecting with `rank`, or with all ranks."""
        self.enter(Phase.CONNECTING)
        self._row[2] = 0 if rank is None else rank + 1

    def begin_batch(self) -> None:
        """Begin the next batch."""
        self._row[3] = 0
        self._row[2] += 1

    def beat(self) -> None:
        """Record a sign of life."""
        self._row[3] += 1

    def watch(self) -> None:
        """Begin to look at the calling thread once a second, and end this process once its launch is over."""
        threading.Thread(
            target=self._look, args=(threading.get_ident(),), daemon=True
        ).start()

    def _look(self, thread: int) -> None:
        clock = time.pthread_getcpuclockid(thread)
        used = time.clock_gettime(clock)
        while True:
            time.sleep(_LOOK_S)
            before, used = used, time.clock_gettime(clock)
            frame = sys._current_frames().get(thread)
            # A rank that is stopped, or waits in C, uses no processor time; a spinning
            # one does, in a file of communication.
            computes = not _communicates(frame) and used - before > _LOOK_S / 1000
            operation = "" if computes or frame is None else _operation(frame)
            del frame  # it would keep what it refers to
            self._text[_OPERATION : _FIELDS.size] = operation.encode()[:32].ljust(
                32, b"\0"
            )
            if computes:
                self._row[4] += 1
            self._row[5] += 1
            if self._row[5] % _LOOKS_AT_FILE == 0 and is_over(self._path):
                _end_with_daemon()


def _communicates(frame: FrameType | None) -> bool:
    """Return True if a thread whose innermost Python function is `frame` waits in a communication."""
    return frame is not None and any(
        part in frame.f_code.co_filename for part in (*_COMMUNICATION, _CONTROL)
    )


def _operation(frame: FrameType) -> str:
    """The operation of a thread that waits in the Python function `frame`."""
    if _CONTROL in frame.f_code.co_filename:
        return "synchronisation"
    name = frame.f_code.co_name.strip("_")
    return "backward" if name.endswith(_BACKWARD) else name


def _end_with_daemon() -> None:
    """End this rank, and its daemon if that is stopped: it would not notice that the launch is over."""
    # Slurm's own daemon is not ours to end
    with suppress(ProcessLookupError, PermissionError):
        if is_stopped(os.getppid()):
            os.kill(os.getppid(), signal.SIGKILL)
    os._exit(1)


def is_stopped(pid: int) -> bool:
    """Return True if a process of this host is stopped, by a signal or a debugger."""
    try:
        return (
            Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "tT"
        )
    except OSError:
        return False


def create_heartbeats(path: Path, ranks: int) -> None:
    """Create an empty file for `ranks` ranks."""
    path.write_bytes(bytes(_FIELDS.size * ranks + len(_OVER)))


def read_heartbeats(path: Path) -> list[Beat]:
    """Read the last beat of each rank; of a file that something else cut, those that are left."""
    rows = path.read_bytes()[: -len(_OVER)]
    rows = rows[: len(rows) - len(rows) % _FIELDS.size]
    return [
        Beat(
            pid,
            Phase(phase),
            batches,
            beats,
            computed,
            _text(host),
            _text(operation),
            looks,
        )
        for pid, phase, batches, beats, computed, looks, host, operation in _FIELDS.iter_unpack(
            rows
        )
    ]


def mark_over(path: Path) -> None:
    """Tell the ranks that their launch is over: one whose daemon was stopped learns of it in no other way."""
    with suppress(OSError), path.open("r+b") as file:
        file.seek(-len(_OVER), os.SEEK_END)
        file.write(_OVER)


def is_over(path: Path) -> bool:
    """Return True if the launcher has ended the launch, or has removed its files."""
    try:
        with path.open("rb") as file:
            file.seek(-len(_OVER), os.SEEK_END)
            return file.read() == _OVER
    except FileNotFoundError:
        return True
    except OSError:
        return False


def _text(field: bytes) -> str:
    return field.rstrip(b"\0").decode(errors="replace")
