"""Partitions: distribution of the rows of a data set over blocks before training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, PositiveFloat

from scalebench.data.ds_tensor import DsTensor
from scalebench.data.exchange import Ints
from scalebench.data.layout import cut
from scalebench.errors import DataError
from scalebench.registry import Choice, Registry


class Partition(Choice):
    """Rule that distributes rows; its fields are its options.

    With the option `balance: speed` a worker's share of the rows is proportional to its speed (Besch and Pohl, PDP
    1995, "flexible" data parallelism), and so are its batches: slower workers have fewer samples in a step, which takes
    equal time as far as it is proportional to samples. A fixed cost of c seconds a step is not balanced: where steps
    take c + n_i t, a worker that is f times slower needs f c + n_i f t.
    """

    @property
    def by_speed(self) -> bool:
        """True if shares are proportional to the workers' speeds."""
        return getattr(self, "balance", "equal") == "speed"

    def deal(
        self, n: int, workers: int, blocks: int, labels: NDArray[Any] | None, rng: np.random.Generator
    ) -> DsTensor:
        """Return the row numbers 0..n-1, each once, in `blocks` blocks. Block k belongs to worker k mod workers."""
        raise NotImplementedError


Balance = Annotated[
    Literal["equal", "speed"],
    Field(description="speed: shards and batches in proportion to the workers' speeds, by virtual.slowdown"),
]
PARTITIONS: Registry[Partition] = Registry("partition", DataError, __name__, "scalebench.partitions")


@PARTITIONS.add
class Iid(Partition):
    """Equal blocks of one seeded permutation of the rows."""

    name = "iid"
    summary = "rows permuted once, equal blocks"

    balance: Balance = "equal"

    def deal(
        self, n: int, workers: int, blocks: int, labels: NDArray[Any] | None, rng: np.random.Generator
    ) -> DsTensor:
        return DsTensor(rng.permutation(n), blocks)


@PARTITIONS.add
class ByOrder(Partition):
    """Equal blocks of the rows in the order of the file."""

    name = "by_order"
    summary = "rows as they lie in the file, equal blocks"

    balance: Balance = "equal"

    def deal(
        self, n: int, workers: int, blocks: int, labels: NDArray[Any] | None, rng: np.random.Generator
    ) -> DsTensor:
        return DsTensor(np.arange(n), blocks)


@PARTITIONS.add
class Dirichlet(Partition):
    """Label skew: the rows of each class are split over workers in proportions drawn from Dirichlet(alpha, ..., alpha).

    Hsu, Qi, Brown 2019 (arXiv 1909.06335). Small alpha: few classes per worker; large alpha: nearly iid. Shards differ
    in size. A worker's rows are permuted and split into its blocks.
    """

    name = "dirichlet"
    summary = "label skew: class proportions per worker from Dirichlet(alpha); shards differ in size"

    alpha: PositiveFloat = 0.5

    def deal(
        self, n: int, workers: int, blocks: int, labels: NDArray[Any] | None, rng: np.random.Generator
    ) -> DsTensor:
        if labels is None or labels.ndim != 1:
            raise DataError("partition dirichlet needs class labels; use partition: iid for regression")
        shares: list[list[Ints]] = [[] for _ in range(workers)]
        for label in np.unique(labels):
            rows = rng.permutation(np.flatnonzero(labels == label))
            edges = np.cumsum(rng.dirichlet(np.full(workers, self.alpha)))[:-1]
            for share, part in zip(shares, np.split(rows, np.rint(edges * len(rows)).astype(np.int64)), strict=True):
                share.append(part)
        dealt: list[Ints] = [np.empty(0, np.int64)] * blocks
        for worker, share in enumerate(shares):
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


def sizes_by_speed(n: int, blocks: int, speeds: Sequence[float]) -> list[int]:
    """Return sizes of `blocks` blocks, block k of worker k mod K; worker i has n speed_i / sum_j speed_j rows.

    Fractions of a row go to the largest remainders. Blocks of one worker differ by at most one row.

    Raises:
        DataError: a worker is so slow that its blocks would be empty.
    """
    workers = len(speeds)
    exact = n * np.asarray(speeds, dtype=np.float64) / sum(speeds)
    shares = np.floor(exact).astype(np.int64)
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
