"""Heartbeats: a small file that all ranks of a launch write and the launcher reads.

A hung run shows no other sign. A stopped worker is behind those that wait for it: in batches, else in beats. One clock
reading is one beat; beats of earlier batches are not compared, as not every worker takes the snapshots.
"""

from __future__ import annotations

import mmap
import os
import platform
import struct
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

_NUMBERS = "=4q"  # process id, phase, batches, beats
_FIELDS = struct.Struct(f"{_NUMBERS}64s")  # and the host name


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


@dataclass(frozen=True)
class Beat:
    """The last heartbeat of one rank; `batches` counts within the phase, `beats` within the batch.

    While a rank connects, `batches` is the rank that it waits for, plus one; 0 if it waits for several.
    """

    pid: int
    phase: Phase
    batches: int
    beats: int
    host: str = ""

    @property
    def progress(self) -> tuple[Phase, int, int]:
        """Progress, to be compared with that of another rank of the same run."""
        return self.phase, self.batches, self.beats


class Heartbeat:
    """The row of one rank in the file."""

    def __init__(self, path: Path, rank: int) -> None:
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)
        row = memoryview(self._memory)[rank * _FIELDS.size : (rank + 1) * _FIELDS.size]
        _FIELDS.pack_into(row, 0, os.getpid(), Phase.STARTING, 0, 0, platform.node().encode()[:64])
        self._row = row[: struct.calcsize(_NUMBERS)].cast("q")

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


def create_heartbeats(path: Path, ranks: int) -> None:
    """Create an empty file for `ranks` ranks."""
    path.write_bytes(bytes(_FIELDS.size * ranks))


def read_heartbeats(path: Path) -> list[Beat]:
    """Read the last beat of each rank."""
    return [
        Beat(pid, Phase(phase), batches, beats, host.rstrip(b"\0").decode(errors="replace"))
        for pid, phase, batches, beats, host in _FIELDS.iter_unpack(path.read_bytes())
    ]
