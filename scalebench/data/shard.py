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

_EPOCHS_APART = 3  # of workers, for which samples of all are held
_ALIGNMENT = 64  # bytes, of tensors that torch allocates


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


class Rows:
    """The training samples of a data set, of which some rows are read as contiguous tensors on `device`."""

    def __init__(
        self, dataset: Dataset, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._x = DsTensor(dataset.x_train)
        self._y = DsTensor(dataset.y_train)
        self._dtypes = (
            dtype,
            torch.int64 if dataset.task == "classification" else dtype,
        )
        self._device = device
        # a whole number of rows, whatever their length, that ends where a tensor may begin
        self.aligned = _ALIGNMENT // min(dtype.itemsize for dtype in self._dtypes)

    def read(self, rows: Ints) -> tuple[Tensor, Tensor]:
        """Return copies of `rows` of x, in the dtype of the run, and of y."""
        x, y = (
            torch.from_numpy(source.rows(rows))
            .to(device=self._device, dtype=dtype)
            .contiguous()
            for source, dtype in zip((self._x, self._y), self._dtypes, strict=True)
        )
        return x, y


class LaidOut:
    """The samples of all workers of one process, whose rows stay: an epoch is laid out for all in one call.

    It is held until each worker has taken its part. Workers that are many epochs behind
    the first read theirs alone.
    """

    def __init__(self, rows: Rows, plan: BatchPlan) -> None:
        self._rows, self._plan = rows, plan
        self._parts: dict[int, dict[int, tuple[Tensor, Tensor]]] = {}
        self._newest = -1

    def part(self, epoch: int, worker: int) -> tuple[Tensor, Tensor]:
        """Return x and y of `worker` in visiting order of `epoch`."""
        if epoch > self._newest:
            self._parts[epoch] = self._lay_out(epoch)
            self._newest = epoch
            self._parts.pop(epoch - _EPOCHS_APART, None)
        parts = self._parts.get(epoch, {})
        if worker not in parts:
            return self._rows.read(self._plan.indices(epoch, worker))
        part = parts.pop(worker)
        if not parts:
            del self._parts[epoch]
        return part

    def _lay_out(self, epoch: int) -> dict[int, tuple[Tensor, Tensor]]:
        sizes = self._plan.shard_sizes(epoch)
        # Products of unaligned samples may differ in the last bit from those of a worker
        # that holds its samples alone.
        aligned = -(-sizes // self._rows.aligned) * self._rows.aligned
        before = np.cumsum(aligned - sizes) - (aligned - sizes)
        rows = np.zeros(aligned.sum(), dtype=np.int64)
        rows[np.arange(sizes.sum()) + np.repeat(before, sizes)] = self._plan.indices(
            epoch, *range(self._plan.workers)
        )
        x, y = self._rows.read(rows)
        # torch.split takes twice as long
        parts = (each.split_with_sizes(aligned.tolist()) for each in (x, y))
        return {
            worker: (of_x[:samples], of_y[:samples])
            for worker, (samples, of_x, of_y) in enumerate(
                zip(sizes.tolist(), *parts, strict=True)
            )
        }


class Shard:
    """Rows of `worker` by `plan`, as contiguous tensors on `device`, those that are `laid_out` for all if given.

    Other rows are read from the data set at the first epoch only; afterwards they are
    sent between workers.
    """

    def __init__(
        self,
        dataset: Dataset,
        plan: BatchPlan,
        worker: int,
        dtype: torch.dtype,
        device: torch.device,
        laid_out: LaidOut | None = None,
    ) -> None:
        self._laid_out = laid_out
        if laid_out is None:
            self._rows_of_all = Rows(dataset, dtype, device)
        self._plan = plan
        self._worker = worker
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
        if self._laid_out is None:
            self._x, self._y = self._moved_to(epoch, exchange)
        else:
            self._x, self._y = self._laid_out.part(epoch, self._worker)
        self._epoch = epoch
        self._versions = (self._x._version, self._y._version)
        return self._x, self._y

    def _moved_to(self, epoch: int, exchange: Exchange | None) -> tuple[Tensor, Tensor]:
        before, self._rows = self._rows, self._plan.indices(epoch, self._worker)
        if self._epoch < 0:
            return self._rows_of_all.read(self._rows)
        # From the second epoch on rows come from other workers, not from the data set.
        owners = self._plan.owners(self._epoch), self._plan.owners(epoch)
        x, y = moved(
            [self._x, self._y],
            before,
            self._rows,
            owners,
            self._plan.workers,
            exchange,
        )
        return x, y

    def _require_unchanged(self) -> None:
        """Raise RunError if samples have been changed in place: batches are views of them, in every epoch."""
        if self._epoch >= 0 and (self._x._version, self._y._version) != self._versions:
            raise RunError(
                "the training samples were changed in place, by the model's forward or by the strategy; compute with "
                "copies of a batch, x = (x - 1) / 2 where x -= 1 stands"
            )
