"""Who still works: a small file that all ranks of a launch write and the launcher reads.

A hung run shows nothing else. One clock reading is one beat, so a worker that stopped is behind those that wait for it.
"""

from __future__ import annotations

import mmap
import os
import struct
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

_FIELDS = 3  # process id, phase, beats
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
    """One rank's last sign of life; `beats` counts within the phase."""

    pid: int
    phase: Phase
    beats: int


class Heartbeat:
    """One rank's row of the file."""

    def __init__(self, path: Path, rank: int) -> None:
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)
        self._row = memoryview(self._memory).cast("q")[rank * _FIELDS : (rank + 1) * _FIELDS]
        self._row[0] = os.getpid()

    def enter(self, phase: Phase) -> None:
        """A new phase begins."""
        self._row[2] = 0
        self._row[1] = phase

    def beat(self) -> None:
        """Still here."""
        self._row[2] += 1


def create_heartbeats(path: Path, ranks: int) -> None:
    """An empty file for `ranks` ranks."""
    path.write_bytes(bytes(_ROW * ranks))


def read_heartbeats(path: Path) -> list[Beat]:
    """The last beat of each rank."""
    return [
        Beat(pid, Phase(phase), beats) for pid, phase, beats in struct.iter_unpack(f"={_FIELDS}q", path.read_bytes())
    ]
