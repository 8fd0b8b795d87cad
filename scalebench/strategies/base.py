"""A strategy is an ordinary sequential training program, written once; where it runs is a plug-in.

`Strategy` is what replicas do to agree; `Worker` is one replica as a strategy sees it. A strategy's fields are its
options (a frozen pydantic model); what changes during training lives in `worker.state`. No module of this package
imports torch when it is loaded, so that options can be checked in a tenth of a second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

from scalebench.comm.base import Capability, Communicator, Server, ServerRule, SharedState
from scalebench.registry import Choice
from scalebench.strategies.traffic import Setting, evaluate
from scalebench.system.clock import Clock

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from scalebench.study.spec import Training


class Batch(NamedTuple):
    """One mini-batch of a worker's shard. `x` (n, ...) and `y` (n,) or (n, d) share the first axis."""

    x: Tensor
    y: Tensor
    weight: float  # n_i K / sum_j n_j over the workers' batches of this step; 1.0 when all are equal
    step: int  # 0-based within the epoch
    first_of_block: bool  # whether the first sample of a ds-tensor block lies in it


class Worker(Protocol):
    """One replica: its model, optimizer, shard of the data, communicator and clock."""

    rank: int
    size: int
    workers_per_node: int
    seed: int
    epochs: int
    model: torch.nn.Module
    parameters: Tensor  # (n,) every parameter of the model is a view of this flat buffer, in parameter order
    gradients: Tensor  # (n,) likewise for .grad
    optimizer: torch.optim.Optimizer
    comm: Communicator
    clock: Clock
    state: SimpleNamespace  # a strategy's own, per worker
    last_loss: Tensor  # () the mean loss of the latest batch, before its update

    @property
    def samples(self) -> int:
        """How many training samples this worker's shard holds in the current epoch."""

    def share(self, initial: Tensor, host: int = 0) -> SharedState:
        """A vector all may merge into, kept by worker `host`; it starts as the host's `initial`. Made by all."""

    def steps_in(self, epoch: int) -> int:
        """How many batches `epoch` has; the same for every worker."""

    def server(self, rule: ServerRule) -> Server:
        """Open the server that runs `rule` (the same on every worker)."""

    def batches(self, epoch: int) -> Iterator[Batch]:
        """The mini-batches of this worker in `epoch`, in an order that depends on (seed, epoch, worker) only."""

    def block_batches(self, epoch: int) -> Iterator[Batch]:
        """The same samples in batches of equal size inside each ds-tensor block; what is over of a block is left out.

        A block of m samples gives c = ceil(m / b) batches of floor(m / c). Workers may then differ in steps.
        """

    def gradient(self, batch: Batch, weight: float = 1.0, *, add: bool = False) -> None:
        """Forward and backward: `gradients` <- (`add`: +=) gradient of weight * mean loss over the batch."""

    @property
    def learning_rate(self) -> float:
        """The learning rate of this moment, by the study's policy."""

    def update(self) -> None:
        """One optimizer step with the learning rate of this moment."""

    def adopt(self, weights: Tensor) -> None:
        """Go on from `weights`, which somebody else (a server) updated; counts as an optimizer step."""

    def observe(self, name: str, value: int) -> None:
        """Count `value` in the histogram `name` of this worker's report; `staleness` also goes into the epoch's row."""

    def local_step(self, batch: Batch) -> None:
        """`gradient`, then `update`."""

    def reset_optimizer(self) -> None:
        """Forget momentum and every other optimizer state."""

    def is_last(self, epoch: int) -> bool:
        """Whether `epoch` (0-based) is the last one."""

    forward: Callable[[Tensor], Tensor]  # what a step calls: the model, or a wrapper of it (the real DDP)

    def use_optimizer(self, wrap: Any) -> None:
        """Replace the flat optimizer by `wrap(a plain optimizer over the model's parameters)`."""

    def epoch_done(self, epoch: int, agreed: bool | None) -> None:
        """Close the meters of `epoch`; `agreed` says that all replicas are equal now.

        None: the strategy takes snapshots itself.
        """

    def snapshot(self, epoch: int, vector: Tensor) -> None:
        """Keep a copy of `vector`, stamped with the training time, to be evaluated after training as `epoch`."""


