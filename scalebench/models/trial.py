"""Two training steps and an evaluation of a user's model before any run: what does not suit is refused in one line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from scalebench.errors import ModelError, place_in_own_code
from scalebench.formatting import counted
from scalebench.models.metric import logits_of, loss_for, own_loss, takes_labels
from scalebench.models.parts import DispatchMode
from scalebench.models.registry import require_logits
from scalebench.study.spec import Component
from scalebench.system.random_state import drawn_since, random_state, seeded

# steps that show which parameters get a gradient, of a model that draws random numbers
_DRAWS = 8


class Trial(NamedTuple):
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
) -> Trial:
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
    return Trial(
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


class _Collectives(DispatchMode):
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
    from torch import distributed
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
