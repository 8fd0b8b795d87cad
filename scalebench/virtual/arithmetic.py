"""How the gradients of virtual workers are computed: each by itself, batched, or one for all.

Where all replicas are equal and their gradients are averaged, one replica computes the
gradient of the mean loss over the batches of all. This and batched gradients are faster
for small models only, and need a model without random numbers and hooks; one for all
also needs a model without statistics, which are those of a worker's own batches. Both
are tried, and measured where a calibration keeps what was faster (`choice_for`).
Elsewhere the size of the model decides, so that equal studies compute equal bits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from statistics import median
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from scalebench.cluster.mesh import Mesh
from scalebench.comm.simulated import lone_communicator
from scalebench.data.batch_plan import BatchPlan
from scalebench.data.dataset import Dataset
from scalebench.errors import in_one_line
from scalebench.models.flat import (
    Memory,
    buffers_have_room,
    equal_attributes,
    module_attributes,
    views,
)
from scalebench.pricing.machine import Choice, Machine
from scalebench.strategies.allreduce import GradientAveraging
from scalebench.strategies.base import Batch, Strategy, Worker
from scalebench.strategies.replica_state import model_buffers
from scalebench.study.spec import BY_LAYER, Run
from scalebench.system.clock import WallClock
from scalebench.system.random_state import drawn_since, random_state
from scalebench.training.loop import evaluate, train
from scalebench.training.replica import Replica
from scalebench.virtual.batched import Batched
from scalebench.virtual.gradients import Gradients, losses_of_samples
from scalebench.virtual.lock_step import Trace, rows_stay
from scalebench.virtual.recorded import RecordedReplica
from scalebench.virtual.tape import value_reads

ONE_BATCH = "one_batch"  # arithmetic of equal replicas
_TRIED = 16  # workers, at most, among which batched gradients are tried
# Parameters, above which two are: more were slower by half at a sixth of it, and each
# of sixteen takes the memory of a model in the process that starts the runs.
_LARGE = 2**20
_STEPS, _ROUNDS = 3, 5  # of a measurement
# of the processor time of single replicas, from which gradients are batched
_FASTER = 0.8
# Where nothing was measured: weights of a larger model fill the caches, and a call for
# few workers takes longer than theirs one by one (shares in docs/measurements.md).
_SMALL, _SEVERAL = 65_536, 4  # parameters, workers
_CLOSE = {
    torch.float64: 1e-9,
    torch.float32: 1e-3,
}  # relative difference of equal gradients


# --- one for all --------------------------------------------------------------------------------------------------


class _MeanOfGradients(GradientAveraging):
    """w <- w - eta * gradient of the mean loss over the batches of all workers."""

    def exchange(self, worker: Worker, scale: float = 1.0) -> None:
        worker.update()


class _GlobalReplica(Replica):
    """The replica of all K workers: its batches are theirs side by side, in the order of their ranks."""

    def use(self, dataset: Dataset, *, records: bool) -> None:
        self._dataset, self._records = dataset, records
        self._trained = [
            parameter
            for parameter in self.model.parameters()
            if parameter.requires_grad
        ]
        self._targets = views(self._trained, self.gradients)
        self._by_shape: dict[tuple[int, ...], Gradients] = {}
        self._of_samples: list[Tensor] = []  # losses of the current epoch, by step
        self.losses: list[list[float]] = []  # by epoch, of each worker

    def batches(self, epoch: int) -> Iterator[Batch]:
        self._epoch = epoch
        plan = self.plan
        sizes = plan.batch_sizes(epoch)
        workers, steps = sizes.shape
        step_of = np.concatenate(
            [np.repeat(np.arange(steps), of_worker) for of_worker in sizes]
        )
        # Stable: the samples of a step stay in the order of the ranks.
        side_by_side = np.argsort(step_of, kind="stable")
        rows = plan.indices(epoch, *range(workers))[side_by_side]
        x = torch.from_numpy(self._dataset.x_train[rows]).to(self.dtype)
        y = torch.from_numpy(self._dataset.y_train[rows])
        y = y.to(torch.int64 if self.task == "classification" else self.dtype)
        of_all = sizes.sum(axis=0).tolist()
        for step, (x_here, y_here) in enumerate(
            zip(torch.split(x, of_all), torch.split(y, of_all), strict=True)
        ):
            yield self.delivered(Batch(x_here, y_here, 1.0, step, step == 0), steps)
        samples = sizes.sum(axis=1)
        owners = torch.from_numpy(np.repeat(np.arange(workers), samples)[side_by_side])
        sums = torch.zeros(workers, dtype=torch.float64).index_add_(
            0, owners, torch.cat(self._of_samples).double()
        )
        self.losses.append((sums / torch.from_numpy(samples)).tolist())
        self._of_samples.clear()

    @torch.no_grad()
    def gradient(self, batch: Batch, weight: float = 1.0, *, add: bool = False) -> None:
        x, y, *_ = batch
        samples = x.shape[0]
        if x.shape not in self._by_shape:
            self._by_shape[x.shape] = Gradients(
                self._losses_of_one, self._trained, x, y, samples, records=self._records
            )
        of_samples, means = self._by_shape[x.shape].into(
            self._targets, [x], [y], [samples], [weight], add=add
        )
        self._of_samples.append(of_samples[0])
        self.computed(means[0], samples)

    def _losses_of_one(
        self, parameters: Sequence[Tensor], x: Tensor, y: Tensor
    ) -> Tensor:
        return losses_of_samples(self.task, self.model(x[0]), y[0])[None]


def train_one_for_all(
    run: Run,
    dataset: Dataset,
    plan: BatchPlan,
    mesh: Mesh,
    on_epoch: Callable[[int], None] | None = None,
    *,
    records: bool = False,
) -> Trace:
    """Train one whole model on the batches of all replicas of `run`, whose strategy takes the mean of their gradients.

    `mesh` says which workers know the loss of a replica: those with its last layers.
    `records`: the model's operations do not depend on values, and are repeated.

    Raises:
        DivergedError: the loss or the weights are not finite.
    """
    replica = _GlobalReplica(
        run, dataset, plan, lone_communicator(plan.workers), WallClock()
    )
    replica.use(dataset, records=records)
    strategy = _MeanOfGradients()
    train(replica, strategy, on_epoch=on_epoch)
    began = time.perf_counter()
    found = evaluate(replica, strategy, dataset)
    assert found.final is not None
    of_replicas = [list(losses) for losses in zip(*replica.losses, strict=True)]
    unknown: list[float | None] = [None] * run.epochs
    by_worker = [
        [*of_replica]
        if mesh.stage_of(part) == mesh.stage_of(mesh.last_part)
        else unknown
        for of_replica in of_replicas
        for part in range(mesh.parts)
    ]
    weights = {"initial": replica.initial, "final": found.final}
    eval_s = time.perf_counter() - began
    return Trace(
        by_worker,
        found.evaluations,
        arithmetic=ONE_BATCH,
        weights=weights,
        eval_s=eval_s,
    )


# --- the choice ---------------------------------------------------------------------------------------------------


def holds_whole_models(run: Run, strategy: Strategy) -> bool:
    """Return True if each worker computes gradients of a whole model."""
    traits = strategy.traits
    parts = traits.mesh(run.workers).parts
    return parts == 1 and not traits.sharded and not traits.mixed


def equals_one_batch(run: Run, strategy: Strategy) -> bool:
    """Return True if one replica on the batches of all ends with the weights of each of several."""
    return run.workers > 1 and strategy.traits.equals_one_batch and rows_stay(run)


def is_chosen(run: Run, strategy: Strategy) -> bool:
    """Return True if `run` computes gradients in a way that is chosen; parts of a model always compute their own."""
    return holds_whole_models(run, strategy) or equals_one_batch(run, strategy)


def choose(run: Run, dataset: Dataset, plan: BatchPlan, machine: Machine) -> Choice:
    """Return how the gradients of `run` are computed: as `machine` knows, else as the size of the model suggests."""
    kept = machine.arithmetic.get(plan.batch_size, {})
    choice = kept.get(workers_tried(run)) or _supposed(run, dataset, plan.batch_size)
    return choice if run.workers > 1 else _single(choice, "a lone worker")


def workers_tried(run: Run) -> int:
    """Return among how many workers it is measured what is faster for `run`: 2, 4, 8 or 16."""
    return max(2, 1 << (min(run.workers, _TRIED).bit_length() - 1))


def choice_for(run: Run, dataset: Dataset, size: int) -> Choice:
    """Return how gradients of batches of `size` samples are computed the fastest, tried and measured now."""

    def too_slow(
        pool: Batched, replicas: Sequence[RecordedReplica], batches: Sequence[Batch]
    ) -> str:
        share = _share_of_time(
            lambda: _ask_all(pool, replicas, batches, _STEPS), replicas, batches
        )
        takes = f"batched gradients take {share:.2f} of the time of single ones"
        return takes if share >= _FASTER else ""

    return _tried(run, dataset, size, workers_tried(run), too_slow)


_supposed_before: dict[tuple[object, ...], Choice] = {}  # of this process


def _supposed(run: Run, dataset: Dataset, size: int) -> Choice:
    """Return how gradients are computed where nothing was measured: what the model allows is tried once."""
    facts = (
        run.threads_per_worker,
        str(run.model),
        run.model_sha256,
        run.dtype,
        str(run.optimizer),
        dataset.input_shape,
        dataset.outputs,
        dataset.task,
        size,
    )

    def too_large(
        pool: Batched, replicas: Sequence[RecordedReplica], batches: Sequence[Batch]
    ) -> str:
        numbers = len(pool.initial)
        large = f"its {numbers:,} parameters are many, and nothing was measured"
        return large if numbers > _SMALL else ""

    if facts not in _supposed_before:
        _supposed_before[facts] = _tried(run, dataset, size, 2, too_large)
    choice = _supposed_before[facts]
    few = f"there are fewer than {_SEVERAL} workers, and nothing was measured"
    return _single(choice, few) if run.workers < _SEVERAL else choice


def _single(choice: Choice, reason: str) -> Choice:
    if not choice.batched:
        return choice
    return choice.model_copy(update={"batched": False, "reason": reason})


def _tried(
    run: Run,
    dataset: Dataset,
    size: int,
    workers: int,
    too_slow: Callable[[Batched, Sequence[RecordedReplica], Sequence[Batch]], str],
) -> Choice:
    """Return what the model allows, tried on batches of `size` samples of few `workers`, unless it is `too_slow`."""
    workers = min(workers, dataset.n_train // size)
    if workers < 2:
        return Choice(reason="fewer samples than two batches")
    rows = workers * size
    part = BatchPlan(rows, workers, seed=run.seed, batch_per_worker=size)
    # At a rate of 0 the steps that are timed leave the weights equal.
    few = run.model_copy(update={"workers": workers, "init_weights": None, "lr": 0.0})
    some = replace(
        dataset, x_train=dataset.x_train[:rows], y_train=dataset.y_train[:rows]
    )

    def replica(rank: int, memory: Memory | None = None) -> RecordedReplica:
        comm = lone_communicator(workers, rank)
        return RecordedReplica(few, some, part, comm, WallClock(), memory=memory)

    first = Replica(few, some, part, lone_communicator(workers), WallClock())
    if workers > 2 and first.parameters.numel() > _LARGE:
        return _tried(run, dataset, size, 2, too_slow)
    if reason := _why_single(first, few):
        return Choice(reason=reason)
    pool = Batched(first, workers, fills=False)
    replicas = [replica(rank, pool.memory(rank)) for rank in range(workers)]
    batches = [next(each.batches(0)) for each in replicas]
    twice = (
        batches,
        [*batches[1:], batches[0]],
    )  # the second call repeats what the first has recorded
    single = _made_by(lambda: _ask_each(replicas, batches), replicas)
    close = _CLOSE[first.dtype]
    one_batch = not changes_buffers(first) and _is_close(
        _of_one_batch(first, batches), single.gradients.mean(dim=0), close
    )
    try:
        equal = all(_agrees(pool, replicas, some, close) for some in twice)
        # of a model that vmap takes, so without branches
        records = all(_repeats(replicas, some) for some in twice)
    except (
        Exception
    ) as error:  # of any kind: what a model does may have no batched form
        return Choice(one_batch=one_batch, reason=in_one_line(error))
    if not equal:
        reason = "its gradients differ when they are batched"
        return Choice(one_batch=one_batch, records=records, reason=reason)
    if reason := too_slow(pool, replicas, batches):
        return Choice(one_batch=one_batch, records=records, reason=reason)
    pool.fills = True
    fills = size > 1 and _agrees(
        pool, replicas, [_without_last(batches[0]), *batches[1:]], close
    )
    return Choice(batched=True, fills=fills, one_batch=one_batch, records=records)


def _why_single(replica: Replica, run: Run) -> str:
    """Name what of the model has no batched form; empty if there is nothing."""
    if replica.dtype not in _CLOSE:
        return f"{run.dtype} rounds batches of another size differently"
    if run.optimizer.name in BY_LAYER:
        return f"optimizer {run.optimizer.name} steps layer by layer"
    if not buffers_have_room(replica.model, replica.parameters):
        return "the model has buffers that share memory or are not contiguous"
    if has_hooks(replica.model):
        return "the model has hooks"
    if replica.gives_labels or not _gives_tensor(replica):
        return "the model gives a loss, or logits, of its own"
    if drawn_in_a_step(replica):
        return "the model draws random numbers"
    if changes_attributes(replica):
        return "the model keeps a state that is no buffer"
    if replaces_buffers(replica):
        return "the model replaces its buffers by other tensors"
    if reads := reads_in_a_step(replica):
        return f"the model reads values of tensors: {', '.join(reads)}"
    return ""


def has_hooks(model: nn.Module) -> bool:
    """Return True if functions are called with what modules take and give, or with gradients of parameters."""
    of_modules = (
        "_forward_hooks",
        "_forward_pre_hooks",
        "_backward_hooks",
        "_backward_pre_hooks",
    )
    of_parameters = ("_backward_hooks", "_post_accumulate_grad_hooks")
    return any(
        getattr(holder, name, None)
        for holders, names in (
            (model.modules(), of_modules),
            (model.parameters(), of_parameters),
        )
        for holder in holders
        for name in names
    )


def drawn_in_a_step(replica: Replica) -> frozenset[str]:
    """Return the generators that a step of the model draws from (dropout): every worker needs its own states."""
    before = random_state()
    with replica.rehearsal():
        replica.gradient(next(replica.batches(0)))
        return drawn_since(before)


def reads_in_a_step(replica: Replica) -> list[str]:
    """Return the calls by which steps read values of tensors: with other values they may have other operations.

    So does one of a sample less, as the batches of an epoch are: a model may read
    values in smaller ones alone.
    """
    with replica.rehearsal():
        batch = next(replica.batches(0))
        with value_reads() as reads:
            replica.gradient(batch)
            if len(batch.x) > 1:
                replica.gradient(_without_last(batch))
    return list(dict.fromkeys(reads))


def _gives_tensor(replica: Replica) -> bool:
    with replica.rehearsal(), torch.no_grad():
        return isinstance(replica.forward(next(replica.batches(0)).x), Tensor)


def changes_attributes(replica: Replica) -> bool:
    """Return True if a step changes attributes of the model's modules, as a counter of calls: each needs its own."""
    with replica.rehearsal():
        before = module_attributes(replica.model)
        replica.gradient(next(replica.batches(0)))
        return not equal_attributes(before, module_attributes(replica.model))


