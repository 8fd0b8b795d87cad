"""The one tree of errors: each message names what was wrong, what was expected and the next step."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterable
from pathlib import Path
from traceback import walk_tb

OWN_MODULE = "scalebench_own_"  # begins the module name of a `file.py:NAME`
_NOBODYS_OWN = {"scalebench", "torch", "numpy", *sys.stdlib_module_names}


class ScalebenchError(Exception):
    """Base of every error a user may meet; printed as one line, without a traceback."""

    exit_code = 1


class UsageError(ScalebenchError):
    """The user asked for something that cannot be: exit code 2, nothing was run."""

    exit_code = 2


class StudyError(UsageError):
    """A study file or flag is not valid."""


class DataError(UsageError):
    """A data set is missing, corrupt or too small."""


class ModelError(UsageError):
    """A model cannot be built as asked."""


class ClusterError(UsageError):
    """A cluster description is unknown, incomplete or not valid."""


class ResultsError(UsageError):
    """A results folder cannot be read or written."""


class EngineError(UsageError):
    """An engine is missing here or cannot carry what was asked of it."""


class DisturbedError(ScalebenchError):
    """Nothing could be measured, as other programs took the cores all the time."""


class RunError(ScalebenchError):
    """One run went wrong; it is recorded as a failed row and the others go on."""

    status = "failed"


class DivergedError(RunError):
    """The training loss or a weight became NaN or infinite; `everywhere`: every worker notices at this very moment."""

    status = "diverged"

    def __init__(self, message: str, *, everywhere: bool = False) -> None:
        super().__init__(message)
        self.everywhere = everywhere


def nearest(name: str, known: Iterable[str], likely: Iterable[str] = ()) -> str:
    """`did you mean 'x'?` or the list of what is known, to end an "unknown name" message; `likely` ones come first."""
    choices = sorted(known)
    for among in (sorted(likely), choices):
        if close := difflib.get_close_matches(name, among, n=1, cutoff=0.5):
            return f"did you mean {close[0]!r}?"
    return f"known: {', '.join(choices) or 'none'}"


def in_one_line(error: BaseException) -> str:
    """An error in one line, with the place it came from unless it was meant for the user.

    The place is the innermost line of a strategy or model of somebody's own where there is one, else the innermost.
    """
    text = " ".join(str(error).split()) or "no message"
    if isinstance(error, ScalebenchError):
        return text + place_in_own_code(error) if getattr(error, "status", "failed") == "failed" else text
    if isinstance(error, SystemExit):
        return f"exited with code {error.code} before reporting"
    lines = [(frame, number) for frame, number in walk_tb(error.__traceback__)]
    own = [line for line in lines if str(line[0].f_globals.get("__name__")).partition(".")[0] not in _NOBODYS_OWN]
    where = ""
    if lines:
        frame, number = (own or lines)[-1]
        where = f" ({Path(frame.f_code.co_filename).name}:{number})"
    return f"{type(error).__name__}: {text}{where}"


def place_in_own_code(error: BaseException) -> str:
    """` (file.py:12)`: the innermost line of a `file.py:NAME` that `error` came through; empty if there is none."""
    own = [
        f" ({Path(frame.f_code.co_filename).name}:{number})"
        for frame, number in walk_tb(error.__traceback__)
        if str(frame.f_globals.get("__name__")).startswith(OWN_MODULE)
    ]
    return own[-1] if own else ""
