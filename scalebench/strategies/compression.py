"""Gradient compression: fewer bits, the largest entries, or low-rank factors.

Top-k and PowerSGD add the unsent remainder to the next gradient (error feedback):
nothing is lost, only late. All are sums of each worker's contribution divided by K; a
lone worker sends nothing and compresses nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from scalebench.errors import ModelError
from scalebench.strategies.base import Worker
from scalebench.strategies.replica_state import parameter_shapes
from scalebench.strategies.traits import Stretch, Traits
from scalebench.system.late import torch

if TYPE_CHECKING:
    from torch import Tensor

BELONGS_TO = {
    "keep": "topk",
    "rank": "powersgd",
    "start": "powersgd",
}  # option: the compression it is of
WIRES = {"fp16": "float16", "bf16": "bfloat16"}
# a matrix is worth compressing if that makes it this much smaller (as torch's hook has
# it)
MIN_RATE = 2
# of PowerSGD's first Q: the first number that torch's hook draws (RandomState(0))
_SEED = 209652396
_GROUP = 8  # numbers of which the largest is looked at first


def compressed(traits: Traits, compression: str, start: int) -> Traits:
    """Return `traits` of averaged gradients that travel by `compression`; PowerSGD's begins after `start` steps.

    A part of a gradient, or an approximation, is not the mean over the batch, and the
    rest is kept for the next one.
    """
    stretches = traits.stretches
    if compression == "powersgd" and stretches is not None:
        stretches = (Stretch(steps=start), *stretches)
    exact = compression not in ("topk", "powersgd")
    mean = traits.mean_over_global_batch and exact
    wire = WIRES.get(compression)
    return replace(
        traits,
        stretches=stretches,
        mean_over_global_batch=mean,
        wire=wire,
        resumes=exact,
    )


class Reducer:
    """Puts the mean of all workers' vectors in place of each."""

    def mean_(self, vector: Tensor) -> None:
        raise NotImplementedError

    def forget(self) -> None:
        """Reset to the state before the first call (after warm-up), if there is any."""


class Plain(Reducer):
    """One allreduce, in the gradients' dtype or a `wire` of two bytes.

    Trap: the largest float16 is 65504; gradients whose sum is larger become infinite.
    bfloat16 has float32's range, and 8 bits of precision.
    """

    def __init__(self, worker: Worker, wire: str | None = None) -> None:
        self._comm, self._wire = worker.comm, wire

    def mean_(self, vector: Tensor) -> None:
        self._comm.allreduce_(vector, "mean", wire=self._wire)


class TopK(Reducer):
    """Each worker sends the k = ceil(`keep` n) entries of c = g + e that are largest in magnitude; e <- c - sent.

    w gets (1/K) sum_i sent_i. Stich, Cordonnier and Jaggi, NeurIPS 2018, arXiv
    1809.07599. k (4 + element size) bytes from each worker to all others, in one
    allgather, which grows with K where an allreduce does not.
    """

    def __init__(self, worker: Worker, keep: float) -> None:
        self._comm, self._clock = worker.comm, worker.clock
        self._k = max(1, math.ceil(keep * worker.gradients.numel()))
        self.residual = worker.gradients.new_zeros(worker.gradients.numel())

    def mean_(self, vector: Tensor) -> None:
        message, self.residual = self._comm.by_rows(
            self._select, [self.residual, vector]
        )
        vector.copy_(self._comm.allgather_combined(message, self._mean))

    def _select(self, residuals: Tensor, vectors: Tensor) -> tuple[Tensor, Tensor]:
        """Return messages (k, b) of the largest entries of each sum, and their places; the rest (k, n) stays."""
        grown = residuals.add(vectors)
        places = places_of_largest(grown.abs(), self._k)
        values = grown.gather(-1, places)
        written = [values.view(torch.uint8), places.to(torch.int32).view(torch.uint8)]
        return torch.cat(written, -1), grown.scatter_(-1, places, 0)

    def _mean(self, messages: list[Tensor]) -> Tensor:
        # Entries that several workers sent are added in the order of their ranks, so that
        # all have the same bits.
        every, split = torch.stack(messages), self._k * self.residual.element_size()
        values = every[:, :split].reshape(-1).clone().view(self.residual.dtype)
        places = every[:, split:].reshape(-1).clone().view(torch.int32)
        return (
            torch.zeros_like(self.residual)
            .index_add_(0, places, values)
            .div_(len(messages))
        )

    def forget(self) -> None:
        self.residual.zero_()


