"""The study's model, built and tried before anything runs: what does not suit is refused in one line, or noted.

A model of the user takes two training steps and an evaluation. Strategies, weights and
memory are checked with any model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed, nn

from scalebench.errors import ModelError, place_in_own_code
from scalebench.formatting import counted, memory_size
from scalebench.launch import planning, traffic
from scalebench.launch.planning import StudyPlan
from scalebench.launch.sweep import strategy_warnings
from scalebench.models import parts
from scalebench.models.flat import to_meta
from scalebench.models.metric import logits_of, loss_for, own_loss, takes_labels
from scalebench.models.registry import build_model, is_foreign, require_logits
from scalebench.pricing.held_parts import cut_of
from scalebench.strategies import registry
from scalebench.study.spec import Component, Run, Study
from scalebench.system import hardware
from scalebench.system.random_state import drawn_since, random_state, seeded
from scalebench.training.initial_weights import load_weights

# steps that show which parameters get a gradient, of a model that draws random numbers
_DRAWS = 8
_TRIED = 2  # samples of a batch on which a model is tried


def look_at_model(plan: StudyPlan) -> list[str]:
    """Build the model and return notes on it: a factory that fails is one line, not a row per run.

    Raises:
        ModelError: it cannot be built, has nothing to train, or a strategy of the study can do nothing with it.
        StudyError: `init_weights` do not fit.
    """
    study, dataset = plan.study, next(iter(plan.prepared.datasets.values()))
    dtype = getattr(torch, study.dtype)
    model = build_model(
        study.model,
        dataset.input_shape,
        dataset.outputs,
        dataset.task,
        dtype,
        study.seed,
    )
    shapes = [
        tuple(parameter.shape)
        for parameter in model.parameters()
        if parameter.requires_grad
    ]
    parameters = sum(
        parameter.numel() for parameter in model.parameters() if parameter.requires_grad
    )
    # frozen parameters alone train nothing, and send nothing
    if parameters == 0:
        raise ModelError(f"model {study.model} has no parameters to train")
    # read now, for their size to be refused in one line
    if study.init_weights is not None:
        load_weights(study.init_weights, parameters)
    without_gradient, notes = _tried(plan, model)
    layers, layer_work = _layers_to_divide(plan, model)
    strategy_warnings(
        study,
        plan.sweep.runs,
        plan.cluster,
        plan.allocation,
        shapes=shapes,
        without_gradient=without_gradient,
        layers=layers,
        layer_work=layer_work,
    )
    # integer buffers count batches, and are no statistics
    if any(buffer.is_floating_point() for buffer in model.buffers()):
        notes += local_statistics(study) + statistics_of_pieces(plan)
    nbytes = parameters * dtype.itemsize
    # without memory from here on: only shapes are recorded
    replica_bytes = partial(_replica_bytes, plan, to_meta(model), nbytes)
    return notes + memory_notes(plan, nbytes, replica_bytes)


def _layers_to_divide(
    plan: StudyPlan, model: nn.Module
) -> tuple[Sequence[parts.Layer] | None, Sequence[float] | None]:
    """Return the layers that strategies of the study divide, and the work of each; None where none divides the model.

    A layer table has no modules, but the work.
    """
    study, dataset = plan.study, next(iter(plan.prepared.datasets.values()))
    if not any(planning.cuts_model(run) for run in plan.sweep.runs):
        return None, None
    if (cut := cut_of(study.model)) is not None:
        return None, cut.work
    layers = parts.require_cut(model, str(study.model), dataset.input_shape)
    dtype = getattr(torch, study.dtype)
    sample = torch.zeros(_TRIED, *dataset.input_shape, dtype=dtype)
    return layers, [each.work for each in parts.facts_of(layers, sample)]


def _replica_bytes(
    plan: StudyPlan, model: nn.Module, parameter_bytes: int, run: Run
) -> int:
    """Return the memory of the fullest worker of `run`, recorded with `model` on the device meta."""
    try:
        schedules = traffic.schedules_of(
            plan, run.model_copy(update={"epochs": 1}), model
        )
    except (Exception, SystemExit):
        # its program fails, or reads numbers out of tensors: its run will say so
        return 3 * parameter_bytes
    most: int = max(schedule.memory_bytes for schedule in schedules)
    return most


def _tried(plan: StudyPlan, model: nn.Module) -> Tried:
    """Train the model on the smallest batch of the study, where it is to be trained.

    Models of this package are known to train but for BatchNorm on one sample.
    """
    study = plan.study
    dataset = next(iter(plan.prepared.datasets.values()))
    # a batch of one fails in BatchNorm, and one of two shows all else
    samples = min(planning.smallest_batch(plan), _TRIED)
    if not samples or not (is_foreign(study.model) or samples == 1):
        return Tried([], [])
    dtype = getattr(torch, study.dtype)
    # a copy: the data set is mapped read-only
    x = torch.tensor(dataset.x_train[:samples], dtype=dtype)
    y = torch.tensor(
        dataset.y_train[:samples],
        dtype=torch.int64 if dataset.task == "classification" else dtype,
    )

    def build() -> nn.Module:
        return build_model(
            study.model,
            dataset.input_shape,
            dataset.outputs,
            dataset.task,
            dtype,
            study.seed,
        )

    if is_foreign(study.model):
        return try_model(study.model, build, x, y, dataset.outputs, dataset.task)
    refuse_small_batches(study.model, build(), x, y, dataset.outputs, dataset.task)
    return Tried([], [])


def local_statistics(study: Study) -> list[str]:
    """Note the strategies under which the model's running statistics (BatchNorm) are never averaged."""
    if max(study.workers) == 1:
        return []
    made = {
        str(component): registry.create(component.name, component.options)
        for component in study.strategies
    }
    traits = {
        name: strategy.traits for name, strategy in made.items() if strategy.requires
    }
    local = [
        name
        for name, each in traits.items()
        if not each.averages_buffers and not each.sends_buffers
    ]
    sent = [name for name, each in traits.items() if each.sends_buffers]
    where = []
    if local:
        where.append(f"stay local under {', '.join(local)} (evaluated with worker 0's)")
    if sent:
        # torch's default
        where.append(f"are worker 0's in each step of {', '.join(sent)}")
    return [
        f"running statistics (BatchNorm) of {study.model} {' and '.join(where)}: use a strategy with "
        "buffers: average, or model: nfnet, which has none"
    ] * bool(where)


