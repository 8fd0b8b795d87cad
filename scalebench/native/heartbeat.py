"""Who still works: a small file that all ranks of a launch write and the launcher reads.

A hung run shows nothing else. A worker that stopped is behind those that wait for it: in batches, else in beats. One
clock reading is one beat; how many an earlier batch took says nothing, as not every worker takes the snapshots.
"""

from __future__ import annotations

import mmap
import os
import struct
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

_FIELDS = 4  # process id, phase, batches, beats
_ROW = 8 * _FIELDS


class Phase(IntEnum):
    """What a rank was doing when it last said so."""

    STARTING = 0
    IDLE = 1
    PREPARING = 2
    TRAINING = 3
    EVALUATING = 4
    REPORTING = 5
    FINISHED = 6


@dataclass(frozen=True)
class Beat:
    """One rank's last sign of life; `batches` counts within the phase, `beats` within the batch."""

    pid: int
    phase: Phase
    batches: int
    beats: int

    @property
    def progress(self) -> tuple[Phase, int, int]:
        """How far it has come; compares with that of a rank of the same run."""
        return self.phase, self.batches, self.beats


class Heartbeat:
    """One rank's row of the file."""

    def __init__(self, path: Path, rank: int) -> None:
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)
        self._row = memoryview(self._memory).cast("q")[rank * _FIELDS : (rank + 1) * _FIELDS]
        self._row[0] = os.getpid()

    def enter(self, phase: Phase) -> None:
        """A new phase begins."""
        self._row[3] = self._row[2] = 0
        self._row[1] = phase

    def begin_batch(self) -> None:
        """The next batch begins."""
        self._row[3] = 0
        self._row[2] += 1

    def beat(self) -> None:
        """Still here."""
        self._row[3] += 1


def create_heartbeats(path: Path, ranks: int) -> None:
    """An empty file for `ranks` ranks."""
    path.write_bytes(bytes(_ROW * ranks))


def read_heartbeats(path: Path) -> list[Beat]:
    """The last beat of each rank."""
    return [
        Beat(pid, Phase(phase), batches, beats)
        for pid, phase, batches, beats in struct.iter_unpack(f"={_FIELDS}q", path.read_bytes())
    ]
