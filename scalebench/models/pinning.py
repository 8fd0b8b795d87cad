"""Checksums of user-supplied files: model, strategies, initial weights and cluster.

User code (`--model file.py:factory`, `--strategy file.py:Class`), initial weights and
cluster files may change between two runs of a study, or between a study and its
repetition. Their checksums are part of the study and of each run; they do not cover
modules imported by the code.
"""

from __future__ import annotations

import hashlib
import stat
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

from scalebench.cluster.cluster_file import own_file
from scalebench.errors import ModelError, RunError
from scalebench.models.registry import check_own, is_own
from scalebench.study.spec import Run, Study, Training
from scalebench.system.user_code import strategy_file

PINS = ("model_sha256", "init_weights_sha256", "cluster_sha256")
STRATEGIES = "strategy_sha256"
_SHOWN = 12  # digits
Pinned = TypeVar("Pinned", bound=Training)


def pinned(training: Pinned) -> Pinned:
    """Return `training` with the SHA-256 of its model file, initial weights, cluster file and user strategies.

    Raises:
        ModelError: a file is missing or has another checksum than stated.
    """
    # None where a study names no such file, or no longer.
    found: dict[str, object] = dict.fromkeys(PINS)
    found |= {
        key: _checked(path, getattr(training, key))
        for key, path in _files(training).items()
    }
    if isinstance(training, Study):
        own = {
            item.name: path
            for item in training.strategies
            if (path := strategy_file(item.name))
        }
        found[STRATEGIES] = {
            name: _checked(path, training.strategy_sha256.get(name))
            for name, path in own.items()
        }
    return training.model_copy(update=found)


def require_unchanged(training: Training) -> None:
    """Raise RunError if a pinned file has changed or is missing."""
    files = _files(training)
    if isinstance(training, Run) and (own := strategy_file(training.strategy.name)):
        files[STRATEGIES] = own
    try:
        for key, path in files.items():
            if getattr(training, key) is not None:
                _checked(path, getattr(training, key))
    except ModelError as error:
        raise RunError(str(error)) from None


def _checked(path: Path, stated: str | None) -> str:
    """Return the checksum of `path`. Raises ModelError if it differs from the `stated` one."""
    digest = checksum(path)
    if stated not in (None, digest):
        raise ModelError(
            f"{changed(path, stated, digest)}; put it back, or begin anew with --new"
        )
    return digest


def changed(path: Path, before: str, now: str) -> str:
    """Return a message about the changed content of `path`."""
    return f"{path} has changed since the study began (sha256 {before[:_SHOWN]}, now {now[:_SHOWN]})"


def checksum(path: Path) -> str:
    """Return the SHA-256 of a file in hex, cached by size and times.

    Raises:
        ModelError: the file cannot be read.
    """
    try:
        state = path.stat()
        # A pipe or a device would be read without end.
        if not stat.S_ISREG(state.st_mode):
            raise ModelError(
                f"cannot read {path}: it is a folder, device or pipe; expected a file"
            )
        return _checksum(
            path.absolute(),
            state.st_size,
            state.st_mtime_ns,
            state.st_ctime_ns,
            state.st_ino,
        )
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from None


# Size, times and inode are in the key: a file that changed is read again.
@lru_cache(maxsize=16)
def _checksum(path: Path, *_: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _files(training: Training) -> dict[str, Path]:
    """Return the pinned files by key of the study."""
    files = {}
    if is_own(training.model.name):
        files["model_sha256"] = check_own(training.model.name)
    if training.init_weights is not None:
        files["init_weights_sha256"] = training.init_weights
    cluster = own_file(training.cluster)
    if cluster is not None and (
        cluster.is_file() or training.cluster_sha256 is not None
    ):
        files["cluster_sha256"] = cluster  # other values are validated at loading
    return files
