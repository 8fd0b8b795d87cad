"""Exceptions of scalebench; each message names the problem, the expected value and the next step."""

from __future__ import annotations

import errno
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from traceback import walk_tb

OWN_MODULE = "scalebench_own_"  # begins the module name of a `file.py:NAME`
# frames of these say where, but not what to change
_LIBRARIES = {"scalebench", "torch", "numpy", *sys.stdlib_module_names}
_USED_UP = {
    errno.EMFILE: "open files (ulimit -n)",
    errno.ENFILE: "open files on this machine",
    errno.ENOMEM: "memory (ulimit -v, or that of the job)",
    errno.EAGAIN: "processes or threads (ulimit -u)",
    errno.EFBIG: "bytes in a file (ulimit -f)",
    errno.ENOSPC: "room on the disk",
    errno.EDQUOT: "room in the quota",
}
# of libraries
_NO_MEMORY = re.compile(
    r"(can't|cannot|unable to) (allocate|map) |failed to map segment", re.IGNORECASE
)
_NO_THREAD = re.compile("can't start new thread")


class ScalebenchError(Exception):
    """Base of all errors for users; printed as one line, without a traceback."""

    exit_code = 1


class UsageError(ScalebenchError):
    """Invalid request: exit code 2, nothing was run."""

    exit_code = 2


class StudyError(UsageError):
    """Invalid study file or flag."""


class DataError(UsageError):
    """Missing, corrupt or too small data set."""


class ModelError(UsageError):
    """Model that cannot be built."""


class ClusterError(UsageError):
    """Unknown, incomplete or invalid cluster description."""


class ResultsError(UsageError):
    """Results folder that cannot be read or written."""


class EngineError(UsageError):
    """Engine that is not installed or cannot run the strategy."""


class DisturbedError(ScalebenchError):
    """Measurement that failed because other programs used the cores all the time."""


class RunError(ScalebenchError):
    """Failure of one run; it is recorded as a failed row and the others continue."""

    status = "failed"


class TimeLimitError(RunError):
    """Run that took longer than its time limit."""

    status = "timeout"


class DivergedError(RunError):
    """NaN or infinite training loss or weight; `everywhere` if every worker detects it at the same step."""

    status = "diverged"

    def __init__(self, message: str, *, everywhere: bool = False) -> None:
        super().__init__(message)
        self.everywhere = everywhere


@contextmanager
def writing(
    path: object, step: str = "choose another folder with --output"
) -> Iterator[None]:
    """Replace an OSError inside by a ResultsError that names `path`, the reason and the next step."""
    try:
        yield
    except OSError as error:
        raise ResultsError(
            f"cannot write {path}: {error.strerror or error}{step and f'; {step}'}"
        ) from None


@contextmanager
def reading(path: object) -> Iterator[None]:
    """Replace an OSError inside by a ResultsError that names `path` and the reason."""
    try:
        yield
    except OSError as error:
        raise ResultsError(f"cannot read {path}: {error.strerror or error}") from None


def nearest(name: str, known: Iterable[str], likely: Iterable[str] = ()) -> str:
    """Return the end of an "unknown name" message: `did you mean 'x'?`, `likely` names first, or the known names.

    A name with which known ones begin, as the models of a device or `cores_per_node`
    for `cores`, stands for these.
    """
    import difflib  # not for commands that succeed

    choices = sorted(known)
    variants = [
        choice for choice in choices if choice.startswith((f"{name}-", f"{name}_"))
    ]
    if variants:
        return f"did you mean {' or '.join(map(repr, variants))}?"
    # a misspelt key is often the one that is missing
    for among in (sorted(likely), choices):
        if close := difflib.get_close_matches(name, among, n=1, cutoff=0.5):
            return f"did you mean {close[0]!r}?"
    return f"known: {', '.join(choices) or 'none'}"


def in_one_line(error: BaseException) -> str:
    """Return an error as one line, with its place in the code unless it is a ScalebenchError.

    The place is the innermost line of a user-supplied strategy or model if there is
    one, else the innermost line.
    """
    text = " ".join(str(error).split()) or "no message"
    # its message says what to do, which a place in our code would bury
    if isinstance(error, ScalebenchError):
        return (
            text + place_in_own_code(error)
            if getattr(error, "status", "failed") == "failed"
            else text
        )
    # a user's model or script may call sys.exit
    if isinstance(error, SystemExit):
        where = place_in_own_code(error)
        if isinstance(error.code, str):
            return f"exited before reporting: {text}{where}"
        return f"exited with code {error.code or 0} before reporting{where}"
    lines = [(frame, number) for frame, number in walk_tb(error.__traceback__)]
    own = [
        line
        for line in lines
        if str(line[0].f_globals.get("__name__")).partition(".")[0] not in _LIBRARIES
    ]
    where = ""
    if lines:
        frame, number = (own or lines)[-1]
        where = f" ({Path(frame.f_code.co_filename).name}:{number})"
    return f"{type(error).__name__}: {text}{where}"


def used_up(error: BaseException) -> str:
    """Return a line that names the resource of which `error` says that there is no more, and the limit to raise."""
    what = _USED_UP.get(error.errno or 0, "") if isinstance(error, OSError) else ""
    # torch raises RuntimeError where malloc fails, which only its text tells
    if isinstance(error, MemoryError) or _NO_MEMORY.search(str(error)):
        what = _USED_UP[errno.ENOMEM]
    elif _NO_THREAD.search(str(error)):
        what = _USED_UP[errno.EAGAIN]
    said = " ".join(str(error).split())
    return (
        f"no more {what}: raise the limit or free some, and the same command goes on ({said})"
        if what
        else ""
    )


def place_in_own_code(error: BaseException) -> str:
    """Return ` (file.py:12)`, the innermost line of user code in the traceback; empty if there is none."""
    own = [
        f" ({Path(frame.f_code.co_filename).name}:{number})"
        for frame, number in walk_tb(error.__traceback__)
        if str(frame.f_globals.get("__name__")).startswith(OWN_MODULE)
    ]
    return own[-1] if own else ""
