"""Samples and batches of every worker in every epoch: a pure function of sizes, options and seed.

Rows are partitioned into blocks; the block at visiting position p belongs to worker p
mod K; a worker's epoch is the sequence of its blocks, split into S batches that differ
by at most one sample. Every worker takes the same number of steps, S = ceil(max_i n_i /
b), because uneven steps hang Horovod and DDP.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, PositiveFloat

from scalebench.data.dataset import Dataset
from scalebench.data.ds_tensor import DsTensor
from scalebench.data.exchange import Ints
from scalebench.data.layout import MOVING, PairwiseRounds, cut
from scalebench.errors import DataError
from scalebench.registry import Choice, Registry
from scalebench.study.spec import Component, Training

# independent streams of random numbers
_DEAL, _ROTATE, _MIX, _IN_BLOCK, _PAIRS = range(5)
_EPOCHS_KEPT = 4  # asynchronous workers may be a few epochs apart
_IID = Component(name="iid")


class _Layout(NamedTuple):
    rows: DsTensor  # row numbers, block k of the partition
    order: Ints  # (blocks,) the block at each visiting position


class Batches(NamedTuple):
    """The batches of one worker in an epoch."""

    sizes: list[int]  # samples
    weights: list[float]  # n_i K / sum_j n_j over the workers' batches of a step
    firsts: frozenset[int]  # batches that begin a ds-tensor block


class BatchPlan:
    """Samples and batches of every worker in every epoch.

    `shuffle` is `none` (the order of the blocks), `in_block` (samples permuted inside
    each block), `rotate_blocks` (blocks permuted over workers each epoch, and
    `in_block`), `pairwise` (random pairs of blocks mixed and split each epoch) or
    `global` (a permutation of all rows over all workers each epoch); both keep block
    sizes. The order of a worker's samples depends on (seed, epoch, worker) only.

    `batch_size` is the batch per worker in use (with a global batch, the largest),
    `notes` lists adjustments. `speeds` are the workers' relative speeds, for partitions
    with `balance: speed`: shards and batches are proportional to speed, and
    `batch_per_worker` is the mean batch. The steps, S = ceil(n / (K b)), and the
    samples of a step are unchanged by it.

    Raises:
        DataError: more workers or blocks than samples, fewer blocks than workers, a shard with fewer samples than
            there are steps, an unknown partition.
    """

    def __init__(
        self,
        n: int,
        workers: int,
        *,
        seed: int,
        batch_per_worker: int | None = None,
        batch_global: int | None = None,
        blocks: int | None = None,
        shuffle: str = "in_block",
        partition: Component = _IID,
        labels: NDArray[Any] | None = None,
        speeds: Sequence[float] | None = None,
    ) -> None:
        self.n = n
        self.workers = workers
        self.seed = seed
        self.shuffle = shuffle
        self.blocks = workers if blocks is None else blocks
        self.notes: list[str] = []
        _check_counts(n, workers, self.blocks)
        rule = PARTITIONS.create(partition.name, partition.options)
        self._dealt = rule.deal(n, workers, self.blocks, labels, self._rng(_DEAL))
        if rule.by_speed:
            if shuffle == "rotate_blocks":
                raise DataError(
                    "balance: speed sizes blocks for their workers; use shuffle: in_block, none or global"
                )
            self._dealt = DsTensor(
                self._dealt.array,
                sizes_by_speed(n, self.blocks, speeds or [1.0] * workers),
            )
        self._pairs = PairwiseRounds(
            self._dealt.array,
            self._dealt.block_sizes,
            lambda epoch: self._rng(_PAIRS, epoch),
        )
        # Caches of this plan alone: as decorators they would be shared by all plans,
        # and keep them alive.
        self._layout = lru_cache(_EPOCHS_KEPT)(self._lay_out)
        self._sizes = lru_cache(_EPOCHS_KEPT)(self._shard_sizes)
        self._owners = lru_cache(_EPOCHS_KEPT)(self._find_owners)
        self._sizes_of_batches = lru_cache(_EPOCHS_KEPT)(self._cut_shards)
        self._batches = lru_cache(_EPOCHS_KEPT * workers)(self._cut_shard)
        # Whether steps follow from the samples of all workers, or from those of the
        # largest shard.
        self._in_all = batch_global is not None or rule.by_speed
        self._balanced = rule.by_speed
        self._batch = self._settle_batch(batch_per_worker, batch_global)
        self._check_steps()
        largest = self._shard_range()[1]
        self.batch_size = (
            -(-largest // self._steps_for(largest))
            if self._in_all
            else int(self._batch)
        )
        if rule.by_speed and workers > 1 and len(set(speeds or [1.0])) == 1:
            self.notes.append(
                "balance: speed has nothing to balance: virtual.slowdown names no slower worker"
            )

    @classmethod
    def of(
        cls,
        training: Training,
        workers: int,
        seed: int,
        dataset: Dataset,
        parts: int = 1,
    ) -> BatchPlan:
        """Return the plan of one run, in which `parts` consecutive workers hold a replica and take its batches.

        The workers of the plan are then the replicas, as fast as the slowest worker of
        each.
        """
        slowdown = training.virtual.slowdown
        slowest = [
            max(slowdown.get(rank, 1.0) for rank in range(first, first + parts))
            for first in range(0, workers, parts)
        ]
        return cls(
            dataset.n_train,
            len(slowest),
            seed=seed,
            batch_per_worker=training.batch_per_worker,
            batch_global=training.batch_global,
            blocks=training.number_of_blocks,
            shuffle=training.shuffle,
            partition=training.partition,
            labels=dataset.y_train if dataset.task == "classification" else None,
            speeds=[1.0 / each for each in slowest],
        )

    @property
    def rows_move(self) -> bool:
        """True if rows may change workers between epochs."""
        return self.shuffle in MOVING

    def shard_sizes(self, epoch: int) -> Ints:
        """Return the number of samples of each worker, (workers,), read-only."""
        return self._sizes(self._stage(epoch))

    def steps(self, epoch: int) -> int:
        """Return S = ceil(max_i n_i / b), or ceil(n / B) with a global batch B; equal for all workers."""
        return self._steps_for(int(self.shard_sizes(epoch).max()))

    def indices(self, epoch: int, *workers: int) -> Ints:
        """Return the row numbers of `workers` in visiting order, one worker after the other."""
        layout = self._layout(self._stage(epoch))
        chains = [layout.order[worker :: self.workers] for worker in workers]
        blocks = np.concatenate(chains)
        rows = np.concatenate([layout.rows.block(k) for k in blocks.tolist()])
        if self.shuffle in ("in_block", "rotate_blocks"):
            # Samples are permuted inside their block.
            place = np.repeat(np.arange(len(blocks)), layout.rows.block_sizes[blocks])
            samples = self.shard_sizes(epoch)
            draws = [
                self._rng(_IN_BLOCK, epoch, worker).random(samples[worker])
                for worker in workers
            ]
            rows = rows[order_by_draw(place, np.concatenate(draws))]
        return rows

    def bounds(self, epoch: int, worker: int) -> Ints:
        """Return the (S+1,) bounds in `indices` of the S batches of `worker`; sizes differ by at most one."""
        samples = int(self.shard_sizes(epoch)[worker])
        return np.concatenate([[0], np.cumsum(cut(samples, self.steps(epoch)))])

    def batch_sizes(self, epoch: int) -> Ints:
        """Return the samples of each batch, (workers, S), read-only."""
        return self._sizes_of_batches(self._stage(epoch))

    def batches(self, epoch: int, worker: int) -> Batches:
        """Return what is known of the batches of `worker` without its samples."""
        return self._batches(self._stage(epoch), worker)

    def block_starts(self, epoch: int, worker: int) -> Ints:
        """Return the positions in `indices` at which a block begins."""
        layout = self._layout(self._stage(epoch))
        sizes = layout.rows.block_sizes[layout.order[worker :: self.workers]]
        return np.cumsum(sizes) - sizes

    def owners(self, epoch: int) -> Ints:
        """Return the worker of each row, (n,), read-only; the same object while no row moves."""
        return self._owners(self._stage(epoch))

    def moved(self, epoch: int) -> Ints:
        """Return (workers, workers) counts of rows sent from worker i to j != i at the start of `epoch`."""
        if epoch == 0 or self._stage(epoch) == self._stage(epoch - 1):
            return np.zeros((self.workers, self.workers), dtype=np.int64)
        # One number for each pair of workers, so that one count finds all moves.
        pairs = self.owners(epoch - 1) * self.workers + self.owners(epoch)
        moved = np.bincount(pairs, minlength=self.workers**2).reshape(
            self.workers, self.workers
        )
        np.fill_diagonal(moved, 0)
        return moved

    def all_batch_sizes(self, epochs: int) -> set[int]:
        """Return all batch sizes in `epochs` epochs."""
        stages = (
            range(epochs) if self.shuffle == "rotate_blocks" else range(min(epochs, 1))
        )
        return {
            int(size) for epoch in stages for size in np.unique(self.batch_sizes(epoch))
        }

    def _stage(self, epoch: int) -> int:
        """Return the epoch that determines the placement of rows: 0 if rows stay with their worker."""
        return epoch if self.rows_move else 0

    def _lay_out(self, epoch: int) -> _Layout:
        order = np.arange(self.blocks)
        if self.shuffle == "rotate_blocks":
            order = self._rng(_ROTATE, epoch).permutation(self.blocks)
        if self.shuffle not in ("pairwise", "global"):
            return _Layout(self._dealt, order)
        whole = self.shuffle == "global"
        mixed = (
            self._rng(_MIX, epoch).permutation(self._dealt.array)
            if whole
            else self._pairs.rows_after(epoch)
        )
        return _Layout(DsTensor(mixed, self._dealt.block_sizes), order)

    def _shard_sizes(self, epoch: int) -> Ints:
        layout = self._layout(epoch)
        sizes = np.zeros(self.workers, dtype=np.int64)
        np.add.at(
            sizes,
            np.arange(self.blocks) % self.workers,
            layout.rows.block_sizes[layout.order],
        )
        sizes.flags.writeable = False
        return sizes

    def _cut_shards(self, epoch: int) -> Ints:
        steps = self.steps(epoch)
        whole, rest = np.divmod(self.shard_sizes(epoch), steps)
        # The first batches have the sample that is left over, as in `cut`.
        sizes = whole[:, None] + (np.arange(steps) < rest[:, None])
        sizes.flags.writeable = False
        return sizes

    def _cut_shard(self, epoch: int, worker: int) -> Batches:
        sizes = self.batch_sizes(epoch)
        weights = sizes[worker] * self.workers / sizes.sum(axis=0)
        bounds = self.bounds(epoch, worker)
        # The batch in which a block starts.
        firsts = (
            np.searchsorted(bounds, self.block_starts(epoch, worker), side="right") - 1
        )
        return Batches(
            sizes[worker].tolist(), weights.tolist(), frozenset(firsts.tolist())
        )

    def _find_owners(self, epoch: int) -> Ints:
        layout = self._layout(epoch)
        worker_of_block = np.empty(self.blocks, dtype=np.int64)
        worker_of_block[layout.order] = np.arange(self.blocks) % self.workers
        owners = np.empty(self.n, dtype=np.int64)
        owners[layout.rows.array] = np.repeat(worker_of_block, layout.rows.block_sizes)
        owners.flags.writeable = False
        return owners

    def _rng(self, *stream: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, *stream])

    def _steps_for(self, largest_shard: int) -> int:
        """Return ceil(n_i / b); ceil(n / B) with a global batch, or with batches by speed, B = K b."""
        samples = (
            Fraction(self.n, self.workers) if self._in_all else Fraction(largest_shard)
        )
        return math.ceil(samples / self._batch)

    def _shard_range(self) -> tuple[int, int]:
        """Return the smallest and largest shard over all epochs."""
        if self.shuffle != "rotate_blocks":
            sizes = self.shard_sizes(0)
            return int(sizes.min()), int(sizes.max())
        # Bounds over all epochs: the smallest blocks may meet on one worker, and so may
        # the largest.
        ascending = np.sort(self._dealt.block_sizes)
        fewest = self.blocks // self.workers
        most = -(-self.blocks // self.workers)
        return int(ascending[:fewest].sum()), int(ascending[-most:].sum())

    def _settle_batch(self, per_worker: int | None, in_all: int | None) -> Fraction:
        if in_all is not None:
            asked = in_all
            most = self.n
            name = "batch_global"
            of = f"{self.n} samples"
        else:
            assert per_worker is not None, "a training has one of the two"
            most = (
                -(-self.n // self.workers) if self._balanced else self._shard_range()[1]
            )
            asked = per_worker
            name = "batch"
            of = f"shard of {most}"
        if asked > most:
            self.notes.append(
                f"{name} {asked} is larger than the {of}: reduced to {most}"
            )
        return Fraction(min(asked, most), 1 if in_all is None else self.workers)

    def _check_steps(self) -> None:
        smallest, largest = self._shard_range()
        steps = self._steps_for(largest)
        if smallest >= steps:
            return
        if self._batch < 1:
            raise DataError(
                f"batch_global {int(self._batch * self.workers)} is smaller than {self.workers} workers; "
                f"use a global batch of at least {self.workers}"
            )
        if self._balanced:
            raise DataError(
                f"balance: speed leaves the slowest worker {smallest} samples for {steps} steps; use a larger batch, "
                "fewer workers or balance: equal"
            )
        raise DataError(
            f"a shard of {smallest} samples cannot fill the {steps} steps that the largest shard ({largest} samples, "
            f"batch {float(self._batch):g}) takes; use a larger batch, fewer workers or a multiple of workers as blocks"
        )


def _check_counts(n: int, workers: int, blocks: int) -> None:
    if workers > n:
        raise DataError(
            f"{workers} workers but {n} training samples; use at most {n} workers or a larger data set"
        )
    if blocks < workers:
        raise DataError(
            f"{blocks} blocks but {workers} workers; use blocks: {workers} or more, or at most {blocks} workers"
        )
    if blocks > n:
        raise DataError(
            f"{blocks} blocks but {n} training samples; use blocks: {n} or fewer"
        )


class Partition(Choice):
    """Rule that distributes rows; its fields are its options.

    With the option `balance: speed` a worker's share of the rows is proportional to its
    speed (Besch and Pohl, PDP 1995, "flexible" data parallelism), and so are its
    batches: slower workers have fewer samples in a step, which takes equal time as far
    as it is proportional to samples. A fixed cost of c seconds a step is not balanced:
    where steps take c + n_i t, a worker that is f times slower needs f c + n_i f t.
    """

    @property
    def by_speed(self) -> bool:
        """True if shares are proportional to the workers' speeds."""
        return getattr(self, "balance", "equal") == "speed"

    def deal(
        self,
        n: int,
        workers: int,
        blocks: int,
        labels: NDArray[Any] | None,
        rng: np.random.Generator,
    ) -> DsTensor:
        """Return the row numbers 0..n-1, each once, in `blocks` blocks. Block k belongs to worker k mod workers."""
        raise NotImplementedError