def replaces_buffers(replica: Replica) -> bool:
    """Return True if a step binds other tensors to the names of buffers."""
    before = list(replica.model.buffers())
    with replica.rehearsal():
        replica.gradient(next(replica.batches(0)))
        after = list(replica.model.buffers())
    return len(after) != len(before) or any(
        one is not other for one, other in zip(after, before, strict=True)
    )


def changes_buffers(replica: Replica) -> bool:
    """Return True if a step changes buffers, as BatchNorm's statistics: of its own batch, in each worker."""
    with replica.rehearsal():
        replica.gradient(next(replica.batches(0)))
        return not all(
            torch.equal(buffer, initial)
            for buffer, initial in zip(
                replica.model.buffers(), replica.initial_buffers, strict=True
            )
        )


def _of_one_batch(replica: Replica, batches: Sequence[Batch]) -> Tensor:
    x, y = (
        torch.cat([getattr(batch, name) for batch in batches]) for name in ("x", "y")
    )
    replica.gradients.zero_()
    losses_of_samples(replica.task, replica.model(x), y).mean().backward()
    return replica.gradients.clone()


class _Made(NamedTuple):
    """Gradients (k, n) of replicas, and their buffers behind these, (k, m)."""

    gradients: Tensor
    buffers: Tensor


def _made_by(compute: Callable[[], None], replicas: Sequence[Replica]) -> _Made:
    """Return what `compute` makes of the replicas, whose buffers are then as before."""
    held = [model_buffers(each) for each in replicas]
    before = [[buffer.clone() for buffer in of_each] for of_each in held]
    compute()
    none = replicas[0].gradients[:0].double()
    made = _Made(
        torch.stack([each.gradients.clone() for each in replicas]),
        torch.stack(
            [torch.cat([none, *(b.double().reshape(-1) for b in o)]) for o in held]
        ),
    )
    for buffer, value in zip(chain(*held), chain(*before), strict=True):
        buffer.copy_(value)
    return made


