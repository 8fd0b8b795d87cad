"""The two sides of a strategy: `Strategy`, a sequential training program, and `Worker`, one replica.

A strategy's fields are its options (a frozen pydantic model); its state during training
lives in `worker.state`. What it sends, how often and how much memory it needs is
recorded by running it on a `RecordingWorker` (room pricing). No module of this package
imports torch when it is loaded: options are checked in a tenth of a second.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Protocol

from scalebench.cluster.mesh import Mesh
from scalebench.comm.base import (
    Capability,
    Communicator,
    Server,
    ServerRule,
    SharedState,
)
from scalebench.registry import Choice
from scalebench.strategies.traits import Traits
from scalebench.system.clock import Clock

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from scalebench.models.parts import Layer
    from scalebench.study.spec import Training

# Activations that a stage gives up after a forward pass: all but the inputs of layers,
# or but those of the stage.
Recompute = Literal["none", "layer", "all"]


class Batch(NamedTuple):
    """One mini-batch of a worker's shard. `x` (n, ...) and `y` (n,) or (n, d) share the first axis."""

    x: Tensor
    y: Tensor
    # n_i K / sum_j n_j over the workers' batches of this step; 1.0 when all are equal
    weight: float
    step: int  # 0-based within the epoch
    first_of_block: bool  # the batch holds the first sample of a ds-tensor block


class Move(NamedTuple):
    """One move of a stage: the forward or backward pass of a micro-batch through one of its chunks of layers.

    A backward pass has two halves, which may be moves of their own: gradients of the
    chunk's inputs, for which the stage before it waits, and of its weights.
    """

    forward: bool
    micro_batch: int
    chunk: int = 0
    half: Literal["both", "inputs", "weights"] = "both"  # of a backward pass


class Unit(Protocol):
    """Consecutive layers of a model, of which a worker keeps a shard (`Worker.divide`)."""

    is_last: bool  # of the model
    own: Tensor  # (n,) this worker's shard of the parameters
    own_gradients: Tensor  # (n,) and of their gradients
    gradients: Tensor  # (K n,) of the whole unit, after its backward pass

    def fill(self, shards: Sequence[Tensor]) -> None:
        """Set the unit's parameters to the shards of all workers."""

    def release(self) -> None:
        """Give up the memory of the unit's parameters until `fill`."""

    def release_gradients(self) -> None:
        """Give up the memory of the unit's gradients until its next backward pass."""


class UnitRule(Protocol):
    """What a worker does around the forward and backward pass of each unit, outside them."""

    by_layer: bool  # a unit is a layer; else the whole model

    def before_forward(self, unit: Unit) -> None: ...
    def after_forward(self, unit: Unit) -> None: ...
    def before_backward(self, unit: Unit) -> None: ...
    def after_backward(self, unit: Unit) -> None: ...


class LayerProfile(NamedTuple):
    """A layer into which a model can be cut: its parameters, the numbers of a sample it takes and gives."""

    name: str
    parameters: int
    takes: int
    gives: int
    # numbers of workers that can share it, which divide those of the run
    degrees: tuple[int, ...]


class SharedComponent(Protocol):
    """Consecutive layers that `degree` neighbouring workers share (`Worker.use_layout`)."""

    @property
    def degree(self) -> int: ...
    @property
    def peers(self) -> Communicator:
        """The workers with the same share."""

    @property
    def gradients(self) -> Tensor:
        """(n,) those of this worker's share, summed over the batches of the workers that share it."""


