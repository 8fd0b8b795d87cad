"""The gradients of virtual workers: of each replica by itself, of all that wait at once, or of one for all.

A gradient depends on the weights of its own worker only. A worker that computes therefore sleeps until the end of its
step in virtual time, and the first that wakes computes the gradients of all sleepers in one call, `torch.func.vmap`
over the rows of a matrix that holds the weights of worker i in row i. Where all replicas are equal and their gradients
are averaged, one replica computes the gradient of the mean loss over the batches of all.

Both are faster for small models only, and need a model without statistics, random numbers and hooks: `choose` tries and
measures it once for each model, batch size and machine, and keeps the choice in the cache.
"""

from __future__ import annotations

import copy
import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from scalebench.data.dataset import Dataset
from scalebench.data.plan import BatchPlan
from scalebench.errors import in_one_line
from scalebench.models.attributes import equal_attributes, module_attributes
from scalebench.models.flat import Memory
from scalebench.records.machine import cpu_model
from scalebench.strategies.allreduce import GradientAveraging
from scalebench.strategies.base import Batch, Worker
from scalebench.study.spec import BY_LAYER, Run
from scalebench.system.atomic_write import cache_folder
from scalebench.system.clock import Task, WallClock
from scalebench.system.random_state import drawn_since, random_state
from scalebench.training.loop import evaluate, train
from scalebench.training.optimizers import FlatSgd
from scalebench.training.outcome import Evaluation
from scalebench.training.replica import Replica
from scalebench.virtual.scheduler import Scheduler

ONE_BATCH = "one_batch"  # arithmetic of equal replicas
_TRIED = 16  # workers, at most, among which batched gradients are tried
_STEPS, _ROUNDS = 3, 5  # of a measurement
_FASTER = 0.8  # of the processor time of single replicas, from which gradients are batched
_CLOSE = {torch.float64: 1e-9, torch.float32: 1e-3}  # relative difference of equal gradients


@dataclass(frozen=True)
class Choice:
    """Ways to compute the gradients of one model and batch size, and why a replica has to compute by itself."""

    batched: bool = False
    one_batch: bool = False
    reason: str = ""


# --- all sleepers at once -----------------------------------------------------------------------------------------


class _Asked(NamedTuple):
    """A gradient that a sleeping worker asked for; with `rate` also the optimizer's step."""

    replica: Replica
    batch: Batch
    weight: float
    add: bool
    rate: float | None
    call: int  # that computes it


