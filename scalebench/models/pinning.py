"""The files that a study's model and cluster come from, known by their content: another content is another model.

One's own code (`--model file.py:factory`), initial weights and cluster file may change between two runs of a study, or
between a study and its repetition. Their checksums are part of the study and of each run; what the code imports is not
in them.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

from scalebench.cluster.load import own_file
from scalebench.errors import ModelError, RunError
from scalebench.models.own import check_own, is_own
from scalebench.study.spec import Training

PINS = ("model_sha256", "init_weights_sha256", "cluster_sha256")
_SHOWN = 12  # digits
Pinned = TypeVar("Pinned", bound=Training)


def pinned(training: Pinned) -> Pinned:
    """`training` with the SHA-256 of its model's file, initial weights and cluster file.

    Raises:
        ModelError: a file is not there, or is not the one whose checksum is stated.
    """
    files = _files(training)
    for key in PINS:
        if key not in files and getattr(training, key) is not None:
            of = f"cluster is {training.cluster}" if key == "cluster_sha256" else f"model is {training.model}"
            raise ModelError(f"{key}: there is no such file, as the {of}; leave it out")
    found = {key: checksum(path) for key, path in files.items()}
    for key, digest in found.items():
        stated = getattr(training, key)
        if stated not in (None, digest):
            raise ModelError(
                f"{changed(files[key], stated, digest)}; put it back, or leave {key} out of the study and begin anew "
                "with --new"
            )
    return training.model_copy(update=found)


def require_unchanged(training: Training) -> None:
    """Nothing, as long as the files are those that were pinned.

    Raises:
        RunError: one has changed since, or is gone.
    """
    for key, path in _files(training).items():
        stated = getattr(training, key)
        if stated is None:
            continue
        try:
            digest = checksum(path)
        except ModelError as error:
            raise RunError(str(error)) from None
        if digest != stated:
            raise RunError(f"{changed(path, stated, digest)}; put it back and retry, or begin anew with --new")


def changed(path: Path, before: str, now: str) -> str:
    """That another content is in `path`, in words."""
    return f"{path} has changed since the study began (sha256 {before[:_SHOWN]}, now {now[:_SHOWN]})"


def checksum(path: Path) -> str:
    """SHA-256 of the file, in hex; read again only when its size or its times have changed.

    Raises:
        ModelError: it cannot be read.
    """
    try:
        state = path.stat()
        return _checksum(path.absolute(), state.st_size, state.st_mtime_ns, state.st_ctime_ns, state.st_ino)
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from None


@lru_cache(maxsize=16)
def _checksum(path: Path, *_: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _files(training: Training) -> dict[str, Path]:
    """Key of the study -> file whose content it pins."""
    files = {}
    if is_own(training.model.name):
        files["model_sha256"] = check_own(training.model.name)
    if training.init_weights is not None:
        files["init_weights_sha256"] = training.init_weights
    cluster = own_file(training.cluster)
    if cluster is not None and (cluster.is_file() or training.cluster_sha256 is not None):
        files["cluster_sha256"] = cluster  # what else it may be is said where it is loaded
    return files