class Worker(Protocol):
    """One replica: its model, optimizer, shard of the data, communicator and clock.

    Where a replica has several workers (`Traits.mesh`), `rank`, `size` and `comm` are
    of the workers that hold the same part of every replica: what a strategy does with
    them, it does with each part of the model.
    """

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...

    epochs: int
    first_epoch: int  # above 0 where a training that was interrupted goes on
    model: torch.nn.Module
    # (n,) every parameter of the model is a view of this flat buffer, in parameter
    # order
    parameters: Tensor
    gradients: Tensor  # (n,) likewise for .grad
    optimizer: torch.optim.Optimizer
    comm: Communicator
    clock: Clock
    state: SimpleNamespace  # a strategy's own, per worker

    @property
    def seed(self) -> int:
        """Seed of the run."""

    @property
    def workers_per_node(self) -> int:
        """Number of workers on a node, at most all."""

    @property
    def last_loss(self) -> Tensor:
        """The mean loss () of the latest batch, before its update."""

    @property
    def samples(self) -> int:
        """Number of training samples in this worker's shard in the current epoch."""

    def share(self, initial: Tensor, host: int = 0) -> SharedState:
        """Make a vector that all workers may change, kept by worker `host`, from the host's `initial`. Collective."""

    def steps_in(self, epoch: int) -> int:
        """Number of batches of `epoch`; the same for every worker."""

    def mean_batch(self, epoch: int) -> float:
        """Mean number of samples in a worker's batch of `epoch`, over all workers; the same for every worker."""

    @property
    def rows_move(self) -> bool:
        """True if workers exchange rows, and so wait for all others, at the start of an epoch."""

    def server(self, make: Callable[[], ServerRule]) -> Server:
        """Open the server that runs the rule that `make` returns (the same on every worker)."""

    def batches(self, epoch: int) -> Iterator[Batch]:
        """Yield this worker's mini-batches of `epoch`, in an order that depends on (seed, epoch, worker) only."""

    def block_batches(self, epoch: int) -> Iterator[Batch]:
        """Yield the same samples in batches of equal size inside each ds-tensor block; a block's remainder is left out.

        A block of m samples gives c = ceil(m / b) batches of floor(m / c). Workers may
        then differ in steps.
        """

    def gradient(self, batch: Batch, weight: float = 1.0, *, add: bool = False) -> None:
        """Forward and backward pass: `gradients` <- (`add`: +=) gradient of weight * mean loss over the batch."""

    @property
    def learning_rate(self) -> float:
        """Current learning rate, by the study's policy."""

    def update(self, onto: Tensor | None = None) -> None:
        """Take one optimizer step with the current learning rate: from the weights, or of the same move from `onto`."""

    def adopt(self, weights: Tensor) -> None:
        """Replace the parameters by `weights`, updated by a server; counts as an optimizer step."""

    def observe(self, name: str, value: int) -> None:
        """Count `value` in histogram `name` of this worker's report; `staleness` also goes into the epoch's row."""

    def local_step(self, batch: Batch) -> None:
        """Call `gradient`, then `update`."""

    def local_steps(
        self,
        batches: Iterator[Batch],
        steps: int | None = None,
        *,
        reset_per_block: bool = False,
    ) -> None:
        """Take a local step on each of the next `steps` of `batches`, by default on all that are left.

        `reset_per_block`: with `reset_optimizer` before the first batch of each
        ds-tensor block.

        The same as a loop over `local_step`, and several times faster in virtual runs:
        as nothing of the worker is looked at between two steps, the steps of all
        workers are computed together.
        """

    def reset_optimizer(self) -> None:
        """Delete momentum and all other optimizer state."""

    def is_last(self, epoch: int) -> bool:
        """Return True if `epoch` (0-based) is the last one."""

    mesh: Mesh

    @property
    def layer_work(self) -> Sequence[float]:
        """Work of a step in each layer into which the model can be cut, in any unit."""

    def take(
        self,
        sizes: Sequence[int],
        order: Callable[[int, int, int], Iterable[Move]],
        micro_batches: int,
        recompute: Recompute = "none",
    ) -> None:
        """Hold one stage of the model only, and train it by micro-batches. Collective.

        Groups of `sizes` consecutive layers are dealt to the stages in turn: one to
        each, or several chunks. `order(stage, stages, micro_batches)` are the moves of
        a stage in a step. Activations that `recompute` gives up after a forward pass
        are computed again before the backward pass. From now on `model`, `parameters`,
        `gradients` and `optimizer` are those of the stage, and `gradient` takes part in
        the step of the replica.
        """

    @property
    def layer_profiles(self) -> Sequence[LayerProfile]:
        """What a choice of degrees needs to know of each layer into which the model can be cut."""

    def use_layout(
        self, sizes: Sequence[int], degrees: Sequence[int]
    ) -> Sequence[SharedComponent]:
        """Share runs of `sizes` consecutive layers among `degrees` neighbouring workers each. Collective.

        From now on `parameters`, `gradients` and `optimizer` are those of this worker's
        shares, with the values and the state that they had in the layout before;
        `gradient` adds up over the batches of those that share a component.
        """

    def use_schedule(self, name: str, micro_batches: int) -> None:
        """Let a schedule of torch.distributed.pipelining move micro-batches through the stage that `take` made."""

    def use_styles(self) -> None:
        """Let styles of torch.distributed.tensor.parallel compute with the shares that `take` made. Collective."""

    def divide(self, rule: UnitRule) -> None:
        """Keep shards of the units of the model only; `rule` exchanges what `gradient` computes with. Collective.

        From now on `parameters`, `gradients` and `optimizer` are those of this worker's
        shards.
        """

    def use_fully_shard(self, *, reshard: bool) -> None:
        """Let torch's fully_shard divide each layer of the model; `reshard`: between its passes, too. Collective."""

    forward: Callable[[Tensor], Tensor]  # the model, or a wrapper of it (the real DDP)

    def use_optimizer(self, wrap: Any) -> None:
        """Replace the flat optimizer by `wrap(a plain optimizer over the model's parameters)`."""

    def epoch_done(self, epoch: int, agreed: bool | None) -> None:
        """Close the meters of `epoch`.

        `agreed`: True if all replicas are equal now; None if the strategy takes
        snapshots itself.
        """

    def snapshot(self, epoch: int, vector: Tensor) -> None:
        """Keep a copy of `vector` with the current training time; it is evaluated after training as `epoch`."""