def statistics_of_pieces(plan: StudyPlan) -> list[str]:
    """Note the strategies under which batch normalisation sees micro-batches, and no whole batches."""
    cut = dict.fromkeys(
        f"{run.strategy} ({planning.micro_batches(run)} of a batch)"
        for run in plan.sweep.runs
        if run.execution != "modelled" and planning.micro_batches(run) > 1
    )
    if not cut:
        return []
    return [
        f"batch normalisation of {plan.study.model} sees micro-batches under {', '.join(cut)}: the weights are those "
        "of one worker that trains in these, and differ from those of whole batches; model: nfnet has none"
    ]


def memory_notes(
    plan: StudyPlan, model_bytes: int, replica_bytes: Callable[[Run], int]
) -> list[str]:
    """A note on the run that needs most memory on one node, if this machine has less.

    `model_bytes` are those of the parameters, `replica_bytes` those of a worker's
    vectors, by run. Each replica keeps a model for each evaluation after the training.
    """
    largest: dict[str, Run] = {}
    # the last of each kind is the largest
    for run in sorted(plan.sweep.runs, key=lambda run: run.workers):
        # else in no memory here
        if run.execution == "virtual" or (not run.is_virtual and not hardware.gpus()):
            largest[f"{run.strategy} {run.execution}"] = run
    has, needs = hardware.usable_memory_mib() * 2**20, []
    for run in largest.values():
        here = (
            run.workers
            if run.is_virtual
            else min(run.workers, plan.cluster.node.workers_per_node)
        )
        # snapshots are evaluated after the training, so that it is not held up
        kept = 1 + ((run.epochs - 1) // run.evaluate_every if run.evaluate_every else 0)
        replicas, models = here * replica_bytes(run), here * kept * model_bytes
        text = (
            f"{run.strategy} at {counted(run.workers, 'worker')} ({run.execution}) may take up to "
            f"{memory_size(replicas + models)} of memory, where this machine has {memory_size(has)}: "
            f"{memory_size(replicas)} for {counted(here, 'replica')}, {memory_size(models)} for their models "
            f"at {counted(kept, 'evaluation')}"
            f"{' (evaluate_every keeps fewer)' * (kept > 1)}"
        )
        needs.append((replicas + models, text))
    most, text = max(needs, default=(0, ""))
    return [text] if most > has else []


class Tried(NamedTuple):
    """Names of parameters that get no gradient in some step, and notes."""

    without_gradient: list[str]
    notes: list[str]


def try_model(
    component: Component,
    build: Callable[[], nn.Module],
    x: Tensor,
    y: Tensor,
    outputs: int,
    task: str,
) -> Tried:
    """Train and evaluate what `build` returns on the batch `x`, `y`, the smallest of the study.

    Raises:
        ModelError: a second call of `build` gives the same parameters or other weights; the model communicates, fails
            in one of its modes, changes its input in place, or has sparse gradients or unsuitable outputs.
    """
    model, again = build(), build()
    _require_new_parameters(component, model, again)
    _refuse_synchronised(component, model)
    steps = _Steps(component, outputs, task)
    with seeded(0), _collectives_refused(component):
        before = random_state()
        first, used = steps.train(model, x, y)
        gradients = [used]
        if drawn_since(before):
            # A model that draws, as stochastic depth does, may use other parameters in
            # each step.
            gradients += [steps.train(model, x, y)[1] for _ in range(_DRAWS - 1)]
        steps.evaluate(model, x, y)
    with seeded(0):
        # The same seed again: equal logits, unless it draws from elsewhere.
        second, _ = steps.train(again, x, y)
    names = [
        name for name, parameter in model.named_parameters() if parameter.requires_grad
    ]
    never = [name for name in names if not any(name in used for used in gradients)]
    notes = []
    if never:
        notes.append(
            f"{_some(never)} of model {component} get no gradient: they stay as they began, and travel with the others"
        )
    if not torch.allclose(first, second, equal_nan=True):
        notes.append(
            f"model {component}: two steps from the same random state differ: it draws from a generator of its own, "
            "which no run seeds; draw from torch, numpy.random or random, which are seeded for each worker"
        )
    if task == "classification" and _are_probabilities(first):
        notes.append(
            f"model {component} ends in a softmax, and the loss, cross entropy, applies one itself: two of them learn "
            "slowly; leave it out, as classes are the same without it"
        )
    if any(kind.__name__ == "LightningModule" for kind in type(model).__mro__):
        notes.append(
            f"model {component}: training_step and configure_optimizers of a LightningModule are not called; its "
            "forward is trained by the study's optimizer"
        )
    return Tried(
        [name for name in names if not all(name in used for used in gradients)], notes
    )


def refuse_small_batches(
    component: Component,
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    outputs: int,
    task: str,
) -> None:
    """Raise ModelError if `model` cannot be trained on the batch `x`, `y`: BatchNorm on one sample."""
    with seeded(0):
        _Steps(component, outputs, task).train(model, x, y)


class _Steps:
    """Steps of a model in both modes, checked."""

    def __init__(self, component: Component, outputs: int, task: str) -> None:
        self._component = component
        self._outputs = outputs
        self._task = task

    def train(self, model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, set[str]]:
        """Return the logits, and the names of the parameters that get a gradient."""
        model.train()
        # None tells a parameter without a gradient from one whose gradient is zero.
        model.zero_grad(set_to_none=True)
        with self._checked(x, y, "while training"):
            made = model(x, labels=y) if takes_labels(model, self._task) else model(x)
        require_logits(
            self._component, made, len(x), self._outputs, self._task, " while training"
        )
        with self._checked(x, y, "in the backward pass"):
            loss = (
                own_loss(made, y, loss_for(self._task))
                if not isinstance(made, Tensor)
                else loss_for(self._task)(made, y)
            )
            loss.backward()
        used = {
            name: parameter.grad
            for name, parameter in model.named_parameters()
            if parameter.grad is not None
        }
        for name, gradient in used.items():
            if gradient.is_sparse:
                raise ModelError(
                    f"model {self._component}: {name} has sparse gradients, and gradients travel dense here; build it "
                    "with sparse=False"
                )
        return logits_of(made).detach().clone(), set(used)

    def evaluate(self, model: nn.Module, x: Tensor, y: Tensor) -> None:
        model.eval()
        with torch.no_grad(), self._checked(x, y, "in evaluation"):
            made = model(x)
        require_logits(
            self._component, made, len(x), self._outputs, self._task, " in evaluation"
        )

    @contextmanager
    def _checked(self, x: Tensor, y: Tensor, when: str) -> Iterator[None]:
        """Refuse what fails, or changes the batch."""
        # Copies, as torch's count of changes misses those by way of numpy.
        given = x.clone(), y.clone()
        try:
            yield
        except ModelError:
            raise
        except (Exception, SystemExit) as error:
            line = f"{type(error).__name__}: {' '.join(str(error).split())}{place_in_own_code(error)}"
            larger = (
                "; use a larger batch, or fewer workers or micro-batches"
                if len(x) == 1
                else ""
            )
            raise ModelError(
                f"model {self._component}: fails {when} on a batch of {counted(len(x), 'sample')}: {line}{larger}"
            ) from error
        before_x, before_y = given
        if not (torch.equal(x, before_x) and torch.equal(y, before_y)):
            raise ModelError(
                f"model {self._component}: its forward changes the batch in place, which is the worker's data in every "
                "epoch; compute with a copy, x = (x - 1) / 2 where x -= 1 stands"
            )


def _require_new_parameters(
    component: Component, model: nn.Module, again: nn.Module
) -> None:
    """Refuse a factory that returns the same tensors at two calls, or other weights from the same seed."""
    first, second = _tensors(model), _tensors(again)
    # By storage: a view of the same memory is as bad as the same tensor.
    held = {
        tensor.untyped_storage().data_ptr()
        for tensor in first.values()
        if tensor.numel()
    }
    for name, tensor in second.items():
        if tensor.numel() and tensor.untyped_storage().data_ptr() in held:
            raise ModelError(
                f"model {component}: {name} is the same tensor at two calls of the factory, and every worker needs its "
                "own; build it inside the factory, or return copy.deepcopy of what was built outside"
            )
    for name, tensor in first.items():
        # Bit for bit, with NaN equal to NaN, which `torch.equal` does not have.
        if name not in second or not torch.allclose(
            tensor, second[name], rtol=0, atol=0, equal_nan=True
        ):
            raise ModelError(
                f"model {component}: two calls of the factory with the same seed give another {name}, and workers "
                "begin with equal weights; draw from torch, numpy.random or random, which are seeded, and keep no "
                "state between calls"
            )


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: tensor.detach()
        for name, tensor in chain(model.named_parameters(), model.named_buffers())
    }