def _ask_each(replicas: Sequence[Replica], batches: Sequence[Batch]) -> None:
    for each, batch in zip(replicas, batches, strict=True):
        Replica.gradient(each, batch)


def _repeats(replicas: Sequence[RecordedReplica], batches: Sequence[Batch]) -> bool:
    """Return True if recorded gradients are the computed ones, bit for bit, and so are buffers."""

    def repeat() -> None:
        for each, batch in zip(replicas, batches, strict=True):
            each.gradient(batch)

    computed = _made_by(lambda: _ask_each(replicas, batches), replicas)
    repeated = _made_by(repeat, replicas)
    return all(map(torch.equal, repeated, computed))


def _agrees(
    pool: Batched, replicas: Sequence[Replica], batches: Sequence[Batch], close: float
) -> bool:
    """Return True if batched gradients are the single ones, and buffers are those behind these."""
    single = _made_by(lambda: _ask_each(replicas, batches), replicas)
    batched = _made_by(lambda: _ask_all(pool, replicas, batches), replicas)
    return all(
        _is_close(found, expected, close)
        for found, expected in zip(batched, single, strict=True)
    )


def _without_last(batch: Batch) -> Batch:
    return batch._replace(x=batch.x[:-1], y=batch.y[:-1])


def _ask_all(
    pool: Batched, replicas: Sequence[Replica], batches: Sequence[Batch], steps: int = 1
) -> None:
    asked = [
        pool.ask(replica, [batch.x] * steps, [batch.y] * steps, rates=[0.0] * steps)
        for replica, batch in zip(replicas, batches, strict=True)
    ]
    pool.complete(asked[0])


def _is_close(found: Tensor, expected: Tensor, close: float) -> bool:
    return bool((found - expected).norm() <= close * expected.norm())


def _share_of_time(
    batched: Callable[[], None],
    replicas: Sequence[RecordedReplica],
    batches: Sequence[Batch],
) -> float:
    """Return the processor time of batched steps relative to single ones, the median over rounds in turn."""
    shares = []
    for _ in range(_ROUNDS):
        # Processor time, in turn: what others do to the machine happens to both.
        moments = [time.thread_time()]
        batched()
        moments.append(time.thread_time())
        for replica, batch in zip(replicas, batches, strict=True):
            replica.take_steps([batch.x] * _STEPS, [batch.y] * _STEPS, [0.0] * _STEPS)
        moments.append(time.thread_time())
        shares.append((moments[1] - moments[0]) / max(moments[2] - moments[1], 1e-9))
    return median(shares)