Balance = Annotated[
    Literal["equal", "speed"],
    Field(
        description="speed: shards and batches in proportion to the workers' speeds, by virtual.slowdown"
    ),
]
PARTITIONS: Registry[Partition] = Registry(
    "partition", DataError, __name__, "scalebench.partitions"
)


@PARTITIONS.add
class _Iid(Partition):
    """Equal blocks of one seeded permutation of the rows."""

    name = "iid"
    summary = "rows permuted once, equal blocks"

    balance: Balance = "equal"

    def deal(
        self,
        n: int,
        workers: int,
        blocks: int,
        labels: NDArray[Any] | None,
        rng: np.random.Generator,
    ) -> DsTensor:
        return DsTensor(rng.permutation(n), blocks)


@PARTITIONS.add
class _ByOrder(Partition):
    """Equal blocks of the rows in the order of the file."""

    name = "by_order"
    summary = "rows as they lie in the file, equal blocks"

    balance: Balance = "equal"

    def deal(
        self,
        n: int,
        workers: int,
        blocks: int,
        labels: NDArray[Any] | None,
        rng: np.random.Generator,
    ) -> DsTensor:
        return DsTensor(np.arange(n), blocks)


@PARTITIONS.add
class Dirichlet(Partition):
    """Label skew: the rows of each class are split over workers in proportions drawn from Dirichlet(alpha, ..., alpha).

    Hsu, Qi, Brown 2019 (arXiv 1909.06335). Small alpha: few classes per worker; large
    alpha: nearly iid. Shards differ in size. A worker's rows are permuted and split
    into its blocks.
    """

    name = "dirichlet"
    summary = "label skew: class proportions per worker from Dirichlet(alpha); shards differ in size"

    alpha: PositiveFloat = 0.5

    def deal(
        self,
        n: int,
        workers: int,
        blocks: int,
        labels: NDArray[Any] | None,
        rng: np.random.Generator,
    ) -> DsTensor:
        if labels is None or labels.ndim != 1:
            raise DataError(
                "partition dirichlet needs class labels; use partition: iid for regression"
            )
        shares: list[list[Ints]] = [[] for _ in range(workers)]
        for label in np.unique(labels):
            rows = rng.permutation(np.flatnonzero(labels == label))
            proportions = rng.dirichlet(np.full(workers, self.alpha))
            edges = np.rint(np.cumsum(proportions)[:-1] * len(rows)).astype(np.int64)
            for share, part in zip(shares, np.split(rows, edges), strict=True):
                share.append(part)
        dealt: list[Ints] = [np.empty(0, np.int64)] * blocks
        for worker, share in enumerate(shares):
            # Permuted once more: the rows of a class lie together, and would fill a
            # block.
            own = rng.permutation(np.concatenate(share))
            mine = range(worker, blocks, workers)
            if len(own) < len(mine):
                raise DataError(
                    f"partition dirichlet(alpha={self.alpha:g}) leaves worker {worker} of {workers} with "
                    f"{len(own)} samples for {len(mine)} block(s); use a larger alpha, fewer workers or another seed"
                )
            edges_of_blocks = np.cumsum(cut(len(own), len(mine)))[:-1]
            for block, part in zip(mine, np.split(own, edges_of_blocks), strict=True):
                dealt[block] = part
        return DsTensor(np.concatenate(dealt), [len(block) for block in dealt])


