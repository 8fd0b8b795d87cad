"""Samples of one worker in memory, in visiting order, so that a batch is a slice."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from scalebench.data.batch_plan import BatchPlan
from scalebench.data.dataset import Dataset
from scalebench.data.ds_tensor import DsTensor
from scalebench.data.exchange import Exchange, Ints, moved
from scalebench.errors import RunError


def equal_batches(
    starts: Ints, samples: int, batch: int
) -> tuple[list[tuple[int, int]], set[int]]:
    """Return (begin, end) of batches inside blocks, and the indices of the first batches of blocks.

    A block of m samples that begins at one of `starts` has c = ceil(m / batch) batches
    of floor(m / c) samples; its last m mod c samples are dropped, as in dislib.
    """
    slices: list[tuple[int, int]] = []
    firsts: set[int] = set()
    for start, end in pairwise([*starts.tolist(), samples]):
        firsts.add(len(slices))
        count = -(-(end - start) // batch)
        size = (end - start) // count
        slices += [
            (start + size * place, start + size * (place + 1)) for place in range(count)
        ]
    return slices, firsts


class Shard:
    """Rows of `worker` by `plan`, as contiguous tensors on `device`.

    Rows are read from the data set at the first epoch only; afterwards they are sent
    between workers.
    """

    def __init__(
        self,
        dataset: Dataset,
        plan: BatchPlan,
        worker: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._x_all = DsTensor(dataset.x_train)
        self._y_all = DsTensor(dataset.y_train)
        self._y_dtype = torch.int64 if dataset.task == "classification" else dtype
        self._plan = plan
        self._worker = worker
        self._dtype = dtype
        self._device = device
        self._epoch = -1
        self._rows: Ints = np.empty(0, dtype=np.int64)
        self._x = self._y = torch.empty(0)
        self._versions = (0, 0)  # torch counts the changes of a tensor and of its views

    def epoch(
        self, epoch: int, exchange: Exchange | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return x (n_i, ...) in the run's dtype and y in visiting order of `epoch`; valid until the next call.

        `exchange` sends tensor i to worker i and returns the tensors of all workers. It
        is called twice (x, then y) if and only if rows move between the current epoch
        and `epoch`, on all workers or on none.
        """
        self._require_unchanged()
        if epoch == self._epoch:
            return self._x, self._y
        rows = self._plan.indices(epoch, self._worker)
        if self._epoch < 0:
            self._x = self._load(self._x_all, rows, self._dtype)
            self._y = self._load(self._y_all, rows, self._y_dtype)
        else:
            # From the second epoch on rows come from other workers, not from the data
            # set.
            owners = self._plan.owners(self._epoch), self._plan.owners(epoch)
            self._x, self._y = moved(
                [self._x, self._y],
                self._rows,
                rows,
                owners,
                self._plan.workers,
                exchange,
            )
        self._rows, self._epoch = rows, epoch
        self._versions = (self._x._version, self._y._version)
        return self._x, self._y

    def _require_unchanged(self) -> None:
        """Raise RunError if samples have been changed in place: batches are views of them, in every epoch."""
        if self._epoch >= 0 and (self._x._version, self._y._version) != self._versions:
            raise RunError(
                "the training samples were changed in place, by the model's forward or by the strategy; compute with "
                "copies of a batch, x = (x - 1) / 2 where x -= 1 stands"
            )

    def _load(self, source: DsTensor, rows: Ints, dtype: torch.dtype) -> Tensor:
        return (
            torch.from_numpy(source.rows(rows))
            .to(device=self._device, dtype=dtype)
            .contiguous()
        )
