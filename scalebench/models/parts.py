"""Models as sequences of layers, of which a worker may hold a part.

A layer is a module with trainable parameters and the modules without that follow it;
what precedes the first belongs to it too. The sequence is that of the children of
`nn.Sequential`, nested ones included, of the modules that a method `layers()` of the
model or a function `layers(model)` of its factory's file returns, in order, or of those
that its forward calls one after the other (`chain.py`).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from scalebench.errors import ModelError
from scalebench.models.chain import chain_of
from scalebench.models.registry import LISTING
from scalebench.system.user_code import raised

_T = TypeVar("_T")
_SAMPLES = 2  # of a trial


class Layer(NamedTuple):
    """Consecutive modules that are held by one worker, and the name of the first with parameters."""

    name: str
    modules: tuple[nn.Module, ...]

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Trainable parameters."""
        return [
            each
            for module in self.modules
            for each in module.parameters()
            if each.requires_grad
        ]


class LayerFacts(NamedTuple):
    """Sizes of a layer: of one sample its output, as shape, and the work of its forward and backward pass."""

    name: str
    parameters: int
    shape: tuple[int, ...]
    forward: float
    backward: float

    @property
    def work(self) -> float:
        """That of both passes."""
        return self.forward + self.backward


def layers_of(model: nn.Module, name: str) -> list[Layer]:
    """Return the layers of a model that is called `name` in errors.

    Raises:
        ModelError: it is no sequence of modules, or one has parameters of another.
    """
    found: list[tuple[str, list[nn.Module]]] = []
    leading: list[nn.Module] = []
    for label, module in _modules(model, name):
        if any(parameter.requires_grad for parameter in module.parameters()):
            found.append((label, [*leading, module]))
            leading = []
        elif found:
            found[-1][1].append(module)
        else:
            leading.append(module)
    layers = [Layer(label, tuple(modules)) for label, modules in found]
    _refuse_shared(layers, name)
    return layers