@dataclass(frozen=True)
class Synchronisation:
    """How often a strategy synchronises, what, and by which rule."""

    every: int = 1  # units between two synchronisations; 0: never
    unit: Literal["batch", "epoch", "none"] = "batch"
    # and "+buffers", "+optimizer", or "worker 0's buffers" where these replace all
    averaged: str = "parameters"
    optimizer_state: str = "keep"  # momentum and the like at a synchronisation
    merge: str = "mean"  # how replicas are combined

    @property
    def epochs(self) -> int | None:
        """Epochs between two synchronisations; None where they count batches, or there are none."""
        return self.every if self.unit == "epoch" else None

    def columns(self) -> dict[str, Any]:
        """Return the columns of a run's row."""
        return {
            "sync_every": self.every or None,
            "sync_unit": self.unit,
            "averaged_state": self.averaged,
            "optimizer_state_policy": self.optimizer_state,
            "merge_policy": self.merge,
        }


@dataclass(frozen=True)
class Setting:
    """A training at one worker count, before anything runs."""

    training: Training
    workers: int
    workers_per_node: int
    steps: int | None = None  # of an epoch; None until the data are partitioned
    # of the model's parameters; None until it is built
    shapes: Sequence[tuple[int, ...]] | None = None
    without_gradient: Sequence[
        str
    ] = ()  # names of parameters that get none in some step
    # into which the model can be cut; None until it is built
    layers: Sequence[Layer] | None = None
    # of a step in each of them, in any unit; None until it is known
    layer_work: Sequence[float] | None = None


