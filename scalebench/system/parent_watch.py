"""Starts this program's own children quickly, and keeps them from outliving it or hearing what only it should hear."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess

_IMPORTED_ONCE = ["scalebench.system.forkserver_preload", "scalebench.virtual.engine", "scalebench.virtual.calibration"]
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)  # loaded here: between fork and exec nothing may be


def end_with_parent() -> None:
    """In a child, before its program: end when the parent does, even by SIGKILL. No orphan trains on for hours."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def preloaded_forkserver() -> ForkServerContext:
    """The context whose processes are forked from one that has imported torch and does nothing else.

    Importing takes 2 to 3 seconds of a core, once instead of in every process; to fork this process itself, which may
    run threads, would not be safe.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED_ONCE)
    return context


def start_forkserver() -> None:
    """Let it begin to import, while this process does something else."""
    preloaded_forkserver()
    with unheard():
        forkserver.ensure_running()


def follow() -> None:
    """In a process that multiprocessing started: die when its parent does, now if it is dead already.

    The kernel reports only the death of the preloaded process, which lives as long as any child could ask it for
    children: an idle thread waits for the end of the process that asked for this one.
    """
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = multiprocessing.parent_process()
    if parent is None or not parent.is_alive():
        os._exit(1)
    threading.Thread(target=_end_after, args=(parent,), daemon=True).start()


def _end_after(parent: BaseProcess) -> None:
    parent.join()
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
