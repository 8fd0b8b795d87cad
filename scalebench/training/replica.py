"""The replica: model, optimizer, shard, meters and snapshots of one worker on any engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

from scalebench.cluster.mesh import Mesh
from scalebench.comm.base import (
    Communicator,
    LibraryCommunicator,
    Server,
    ServerRule,
    SharedState,
)
from scalebench.data.batch_plan import BatchPlan
from scalebench.data.dataset import Dataset
from scalebench.data.shard import LaidOut, Shard, equal_batches
from scalebench.models import flat
from scalebench.models.metric import loss_for, own_loss, takes_labels
from scalebench.models.parts import Layer, LayerFacts, facts_of, layers_of
from scalebench.models.pinning import require_unchanged
from scalebench.models.registry import build_model
from scalebench.models.sharding import held_by
from scalebench.strategies.base import (
    Batch,
    LayerProfile,
    Recompute,
    SharedComponent,
    UnitRule,
)
from scalebench.strategies.replica_state import floating_buffers, model_buffers
from scalebench.study.spec import BY_LAYER, Run
from scalebench.system.clock import Clock, Task
from scalebench.system.random_state import put_back, random_state
from scalebench.training import components, optimizers
from scalebench.training.division import (
    Division,
    Part,
    step_overhead,
    with_trained,
)
from scalebench.training.initial_weights import load_weights
from scalebench.training.outcome import Meters
from scalebench.training.sharded import ShardedModel
from scalebench.training.stage import (
    Chunk,
    Order,
    Stage,
    StageArithmetic,
    by_mesh,
    sizes_of,
)
from scalebench.training.torch_optimizers import FlatSgd, step_onto

_CUT_AT_ONCE = 32  # batches


@dataclass
class Snapshot:
    """A model to be evaluated after training; `vector` is None if another worker holds it."""

    epoch: int
    elapsed_s: float
    vector: Tensor | None
    # True if the vector is the consensus; else it is computed from the vectors of all
    # workers
    agreed: bool
    # floating-point buffers of that moment
    buffers: list[Tensor] = field(default_factory=list)


class Replica:
    """Implements `strategies.base.Worker`.

    Weights depend on `run.seed` only, so that all replicas start equal; batches come
    from the plan; the clock records the time of each phase of training.

    A replica of several workers (`mesh`) has one object on each. `world` joins all
    workers, `replica` those of one model, `comm` those that hold the same part of every
    model; `rank` and `size` are of `comm`.
    """

    def __init__(
        self,
        run: Run,
        dataset: Dataset,
        plan: BatchPlan,
        comm: Communicator,
        clock: Clock,
        device: torch.device | None = None,
        shared: Callable[[Tensor, int], SharedState] | None = None,
        server: Callable[[Callable[[], ServerRule]], Server] | None = None,
        workers_per_node: int | None = None,
        memory: flat.Memory | None = None,
        mesh: Mesh | None = None,
        laid_out: LaidOut | None = None,
    ) -> None:
        require_unchanged(run)
        self.run, self.plan, self.clock = run, plan, clock
        self.mesh = mesh or Mesh(comm.size)
        self.world = comm
        self.replica, self.comm = by_mesh(comm, self.mesh)
        self.rank, self.size = self.comm.rank, self.comm.size
        self.epochs, self.seed = run.epochs, run.seed
        together = min(workers_per_node or comm.size, comm.size)
        self.workers_per_node = max(1, together // self.mesh.parts)
        self.task = dataset.task
        self._input_shape, self._outputs = dataset.input_shape, dataset.outputs
        self.device = device or torch.device("cpu")
        self.dtype: torch.dtype = getattr(torch, run.dtype)
        self.state = SimpleNamespace()
        self._begin_model(memory)
        self.shard = Shard(dataset, plan, self.rank, self.dtype, self.device, laid_out)
        self.loss = loss_for(dataset.task)
        self.division = Division()
        self._loss_is_elsewhere = False
        self._lr, self._lr_is_constant = run.lr, run.lr_policy == "constant"
        self._open_shared, self._open_server = shared, server
        self._last_loss = torch.zeros((), dtype=self.dtype, device=self.device)
        # mean losses () or (m,) of batches of the current epoch
        self._losses: list[Tensor] = []
        self._samples: list[int] = []  # of these batches
        self.first_epoch = 0
        self.on_epoch: Callable[[int], None] | None = None
        self.on_batch: Callable[[], None] = lambda: None
        self.meters = Meters(comm.rank, clock, comm)
        self._begin()

    def _begin_model(self, memory: flat.Memory | None) -> None:
        """Build the whole model with its initial weights."""
        self._hold(self._built(), memory)
        if self.run.init_weights is not None:
            self.parameters.copy_(
                load_weights(self.run.init_weights, self.parameters.numel())
            )
            self.initial.copy_(self.parameters)
        self.gives_labels = takes_labels(self.model, self.task)

    def _hold(self, model: torch.nn.Module, memory: flat.Memory | None = None) -> None:
        """Set the model that is trained, with flat vectors of its parameters and gradients, and its optimizer."""
        run, self.model = self.run, model
        self.forward: Callable[..., Any] = model
        options = optimizers.check_optimizer(run.optimizer).model_dump()
        velocities = int(run.optimizer.name == "sgd" and options["momentum"] > 0)
        self.parameters, self.gradients, velocity = flat.side_by_side(
            model, velocities, memory
        )
        self.initial = self.parameters.clone()
        self.initial_buffers = [buffer.clone() for buffer in model.buffers()]
        self._optimise(velocity if velocities else None)

    def _optimise(self, velocity: Tensor | None = None) -> None:
        """Set the optimizer of `parameters` and `gradients`, with memory for the velocity of SGD if it is given."""
        run = self.run
        self._flat_parameter = torch.nn.Parameter(self.parameters)
        self._flat_parameter.grad = self.gradients
        by_layer = run.optimizer.name in BY_LAYER
        stepped = list(self.model.parameters()) if by_layer else [self._flat_parameter]
        self.optimizer = optimizers.build_optimizer(
            run.optimizer, stepped, run.lr, flat=not by_layer
        )
        if isinstance(self.optimizer, FlatSgd) and velocity is not None:
            self.optimizer.room = velocity

    def _begin(self) -> None:
        self.steps = 0
        self.snapshots: list[Snapshot] = []
        self._epoch = 0
        self._moment = 0.0  # of the current batch, in epochs
        self._forget_losses()
        self.meters.open()

    def _forget_losses(self) -> None:
        self._losses.clear()
        self._samples.clear()

    # --- data -------------------------------------------------------------------------------------------------

    @property
    def samples(self) -> int:
        return int(self.plan.shard_sizes(self._epoch)[self.rank])

    def steps_in(self, epoch: int) -> int:
        return self.plan.steps(epoch)

    @property
    def rows_move(self) -> bool:
        return self.plan.rows_move

    def mean_batch(self, epoch: int) -> float:
        return float(self.plan.shard_sizes(epoch).mean()) / self.plan.steps(epoch)

    def batches(self, epoch: int) -> Iterator[Batch]:
        x_all, y_all = self.samples_of(epoch)
        sizes, weights, firsts = self.plan.batches(epoch, self.rank)
        for step, (x, y) in enumerate(
            zip(_pieces(x_all, sizes), _pieces(y_all, sizes), strict=True)
        ):
            yield self.delivered(
                Batch(x, y, weights[step], step, step in firsts), len(sizes)
            )

    def samples_of(self, epoch: int) -> tuple[Tensor, Tensor]:
        """Return x (n, ...) and y of this worker in visiting order, after rows have moved if the study says so."""
        self._epoch = epoch
        x, y = self.shard.epoch(epoch, self._exchange)
        self.clock.did(Task.SHUFFLE, len(x))
        return x, y

    def block_batches(self, epoch: int) -> Iterator[Batch]:
        x, y = self.samples_of(epoch)
        slices, firsts = equal_batches(
            self.plan.block_starts(epoch, self.rank), len(x), self.plan.batch_size
        )
        for step, (low, high) in enumerate(slices):
            yield self.delivered(
                Batch(x[low:high], y[low:high], 1.0, step, step in firsts), len(slices)
            )

    def delivered(self, batch: Batch, steps: int) -> Batch:
        """Note that a batch, one of `steps` in this epoch, is at hand."""
        self._moment = self._epoch + batch.step / steps
        self.on_batch()
        self.clock.did(Task.DATA, batch.x.shape[0])
        return batch

    def _exchange(self, tensors: list[Tensor]) -> list[Tensor]:
        """Exchange rows. Their bytes are counted, but no synchronisation of replicas."""
        counters = (self.comm, self.world)
        synchronised = [comm.collectives for comm in counters]
        received = self.comm.alltoallv(tensors)
        for comm, count in zip(counters, synchronised, strict=True):
            comm.collectives = count
        return received

    # --- parts of the model -----------------------------------------------------------------------------------

    @cached_property
    def _layers(self) -> list[Layer]:
        return layers_of(self.model, str(self.run.model))

    @cached_property
    def _layer_facts(self) -> list[LayerFacts]:
        return facts_of(self._layers, self._sample())

    @property
    def layer_work(self) -> Sequence[float]:
        return [each.work for each in self._layer_facts]

    def take(
        self,
        sizes: Sequence[int],
        order: Order,
        micro_batches: int,
        recompute: Recompute = "none",
    ) -> None:
        mesh, replica, name = self.mesh, self.replica, str(self.run.model)
        whole = self.parameters.numel()
        held = held_by(
            self._layers,
            sizes,
            mesh,
            replica.rank,
            name,
            by_layer=recompute == "layer",
        )
        facts = sizes_of(
            self._layer_facts, held, sizes, mesh, replica.rank, self._sample()
        )
        self._hold_part(held.model)
        tensor = mesh.tensor
        sharing = replica.split(lambda rank: rank // tensor) if tensor > 1 else replica
        chunks = []
        for (stage, segments), modules in zip(facts, held.chunks, strict=True):
            compute = StageArithmetic(
                stage, modules, segments, self.loss, sharing, self.parameters, recompute
            )
            chunks.append(Chunk(stage, compute))
        self.division = Part(
            Stage(chunks, order, micro_batches, replica, mesh),
            self.parameters.numel() / whole,
            self._built,
            sizes,
            mesh,
            replica,
            name,
        )

    def _hold_part(self, model: torch.nn.Module) -> None:
        """Set what this worker holds of the model, in place of the whole model or of another part."""
        self._hold(model.train(self.model.training))
        self.__dict__.pop("_layers", None)  # with the layers of other workers
        self.state.__dict__.pop("buffers_of_modules", None)

    def use_schedule(self, name: str, micro_batches: int) -> None:
        # half a second of imports
        from scalebench.training.torch_stage import TorchStage

        part = self.division
        assert isinstance(part, Part), "a stage was taken"
        replica = cast(LibraryCommunicator, self.replica)
        part.stage = TorchStage(part.chunks, name, micro_batches, replica)

    def use_styles(self) -> None:
        # a second of imports
        from scalebench.training.torch_dtensors import TorchStyles

        part = self.division
        assert isinstance(part, Part), "a share was taken"
        (chunk,) = part.chunks
        replica = cast(LibraryCommunicator, self.replica)
        part.stage = styles = TorchStyles(chunk, self.mesh.tensor, replica)
        self.optimizer = optimizers.build_optimizer(
            self.run.optimizer, styles.trained, self.run.lr
        )

    def divide(self, rule: UnitRule) -> None:
        layers = self._layers if rule.by_layer else None
        shards = ShardedModel(
            self.model, layers, rule, self.comm, self._sample(), self.loss
        )
        self.parameters, self.gradients = shards.parameters, shards.gradients
        self.initial = self.parameters.clone()
        self._optimise()
        self.division = shards

    def use_fully_shard(self, *, reshard: bool) -> None:
        # a second of imports
        from scalebench.training.torch_dtensors import TorchShards

        comm = cast(LibraryCommunicator, self.comm)
        shards = TorchShards(
            self.model, self._layers, self._built, comm, reshard=reshard
        )
        # torch has its own
        self.parameters = self.gradients = self.initial = self.parameters.new_empty(0)
        self.optimizer = optimizers.build_optimizer(
            self.run.optimizer, shards.trained, self.run.lr
        )
        self.division = shards

    @cached_property
    def layer_profiles(self) -> Sequence[LayerProfile]:
        return components.profiles_of(
            self._layers,
            self._layer_facts,
            self._input_shape,
            self.size,
            str(self.run.model),
        )

    def use_layout(
        self, sizes: Sequence[int], degrees: Sequence[int]
    ) -> Sequence[SharedComponent]:
        # before the layers of other workers go
        numbers = sum(each.parameters for each in self.layer_profiles)
        facts = self._layer_facts
        model = self._whole(self.parameters)
        states = {  # vectors as whole models
            name: self._whole(value) if value.shape == self.parameters.shape else value
            for name, value in self.optimizer.state.get(
                self._flat_parameter, {}
            ).items()
        }
        layout = components.SharedLayout(
            model,
            self._built,
            self.comm,
            str(self.run.model),
            self.loss,
            self._rows,
            sizes,
            degrees,
        )
        self._hold_part(layout.model)
        for name, value in states.items():
            own = (
                layout.share_of(value) if isinstance(value, torch.nn.Module) else value
            )
            self.optimizer.state[self._flat_parameter][name] = own
        layout.share = self.parameters.numel() / numbers
        self.division = layout
        return layout.components(self.gradients, facts, self._input_shape)

    def _whole(self, vector: Tensor) -> torch.nn.Module:
        """Return a whole model with the parameters in `vector`: all, or by a layout every worker's. Collective then."""
        if isinstance(self.division, components.SharedLayout):
            return self.division.whole(vector)
        return with_trained(self._built(), vector)

    def _rows(self, step: int) -> list[int]:
        """Return the samples in the batch of each worker in a step of the epoch."""
        rows: list[int] = self.plan.batch_sizes(self._epoch)[:, step].tolist()
        return rows

    def _built(self) -> torch.nn.Module:
        model = build_model(
            self.run.model,
            self._input_shape,
            self._outputs,
            self.task,
            self.dtype,
            self.seed,
        )
        return model.to(self.device)

    def _sample(self) -> Tensor:
        return torch.zeros(2, *self._input_shape, dtype=self.dtype, device=self.device)

    def assembled(self, vector: Tensor | None) -> tuple[Tensor, torch.nn.Module] | None:
        """Return the vector of a whole model and a model for it, from the `vector` of each part: on part 0, else None.

        Its floating-point buffers are those of the parts. Collective over a replica.
        """
        return None if vector is None else self.division.assembled(vector, self.model)

    # --- training ---------------------------------------------------------------------------------------------

    def batch_loss(self, batch: Batch) -> Tensor:
        """Return the mean loss () of a batch: the model's own where it gives one."""
        outputs = (
            self.forward(batch.x, labels=batch.y)
            if self.gives_labels
            else self.forward(batch.x)
        )
        if isinstance(outputs, Tensor):
            return self.loss(outputs, batch.y)
        return own_loss(outputs, batch.y, self.loss)

    def gradient(self, batch: Batch, weight: float = 1.0, *, add: bool = False) -> None:
        if not add:
            self.gradients.zero_()
        mean = self.division.step(batch, weight, self.batch_loss, self.clock)
        if self.division.shares_layers:
            self.clock.work(step_overhead)
        if mean is not None:
            self.computed(mean, batch.x.shape[0])
        self._loss_is_elsewhere = self.mesh.pipeline > 1

    @property
    def last_loss(self) -> Tensor:
        """The mean loss () of the latest batch; of a pipeline its last stage has it, and sends it when it is read."""
        if self._loss_is_elsewhere:
            self.replica.broadcast_(self._last_loss, root=self.mesh.last_part)
            self._loss_is_elsewhere = False
        return self._last_loss[-1] if self._last_loss.dim() else self._last_loss

    def computed(self, loss: Tensor, samples: int) -> None:
        """Record the mean loss () of a batch whose gradient has been computed."""
        self._last_loss = loss
        self._losses.append(loss)  # a sum here would cost as much as three laps
        self._samples.append(samples)

    def take_losses(self) -> tuple[Tensor, list[int]]:
        """Return the mean losses (m,) of the batches of this epoch so far, and their samples, and forget them."""
        losses = [each.reshape(-1) for each in self._losses]
        samples = list(self._samples)
        self._forget_losses()
        return torch.cat(losses) if losses else self._last_loss.new_empty(0), samples

    def computed_several(self, losses: Tensor, samples: Sequence[int]) -> None:
        """Record the mean losses (m,) of consecutive batches."""
        self._last_loss = losses  # few strategies ask for the last one
        self._losses.append(losses)
        self._samples.extend(samples)

    @property
    def learning_rate(self) -> float:
        return optimizers.learning_rate(self.run, self.size, self._moment, self.steps)

    def settle_rate(self) -> float:
        """Give the optimizer the current learning rate, and return it."""
        if not self._lr_is_constant and (rate := self.learning_rate) != self._lr:
            self._lr = rate
            for group in self.optimizer.param_groups:
                group["lr"] = rate
        return self._lr

    def update(self, onto: Tensor | None = None) -> None:
        self.settle_rate()
        if onto is None:
            self.optimizer.step()
        else:
            step_onto(self.optimizer, self.parameters, onto)
        self.steps += 1
        self.clock.did(Task.UPDATE, share=self.division.share)

    def adopt(self, weights: Tensor) -> None:
        # A server in this process has written them there.
        if weights is not self.parameters:
            self.parameters.copy_(weights)
        self.steps += 1
        self.clock.did(Task.COMM)

    def observe(self, name: str, value: int) -> None:
        if self.clock.running:
            self.meters.observe(name, value)

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
            if reset_per_block and batch.first_of_block:
                self.reset_optimizer()
            self.local_step(batch)

    def reset_optimizer(self) -> None:
        self.optimizer.state.clear()

    def is_last(self, epoch: int) -> bool:
        return epoch == self.epochs - 1

    def use_optimizer(self, wrap: Any) -> None:
        trainable = [
            parameter
            for parameter in self.model.parameters()
            if parameter.requires_grad
        ]
        self.optimizer = wrap(
            optimizers.build_optimizer(self.run.optimizer, trainable, self.run.lr)
        )
        for parameter, gradient in zip(
            trainable, flat.views(trainable, self.gradients), strict=True
        ):
            parameter.grad = gradient  # a wrapper may have replaced it

    # --- agreement --------------------------------------------------------------------------------------------

    def share(self, initial: Tensor, host: int = 0) -> SharedState:
        assert self._open_shared is not None, (
            "the strategy's requirements were matched with the engine"
        )
        return self._open_shared(initial, host)

    def server(self, make: Callable[[], ServerRule]) -> Server:
        assert self._open_server is not None, (
            "the strategy's requirements were matched with the engine"
        )
        return self._open_server(make)

    # --- meters -----------------------------------------------------------------------------------------------

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Undo the steps inside: only time has passed behind it.

        Weights, buffers, attributes of the model's modules, random states, optimizer
        and meters are put back.
        """
        states, attributes = random_state(), flat.module_attributes(self.model)
        on_device = (
            torch.cuda.get_rng_state(self.device)
            if self.device.type == "cuda"
            else None
        )
        try:
            yield
        finally:
            put_back(states)
            flat.put_back_attributes(attributes)
            if on_device is not None:
                torch.cuda.set_rng_state(on_device, self.device)
            self.reset()

    def reset(self) -> None:
        """Reset weights, optimizer state and meters."""
        self.division.reset()
        with torch.no_grad():
            self.parameters.copy_(self.initial)
            for buffer, value in zip(
                model_buffers(self), self.initial_buffers, strict=True
            ):
                buffer.copy_(value)
        self.gradients.zero_()
        self._last_loss = torch.zeros((), dtype=self.dtype, device=self.device)
        self.reset_optimizer()
        self._begin()

    def epoch_done(self, epoch: int, agreed: bool | None) -> None:
        elapsed = self.clock.elapsed()
        with self.clock.paused():
            # Replicas that agree are equal: if one's weights are not finite, every
            # worker finds that here.
            poisoned = agreed is True and not self.is_finite()
            self.meters.close_epoch(
                epoch, elapsed, self._mean_loss(), poisoned_everywhere=poisoned
            )
            self._forget_losses()
            if agreed is not None and self.evaluates(epoch):
                self.keep(epoch, elapsed, agreed)
            if self.on_epoch is not None:
                self.on_epoch(epoch)

    def is_finite(self) -> bool:
        """Return True if all weights of the model are finite, of which others may hold parts. Collective then."""
        finite = flat.is_finite(self.division.own(self.parameters))
        holders = self.division.holders
        if holders is None:
            return finite
        flag = torch.full((1,), float(finite), dtype=self.dtype, device=self.device)
        holders.allreduce_(flag, "min")
        return bool(flag)

    def _mean_loss(self) -> float | None:
        """Return the mean loss of the epoch's samples; None without a batch (a late worker, an unselected client)."""
        if not self._losses:
            return None
        weights = torch.tensor(self._samples, dtype=torch.float64, device=self.device)
        # most are vectors already, which is found out sooner than reshaped
        vectors = [each if each.dim() else each.reshape(-1) for each in self._losses]
        losses = torch.cat(vectors)
        return float(losses.double().dot(weights)) / sum(self._samples)

    def evaluates(self, epoch: int) -> bool:
        """Return True if the model is evaluated after `epoch`; the last epoch is always evaluated after training."""
        every = self.run.evaluate_every
        return every > 0 and (epoch + 1) % every == 0 and not self.is_last(epoch)

    def keep(self, epoch: int, elapsed_s: float, agreed: bool) -> None:
        """Store a snapshot of the model; replicas in agreement need only the copy of worker 0.

        Collective where workers keep shards.
        """
        stored = not agreed or self.rank == 0
        vector = self.division.kept(self.parameters, here=stored)
        self.snapshots.append(
            Snapshot(
                epoch, elapsed_s, vector, agreed, self._statistics() if stored else []
            )
        )

    def snapshot(self, epoch: int, vector: Tensor) -> None:
        if self.evaluates(epoch):
            with self.clock.paused():
                elapsed = self.clock.elapsed()
                self.snapshots.append(
                    Snapshot(
                        epoch,
                        elapsed,
                        vector.detach().clone(),
                        True,
                        self._statistics(),
                    )
                )

    def _statistics(self) -> list[Tensor]:
        return [buffer.clone() for buffer in floating_buffers(self)]


def _pieces(tensor: Tensor, sizes: list[int]) -> Iterator[Tensor]:
    """Yield consecutive views of `tensor` of `sizes`, created in groups, which is twice as fast as one by one."""
    begin = 0
    for first in range(0, len(sizes), _CUT_AT_ONCE):
        some = sizes[first : first + _CUT_AT_ONCE]
        yield from torch.split(tensor.narrow(0, begin, sum(some)), some)
        begin += sum(some)