def order_by_draw(places: Ints, draws: NDArray[np.float64]) -> Ints:
    """Return the order by place and by draw (from 0 to below 1) at each place, by one sort in place of two."""
    keys = places + draws
    order = np.argsort(keys, kind="stable")
    ascending = keys[order]
    # Sums are rounded: different draws may have equal ones.
    if (ascending[1:] == ascending[:-1]).any():
        return np.lexsort((draws, places))
    return order


def sizes_by_speed(n: int, blocks: int, speeds: Sequence[float]) -> list[int]:
    """Return sizes of `blocks` blocks, block k of worker k mod K; worker i has n speed_i / sum_j speed_j rows.

    Fractions of a row go to the largest remainders. Blocks of one worker differ by at
    most one row.

    Raises:
        DataError: a worker is so slow that its blocks would be empty.
    """
    workers = len(speeds)
    exact = n * np.asarray(speeds, dtype=np.float64) / sum(speeds)
    shares = np.floor(exact).astype(np.int64)
    # Largest remainders: one row more where most was rounded off.
    shares[np.argsort(shares - exact, kind="stable")[: n - shares.sum()]] += 1
    sizes = [0] * blocks
    for worker, share in enumerate(shares.tolist()):
        own = range(worker, blocks, workers)
        if share < len(own):
            raise DataError(
                f"balance: speed leaves worker {worker}, {min(speeds) / max(speeds):g} times as fast as the fastest, "
                f"{share} samples for {len(own)} block(s); use balance: equal or a larger data set"
            )
        for block, size in zip(own, cut(share, len(own)), strict=True):
            sizes[block] = int(size)
    return sizes
