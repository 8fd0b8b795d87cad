"""Recording of schedules: a strategy's program runs on meta tensors, without data or arithmetic.

Workers of one run are independent of one another here. Where a strategy's order depends
on time (servers, asynchronous merges), a schedule holds the worker's own part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, cached_property
from itertools import islice, pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from scalebench.cluster.mesh import Mesh
from scalebench.comm.base import Communicator, Server, ServerRule, SharedState
from scalebench.data.batch_plan import BatchPlan
from scalebench.data.shard import equal_batches
from scalebench.models.parts import LayerFacts
from scalebench.pricing import recorders
from scalebench.pricing.held_parts import MetaModel, TableCut, cut_of, trainable_numbers
from scalebench.pricing.recorded_divisions import (
    RecordedDivision,
    RecordedLayout,
    RecordedPart,
    RecordedShards,
)
from scalebench.pricing.schedule import Event, RankGroups, Schedule
from scalebench.strategies.base import (
    Batch,
    LayerProfile,
    Recompute,
    SharedComponent,
    Strategy,
    UnitRule,
)
from scalebench.study.spec import Component, Run
from scalebench.system.clock import Clock, Task
from scalebench.system.random_state import (
    drawn_since,
    random_state,
    seeded,
    worker_seed,
)
from scalebench.training.components import Component as SharedLayers
from scalebench.training.components import Passes, sharers, slices
from scalebench.training.division import step_overhead
from scalebench.training.loop import train
from scalebench.training.optimizers import build_optimizer
from scalebench.training.outcome import Meters
from scalebench.training.stage import Chunk, Order, Stage, StageShapes, by_mesh

_STATES: dict[tuple[str, bool], dict[str, Tensor]] = {}  # of optimizers after a step


def record(
    run: Run,
    strategy: Strategy,
    plan: BatchPlan,
    model: torch.nn.Module,
    workers_per_node: int,
    input_shape: tuple[int, ...] = (),
) -> list[Schedule]:
    """Record the schedules of all workers of `run`; `model` is on the meta device.

    `input_shape` is that of a sample, which only strategies ask for that cut the model.
    """
    return list(
        record_each(
            run, strategy, plan, model, workers_per_node, input_shape=input_shape
        )
    )


def record_each(
    run: Run,
    strategy: Strategy,
    plan: BatchPlan,
    model: torch.nn.Module,
    workers_per_node: int,
    everyone: RankGroups | None = None,
    input_shape: tuple[int, ...] = (),
    cut: TableCut | None = None,
) -> Iterator[Schedule]:
    """Yield the schedules of `record`, each recorded when it is asked for.

    Recordings of one strategy that are given `everyone` share its divisions into
    groups. The layers of `model` are those of `cut`, if it is given, or of the layer
    table that the run names in place of a model.
    """
    everyone = everyone or RankGroups.of_all(run.workers)
    cut = cut or cut_of(run.model)
    # Recorded once for the workers that hold the same part and take the same batches,
    # where their rank is not read.
    alike: dict[object, Schedule] = {}
    mesh = strategy.traits.mesh(run.workers)
    for rank in range(run.workers):
        own = rank % mesh.parts, batches_of(plan, rank // mesh.parts, run.epochs)
        same = alike.get(own) if alike else None
        if same is not None and same.report is not None:
            yield replace(
                same,
                rank=rank,
                moved=rank - same.rank,
                report=replace(same.report, rank=rank),
            )
            continue
        schedule = Schedule(rank)
        clock = recorders.RecordingClock(schedule)
        comm = recorders.RecordingCommunicator(clock, everyone, rank, parts=mesh.parts)
        worker = RecordingWorker(
            run, plan, comm, clock, workers_per_node, model, mesh, input_shape, cut
        )
        # a user's strategy may draw from the global generators
        with seeded(worker_seed(run.seed, rank)):
            before = random_state()
            schedule.report = train(worker, strategy)
            # It drew by the seed of its rank: others draw other numbers.
            if drawn_since(before):
                schedule.reads_seed = schedule.reads_rank = True
        schedule.memory_bytes = worker.memory_bytes
        schedule.part = worker.division.memory()
        yield schedule
        if not schedule.reads_rank:
            alike[own] = schedule


def batches_of(plan: BatchPlan, rank: int, epochs: int) -> object:
    """Return what the batches of a worker are identified by."""
    return tuple(
        (
            int(plan.shard_sizes(epoch)[rank]),
            plan.bounds(epoch, rank).tobytes(),
            plan.block_starts(epoch, rank).tobytes(),
        )
        for epoch in range(epochs)
    )


class RecordingWorker:
    """Implements `strategies.base.Worker` on torch's meta device."""

    def __init__(
        self,
        run: Run,
        plan: BatchPlan,
        comm: Communicator,
        clock: Clock,
        workers_per_node: int,
        model: torch.nn.Module,
        mesh: Mesh | None = None,
        input_shape: tuple[int, ...] = (),
        cut: TableCut | None = None,
        shared: Callable[[Tensor, int], SharedState] | None = None,
        server: Callable[[Callable[[], ServerRule]], Server] | None = None,
    ) -> None:
        """Begin a worker; `shared` and `server` open what the event engine hosts, if it plays the program."""
        self.run, self.plan, self.clock = run, plan, clock
        self._open_shared, self._open_server = shared, server
        self.mesh = mesh or Mesh(comm.size)
        self.world = comm
        world_rank = comm.rank
        self.replica, self.comm = by_mesh(comm, self.mesh)
        self._rank, self.size = self.comm.rank, self.comm.size
        self.epochs, self.first_epoch = run.epochs, 0
        # Strategies count replicas, and several workers may hold one.
        self._workers_per_node = max(
            1, min(workers_per_node, comm.size) // self.mesh.parts
        )
        self.division = RecordedDivision()
        self._loss_is_elsewhere = False
        self.model: Any = model
        numbers = trainable_numbers(model)
        self.dtype: torch.dtype = getattr(torch, run.dtype)
        # a layer table stands for the layers of the model
        self._layers = cut or MetaModel(model, str(run.model), input_shape, self.dtype)
        self.parameters = torch.empty(numbers, dtype=self.dtype, device="meta")
        # other ways to make meta tensors import sympy, in half a second
        self.gradients = self.parameters.clone()
        self.forward: Callable[[Tensor], Tensor] = lambda x: x
        self.state = SimpleNamespace()
        self.on_epoch: Callable[[int], None] | None = None
        self.meters = Meters(world_rank, clock, comm)
        self.steps = 0
        self._hosted: list[Tensor] = []  # models that others access here
        self._epoch = self._epochs_done = 0
        # at which a model would be kept for evaluation, by epoch
        self.moments: dict[int, float] = {}
        self.has_read_loss = False
        if isinstance(clock, recorders.RecordingClock):
            clock.schedule.reads_rank = False  # here it was

    def _build_optimizer(self) -> Any:
        """Return the optimizer of the parameters."""
        stepped = self._stepped()
        optimizer: Any = build_optimizer(
            self.run.optimizer, stepped, self.run.lr, flat=True
        )
        optimizer.begin = lambda: optimizer.state.update(
            {each: self._optimizer_state(each) for each in stepped}
        )
        return optimizer

    # few strategies look at it, and building it takes long
    optimizer: Any = cached_property(_build_optimizer)

    def _reads(self, what: str) -> None:
        if isinstance(self.clock, recorders.RecordingClock):
            self.clock.reads(what)

    @property
    def rank(self) -> int:
        self._reads("rank")
        return self._rank

    @property
    def last_loss(self) -> Tensor:
        """A loss that halves with each epoch; the schedule then depends on it."""
        self._reads("loss")
        self.has_read_loss = True
        # The last stage has it: real workers get it by a broadcast, which the schedule
        # has, too.
        if self._loss_is_elsewhere:
            self.replica.broadcast_(
                self.parameters.new_empty(()), root=self.mesh.last_part
            )
            self._loss_is_elsewhere = False
        return torch.full((), 0.5**self._epochs_done, dtype=self.dtype)

    @property
    def seed(self) -> int:
        self._reads("seed")
        return self.run.seed

    @property
    def workers_per_node(self) -> int:
        self._reads("placement")
        return self._workers_per_node

    @property
    def samples(self) -> int:
        return int(self.plan.shard_sizes(self._epoch)[self._rank])

    @property
    def memory_bytes(self) -> int:
        """Bytes of parameters, gradients, initial weights, optimizer state and the tensors in `state`.

        Of a divided model those of this worker's shards, and what it holds whole at the
        same time.
        """
        held = [
            [self._optimizer_state(each) for each in self._stepped()],
            self._hosted,
            self.state,
        ]
        own = [
            self.parameters,
            self.gradients,
            self.parameters.clone(),
            *_tensors(held),
            *self.division.gathered(),
        ]
        # Views of one storage count once.
        storages = {
            tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes()
            for tensor in set(own)
        }
        return sum(storages.values())

    def share(self, initial: Tensor, host: int = 0) -> SharedState:
        if self._open_shared is not None:
            return self._open_shared(initial, host)
        shared = recorders.RecordingShared(*self._recorders(), initial, host)
        if host == self._rank:
            self._hosted.append(shared.vector)
        return shared

    def server(self, make: Callable[[], ServerRule]) -> Server:
        if self._open_server is not None:
            return self._open_server(make)
        return recorders.RecordingServer(*self._recorders(), self.parameters)

    def _recorders(
        self,
    ) -> tuple[recorders.RecordingCommunicator, recorders.RecordingClock]:
        """Return communicator and clock of a worker that no event engine plays."""
        assert isinstance(self.comm, recorders.RecordingCommunicator)
        assert isinstance(self.clock, recorders.RecordingClock)
        return self.comm, self.clock

    def steps_in(self, epoch: int) -> int:
        return self.plan.steps(epoch)

    @property
    def rows_move(self) -> bool:
        return self.plan.rows_move

    def mean_batch(self, epoch: int) -> float:
        return float(self.plan.shard_sizes(epoch).mean()) / self.plan.steps(epoch)

    def batches(self, epoch: int) -> Iterator[Batch]:
        bounds = self.plan.bounds(epoch, self._rank).tolist()
        return self._walk(epoch, list(pairwise(bounds)))

    def block_batches(self, epoch: int) -> Iterator[Batch]:
        self._epoch = epoch
        starts = self.plan.block_starts(epoch, self._rank)
        return self._walk(
            epoch, equal_batches(starts, self.samples, self.plan.batch_size)[0]
        )

    def _walk(self, epoch: int, bounds: list[tuple[int, int]]) -> Iterator[Batch]:
        self._epoch = epoch
        begun = np.searchsorted(
            self.plan.block_starts(epoch, self._rank), bounds
        ).tolist()
        self.clock.did(Task.SHUFFLE, self.samples)
        for step, ((low, high), (before, after)) in enumerate(
            zip(bounds, begun, strict=True)
        ):
            self.clock.did(Task.DATA, high - low)
            nothing = _nothing(high - low)
            yield Batch(nothing, nothing, 1.0, step, after > before)

    @property
    def layer_work(self) -> Sequence[float]:
        return self._layers.work

    def take(
        self,
        sizes: Sequence[int],
        order: Order,
        micro_batches: int,
        recompute: Recompute = "none",
    ) -> None:
        mesh, replica, tensor = self.mesh, self.replica, self.mesh.tensor
        whole = self.parameters.numel()
        held = self._layers.part(sizes, mesh, replica.rank, recompute)
        self.parameters = torch.empty(held.parameters, dtype=self.dtype, device="meta")
        self.gradients = self.parameters.clone()
        sharing = replica.split(lambda rank: rank // tensor) if tensor > 1 else replica
        chunks = [
            Chunk(
                stage, StageShapes(stage, segments, sharing, self.parameters, recompute)
            )
            for stage, segments in held.chunks
        ]
        self.division = RecordedPart(
            Stage(chunks, order, micro_batches, replica, mesh),
            held.parameters,
            # An update takes time in proportion to the numbers that it steps.
            held.parameters / whole,
            held.kept,
            shares_layers=tensor > 1,
            loss_is_elsewhere=mesh.pipeline > 1,
        )

    @cached_property
    def layer_profiles(self) -> Sequence[LayerProfile]:
        return self._layers.profiles(self.size)

    def use_layout(
        self, sizes: Sequence[int], degrees: Sequence[int]
    ) -> Sequence[SharedComponent]:
        whole = sum(each.parameters for each in self.layer_profiles)
        rank = self.comm.rank
        numbers, found = [], []
        for place, degree in enumerate(degrees):
            held = self._layers.component(sizes, place, degree, rank % degree)
            numbers.append(held.parameters)
            found += held.chunks
        self.parameters = torch.empty(sum(numbers), dtype=self.dtype, device="meta")
        self.gradients = self.parameters.clone()
        components = []
        for (stage, segments), degree, own in zip(
            found, degrees, slices(self.gradients, numbers), strict=True
        ):
            group, peers = sharers(self.comm, degree)
            compute = StageShapes(stage, segments, group, self.parameters)
            components.append(SharedLayers(stage, compute, degree, group, peers, own))
        self.division = RecordedLayout(
            Passes(components, rank),
            self.parameters,
            sum(numbers) / whole,
            self._rows,
        )
        return components

    def use_schedule(self, name: str, micro_batches: int) -> None:
        raise NotImplementedError("a recording has no process group")

    def use_styles(self) -> None:
        raise NotImplementedError("a recording has no process group")

    def use_fully_shard(self, *, reshard: bool) -> None:
        raise NotImplementedError("a recording has no process group")

    def divide(self, rule: UnitRule) -> None:
        whole = self.parameters.numel()
        facts = (
            self._layers.facts
            if rule.by_layer
            else [LayerFacts("", whole, (), 1.0, 1.0)]
        )
        self.division = shards = RecordedShards(facts, rule, self.size, self.parameters)
        self.parameters = shards.parameters
        self.gradients = self.parameters.clone()

    def _rows(self, step: int) -> list[int]:
        """Return the samples in the batch of each worker in a step of the epoch."""
        rows: list[int] = self.plan.batch_sizes(self._epoch)[:, step].tolist()
        return rows

    def is_finite(self) -> bool:
        return True

    def gradient(self, batch: Batch, weight: float = 1.0, *, add: bool = False) -> None:
        self.division.step(batch, weight, self.clock)
        if self.division.shares_layers:
            self.clock.work(step_overhead)
        self._loss_is_elsewhere = self.division.loss_is_elsewhere

    @property
    def learning_rate(self) -> float:
        return self.run.lr

    def update(self, onto: Tensor | None = None) -> None:
        self.steps += 1
        self.clock.did(Task.UPDATE, share=self.division.share)

    def local_step(self, batch: Batch) -> None:
        self.gradient(batch)
        self.update()

    def local_steps(
        self,
        batches: Iterator[Batch],
        steps: int | None = None,
        *,
        reset_per_block: bool = False,
    ) -> None:
        for batch in islice(batches, steps):
            self.local_step(batch)

    def adopt(self, weights: Tensor) -> None:
        self.steps += 1
        self.clock.did(Task.COMM)

    def observe(self, name: str, value: int) -> None:
        self.meters.observe(name, value)

    def reset_optimizer(self) -> None:
        self.optimizer.state.clear()

    def use_optimizer(self, wrap: Any) -> None:
        raise NotImplementedError(
            "a recording has no gradients for a library's optimizer"
        )

    def _stepped(self) -> list[torch.nn.Parameter]:
        """Return the parameters that the optimizer steps: one flat vector, or those of layers whose states differ.

        A part of a model, whose layers a recording does not have apart, counts as one
        matrix.
        """
        trained = [each for each in self.model.parameters() if each.requires_grad]
        is_whole = sum(each.numel() for each in trained) == self.parameters.numel()
        # Muon steps matrices one by one, and has other states for what is no matrix.
        if self.run.optimizer.name == "muon" and is_whole:
            return [
                torch.nn.Parameter(self.parameters.new_empty(each.shape))
                for each in trained
            ]
        flat = torch.nn.Parameter(self.parameters)
        flat.grad = self.gradients
        return [flat]

    def _optimizer_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return the tensors that the optimizer has of `parameter` after a step."""
        is_matrix = parameter.dim() == 2 or parameter.numel() == self.parameters.numel()
        return {
            name: parameter.detach().clone() if value.dim() else value.to("meta")
            for name, value in _state_after_step(
                self.run.optimizer, is_matrix=is_matrix
            ).items()
        }

    def is_last(self, epoch: int) -> bool:
        return epoch == self.epochs - 1

    def epoch_done(self, epoch: int, agreed: bool | None) -> None:
        self._epochs_done += 1
        elapsed = self.clock.elapsed()
        self.meters.close_epoch(epoch, elapsed, None)
        if agreed is not None:
            self.moments[epoch] = elapsed
        if self.on_epoch is not None:
            self.on_epoch(epoch)
        if isinstance(self.clock, recorders.RecordingClock):
            self.clock.wrote(Event("epoch", epoch))

    def keep(self, epoch: int, elapsed_s: float, agreed: bool) -> None:
        """End the program; there is nothing to evaluate."""
        self.moments[epoch] = elapsed_s
        if isinstance(self.clock, recorders.RecordingClock):
            self.clock.watching = False

    def snapshot(self, epoch: int, vector: Tensor) -> None:
        """Keep the moment only: there is nothing to evaluate."""
        self.moments[epoch] = self.clock.elapsed()


def _state_after_step(optimizer: Component, *, is_matrix: bool) -> dict[str, Tensor]:
    """Return the tensors that an optimizer has after a step on a parameter of one number; equal ones step once."""
    if (key := (str(optimizer), is_matrix)) not in _STATES:
        # One number tells which tensors there are; their sizes are those of the
        # parameter.
        one = torch.nn.Parameter(torch.zeros(1, 1) if is_matrix else torch.zeros(1))
        one.grad = torch.ones_like(one)
        stepped: Any = build_optimizer(optimizer, [one], 0.1, flat=True)
        stepped.step()
        _STATES[key] = {
            name: value
            for name, value in stepped.state[one].items()
            if isinstance(value, Tensor)
        }
    return _STATES[key]


@cache
def _nothing(samples: int) -> Tensor:
    return torch.empty(samples, device="meta")


def _tensors(held: Any) -> Iterator[Tensor]:
    """Yield tensors in containers and in objects of strategies, at any depth; a list has one kind, as of its first."""
    pending = [held]
    while pending:
        held = pending.pop()
        if isinstance(held, Tensor):
            yield held
        elif isinstance(held, dict):
            pending += held.values()
        elif isinstance(held, list):  # of each worker, it may be
            pending += (
                ()
                if held and isinstance(held[0], int | float | recorders.RecordingShared)
                else held
            )
        elif isinstance(held, tuple | set):
            pending += held
        elif isinstance(held, SimpleNamespace) or type(held).__module__.startswith(
            "scalebench.strategies"
        ):
            inner = getattr(held, "__dict__", {}).values()
            pending += [each for each in inner if not isinstance(each, RecordingWorker)]
