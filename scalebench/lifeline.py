"""Keeps children from outliving their parent, and from hearing what only the parent should hear."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)  # loaded here: between fork and exec nothing may be


def end_with_parent() -> None:
    """In a child, before its program: end when the parent does, even by SIGKILL. No orphan trains on for hours."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def follow(parent: int) -> None:
    """In a process that multiprocessing started: die when the process `parent` does, now if it is dead already."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


@contextmanager
def unheard() -> Iterator[None]:
    """Processes that are started inside never hear Ctrl-C or SIGUSR1: their parent decides what becomes of them.

    A terminal sends Ctrl-C to all of them, and the mask is inherited. SIGTERM still ends them.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGUSR1})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