def _modules(model: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of a model in the order of its forward pass, with their names."""
    listed, listing = getattr(model, "layers", None), vars(model).get(LISTING)
    if listing is not None:
        yield from _listed(partial(listing, model), "layers(model)", name)
    elif type(model) is nn.Sequential:
        for label, child in model._modules.items():  # a module may be there twice
            assert child is not None
            # By the type itself: a subclass may have a forward of its own.
            if type(child) is nn.Sequential or inspect.ismethod(
                getattr(child, "layers", None)
            ):
                yield from (
                    (f"{label}.{inner}", module)
                    for inner, module in _modules(child, name)
                )
            else:
                yield label, child
    elif inspect.ismethod(listed):
        yield from _listed(listed, "layers()", name)
    else:
        yield from chain_of(model, name)


def _listed(
    listing: Callable[[], Iterable[Any]], call: str, name: str
) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that a user's `listing` returns, and `call` with the place of each."""
    try:
        modules = list(listing())
    except Exception as error:
        raise ModelError(f"model {name}: {call} raised {raised(error)}") from error
    for place, module in enumerate(modules):
        if not isinstance(module, nn.Module):
            raise ModelError(
                f"model {name}: {call}[{place}] is {type(module).__name__}, expected a torch.nn.Module"
            )
        yield f"{call}[{place}]", module


def _refuse_shared(layers: Sequence[Layer], name: str) -> None:
    owners: dict[nn.Parameter, Layer] = {}
    for layer in layers:
        for parameter in layer.parameters:
            # The gradient of a shared parameter would be made on two workers.
            owner = owners.setdefault(parameter, layer)
            if owner is not layer:
                raise ModelError(
                    f"model {name}: layers {owner.name} and {layer.name} share a parameter, so that no cut between "
                    "them is possible; give each its own"
                )


def facts_of(layers: Sequence[Layer], x: Tensor) -> list[LayerFacts]:
    """Return the sizes of layers, by their forward pass of the samples `x` without gradients.

    Work is counted as floating-point operations, one for each element of an output
    where nothing is multiplied. The backward pass does twice that of the forward pass,
    for inputs and for parameters; the first layer needs the second alone.

    Raises:
        ModelError: a layer gives something else than a tensor of the samples.
    """
    samples, found = len(x), []
    modules = [module for layer in layers for module in layer.modules]
    with torch.no_grad(), evaluating(modules):
        for place, layer in enumerate(layers):
            x, work = counted(partial(through, layer, x))
            _require_rows(x, layer, samples)
            work /= samples
            parameters = sum(parameter.numel() for parameter in layer.parameters)
            found.append(
                LayerFacts(
                    layer.name,
                    parameters,
                    tuple(x.shape[1:]),
                    work,
                    work * (2 if place else 1),
                )
            )
    return found


@contextmanager
def evaluating(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Set modules to evaluation mode, in which no statistics change.

    Attention may be one fused operation then, which differs among devices: here it is
    made of products everywhere, so that counted work is the same.
    """
    modes = [
        (inner, inner.training) for module in modules for inner in module.modules()
    ]
    fused = torch.backends.mha.get_fastpath_enabled()
    flash = torch.backends.cuda.flash_sdp_enabled()  # of the CPU, too
    torch.backends.mha.set_fastpath_enabled(False)
    torch.backends.cuda.enable_flash_sdp(False)
    for inner, _ in modes:
        inner.training = False
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
        torch.backends.cuda.enable_flash_sdp(flash)
        for inner, mode in modes:
            inner.training = mode


def through(layer: Layer, x: Tensor) -> Tensor:
    """Return the output of a layer."""
    for module in layer.modules:
        x = module(x)
    return x


def counted(operation: Callable[[], _T]) -> tuple[_T, float]:
    """Return what an operation returns, and its floating-point operations."""
    counter = _Work()
    with counter:
        made = operation()
    return made, counter.amount


class DispatchMode(TorchDispatchMode):
    """Sees each operation of torch inside its context, by `__torch_dispatch__` of a subclass."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch gives it no types

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # or the first operation imports torch's compiler, in two seconds


class _Work(DispatchMode):
    """Counter of floating-point operations of a forward pass. Torch's own takes seconds to import."""

    amount = 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        written = next(
            (leaf for leaf in tree_leaves(made) if isinstance(leaf, Tensor)), None
        )
        read = {
            leaf.untyped_storage()._cdata
            for leaf in tree_leaves((args, kwargs))
            if isinstance(leaf, Tensor)
        }
        # a view is no work
        if written is not None and written.untyped_storage()._cdata not in read:
            self.amount += written.numel() * _per_element(
                func._overloadpacket.__name__, args
            )
        return made


def _per_element(operation: str, args: Any) -> float:
    """Return the floating-point operations for each element of an output: 2 k of a product that sums over k."""
    if operation in ("mm", "bmm"):
        return float(2 * args[0].shape[-1])
    if operation in ("addmm", "baddbmm"):
        return float(2 * args[1].shape[-1])
    if operation == "convolution":
        return float(2 * math.prod(args[1].shape[1:]))
    # (samples, heads, places, width): two products, over width and over places
    if "attention" in operation:
        return float(4 * args[1].shape[-2])
    return 1.0


def require_cut(
    model: nn.Module, name: str, input_shape: tuple[int, ...]
) -> list[Layer]:
    """Return the layers of a model, which compute one after the other what it does.

    Raises:
        ModelError: they do not, or it is no sequence; the message says where it fails.
    """
    layers = layers_of(model, name)
    # Values that differ: zeros would hide mistakes.
    x = torch.linspace(
        -1, 1, _SAMPLES * math.prod(input_shape), dtype=next(model.parameters()).dtype
    )
    x = made = x.view(_SAMPLES, *input_shape)
    pieces = [module for layer in layers for module in layer.modules]
    with torch.no_grad(), evaluating([model, *pieces]):
        for layer in layers:
            try:
                made = through(layer, made)
            except Exception as error:
                said = " ".join(str(error).split())
                raise ModelError(
                    f"model {name}: cannot be cut: layer {layer.name} fails on the output of the one before it: "
                    f"{type(error).__name__}: {said}"
                ) from error
            _require_rows(made, layer, _SAMPLES, f"model {name}: ")
        was_training = model.training
        whole = model.eval()(x)
        model.train(was_training)
    # Tolerances of float32: the same sums may be made in another order.
    if not (
        isinstance(whole, Tensor)
        and whole.shape == made.shape
        and torch.allclose(whole, made, rtol=1e-3, atol=1e-5)
    ):
        raise ModelError(
            f"model {name}: cannot be cut: its layers one after the other do not compute what its forward does; "
            "layers() has to return all modules, in order"
        )
    return layers


def _require_rows(made: Any, layer: Layer, samples: int, model: str = "") -> None:
    """Raise ModelError unless a layer gave one tensor with a row for each sample."""
    if isinstance(made, Tensor) and made.dim() > 0 and len(made) == samples:
        return
    given = (
        f"a tensor {tuple(made.shape)}"
        if isinstance(made, Tensor)
        else type(made).__name__
    )
    raise ModelError(
        f"{model}cannot be cut: layer {layer.name} gives {given} for {samples} samples; the next worker takes one "
        "tensor with a row for each sample"
    )


def bounds_of(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Return the first layer of each stage, and that behind its last one."""
    return list(pairwise([0, *accumulate(sizes)]))
