"""Interruption of a study by signals: finish the runs under way, or abandon them on a second signal.

After SIGINT (Ctrl-C), SIGTERM or SIGUSR1 (a scheduler's warning) runs under way are
finished and kept, and no other begins. A second Ctrl-C abandons them, and so does the
end of the grace period after SIGTERM: abandoned runs leave no row, as if the command
had been killed. A third Ctrl-C exits at once.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType
from typing import Any

GRACE_S = 20.0  # after SIGTERM: Slurm kills 30 s after it by default
_ECHO_S = 0.3  # `timeout`, and some wrappers, deliver one signal twice
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class AbandonedError(KeyboardInterrupt):
    """Raised wherever the program is, by the signal that abandons the runs under way; `signum` is the first one."""

    def __init__(self, signum: int | None = None) -> None:
        super().__init__()
        self.signum = signum


class Interruption:
    """Handles signals while a study runs; `signum` is the first one received.

    Only in the main thread. A signal that was ignored before (as by nohup) stays
    ignored. `in_job`: the end of the parent, the shell of a batch job, is a SIGTERM
    too, as schedulers may send that to the shell alone.
    """

    def __init__(
        self,
        grace_s: float = GRACE_S,
        say: Callable[[str], None] | None = None,
        *,
        in_job: bool = False,
    ) -> None:
        self.signum: int | None = None
        self._shell = os.getppid() if in_job else None
        self._grace_s, self._say = grace_s, say or _say
        self._heard_at = 0.0
        self._under_way = self._shielded = self._owed = self._abandoned = False
        self._before: dict[int, Any] = {}
        self._timer_before: tuple[float, float] | None = None

    def asked(self) -> bool:
        """Return True if no further run should begin."""
        if self._shell is not None and self._shell != os.getppid():
            self.end_with_job()
        return self.signum is not None

    def end_with_job(self) -> None:
        """Do as after SIGTERM: the job of this command is ending."""
        if self.signum is None:
            self.signum, self._heard_at = signal.SIGTERM, time.monotonic()
            self._say("stopping: the job of the scheduler is ending")
            self._set_grace(signal.SIGTERM)

    @contextmanager
    def runs_under_way(self) -> Iterator[None]:
        """Let runs inside finish after the first signal; outside, the first signal abandons at once."""
        self._under_way = True
        try:
            yield
        finally:
            self._under_way = False

    @contextmanager
    def shielded(self) -> Iterator[None]:
        """Delay abandoning until the block has ended."""
        self._shielded = True
        try:
            yield
        finally:
            self._shielded = False
            if self._owed:
                self._abandon()

    def __enter__(self) -> Interruption:
        if threading.current_thread() is threading.main_thread():
            for signum in (*_SIGNALS, signal.SIGALRM):
                if signal.getsignal(signum) is not signal.SIG_IGN:
                    self._before[signum] = signal.signal(signum, self._hear)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._timer_before is not None:
            signal.setitimer(signal.ITIMER_REAL, *self._timer_before)
        for signum, handler in self._before.items():
            signal.signal(signum, handler)

    def _hear(self, signum: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if signum == signal.SIGALRM:
            self._abandon()
        elif self.signum is None:
            self.signum, self._heard_at = signum, now
            if self._under_way:
                self._say(_PROMISE[signum].format(grace=self._grace_s))
                self._set_grace(signum)
            else:
                self._abandon()
        elif now - self._heard_at < _ECHO_S:
            return
        elif signum != signal.SIGINT:
            self._set_grace(signum)
        elif self._abandoned:
            # Without cleaning up: a third Ctrl-C means at once.
            os._exit(128 + signum)
        else:
            self._heard_at = now
            self._say("abandoning what is under way")
            self._abandon()

    def _set_grace(self, signum: int) -> None:
        if signum == signal.SIGTERM and self._timer_before is None:
            self._timer_before = signal.setitimer(signal.ITIMER_REAL, self._grace_s)

    def _abandon(self) -> None:
        if self._abandoned:
            return
        if self._shielded:
            self._owed = True
            return
        self._abandoned, self._owed = True, False
        raise AbandonedError(self.signum)


# Printed while ranks start, too, before any run has begun.
_PROMISE: dict[int, str] = {
    signal.SIGINT: "stopping: any run that has begun is finished and kept; Ctrl-C again abandons it",
    signal.SIGTERM: "stopping (SIGTERM): any run that has begun has {grace:g} s to finish",
    signal.SIGUSR1: "stopping (SIGUSR1): any run that has begun is finished and kept",
}


def _say(text: str) -> None:
    """Write a line to standard error without Python's buffers, which may be in use in a signal handler."""
    # over the bar and the ^C behind it, which else stay
    line_anew = "\r\x1b[2K" if sys.stderr.isatty() else ""
    with suppress(OSError):
        os.write(2, f"{line_anew}{text}\n".encode())
