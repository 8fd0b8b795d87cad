"""The gradients of all virtual workers that wait for one, in one call over the rows of matrices.

A gradient depends on the weights of its own worker only. A worker that computes
therefore sleeps, in virtual time, until the end of its step, or of all steps that it
takes alone, and the first that wakes computes what all sleepers have asked for:
`torch.func.vmap` over matrices that hold the weights of worker i in row i, and over others
that hold its buffers.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from scalebench.models.flat import Memory, lie_in
from scalebench.strategies.base import Batch
from scalebench.strategies.replica_state import parameter_shapes
from scalebench.system.clock import Task
from scalebench.training.replica import Replica, Snapshot
from scalebench.training.torch_optimizers import FlatSgd
from scalebench.virtual.gradients import Gradients, Losses, places_of
from scalebench.virtual.scheduler import Scheduler
from scalebench.virtual.stretches import StretchingReplica
from scalebench.virtual.worker_rows import (
    BufferRows,
    Rows,
    are_adjacent,
    fetch_rows,
    matrix_views,
    put_rows,
    step_rows,
    take_row_steps,
)

_CACHED = 2**22  # bytes of weights that are worked on at once
_LEAST = 8  # workers at once, at least
_ROWS_OF_RECORDING = 200  # whose gradients take as long as one recording


class _Asked(NamedTuple):
    """Gradients that a sleeping worker asked for, of one batch after the other; with `rates` also optimizer steps."""

    replica: Replica
    x: Sequence[Tensor]
    y: Sequence[Tensor]
    sizes: Sequence[int]  # of these batches
    call: int  # that computes it
    weight: float = 1.0
    add: bool = False
    rates: Sequence[float] | None = None

    def kind(self, *, fills: bool) -> tuple[Any, ...]:
        """What has to be equal for gradients to be computed in one call; batches of any size if that `fills` them."""
        sizes = None if fills else tuple(self.sizes)
        return (
            self.x[0].shape[1:],
            self.y[0].shape[1:],
            sizes,
            self.add,
            self.rates is None,
        )


class _Step(NamedTuple):
    """A batch (x, y) of each of these workers, its samples, and the rate of an optimizer step if one follows."""

    asked: Sequence[_Asked]
    x: Sequence[Tensor]
    y: Sequence[Tensor]
    sizes: list[int]
    rates: Sequence[float]


class _Stepping(NamedTuple):
    """The optimizer step that a sleeping worker takes on the gradient in its row."""

    rank: int
    optimizer: FlatSgd
    rate: float
    call: int  # that computes it


class Batched:
    """Weights, gradients, momenta and buffers of K replicas as rows of matrices, and the gradients that are asked for.

    `fills`: smaller batches are filled up with samples of weight 0, so that one call
    computes gradients of batches of different size. A model that couples the samples of
    a batch does not allow that.
    """

    def __init__(self, first: Replica, workers: int, *, fills: bool) -> None:
        # A replica has its velocity behind its weights, in one piece of memory: so has a row.
        n = first.parameters.numel()
        each = (
            first.parameters.untyped_storage().nbytes()
            // first.parameters.element_size()
        )
        has_momenta = (
            isinstance(first.optimizer, FlatSgd) and first.optimizer.room is not None
        )
        self._whole = first.parameters.new_empty(workers, each)
        gradients = first.parameters.new_zeros(workers, n)
        self._rows = Rows(
            self._whole[:, :n], gradients, self._whole[:, each - n * has_momenta :]
        )
        at_once = max(_LEAST, min(workers, _CACHED // gradients[0].nbytes))
        # Rows that no worker fills are computed with too: they are finite.
        self._copies = Rows(
            *(matrix.new_zeros(at_once, matrix.shape[1]) for matrix in self._rows)
        )
        self.initial = first.parameters.clone()
        initial = [buffer.clone() for buffer in first.model.buffers()]
        self.buffers = BufferRows(initial, self._whole[:, n:], at_once)
        self.fills = fills
        model = copy.deepcopy(first.model)
        self.shapes = parameter_shapes(first)
        self._trained = [
            parameter for parameter in model.parameters() if parameter.requires_grad
        ]
        self._losses = Losses(
            model,
            places_of(model, self._trained),
            places_of(model, list(model.buffers())),
            first.task,
        )
        # By the shapes of batches, and by the number of rows.
        self._recorded: dict[tuple[Any, ...], dict[int, Gradients]] = {}
        self._in_vain: Counter[tuple[Any, ...]] = Counter()
        self._asked: list[_Asked] = []
        self._calls = 0
        # Set where the moment of a step among those of others does not matter.
        self.steps_together = False
        self._stepping: list[_Stepping] = []
        self._step_calls = 0

    def memory(self, rank: int) -> Memory:
        """The row of a worker, with the initial weights, that of its gradient, and those of its buffers."""
        self._rows.weights[rank].copy_(self.initial)
        buffers = self.buffers.of(rank)
        return Memory(self._whole[rank], self._rows.gradients[rank], buffers)

    def ask(
        self, replica: Replica, x: Sequence[Tensor], y: Sequence[Tensor], **options: Any
    ) -> _Asked:
        """Ask for gradients of batches (x, y), and with `rates` for the steps that follow them."""
        sizes = [batch.shape[0] for batch in x]
        asked = _Asked(replica, x, y, sizes, self._calls, **options)
        self._asked.append(asked)
        return asked

    def complete(self, asked: _Asked) -> None:
        """Compute everything that is asked for, unless `asked` has been computed already."""
        # The first of the sleepers that woke has computed what all had asked for.
        if asked.call < self._calls:
            return
        self._calls += 1
        alike: dict[Any, list[_Asked]] = {}
        # Who takes most steps comes first: those that go on are the first rows at each step.
        for each in sorted(
            self._asked, key=lambda each: (-len(each.x), each.replica.rank)
        ):
            alike.setdefault(each.kind(fills=self.fills), []).append(each)
        self._asked = []
        for same in alike.values():
            for begin in range(0, len(same), len(self._copies.weights)):
                self._compute(same[begin : begin + len(self._copies.weights)])

    def ask_step(self, rank: int, optimizer: FlatSgd, rate: float) -> _Stepping:
        """Ask for a step on the gradient that lies in the worker's row."""
        stepping = _Stepping(rank, optimizer, rate, self._step_calls)
        self._stepping.append(stepping)
        return stepping

    def complete_steps(self, stepping: _Stepping) -> None:
        """Take all steps that are asked for, unless that of `stepping` has been taken already."""
        if stepping.call < self._step_calls:
            return
        self._step_calls += 1
        asked, self._stepping = self._stepping, []
        self._take_steps(sorted(asked, key=lambda each: each.rank))

    @torch.no_grad()
    def _take_steps(self, asked: Sequence[_Stepping]) -> None:
        for each in asked:
            _begin(each.optimizer)
        optimizer = asked[0].optimizer
        rates = [each.rate for each in asked]
        at_once = len(self._copies.weights)
        for begin in range(0, len(asked), at_once):
            places = [each.rank for each in asked[begin : begin + at_once]]
            of_these = rates[begin : begin + at_once]
            take_row_steps(optimizer, of_these, self._rows, places)

    @torch.no_grad()
    def _compute(self, asked: Sequence[_Asked]) -> None:
        """Compute what workers of one kind asked for, those that ask for most first, on copies of their rows."""
        optimizer, steps = asked[0].replica.optimizer, asked[0].rates is not None
        places = [each.replica.rank for each in asked]
        if steps and isinstance(optimizer, FlatSgd):
            for each in asked:
                _begin(each.replica.optimizer)
        # What gradients are not computed from stays in the rows of neighbours.
        directly = are_adjacent(places)
        if directly:
            first, end = places[0], places[-1] + 1
            rows = self._rows.between(first, end)._replace(weights=self._copies.weights)
            # Repeated operations read the weights where they were recorded: in the copies.
            fetch_rows(self._rows.weights, places, self._copies.weights)
        else:
            rows = self._copies
            self._fetch(places, gradients=asked[0].add, momenta=steps)
        self.buffers.fetch(places)
        losses = self._copies.weights.new_empty(len(asked[0].x), len(asked))
        into: list[Tensor] = []
        for number, step in enumerate(_by_step(asked)):
            count = len(step.asked)
            if not into or len(into[0]) != count:
                into = matrix_views(self._trained, rows.gradients[:count])
            losses[number, :count] = self._gradients(step, into)
            if not steps:
                continue
            if isinstance(optimizer, FlatSgd):
                step_rows(optimizer, step.rates, rows.first(count))
            else:
                self._step_one_by_one(step.asked, step.rates, directly=directly)
        if not directly:
            self._put_back(places, momenta=steps)
        elif steps:
            put_rows(self._copies.weights, self._rows.weights, places)
        self.buffers.put_back(places)
        for each, of_each in zip(asked, losses.unbind(1), strict=True):
            own = of_each if len(each.x) == len(losses) else of_each[: len(each.x)]
            each.replica.computed_several(own, each.sizes)

    def _fetch(self, places: Sequence[int], *, gradients: bool, momenta: bool) -> None:
        """Copy the rows in `places`: the weights, and what is asked for."""
        fetch_rows(self._rows.weights, places, self._copies.weights)
        if gradients:
            fetch_rows(self._rows.gradients, places, self._copies.gradients)
        if momenta:
            fetch_rows(self._rows.momenta, places, self._copies.momenta)

    def _put_back(self, places: Sequence[int], *, momenta: bool) -> None:
        put_rows(self._copies.gradients, self._rows.gradients, places)
        if momenta:
            put_rows(self._copies.weights, self._rows.weights, places)
            put_rows(self._copies.momenta, self._rows.momenta, places)

    def _step_one_by_one(
        self, asked: Sequence[_Asked], rates: Sequence[float], *, directly: bool
    ) -> None:
        """Take the steps of optimizers that have no form by rows."""
        places = [each.replica.rank for each in asked]
        if not directly:
            self._put_back(places, momenta=True)
        else:
            put_rows(self._copies.weights, self._rows.weights, places)
        for each, rate in zip(asked, rates, strict=True):
            for group in each.replica.optimizer.param_groups:
                group["lr"] = rate
            each.replica.optimizer.step()
        self._fetch(places, gradients=False, momenta=not directly)

    def _gradients(self, step: _Step, into: Sequence[Tensor]) -> Tensor:
        """Compute the gradients of the workers' batches into views, (k, ...); return their mean losses, (k,)."""
        asked, x, y, sizes, _ = step
        shapes = (max(sizes), x[0].shape[1:], y[0].shape[1:])
        recorded = self._recorded.setdefault(shapes, {})
        rows = self._rows_for(len(asked), shapes)
        if rows not in recorded:
            leaves = [
                leaf.detach().requires_grad_()
                for leaf in matrix_views(self._trained, self._copies.weights[:rows])
            ]
            buffers = self.buffers.copies(rows)
            recorded[rows] = Gradients(
                partial(self._losses, buffers),
                leaves,
                x[0],
                y[0],
                max(sizes),
                rows,
                records=True,
                buffers=buffers,
            )
        weights_of_all = [each.weight for each in asked]
        with self.buffers.kept(len(asked), rows):
            means = recorded[rows].into(
                into, x, y, sizes, weights_of_all, add=asked[0].add
            )[1]
        return means[: len(asked)]

    def _rows_for(self, count: int, shapes: tuple[Any, ...]) -> int:
        """Return with how many rows the gradients of `count` workers are computed.

        More rows are repeated where they are recorded, until those computed in vain
        have taken the time of a recording of their own.
        """
        wanted = min(_rounded_up(count), len(self._copies.weights))
        enough = min(
            (rows for rows in self._recorded[shapes] if rows >= wanted), default=wanted
        )
        self._in_vain[shapes, wanted] += enough - wanted
        worth = self._in_vain[shapes, wanted] > _ROWS_OF_RECORDING
        return wanted if worth else enough