def _refuse_synchronised(component: Component, model: nn.Module) -> None:
    """Raise ModelError for SyncBatchNorm, torch's or Horovod's."""
    for name, module in model.named_modules():
        if any(kind.__name__ == "SyncBatchNorm" for kind in type(module).__mro__):
            raise ModelError(
                f"model {component}: {name or 'it'} is a SyncBatchNorm, which communicates by itself: neither its "
                "arithmetic nor its messages would be those of the strategy; use BatchNorm, or GroupNorm"
            )


class _Collectives(parts.DispatchMode):
    """Raises ModelError at a collective of torch.distributed."""

    def __init__(self, component: Component) -> None:
        super().__init__()
        self._component = component

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # Operations of torch.distributed, in place or functional.
        if func.namespace in ("c10d", "_c10d_functional"):
            raise ModelError(
                f"model {self._component}: communicates by itself ({func.name()}); leave that to the strategy, whose "
                "communication is counted and takes time"
            )
        return func(*args, **(kwargs or {}))


@contextmanager
def _collectives_refused(component: Component) -> Iterator[None]:
    """Let a model believe that it is one of two workers, and refuse a collective that it then calls."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    # A process group that sends nothing, so that a model that looks for one finds two
    # ranks.
    distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        with _Collectives(component):
            yield
    finally:
        distributed.destroy_process_group()


def _are_probabilities(logits: Tensor) -> bool:
    if logits.shape[1] < 2 or bool((logits < 0).any()):
        return False
    sums = logits.sum(dim=1)
    return torch.allclose(sums, torch.ones_like(sums))


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