class PowerSgd(Reducer):
    """Each weight matrix M (n x m) of c = g + e travels as P (n x r) and Q (m x r); e <- c - P Q^T.

    P <- mean_i M_i Q, orthonormalised; Q <- mean_i M_i^T P; all take P Q^T. Q is kept
    for the next step. Vogels, Karimireddy and Jaggi, NeurIPS 2019, arXiv 1905.13727;
    constants and order as in torch's powerSGD_hook. The first `start` steps, vectors,
    and matrices that would not shrink by more than `MIN_RATE` are averaged as they are.
    Two collectives a step: vectors with P, then Q.
    """

    def __init__(self, worker: Worker, rank: int, start: int) -> None:
        self._comm, self._clock, self._start = worker.comm, worker.clock, start
        # where each matrix lies, its n, m and r
        self._pieces: list[tuple[slice, int, int, int]] = []
        self._rest: list[slice] = []
        shapes, at = parameter_shapes(worker), 0
        require_matrices(shapes, rank)
        for shape in shapes:
            n, m = rows_and_columns(shape)
            place, at = slice(at, at + n * m), at + n * m
            if shrinks(n, m, rank):
                self._pieces.append((place, n, m, min(n, m, rank)))
            else:
                self._rest.append(place)
        self._pieces.reverse()  # as the backward pass meets them
        self.residual = worker.gradients.new_zeros(at)
        self._kept = self._matrices_of(self.residual)
        self._seen: Tensor | None = None
        self._views: tuple[list[Tensor], list[Tensor]] = ([], [])
        self.forget()

    def forget(self) -> None:
        self._steps = 0
        self.residual.zero_()
        generator = torch.Generator().manual_seed(_SEED)
        self._q = [
            torch.randn(m, r, generator=generator, dtype=self.residual.dtype).to(
                self.residual.device
            )
            for _, _, m, r in self._pieces
        ]

    def mean_(self, vector: Tensor) -> None:
        self._steps += 1
        if self._steps <= self._start:
            self._comm.allreduce_(vector, "mean")
            return
        if vector is not self._seen:  # a worker's gradients lie in one place for ever
            self._seen = vector
            self._views = (
                self._matrices_of(vector),
                [vector[place] for place in self._rest],
            )
        matrices, rest = self._views
        # Q is equal on all workers: one of several virtual ones orthonormalises it.
        bases = self._comm.cached(self._bases)
        first = self._clock.work(self._write_first, matrices, rest, bases)
        self._comm.allreduce_(first, "mean")
        means, bases = self._comm.cached(partial(self._read_first, first))
        second = self._clock.work(self._write_second, bases)
        self._comm.allreduce_(second, "mean")
        self._q, agreed = self._comm.cached(partial(self._read_second, second, bases))
        self._clock.work(self._settle, [*rest, *matrices], [*means, *agreed], agreed)

    def _bases(self) -> list[Tensor]:
        return [_orthonormal(q) for q in self._q]

    def _write_first(
        self, matrices: list[Tensor], rest: list[Tensor], bases: list[Tensor]
    ) -> Tensor:
        """Message of the first collective: uncompressed parameters, and M Q of each matrix."""
        torch._foreach_add_(self._kept, matrices)
        products = (
            (kept @ q).view(-1) for kept, q in zip(self._kept, bases, strict=True)
        )
        return torch.cat([*rest, *products])

    def _write_second(self, bases: list[Tensor]) -> Tensor:
        """M^T P of each matrix."""
        return torch.cat(
            [(kept.T @ p).view(-1) for kept, p in zip(self._kept, bases, strict=True)]
        )

    def _settle(
        self, places: list[Tensor], means: list[Tensor], agreed: list[Tensor]
    ) -> None:
        """Put the `means` in place, and keep the error M - P Q^T."""
        torch._foreach_copy_(places, means)
        torch._foreach_sub_(self._kept, agreed)

    def _read_first(self, message: Tensor) -> tuple[Sequence[Tensor], list[Tensor]]:
        """Means of the uncompressed parameters, and P of each matrix, orthonormal."""
        parts = torch.split(
            message,
            [at.stop - at.start for at in self._rest]
            + [n * r for _, n, _, r in self._pieces],
        )
        products = zip(parts[len(self._rest) :], self._pieces, strict=True)
        return parts[: len(self._rest)], [
            _orthonormal(p.view(n, r)) for p, (_, n, _, r) in products
        ]

    def _read_second(
        self, message: Tensor, bases: list[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Q of each matrix, and P Q^T."""
        parts = torch.split(message, [q.numel() for q in self._q])
        factors = [part.view_as(q) for part, q in zip(parts, self._q, strict=True)]
        return factors, [p @ q.T for p, q in zip(bases, factors, strict=True)]

    def _matrices_of(self, vector: Tensor) -> list[Tensor]:
        return [vector[place].view(n, m) for place, n, m, _ in self._pieces]


def places_of_largest(magnitudes: Tensor, k: int) -> Tensor:
    """Return the places (..., k), in any order, of the k largest of `magnitudes` (..., n).

    These lie in the k groups of numbers with the largest maxima. torch takes a third of
    the time to find those groups, then the largest of their numbers.
    """
    n = magnitudes.shape[-1]
    groups = n // _GROUP
    if groups <= k:
        return magnitudes.topk(k, dim=-1, sorted=False).indices
    grouped = magnitudes[..., : groups * _GROUP].unflatten(-1, (_GROUP, groups))
    best = grouped.amax(-2).topk(k, dim=-1, sorted=False).indices
    # A group has every `groups`-th number, so that its maximum is one over rows.
    every = torch.arange(n, device=magnitudes.device)
    places = (best[..., None, :] + every[: groups * _GROUP : groups, None]).flatten(-2)
    ungrouped = every[groups * _GROUP :].expand(*magnitudes.shape[:-1], -1)
    places = torch.cat([places, ungrouped], -1)
    largest = magnitudes.gather(-1, places).topk(k, dim=-1, sorted=False).indices
    return places.gather(-1, largest)


def shrinks(n: int, m: int, rank: int) -> bool:
    """Return True if P and Q of an n x m matrix are less than 1/MIN_RATE of it."""
    return (n + m) * min(n, m, rank) * MIN_RATE < n * m


class _Compresses(Protocol):
    """A strategy with an option `compression`."""

    @property
    def compression(self) -> str: ...

    @property
    def model_fields_set(self) -> set[str]: ...


_Strategy = TypeVar("_Strategy", bound=_Compresses)


def options_have_an_effect(strategy: _Strategy) -> _Strategy:
    """Validate a strategy: refuse options that belong to another compression than its own.

    Raises:
        ValueError: there is one.
    """
    compression = strategy.compression
    for option in strategy.model_fields_set:
        if BELONGS_TO.get(option, compression) != compression:
            raise ValueError(
                f"{option} has no effect with compression {compression}; write compression: {BELONGS_TO[option]}, or "
                f"leave {option} out"
            )
    return strategy


def require_matrices(shapes: Sequence[tuple[int, ...]], rank: int) -> None:
    """Refuse a model whose parameters have these `shapes` if PowerSGD of `rank` makes none of them smaller.

    Raises:
        ModelError: no matrix gets smaller.
    """
    if not any(shrinks(*rows_and_columns(shape), rank) for shape in shapes):
        lower = "use a lower rank, a wider model" if rank > 1 else "use a wider model"
        raise ModelError(
            f"compression powersgd: no layer shrinks to less than 1/{MIN_RATE} at rank {rank}; "
            f"{lower} or another compression"
        )


def powersgd_elements(model: Any, rank: int) -> int:
    """Numbers that a worker sends per step, once PowerSGD of `rank` has started."""
    sent = 0
    for parameter in model.parameters():
        n, m = rows_and_columns(tuple(parameter.shape))
        sent += (n + m) * min(n, m, rank) if shrinks(n, m, rank) else parameter.numel()
    return sent


def rows_and_columns(shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns of the matrix that stands for a parameter of this shape."""
    rows = shape[0] if shape else 1
    return rows, math.prod(shape) // max(1, rows)


def _orthonormal(matrix: Tensor) -> Tensor:
    """An orthonormal basis of the columns' span; half precision has no QR."""
    wide: Any = (
        matrix if matrix.dtype in (torch.float32, torch.float64) else matrix.float()
    )
    basis: Tensor = torch.linalg.qr(wide)[0].to(matrix.dtype)
    return basis