class BatchedReplica(StretchingReplica):
    """A replica whose gradients are computed together with those of other workers that compute at the same time."""

    pool: Batched
    scheduler: Scheduler
    form_consensus: Callable[[Replica, Snapshot], None]
    _memory: Memory

    def _begin_model(self, memory: Memory | None) -> None:
        """Take over a row of the pool, which computes with one model for all."""
        assert memory is not None
        self._memory = memory
        self.gradients = memory.gradients
        statistics = [each for each in memory.buffers if each.is_floating_point()]
        self._has_statistics = bool(statistics)
        trained = len(self.gradients)
        held = trained + sum(each.numel() for each in statistics)
        self.parameters, velocity = memory.whole[:trained], memory.whole[held:]
        # to look for them would build the model
        self.state.buffers_of_modules = [dict(enumerate(memory.buffers))]
        self._optimise(velocity if len(velocity) else None)

    def _own_model(self) -> nn.Module:
        model = self._built()
        lie_in(self._memory, model)
        return model

    # Built when they are asked for: by few strategies, and to evaluate the model of one
    # worker.
    model: Any = cached_property(_own_model)
    forward: Any = cached_property(lambda self: self.model)

    def gradient(self, batch: Batch, weight: float = 1.0, *, add: bool = False) -> None:
        self._charge(batch)
        self._sleep(self.pool.ask(self, [batch.x], [batch.y], weight=weight, add=add))

    def local_step(self, batch: Batch) -> None:
        self._charge(batch)
        rate = self.settle_rate()
        self.clock.did(Task.UPDATE)
        self.steps += 1
        self._sleep(self.pool.ask(self, [batch.x], [batch.y], rates=[rate]))

    def update(self, onto: Tensor | None = None) -> None:
        optimizer: Any = self.optimizer
        together = self.pool.steps_together and isinstance(optimizer, FlatSgd)
        if onto is not None or not together:
            super().update(onto)
            return
        rate = self.settle_rate()
        self.clock.did(Task.UPDATE)
        self.steps += 1
        stepping = self.pool.ask_step(self.rank, optimizer, rate)
        self.scheduler.sleep(self.rank, self.clock.elapsed())
        self.pool.complete_steps(stepping)

    def take_steps(
        self, x: Sequence[Tensor], y: Sequence[Tensor], rates: Sequence[float]
    ) -> None:
        self._sleep(self.pool.ask(self, x, y, rates=rates))

    def keep(self, epoch: int, elapsed_s: float, agreed: bool) -> None:
        # Statistics are averaged where they lie, with which training goes on.
        if agreed or self._has_statistics:
            super().keep(epoch, elapsed_s, agreed)
            return
        # Thousands of workers would each keep a vector of each epoch, of all of which
        # only the consensus is evaluated.
        snapshot = Snapshot(epoch, elapsed_s, None, agreed=True)
        self.snapshots.append(snapshot)
        self.form_consensus(self, snapshot)

    def _charge(self, batch: Batch) -> None:
        samples = batch.x.shape[0]
        self.clock.did(Task.FORWARD, samples)
        self.clock.did(Task.BACKWARD, samples)

    def _sleep(self, asked: _Asked) -> None:
        self.scheduler.sleep(self.rank, self.clock.elapsed())
        self.pool.complete(asked)


def _by_step(asked: Sequence[_Asked]) -> Iterator[_Step]:
    """Yield the batches of each step, of the workers that go on: those that take most steps come first."""
    columns = [
        zip_longest(*(of_each or () for of_each in of_all))
        for of_all in zip(
            *((each.x, each.y, each.sizes, each.rates) for each in asked), strict=True
        )
    ]
    count = len(asked)
    for step, (x, y, sizes, rates) in enumerate(zip_longest(*columns, fillvalue=())):
        while len(asked[count - 1].x) <= step:
            count -= 1
        yield _Step(
            asked[:count], x[:count], y[:count], list(sizes[:count]), rates[:count]
        )


def _rounded_up(rows: int) -> int:
    """Return the next of 1 to 8, 10, 12, 14, 16, 20, ...: recording a number of rows takes the time of many calls."""
    step = 1 << max(0, (rows - 1).bit_length() - 3)
    return -(-rows // step) * step


def _begin(optimizer: Any) -> None:
    """Create the momentum of a `FlatSgd` that has taken no step yet, v = 0."""
    (group,) = optimizer.param_groups
    if optimizer.state[group["params"][0]].get("momentum_buffer") is None:
        optimizer.begin()