class Batched:
    """Weights, gradients and momenta of K replicas as rows of matrices, and the gradients that are asked for."""

    def __init__(self, first: Replica, workers: int) -> None:
        self._n = first.parameters.numel()
        each = first.parameters.untyped_storage().nbytes() // first.parameters.element_size()
        self._whole = first.parameters.new_empty(workers, each)
        self._gradients = first.parameters.new_zeros(workers, self._n)
        self._model = copy.deepcopy(first.model)
        self._task = first.task
        self._trained = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        self._places = _places(self._model, self._trained)
        self._asked: list[_Asked] = []
        self._calls = 0

    def memory(self, rank: int) -> Memory:
        """The row of a worker's weights, statistics and momentum, and that of its gradient."""
        return Memory(self._whole[rank], self._gradients[rank])

    def ask(self, replica: Replica, batch: Batch, weight: float, *, add: bool, rate: float | None) -> _Asked:
        """Ask for a gradient, and with `rate` for the step that follows it."""
        asked = _Asked(replica, batch, weight, add, rate, self._calls)
        self._asked.append(asked)
        return asked

    def complete(self, asked: _Asked) -> None:
        """Compute everything that is asked for, unless `asked` has been computed already."""
        if asked.call < self._calls:
            return
        self._calls += 1
        groups: dict[tuple[Any, ...], list[_Asked]] = {}
        for each in self._asked:
            groups.setdefault((each.batch.x.shape, each.batch.y.shape, each.add, each.rate), []).append(each)
        self._asked = []
        for group in groups.values():
            group.sort(key=lambda each: each.replica.rank)
            self._compute(group)

    def _compute(self, group: list[_Asked]) -> None:
        """Compute the gradients of a group with batches of one shape, and its steps."""
        ranks = torch.tensor([each.replica.rank for each in group])
        everyone = len(ranks) == len(self._whole)
        weights = self._whole[:, : self._n]
        taken = weights if everyone else weights.index_select(0, ranks)  # then a copy
        leaves = [leaf.detach().requires_grad_() for leaf in _matrix_views(self._trained, taken)]
        x = torch.stack([each.batch.x for each in group])
        y = torch.stack([each.batch.y for each in group])
        made = torch.func.vmap(self._forward_with, randomness="error")(tuple(leaves), x)
        of_each = _losses(self._task, made.flatten(0, 1), y.flatten(0, 1))  # outside vmap, where it is one operation
        losses = of_each.view(len(group), -1).mean(dim=1)
        scale = torch.tensor([each.weight for each in group], dtype=losses.dtype)
        engine = torch.autograd.Variable._execution_engine
        found = engine.run_backward((losses,), (scale,), False, False, tuple(leaves), allow_unreachable=True)
        whole = everyone and not group[0].add
        gradients = self._gradients if whole else self._gradients.new_empty(len(group), self._n)
        for target, gradient in zip(_matrix_views(self._trained, gradients), found, strict=True):
            if gradient is None:  # a parameter that takes no part
                target.zero_()
            else:
                target.copy_(gradient)
        if group[0].add:
            self._gradients.index_add_(0, ranks, gradients)
        elif not whole:
            self._gradients.index_copy_(0, ranks, gradients)
        if group[0].rate is not None:
            self._step(group, ranks, taken, gradients, group[0].rate)
        for each, loss in zip(group, losses.detach().unbind(), strict=True):
            each.replica.computed(loss, each.batch.x.shape[0])

    def _forward_with(self, parameters: Sequence[Tensor], x: Tensor) -> Tensor:
        for value, places in zip(parameters, self._places, strict=True):
            for module, name in places:
                module._parameters[name] = value  # type: ignore[assignment]  # bound without a search by name
        made: Tensor = self._model(x)
        return made

    def _step(self, group: list[_Asked], ranks: Tensor, taken: Tensor, change: Tensor, rate: float) -> None:
        """Take the optimizer's step of `group`, whose weights are `taken`: `FlatSgd` by rows, others one by one."""
        first = group[0].replica.optimizer
        if not isinstance(first, FlatSgd):
            for each in group:
                each.replica.optimizer.step()
            return
        (options,) = first.param_groups
        everyone = len(ranks) == len(self._whole)
        if options["weight_decay"]:
            change = change.add(taken, alpha=options["weight_decay"])
        if options["momentum"]:
            for each in group:
                _begin(each.replica.optimizer)
            momenta = self._whole[:, -self._n :]
            velocity = momenta if everyone else momenta.index_select(0, ranks)
            velocity.mul_(options["momentum"]).add_(change)
            if not everyone:
                momenta.index_copy_(0, ranks, velocity)
            change = change.add(velocity, alpha=options["momentum"]) if options["nesterov"] else velocity
        taken.add_(change, alpha=-rate)
        if not everyone:
            self._whole[:, : self._n].index_copy_(0, ranks, taken)


