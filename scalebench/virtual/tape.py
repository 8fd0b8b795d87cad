"""A computation as the list of its operations, taken down once and repeated without autograd and vmap.

A small model's gradient takes longer to find its operations than to execute them:
`torch.func.vmap` and autograd spend two thirds of a millisecond in Python, the thirty
operations below them a fifth.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from scalebench.models.parts import DispatchMode

Results = Sequence[Tensor | None]
_TIMES = torch.ops.aten.mul.Scalar
# Methods by which values leave torch without an operation.
_EXPORTS = frozenset({"tolist", "numpy", "__array__", "__dlpack__", "__repr__"})


def record(
    compute: Callable[[], Results], inputs: Sequence[Tensor]
) -> tuple[Results, Callable[[], Results]]:
    """Call `compute`, and return its results and a function that repeats its operations.

    What `compute` reads must be `inputs`, whose contents may have changed when it is
    repeated but not their places, or must never change.

    Raises:
        RuntimeError: `compute` reads a value (a branch, `item`), or changes what two results share.
    """
    tape = _Tape(inputs)
    with tape:
        results = compute()
    return results, tape.repeat(results)


def gradients_of(made: Tensor, weights: Tensor, leaves: Sequence[Tensor]) -> Results:
    """Return the gradients of sum(weights * made) by `leaves`, None where a leaf takes no part."""
    engine = torch.autograd.Variable._execution_engine
    found: Results = engine.run_backward(
        (made,), (weights,), False, False, tuple(leaves), allow_unreachable=True
    )
    return found


def write(gradients: Results, targets: Sequence[Tensor], *, add: bool) -> None:
    """Write (`add`: add) gradients to `targets`."""
    reached = list(targets)
    found = [gradient for gradient in gradients if gradient is not None]
    if len(found) < len(reached):  # some parameters take no part
        pairs = list(zip(targets, gradients, strict=True))
        reached = [target for target, gradient in pairs if gradient is not None]
        if not add:
            torch._foreach_zero_([target for target, given in pairs if given is None])
    if found and add:
        torch._foreach_add_(reached, found)
    elif found and (found[0].is_contiguous() or found[0].dtype == torch.bfloat16):
        torch._foreach_copy_(reached, found)
    else:
        # Of matrices vmap leaves transposed ones, which numpy copies in 0.6 of the time.
        # It has no bfloat16.
        for target, gradient in zip(reached, found, strict=True):
            np.copyto(target.numpy(), gradient.numpy())


@contextmanager
def value_reads() -> Iterator[list[str]]:
    """Yield the calls by which the program inside reads values of tensors, on which its operations may depend.

    Counted are numbers and truths of tensors, exports to lists and other libraries, and
    results whose shape depends on values. The reading itself is found, whatever branch
    is taken on it.
    """
    found: list[str] = []
    calls = _Calls(found)
    with calls, _Readings(found, calls):
        yield found


class _Readings(DispatchMode):
    """Adds to `found` the `calls` whose operations give numbers, or shapes that depend on values."""

    def __init__(self, found: list[str], calls: _Calls) -> None:
        super().__init__()
        self._found, self._calls = found, calls

    def __torch_dispatch__(
        self,
        operation: Any,
        types: Any,
        arguments: Any = (),
        keywords: dict[str, Any] | None = None,
    ) -> Any:
        made = operation(*arguments, **(keywords or {}))
        if isinstance(made, bool | int | float | complex) or _shape_depends_on_values(
            operation, arguments
        ):
            self._found.append(self._calls.innermost or operation._schema.name)
        return made


class _Calls(TorchFunctionMode):
    """Knows the function of torch that is being called, and adds exports of values to `found`."""

    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self._found = found
        self.innermost = ""

    def __torch_function__(
        self,
        function: Any,
        types: Any,
        arguments: Any = (),
        keywords: dict[str, Any] | None = None,
    ) -> Any:
        name = getattr(function, "__name__", "")
        if name in _EXPORTS:
            self._found.append(name)
        outer, self.innermost = self.innermost, name
        try:
            return function(*arguments, **(keywords or {}))
        finally:
            self.innermost = outer


def _shape_depends_on_values(operation: Any, arguments: Sequence[Any]) -> bool:
    """Return True for `nonzero` and the like, and for an index that is a mask."""
    if torch.Tag.dynamic_output_shape not in operation.tags:
        return False
    if operation is not torch.ops.aten.index.Tensor:
        return True
    return any(
        index is not None and index.dtype in (torch.bool, torch.uint8)
        for index in arguments[1]
    )


class _Tape(DispatchMode):
    """Takes down operations below autograd and vmap, without views of inputs and what changes nothing.

    They become the lines of a function in Python. `torch.fx` writes such lines too, but
    with it a recording takes twice as long, and a run makes one for each batch shape.
    """

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self._places = {tensor.untyped_storage().data_ptr() for tensor in inputs}
        self._lines: list[str] = []
        self._bound: dict[str, Any] = {}  # operations and values, by name in the lines
        self._names: dict[Tensor, str] = {}  # of results, by tensor
        self._made = 0
        # of which one stands for two, equal as long as none is changed
        self._once: set[Tensor] = set()

    def repeat(self, results: Results) -> Callable[[], Results]:
        """Return a function that executes the operations again and returns what `results` are then."""
        lines = _with_releases([*self._lines, f"return {self._text(results)}"])
        source = "\n    ".join(["def repeated():", *lines])
        # Names and integers only: all else is bound to names.
        exec(source, self._bound)  # noqa: S102
        repeated: Callable[[], Results] = self._bound["repeated"]
        return repeated

    def __torch_dispatch__(
        self,
        operation: Any,
        types: Any,
        arguments: Any = (),
        keywords: dict[str, Any] | None = None,
    ) -> Any:
        made = operation(*arguments, **(keywords or {}))
        of = arguments[0] if arguments and isinstance(arguments[0], Tensor) else None
        if operation._schema.is_mutable:
            if of is not None and of in self._once:
                raise RuntimeError(
                    f"{operation} changes in place what the recording takes for another tensor"
                )
        elif isinstance(made, Tensor) and of is not None:
            if self._lasts(of) and self._lasts(made):
                return made
            if name := self._known(made, operation, of, arguments[1:]):
                self._names[made] = name
                return made
        if not isinstance(made, Tensor | Sequence):
            raise RuntimeError(
                f"{operation} reads a value, on which what follows may depend"
            )
        words = [self._text(each) for each in arguments]
        for name, argument in (keywords or {}).items():
            words.append(f"{name}={self._text(argument)}")
        call = f"{self._bind(_binding(operation))}({', '.join(words)})"
        if isinstance(made, Tensor):
            self._lines.append(f"{self._name(made)} = {call}")
        else:
            self._lines.append(f"{', '.join(map(self._name, made))}, = {call}")
        return made

    def _known(
        self, made: Tensor, operation: Any, of: Tensor, options: Sequence[Any]
    ) -> str:
        """Return the name of a result that needs no line, as another tensor has its elements; empty if it needs one."""
        if operation is _TIMES and options[0] == 1 and made.dtype == of.dtype:
            self._once.update((made, of))
            return self._text(of)
        if operation.is_view and of in self._once:
            self._once.add(made)
        if _is_the_same(made, of):
            return self._text(of)
        held = self._bound.get(self._names.get(of, ""))
        if held is None or not operation.is_view:
            return ""
        # `held` stays where it is, and so does this view of it
        return self._bind(operation(held, *options))

    def _lasts(self, tensor: Tensor) -> bool:
        """Return True if `tensor` is an input or a view of one: the same when the operations are repeated."""
        return (
            tensor not in self._names
            and tensor.untyped_storage().data_ptr() in self._places
        )

    def _text(self, argument: Any) -> str:
        """Return how a line names an argument; a tensor that no line has made stays where it is."""
        if isinstance(argument, Tensor):
            return self._names.get(argument) or self._bind(argument.detach())
        if isinstance(argument, list | tuple):
            return f"[{', '.join(map(self._text, argument))}]"
        if argument is None or isinstance(argument, int):
            return repr(argument)
        return self._bind(argument)

    def _bind(self, value: Any) -> str:
        name = f"bound_{len(self._bound)}"
        self._bound[name] = value
        return name

    def _name(self, made: Any) -> str:
        """Return a new name for what a line makes; of several results some may be no tensors."""
        name = f"made_{self._made}"
        self._made += 1
        if isinstance(made, Tensor):
            self._names[made] = name
        return name


def _with_releases(lines: Sequence[str]) -> Iterator[str]:
    """Yield `lines` that let go of each tensor where it is read last: the next one takes its place in the cache."""
    last = {
        name: place
        for place, line in enumerate(lines)
        for name in re.findall(r"made_\d+", line)
    }
    for place, line in enumerate(lines[:-1]):
        done = [name for name, at in last.items() if at == place]
        yield f"{line}; del {', '.join(done)}" if done else line
    yield lines[-1]


def _is_the_same(view: Tensor, of: Tensor) -> bool:
    """Return True if `view` has the elements of `of` in the same places."""
    same_place = view.data_ptr() == of.data_ptr() and view.dtype == of.dtype
    return same_place and view.shape == of.shape and view.stride() == of.stride()


def _binding(operation: Any) -> Callable[..., Any]:
    """Return torch's own function or method of that name, which is called in half of the time, if it has one."""
    name = operation._schema.name.removeprefix("aten::")
    for of in (torch._C._VariableFunctions, torch._C.TensorBase):
        found: Callable[..., Any] | None = getattr(of, name, None)
        if found is not None:
            return found
    return cast(Callable[..., Any], operation._op)