class Strategy(Choice):
    """A rule by which replicas agree.

    Life: `setup`, then `train` (by default `train_epoch` for each epoch), then
    `finish`. One worker by default ends with the weights of `serial`, bit for bit.
    """

    source: ClassVar[str]  # paper or document
    # empty: runs at one worker only
    requires: ClassVar[frozenset[Capability]] = frozenset({Capability.COLLECTIVES})
    engines: ClassVar[tuple[str, ...]] = (
        "mpi",
        "gloo",
        "horovod",
    )  # native engines, the preferred first
    deterministic: ClassVar[bool] = True  # final weights do not depend on timing

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        """Take back what bases state of their program if `cls` changes it, and does not state it again."""
        super().__pydantic_init_subclass__(**kwargs)
        if _is_changed_since("traits", cls):
            inherited: Any = cls.traits
            without_promises = property(
                lambda self: inherited.fget(self).of_changed_program()
            )
            cls.traits = without_promises  # type: ignore[assignment, method-assign]
        if _is_changed_since("arithmetic", cls):
            cls.arithmetic = Strategy.arithmetic  # type: ignore[method-assign]

    @property
    def needs(self) -> frozenset[Capability]:
        """Capabilities that these options ask of an engine: `requires`, or more."""
        return self.requires

    @property
    def synchronisation(self) -> Synchronisation:
        return Synchronisation()

    @property
    def traits(self) -> Traits:
        """What others may rely on. A subclass that changes the program states it again, or is recorded whole."""
        return Traits()

    def check(self, setting: Setting) -> list[str]:
        """Return warnings about `setting`, before anything runs.

        Raises:
            StudyError: the strategy cannot work there, in one line that says what could.
            ModelError: the model leaves it nothing to do.
        """
        return []

    def arithmetic(self, workers: int) -> str | None:
        """Name of the arithmetic: virtual runs of equal name end with equal weights, and one is computed for all.

        For strategies that step and average gradients, or do nothing else at this
        number of workers; else None.
        """
        return None

    def setup(self, worker: Worker) -> None:
        """Prepare; replicas already start from equal weights."""

    def warm_up(self, worker: Worker, batch: Batch) -> None:
        """Take one step as in training, before it; the worker is reset afterwards."""
        worker.local_step(batch)

    def train(self, worker: Worker) -> None:
        """Train all epochs; override where the rhythm is not the epoch, and call `worker.epoch_done`."""
        for epoch in range(worker.first_epoch, worker.epochs):
            self.train_epoch(worker, epoch)
            worker.epoch_done(epoch, self.in_agreement(worker, epoch))

    def train_epoch(self, worker: Worker, epoch: int) -> None:
        raise NotImplementedError

    def finish(self, worker: Worker) -> None:
        """Conclude after the last epoch, inside the training time."""

    def in_agreement(self, worker: Worker, epoch: int) -> bool | None:
        """Return True if all replicas are equal after `epoch`, so that any of them is the consensus.

        None: workers take snapshots of a shared model themselves, and are equal after
        `finish`.
        """
        return worker.size == 1

    def consensus(self, worker: Worker) -> Tensor:
        """The flat vector (n,) that the strategy would hand out now: by default the mean of the replicas.

        Called outside the training time, on the weights and buffers of one snapshot; it
        leaves the weights as they are.
        """
        vector = worker.parameters.detach().clone()
        if worker.size > 1:
            worker.comm.allreduce_(vector, "mean")
        return vector


_DESCRIPTIONS = {
    "arithmetic",
    "check",
    "consensus",
    "final_weights",
    "needs",
    "synchronisation",
    "traits",
    "warm_up",
}


def _is_changed_since(statement: str, cls: type[Strategy]) -> bool:
    """Return True if a class defines a part of the program that is not among the bases of the one with `statement`."""
    for each in cls.__mro__:
        if statement in vars(each):
            return False
        if any(_is_of_program(name, value) for name, value in vars(each).items()):
            return True
    return False


def _is_of_program(name: str, value: object) -> bool:
    """Return True for a method or property that may do something in a training."""
    if name in _DESCRIPTIONS or name.startswith("__"):
        return False
    return inspect.isroutine(value) or isinstance(
        value, property | functools.cached_property
    )
