"""Meters of one worker: time, communication and loss of each epoch, from its clock and communicator."""

from __future__ import annotations

import math
from collections import Counter, defaultdict

from scalebench.comm.base import Communicator
from scalebench.errors import DivergedError
from scalebench.system.clock import Clock, Ledger
from scalebench.training.outcome import EpochReport


class Meters:
    """Reports of successive epochs; each has the differences to the previous one."""

    def __init__(self, rank: int, clock: Clock, comm: Communicator) -> None:
        self._rank, self._clock, self._comm = rank, clock, comm
        self.open()

    def open(self) -> None:
        """Reset all counts."""
        self.epochs: list[EpochReport] = []
        self._ledger = Ledger()
        self._counted = (0, 0)
        self._elapsed = 0.0
        self.histograms: defaultdict[str, Counter[int]] = defaultdict(Counter)
        self._stale: list[int] = []

    def observe(self, name: str, value: int) -> None:
        """Count `value` in the histogram `name`; `staleness` is also summarised for each epoch."""
        self.histograms[name][value] += 1
        if name == "staleness":
            self._stale.append(value)

    def close_epoch(
        self, epoch: int, elapsed_s: float, train_loss: float | None, *, poisoned_everywhere: bool = False
    ) -> None:
        """Add the report of `epoch`, which ended after `elapsed_s` seconds of training.

        Raises:
            DivergedError: the loss is not finite, or the weights of all workers are not (`poisoned_everywhere`).
        """
        ledger, before = self._clock.ledger.copy(), self._ledger
        counted = (self._comm.collectives, self._comm.bytes_sent)
        self.epochs.append(
            EpochReport(
                epoch=epoch,
                elapsed_s=elapsed_s,
                epoch_s=elapsed_s - self._elapsed,
                compute_s=ledger.compute_s - before.compute_s,
                comm_s=ledger.comm_s - before.comm_s,
                wait_s=ledger.wait - before.wait,
                data_s=ledger.data_s - before.data_s,
                train_loss=train_loss,
                syncs=counted[0] - self._counted[0],
                bytes_sent=counted[1] - self._counted[1],
                mean_staleness=sum(self._stale) / len(self._stale) if self._stale else None,
                max_staleness=max(self._stale, default=None),
            )
        )
        self._stale.clear()
        self._ledger, self._counted, self._elapsed = ledger, counted, elapsed_s
        if train_loss is not None and not math.isfinite(train_loss):
            message = f"worker {self._rank}: the training loss is {train_loss} in epoch {epoch + 1}"
            raise DivergedError(message, everywhere=poisoned_everywhere)
        if poisoned_everywhere:
            raise DivergedError(f"the weights are not finite after epoch {epoch + 1}", everywhere=True)
