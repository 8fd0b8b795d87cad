"""Training and evaluation of one worker, virtual or real."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from scalebench.comm.base import Communicator
from scalebench.data.batch_plan import BatchPlan
from scalebench.data.dataset import Dataset
from scalebench.errors import DivergedError
from scalebench.models.metric import evaluate as evaluate_model
from scalebench.strategies.base import Strategy, Worker
from scalebench.strategies.replica_state import floating_buffers
from scalebench.study.spec import Run
from scalebench.training.outcome import Evaluation, Meters, WorkerReport
from scalebench.training.replica import Replica


class Trainee(Worker, Protocol):
    """Worker with the members used by `train`."""

    run: Run
    plan: BatchPlan
    meters: Meters
    world: Communicator  # of all workers
    steps: int
    on_epoch: Callable[[int], None] | None

    def is_finite(self) -> bool: ...
    def keep(self, epoch: int, elapsed_s: float, agreed: bool) -> None: ...


def train(
    replica: Trainee,
    strategy: Strategy,
    *,
    warm: bool = False,
    measured_split: bool = True,
    on_begin: Callable[[], None] | None = None,
    on_epoch: Callable[[int], None] | None = None,
) -> WorkerReport:
    """Train `replica` by `strategy` and return the report of its meters.

    `warm` runs the study's warm-up steps first and resets the replica; the time starts
    after a barrier. `measured_split` is False if compute and communication cannot be
    separated (the real DDP): both are then None. `on_begin` is called before that
    barrier, `on_epoch` after each epoch, outside the training time.

    Raises:
        DivergedError: NaN or infinite training loss of an epoch, weights of replicas in agreement, or final weights.
    """
    strategy.setup(replica)
    if warm:
        assert isinstance(replica, Replica)
        _warm_up(replica, strategy)
    if on_begin is not None:
        on_begin()
    replica.world.barrier()
    replica.clock.start()
    replica.on_epoch = on_epoch
    strategy.train(replica)
    strategy.finish(replica)
    with replica.clock.paused():
        elapsed = replica.clock.elapsed()
        last = replica.epochs - 1
        # None: replicas are equal after `finish`
        agreed = strategy.in_agreement(replica, last) is not False
        if not replica.is_finite():  # no loss follows the last update
            message = f"worker {replica.world.rank}: the weights are not finite at the end of training"
            raise DivergedError(message, everywhere=agreed)
        replica.keep(last, elapsed, agreed)
    return _report(replica, elapsed, measured_split=measured_split)


def _report(
    replica: Trainee, elapsed_s: float, *, measured_split: bool
) -> WorkerReport:
    """Return the report of the meters of `replica` after a training of so many seconds."""
    ledger = replica.clock.ledger
    if not measured_split:
        for epoch in replica.meters.epochs:
            epoch.compute_s = epoch.comm_s = epoch.wait_s = None
    return WorkerReport(
        rank=replica.world.rank,
        train_s=elapsed_s,
        compute_s=ledger.compute_s if measured_split else None,
        comm_s=ledger.comm_s if measured_split else None,
        wait_s=ledger.wait if measured_split else None,
        data_s=ledger.data_s,
        other_s=ledger.other_s if measured_split else None,
        optimizer_steps=replica.steps,
        syncs=replica.world.collectives,
        bytes_sent=replica.world.bytes_sent,
        epochs=replica.meters.epochs,
        samples=replica.samples,
        collective_calls=replica.world.calls,
        histograms={
            name: {str(value): times for value, times in sorted(counted.items())}
            for name, counted in replica.meters.histograms.items()
        },
    )


def _warm_up(replica: Replica, strategy: Strategy) -> None:
    steps = min(replica.run.warmup_steps, replica.plan.steps(0))
    with replica.rehearsal():
        for batch in replica.batches(0):
            if batch.step == steps:
                break
            strategy.warm_up(replica, batch)


class EvaluationResult(NamedTuple):
    """Evaluations of this worker, and the final consensus on worker 0."""

    evaluations: list[Evaluation]
    final: Tensor | None


def evaluate(
    replica: Replica, strategy: Strategy, dataset: Dataset
) -> EvaluationResult:
    """Evaluate the consensus of every snapshot on the held-out samples; collective, outside the training time.

    Each snapshot is evaluated by one worker, which returns the evaluation. The last one
    is also evaluated on as many training samples, spread evenly over the training set.
    """
    some = np.linspace(
        0, dataset.n_train - 1, min(dataset.n_test, dataset.n_train)
    ).astype(int)
    evaluations: list[Evaluation] = []
    final: Tensor | None = None
    test: tuple[Tensor, Tensor] | None = None
    for snapshot in replica.snapshots:
        vector = snapshot.vector
        for buffer, then in zip(
            floating_buffers(replica), snapshot.buffers, strict=bool(snapshot.buffers)
        ):
            buffer.copy_(then)
        if not snapshot.agreed:
            assert vector is not None
            replica.parameters.copy_(vector)
            # Given up here: thousands of virtual workers hold one for each epoch.
            snapshot.vector = None
            consensus = strategy.consensus(replica)
            vector = consensus if replica.rank == 0 else None
        last = snapshot.epoch == replica.epochs - 1
        if (whole := replica.assembled(vector)) is not None:
            vector, model = whole
            test = test or _on_device(replica, dataset.x_test, dataset.y_test)
            metric = evaluate_model(model, *test, replica.task)
            evaluation = Evaluation(snapshot.epoch, snapshot.elapsed_s, metric)
            if last:
                seen = _on_device(replica, dataset.x_train[some], dataset.y_train[some])
                evaluation.train_metric = evaluate_model(model, *seen, replica.task)
            evaluations.append(evaluation)
            if last:
                final = vector
    return EvaluationResult(evaluations, final if replica.world.rank == 0 else None)


def _on_device(
    replica: Replica, x: NDArray[Any], y: NDArray[Any]
) -> tuple[Tensor, Tensor]:
    """Return samples as the replica's model takes them."""
    inputs = torch.tensor(x, dtype=replica.dtype, device=replica.device)
    targets = torch.tensor(y, device=replica.device)
    return inputs, targets if replica.task == "classification" else targets.to(
        replica.dtype
    )