class BatchedReplica(Replica):
    """A replica whose gradients are computed together with those of other workers that compute at the same time."""

    pool: Batched
    scheduler: Scheduler

    def gradient(self, batch: Batch, weight: float = 1.0, *, add: bool = False) -> None:
        self._charge(batch)
        self._sleep(self.pool.ask(self, batch, weight, add=add, rate=None))

    def local_step(self, batch: Batch) -> None:
        self._charge(batch)
        rate = self.settle_rate()
        self.clock.did(Task.UPDATE)
        self._sleep(self.pool.ask(self, batch, 1.0, add=False, rate=rate))
        self.steps += 1

    def _charge(self, batch: Batch) -> None:
        samples = batch.x.shape[0]
        self.clock.did(Task.FORWARD, samples)
        self.clock.did(Task.BACKWARD, samples)

    def _sleep(self, asked: _Asked) -> None:
        self.scheduler.sleep(self.rank, self.clock.elapsed())
        self.pool.complete(asked)


def _places(model: nn.Module, parameters: Sequence[nn.Parameter]) -> list[list[tuple[nn.Module, str]]]:
    """Return where each parameter is bound; a shared one is bound in several places."""
    found: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            found.setdefault(id(parameter), []).append((module, name))
    return [found[id(parameter)] for parameter in parameters]


def _begin(optimizer: Any) -> None:
    """Create the momentum of a `FlatSgd` that has taken no step yet, v = 0."""
    (group,) = optimizer.param_groups
    if optimizer.state[group["params"][0]].get("momentum_buffer") is None:
        optimizer.begin()


def _matrix_views(parameters: Sequence[Tensor], matrix: Tensor) -> list[Tensor]:
    """Return consecutive views (K, *shape) of the columns of `matrix`."""
    found, begin = [], 0
    for parameter in parameters:
        end = begin + parameter.numel()
        found.append(matrix[:, begin:end].view(len(matrix), *parameter.shape))
        begin = end
    return found


# --- one for all --------------------------------------------------------------------------------------------------


class _Alone:
    """Communicator of the one replica that computes what K equal ones would."""

    rank, collectives, bytes_sent = 0, 0, 0
    calls = None

    def __init__(self, size: int) -> None:
        self.size = size

    def barrier(self) -> None:
        """Nothing to wait for."""


class _MeanOfGradients(GradientAveraging):
    """w <- w - eta * gradient of the mean loss over the batches of all workers."""

    def exchange(self, worker: Worker, scale: float = 1.0) -> None:
        worker.update()


class _GlobalReplica(Replica):
    """The replica of all K workers: its batches are theirs side by side, in the order of their ranks."""

    def use(self, dataset: Dataset) -> None:
        self._dataset = dataset
        self.losses: list[list[float]] = []  # by epoch, of each worker

    def batches(self, epoch: int) -> Iterator[Batch]:
        self._epoch = epoch
        plan = self.plan
        sizes = plan.batch_sizes(epoch)
        rows = [np.split(plan.indices(epoch, rank), plan.bounds(epoch, rank)[1:-1]) for rank in range(plan.workers)]
        sums = torch.zeros(plan.workers, dtype=torch.float64)
        for step, of_workers in enumerate(zip(*rows, strict=True)):
            together = np.concatenate(of_workers)
            x = torch.from_numpy(self._dataset.x_train[together]).to(self.dtype)
            y = torch.from_numpy(self._dataset.y_train[together])
            y = y.to(torch.int64 if self.task == "classification" else self.dtype)
            yield self._delivered(Batch(x, y, 1.0, step, step == 0), sizes.shape[1])
            owners = torch.from_numpy(np.repeat(np.arange(plan.workers), sizes[:, step]))
            sums.index_add_(0, owners, self._of_each)
        self.losses.append((sums / torch.from_numpy(sizes.sum(axis=1))).tolist())

    def gradient(self, batch: Batch, weight: float = 1.0, *, add: bool = False) -> None:
        self._of_each = _mean_gradient(self, batch)
        self.computed(self._of_each.mean().to(self.dtype), len(batch.x))


def _mean_gradient(replica: Replica, batch: Batch) -> Tensor:
    """Compute the gradient of the mean loss of `batch`, and return the loss of each sample, (n,) in float64."""
    of_each = _losses(replica.task, replica.model(batch.x), batch.y)
    replica.gradients.zero_()
    of_each.mean().backward()  # type: ignore[no-untyped-call]
    return of_each.detach().double()


