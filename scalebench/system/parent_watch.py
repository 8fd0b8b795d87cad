"""Start of child processes that end with their parent and ignore its signals."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess

# what the children need, imported once in the process that they are forked from
PRELOADED = (
    "scalebench.virtual.engine",
    "scalebench.calibration.steps_under_load",
)
_PR_SET_PDEATHSIG = 1
# loaded at import, as no library may be loaded between fork and exec
_LIBC = ctypes.CDLL(None)


def end_with_parent() -> None:
    """End this child process when its parent ends, even by SIGKILL; called before exec."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def end_with_launcher() -> None:
    """Kill this rank when the process that started it (of mpirun, srun or torchrun) ends, at once if it has already.

    A rank that imports while its launcher is killed would otherwise wait for its peers
    for ever.
    """
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == 1:
        os._exit(1)


def preloaded_forkserver() -> ForkServerContext:
    """Return a multiprocessing context that forks from a process with torch imported.

    Saves 2 to 3 seconds of imports in each child; forking this process itself is not
    safe if it has threads.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["scalebench.system.forkserver_preload"])
    # Python's tracker of resources unblocks SIGINT behind its start, and with it in a
    # forkserver that is started next.
    resource_tracker.ensure_running()
    return context


def start_forkserver() -> None:
    """Start the forkserver, which imports torch in the background."""
    preloaded_forkserver()
    with signals_blocked():
        forkserver.ensure_running()


def exit_with_parent() -> None:
    """End this multiprocessing child when the process that requested it ends, at once if it has ended already.

    The kernel only reports the end of the forkserver, so that an idle thread waits for
    the requesting process.
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
def signals_blocked() -> Iterator[None]:
    """Block SIGINT and SIGUSR1 for processes started in the context; SIGTERM still ends them.

    A terminal sends Ctrl-C to all processes of the group, and the signal mask is
    inherited.
    """
    # Children inherit the mask; this process takes its own back right after.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGUSR1})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
