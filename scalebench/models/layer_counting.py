"""Counting of the layers of a torch module: one forward pass on the meta device, nothing is allocated or computed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from scalebench.errors import ModelError
from scalebench.models.layers import Layer, LayerTable
from scalebench.models.parts import DispatchMode
from scalebench.models.registry import build_own, inputs_wanted

_SAMPLES = 2  # in the counted pass; BatchNorm takes no single value per channel
_ALLOCATIONS = {
    "empty_like",
    "new_empty",
    "zeros_like",
    "ones_like",
    "full_like",
    "new_zeros",
    "detach",
}


def count_own(name: str, input_shape: tuple[int, ...], outputs: int) -> LayerTable:
    """Return the layer table of the model that `file.py:factory` builds.

    A model that takes no floating-point numbers gets integers, as a model of words
    does.

    Raises:
        ModelError: the factory fails, or the model fails on samples of `input_shape`.
    """

    def build(device: str) -> nn.Module:
        with torch.device(device):
            return build_own(name, {}, input_shape, outputs)

    return count_model(build, name, input_shape)


def count_model(
    build: Callable[[str], nn.Module], name: str, input_shape: tuple[int, ...]
) -> LayerTable:
    """Return the layer table of the model that `build` makes on a device, for samples of `input_shape`.

    It is counted on torch's meta device; one that reads values of tensors on the CPU.

    Raises:
        ModelError: the model fails on samples of that shape.
    """
    problem, model = "", None
    # whole numbers second: models of words look them up
    for device, dtype in product(("meta", "cpu"), (torch.float32, torch.int64)):
        source = f"{name}, counted by torch {torch.__version__} on its {device} device"
        try:
            model = build(device)
            # between zero and one: a branch on samples of zeros would be a rare one
            values = torch.linspace(
                0, 1, _SAMPLES * math.prod(input_shape), device=device
            )
            sample = values.view(_SAMPLES, *input_shape).to(dtype)
            return count_layers(model, sample, name, source)
        except Exception as error:
            if device == "cpu" and model is None:
                raise
            if dtype == torch.float32:
                problem = f"{type(error).__name__}: {' '.join(str(error).split())}"
    shape = "x".join(map(str, input_shape))
    advice = (model and inputs_wanted(model)) or "; give its layers as FILE.csv"
    raise ModelError(
        f"layers of {name!r}: the model fails on a sample of shape {shape}: {problem}{advice}"
    )


def count_layers(
    model: nn.Module, inputs: Tensor, name: str, source: str
) -> LayerTable:
    """Return the layer table of `model`, mostly on the meta device, for samples like those of `inputs`.

    A layer is an operation of the forward pass in training mode; operations of one call
    of a module without children that follow a product, or one another, count as one
    kernel with it. Flops are those of torch's flop counter.
    """
    counter = _Counter(model, len(inputs))
    model.train()
    with (
        counter.named_modules(),
        counter,
        torch.autograd.graph.saved_tensors_hooks(counter.keep, lambda kept: kept),
    ):
        model(inputs)
    return LayerTable(name, counter.layers(), source, tuple(inputs.shape[1:]))


class _Counter(DispatchMode):
    """Recorder of operations; storages identify parameters and activations."""

    def __init__(self, model: nn.Module, samples: int) -> None:
        super().__init__()
        self._model, self._samples = model, samples
        self._rows: list[Layer] = []
        self._calls: list[tuple[nn.Module] | None] = []  # by row
        # of a module without children; each call is an object of its own
        self._call: tuple[nn.Module] | None = None
        self._path: list[str] = [""]
        self._unused = {
            _storage(parameter): parameter.numel() for parameter in model.parameters()
        }
        self._fixed = {
            _storage(tensor) for tensor in (*model.parameters(), *model.buffers())
        }
        self._written: dict[int, int] = {}  # row that wrote a storage
        # bytes of a storage that the backward pass reads
        self._kept: dict[int, int] = {}
        # a freed storage's identity would be given to another
        self._alive: list[Any] = []

    @contextmanager
    def named_modules(self) -> Iterator[None]:
        """Follow which module is called."""
        hooks: list[Any] = []
        for name, module in self._model.named_modules():
            if isinstance(module, torch.jit.ScriptModule):
                continue  # takes no hooks
            hooks += [module.register_forward_pre_hook(self._enter(name))]
            hooks += [module.register_forward_hook(self._leave)]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _enter(self, name: str) -> Callable[..., None]:
        def enter(module: nn.Module, *_: object) -> None:
            self._path.append(name)
            self._call = None if any(module.children()) else (module,)

        return enter

    def _leave(self, *_: object) -> None:
        self._path.pop()
        self._call = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        read = [
            leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)
        ]
        outputs = [
            leaf
            for leaf in tree_leaves(made)
            if isinstance(leaf, Tensor) and leaf.dim() > 0
        ]
        operation = func._overloadpacket.__name__
        sources = {_storage(tensor) for tensor in read}
        is_view = not func._schema.is_mutable and all(
            _storage(tensor) in sources for tensor in outputs
        )
        if read and outputs and not is_view and operation not in _ALLOCATIONS:
            self._alive += [read, outputs]
            self._record(func, operation, args, kwargs or {}, made, read, outputs)
        return made

    def _record(
        self,
        func: Any,
        operation: str,
        args: Any,
        kwargs: Any,
        made: Any,
        read: list[Tensor],
        outputs: list[Tensor],
    ) -> None:
        formula = flop_registry.get(func._overloadpacket)
        flops = (
            int(formula(*args, **kwargs, out_val=made)) // self._samples
            if formula
            else 0
        )
        kind, count, m, n, k = _product(operation, args, made, self._samples)
        # A parameter counts where it is read first, and once where layers share it.
        owned = sum(
            self._unused.pop(key, 0) for key in {_storage(tensor) for tensor in read}
        )
        activations = sum(map(_elements, outputs)) // self._samples
        if (
            self._call is not None
            and self._calls
            and self._calls[-1] is self._call
            and not flops
        ):
            # A bias, say: part of the same call, and no product of its own.
            before = self._rows[-1]
            self._rows[-1] = replace(
                before, parameters=before.parameters + owned, activations=activations
            )
        else:
            varying = [tensor for tensor in read if _storage(tensor) not in self._fixed]
            inputs = sum(map(_elements, varying)) // self._samples
            name = self._path[-1]
            if self._call is None:  # no module is being called
                name = ".".join(filter(None, (name, kind)))
            elif count == 0:
                kind = type(self._call[0]).__name__.lower()
            product = {"count": count, "m": m, "n": n, "k": k}
            self._rows.append(
                Layer(
                    name or kind,
                    kind,
                    owned,
                    flops,
                    inputs,
                    activations,
                    kept=0,
                    **product,
                )
            )
            self._calls.append(self._call)
        for tensor in outputs:
            self._written.setdefault(_storage(tensor), len(self._rows) - 1)

    def keep(self, tensor: Tensor) -> Tensor:
        """Note that the backward pass reads `tensor`; called by autograd."""
        if tensor.dim() > 0:
            self._alive.append(tensor)
            key = _storage(tensor)
            self._kept[key] = max(
                self._kept.get(key, 0), tensor.untyped_storage().nbytes()
            )
        return tensor

    def layers(self) -> tuple[Layer, ...]:
        """Return the rows with the elements that each keeps, and a last one of parameters without use."""
        kept = [0] * len(self._rows)
        for key, nbytes in self._kept.items():
            if key in self._written and key not in self._fixed:
                kept[self._written[key]] += nbytes // 4 // self._samples
        rows = [
            replace(row, kept=number)
            for row, number in zip(self._rows, kept, strict=True)
        ]
        if unused := sum(self._unused.values()):
            rows.append(Layer("unused", "unused", unused, 0, 0, 0, 0))
        return tuple(rows)


def _product(
    operation: str, args: Any, made: Any, samples: int
) -> tuple[str, int, int, int, int]:
    """Return (kind, count, m, n, k) of a product of one sample, all zero for other operations."""
    if operation in ("mm", "addmm"):
        a, b = args[-2:] if operation == "mm" else args[1:3]
        return "gemm", 1, a.shape[0] // samples, b.shape[1], a.shape[1]
    if operation in ("bmm", "baddbmm"):
        a, b = args[-2:] if operation == "bmm" else args[1:3]
        return "bmm", a.shape[0] // samples, a.shape[1], b.shape[2], a.shape[2]
    if operation == "convolution":
        x = args[0]
        weight = args[1]
        transposed = args[6]
        groups = args[8]
        pixels = math.prod((x if transposed else made).shape[2:])
        filters, depth = weight.shape[0], math.prod(weight.shape[1:])
        if transposed:
            return "conv", groups, pixels, depth, filters // groups
        return "conv", groups, pixels, filters // groups, depth
    return (
        operation.removeprefix("_").removeprefix("native_").removesuffix("_"),
        0,
        0,
        0,
        0,
    )


def _elements(tensor: Tensor) -> int:
    """Return the size in elements of 4 bytes."""
    return tensor.nbytes // 4


def _storage(tensor: Tensor) -> int:
    # Tensors on the meta device have no address: their storage objects tell them apart.
    return int(tensor.untyped_storage()._cdata)