def _losses(task: str, outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the loss of each sample, (n,), whose mean is the `loss_for` the task."""
    loss = nn.functional.cross_entropy if task == "classification" else nn.functional.mse_loss
    return loss(outputs, targets, reduction="none").reshape(len(targets), -1).mean(dim=1)


@dataclass(frozen=True)
class OneForAll:
    """Results of K equal replicas: mean loss of each worker and epoch, evaluations, and weights."""

    losses: list[list[float | None]]
    evaluated: list[Evaluation]
    weights: Mapping[str, Tensor]
    eval_s: float


def train_one_for_all(
    run: Run, dataset: Dataset, plan: BatchPlan, on_epoch: Callable[[int], None] | None = None
) -> OneForAll:
    """Train one replica on the batches of all workers of `run`, whose strategy averages their gradients.

    Raises:
        DivergedError: the loss or the weights are not finite.
    """
    replica = _GlobalReplica(run, dataset, plan, _Alone(run.workers), WallClock())  # type: ignore[arg-type]
    replica.use(dataset)
    strategy = _MeanOfGradients()
    train(replica, strategy, on_epoch=on_epoch)
    began = time.perf_counter()
    found = evaluate(replica, strategy, dataset)
    assert found.final is not None
    by_worker: list[list[float | None]] = [list(losses) for losses in zip(*replica.losses, strict=True)]
    weights = {"initial": replica.initial, "final": found.final}
    return OneForAll(by_worker, found.evaluations, weights, time.perf_counter() - began)


# --- the choice ---------------------------------------------------------------------------------------------------


def choose(run: Run, dataset: Dataset, plan: BatchPlan) -> Choice:
    """Return how the gradients of `run` are computed, as measured once on this machine and kept in its cache."""
    if run.workers == 1:
        return Choice(reason="a lone worker")
    facts = (
        *(torch.__version__, cpu_model(), run.threads_per_worker, str(run.model), run.model_sha256, run.dtype),
        *(str(run.optimizer), dataset.input_shape, dataset.outputs, dataset.task, plan.batch_size),
        min(run.workers, _TRIED),
    )
    key = hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
    path = cache_folder("arithmetic") / f"{key}.json"
    with suppress(OSError, ValueError, TypeError):
        return Choice(**json.loads(path.read_text()))
    measured = _measure(run, dataset, plan.batch_size)
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with path.open("x", encoding="utf-8") as file:
                json.dump(asdict(measured), file)
        except FileExistsError:  # of several processes the first one's choice counts
            with suppress(ValueError, TypeError):
                return Choice(**json.loads(path.read_text()))
    return measured


def _measure(run: Run, dataset: Dataset, size: int) -> Choice:
    workers = min(run.workers, _TRIED, dataset.n_train // size)
    if workers < 2:
        return Choice(reason="fewer samples than two batches")
    rows = workers * size
    part = BatchPlan(rows, workers, seed=run.seed, batch_per_worker=size)
    few = run.model_copy(update={"workers": workers, "init_weights": None, "lr": 0.0})
    some = Dataset(**(vars(dataset) | {"x_train": dataset.x_train[:rows], "y_train": dataset.y_train[:rows]}))

    def replica(rank: int, memory: Memory | None = None) -> Replica:
        comm: Any = _Alone(workers)
        comm.rank = rank
        return Replica(few, some, part, comm, WallClock(), memory=memory)

    first = replica(0)
    if reason := _why_single(first, few):
        return Choice(reason=reason)
    pool = Batched(first, workers)
    replicas = [replica(rank, pool.memory(rank)) for rank in range(workers)]
    batches = [next(each.batches(0)) for each in replicas]
    for each, batch in zip(replicas, batches, strict=True):
        each.gradient(batch)
    single = torch.stack([each.gradients.clone() for each in replicas])
    close = _CLOSE[first.dtype]
    one_batch = _is_close(_of_one_batch(first, batches), single.mean(dim=0), close)
    try:
        _ask_all(pool, replicas, batches)
    except Exception as error:  # of any kind: what a model does may have no batched form
        return Choice(one_batch=one_batch, reason=in_one_line(error))
    if not _is_close(torch.stack([each.gradients for each in replicas]), single, close):
        return Choice(one_batch=one_batch, reason="its gradients differ when they are batched")
    share = _share_of_time(lambda: _ask_all(pool, replicas, batches), replicas, batches)
    slower = "" if share < _FASTER else f"batched gradients take {share:.2f} of the time of single ones"
    return Choice(batched=not slower, one_batch=one_batch, reason=slower)


def _why_single(replica: Replica, run: Run) -> str:
    """Name what of the model has no batched form; empty if there is nothing."""
    if replica.dtype not in _CLOSE:
        return f"{run.dtype} rounds batches of another size differently"
    if run.optimizer.name in BY_LAYER:
        return f"optimizer {run.optimizer.name} steps layer by layer"
    if next(replica.model.buffers(), None) is not None:
        return "the model has buffers"
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    if any(getattr(module, name, None) for module in replica.model.modules() for name in hooks):
        return "the model has hooks"
    if replica.gives_labels or not _gives_tensor(replica):
        return "the model gives a loss, or logits, of its own"
    if drawn_in_a_step(replica):
        return "the model draws random numbers"
    if _changes_attributes(replica):
        return "the model keeps a state that is no buffer"
    return ""


def drawn_in_a_step(replica: Replica) -> frozenset[str]:
    """Return the generators that a step of the model draws from (dropout): every worker needs its own states."""
    before = random_state()
    with replica.rehearsal():
        replica.gradient(next(replica.batches(0)))
        return drawn_since(before)


def _gives_tensor(replica: Replica) -> bool:
    with replica.rehearsal(), torch.no_grad():
        return isinstance(replica.forward(next(replica.batches(0)).x), Tensor)


def _changes_attributes(replica: Replica) -> bool:
    """Return True if a step changes attributes of the model's modules, as a counter of calls: each needs its own."""
    with replica.rehearsal():
        before = module_attributes(replica.model)
        replica.gradient(next(replica.batches(0)))
        return not equal_attributes(before, module_attributes(replica.model))


def _of_one_batch(replica: Replica, batches: Sequence[Batch]) -> Tensor:
    x, y = (torch.cat([getattr(batch, name) for batch in batches]) for name in ("x", "y"))
    _mean_gradient(replica, Batch(x, y, 1.0, 0, True))
    return replica.gradients.clone()


def _ask_all(pool: Batched, replicas: Sequence[Replica], batches: Sequence[Batch]) -> None:
    asked = [
        pool.ask(replica, batch, 1.0, add=False, rate=0.0) for replica, batch in zip(replicas, batches, strict=True)
    ]
    pool.complete(asked[0])


def _is_close(found: Tensor, expected: Tensor, close: float) -> bool:
    return bool((found - expected).norm() <= close * expected.norm())


def _share_of_time(batched: Callable[[], None], replicas: Sequence[Replica], batches: Sequence[Batch]) -> float:
    """Return the processor time of batched steps relative to single ones, the median over rounds in turn."""
    shares = []
    for _ in range(_ROUNDS):
        moments = [time.thread_time()]
        for _ in range(_STEPS):
            batched()
        moments.append(time.thread_time())
        for _ in range(_STEPS):
            for replica, batch in zip(replicas, batches, strict=True):
                replica.local_step(batch)
        moments.append(time.thread_time())
        shares.append((moments[1] - moments[0]) / max(moments[2] - moments[1], 1e-9))
    return median(shares)