class Strategy(Choice):
    """How replicas agree.

    Life: `setup`, then `train` (by default `train_epoch` for each epoch), then `finish`. `consensus` says which model
    the strategy would hand out now and never changes training.
    """

    source: ClassVar[str]  # paper or document
    requires: ClassVar[frozenset[Capability]] = frozenset({Capability.COLLECTIVES})
    engines: ClassVar[tuple[str, ...]] = ("mpi", "gloo", "horovod")  # native engines, the preferred first
    split_is_measured: ClassVar[bool] = True  # compute and communication can be told apart natively
    single_worker: ClassVar[bool] = False  # runs at one worker only (`serial`)
    asynchronous: ClassVar[bool] = False  # takes its own snapshots of a shared model
    deterministic: ClassVar[bool] = True  # final weights do not depend on timing
    sync_unit: ClassVar[str] = "batch"  # batch | epoch | none: what `sync_every` counts
    alone: ClassVar[str] = ""  # why one worker by default does not end as `serial` does, bit for bit; empty: it does
    sends_buffers: ClassVar[bool] = False  # each step begins with worker 0's buffers, on every worker
    in_rules: ClassVar[bool] = False  # of a base: its docstring is a part of the rule of those that refine it
    counts: ClassVar[dict[str, str]] = {}  # what `quantities` counts, in words

    @property
    def sync_every(self) -> int:
        """How many `sync_unit`s lie between two synchronisations."""
        return 1

    def first_interval(self, steps: int) -> tuple[int, int]:
        """After how many batches replicas begin to train alone, and after how many they next meet, at the latest.

        Of a `sync_unit` of batches, in epochs of `steps` of them.
        """
        return 0, self.sync_every

    @property
    def needs(self) -> frozenset[Capability]:
        """What these options ask of an engine: `requires`, or more."""
        return self.requires

    @property
    def averaged_state(self) -> str:
        """What is averaged, for the records: parameters, +buffers, +optimizer."""
        return "parameters"

    @property
    def optimizer_state_policy(self) -> str:
        """What becomes of momentum at a synchronisation, for the records."""
        return "keep"

    @property
    def merge_policy(self) -> str:
        """How replicas are combined, for the records."""
        return "mean"

    def arithmetic(self, workers: int) -> str | None:
        """A name for the numbers this strategy computes, whatever the time they take.

        Virtual runs with the same name end with the same weights, so that one of them is computed for all. Only for
        strategies that step and average gradients, or do nothing else at this number of workers.
        """
        return None

    def check(self, workers: int, workers_per_node: int) -> list[str]:
        """Before anything runs: warnings about this set-up.

        Raises:
            StudyError: it cannot work at all, in one line that says what could.
        """
        return []

    def check_training(self, training: Training) -> None:
        """Before anything runs: refuse a training that this strategy must not have.

        Raises:
            StudyError: it contradicts the rule, in one line that says what to write.
        """

    def check_model(self, shapes: Sequence[tuple[int, ...]]) -> None:
        """Before anything runs: refuse a model, of parameters of these `shapes`, for which there is nothing to do.

        Raises:
            ModelError: nothing, in one line that says what to change.
        """

    def final_weights(self, merges: Sequence[Iterable[int]], epochs: int, samples: Sequence[int]) -> list[float] | None:
        """(workers,) how much of each worker's training the final model holds; None where all are treated alike.

        `merges` are each worker's places among all merges, as it observed them as `merge_position`; `samples` the sizes
        of their shards.
        """
        return None

    def advice(self, training: Training) -> list[str]:
        """Warnings about a training, whatever the number of workers, before anything runs."""
        return []

    def setup(self, worker: Worker) -> None:
        """Prepare; replicas already start from equal weights."""

    def warm_up(self, worker: Worker, batch: Batch) -> None:
        """One step as in training, before it; the worker is put back afterwards."""
        worker.local_step(batch)

    def train(self, worker: Worker) -> None:
        """The whole training; override where the rhythm is not the epoch, and call `epoch_done` yourself."""
        for epoch in range(worker.epochs):
            self.train_epoch(worker, epoch)
            worker.epoch_done(epoch, None if self.asynchronous else self.in_agreement(worker, epoch))

    def train_epoch(self, worker: Worker, epoch: int) -> None:
        raise NotImplementedError

    def finish(self, worker: Worker) -> None:
        """After the last epoch, inside the training time."""

    def in_agreement(self, worker: Worker, epoch: int) -> bool:
        """Whether all replicas are equal after `epoch`, so that any of them is the consensus."""
        return worker.size == 1

    def weight(self, worker: Worker) -> float | None:
        """Of this worker in a mean of the replicas; None: all weigh the same."""
        return None

    def consensus(self, worker: Worker) -> Tensor:
        """The flat vector (n,) this strategy would hand out now: by default the mean of the replicas."""
        vector = worker.parameters.detach().clone()
        if worker.size > 1:
            worker.comm.allreduce_(vector, "mean", weight=self.weight(worker))
        return vector

    @property
    def at_most(self) -> frozenset[str]:
        """Which formulas, of `syncs` and `bytes`, are upper bounds: timing or a draw decides."""
        return frozenset()

    @property
    def syncs_formula(self) -> str:
        """How many synchronisations worker 0 takes part in, in an epoch, as its communicator counts them: a formula of
        traffic.py. A collective is one, inside a node too, and so is a request to a server or an access to a shared
        model."""
        return "S"

    @property
    def state_bytes(self) -> str:
        """How many bytes one synchronisation carries of a worker: a formula of traffic.py."""
        return "n"

    @property
    def bytes_formula(self) -> str:
        """How many bytes a worker hands over in an epoch, on the mean over the workers: a formula of traffic.py."""
        return f"{self.state_bytes} * syncs"

    def quantities(self, epoch: int, setting: Setting) -> dict[str, int]:
        """What formulas need that is not arithmetic: the values of the symbols in `counts`."""
        return {}

    def syncs_in_epoch(self, epoch: int, setting: Setting) -> int:
        """The value of `syncs_formula` in `epoch`; a lone worker has nobody to synchronise with."""
        if setting.workers == 1:
            return 0
        return int(evaluate(self.syncs_formula, self._symbols(epoch, setting)))

    def bytes_in_epoch(self, epoch: int, setting: Setting) -> float:
        """The value of `bytes_formula` in `epoch`; a lone worker hands over nothing. Rows that move come on top."""
        if setting.workers == 1:
            return 0.0
        syncs = self.syncs_in_epoch(epoch, setting)
        return evaluate(self.bytes_formula, {**self._symbols(epoch, setting), "syncs": syncs})

    def _symbols(self, epoch: int, setting: Setting) -> dict[str, Any]:
        here = {"e": epoch, "last": int(epoch == setting.epochs - 1)}
        return {**dict(self), **setting.symbols(), **here, **self.quantities(epoch, setting)}
