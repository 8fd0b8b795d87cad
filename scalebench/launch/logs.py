"""Logs of the processes of launches: a folder for each in that of the study, which stays where a run failed."""

from __future__ import annotations

import shutil
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from scalebench.native.job_files import HEARTBEATS
from scalebench.records.provenance import redact


def new_logs(study: Path) -> Path:
    """Return a folder for the logs of a launch that begins now, which is not made yet."""
    return study / "logs" / datetime.now(UTC).strftime("%Y%m%dT%H%M%S%f")


def remove_logs(logs: Path) -> None:
    """Remove the logs of a launch."""
    shutil.rmtree(logs, ignore_errors=True)
    with suppress(OSError):  # the folder holds logs of earlier commands
        logs.parent.rmdir()


def redact_logs(logs: Path) -> None:
    """Take names and secrets out of all files that the processes of failed launches left."""
    for path in sorted(logs.rglob("*")):
        with suppress(OSError):
            if path.name == HEARTBEATS:
                # no text: names of hosts between numbers, which a rank that has not
                # ended yet may write
                path.unlink()
            elif path.is_file() and not path.is_symlink():
                text = path.read_bytes().decode(errors="surrogateescape")
                if (known := redact(text)) != text:
                    path.write_bytes(known.encode(errors="surrogateescape"))
