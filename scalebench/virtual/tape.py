"""A computation as the list of its operations, taken down once and repeated without autograd and vmap.

A small model's gradient takes longer to find its operations than to execute them:
`torch.func.vmap` and autograd spend two thirds of a millisecond in Python, the thirty
operations below them a fifth.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate
from torch.utils._python_dispatch import TorchDispatchMode

Results = Sequence[Tensor | None]
_TIMES = torch.ops.aten.mul.Scalar


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
    for target, gradient in zip(targets, gradients, strict=True):
        if gradient is not None:
            target.add_(gradient) if add else target.copy_(gradient)
        elif not add:  # the parameter takes no part
            target.zero_()


class _Tape(TorchDispatchMode):
    """Takes down operations below autograd and vmap, without views of inputs and what changes nothing."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._places = {tensor.untyped_storage().data_ptr() for tensor in inputs}
        self._graph = fx.Graph()
        self._lasting: dict[str, Tensor] = {}  # by name in the graph
        self._nodes: dict[Tensor, fx.Node] = {}
        # of which one stands for two, equal as long as none is changed
        self._once: set[Tensor] = set()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # or the first operation imports torch's compiler, in two seconds

    def repeat(self, results: Results) -> Callable[[], Results]:
        """Return a function that executes the operations again and returns what `results` are then."""
        self._graph.output(
            [None if result is None else self._node(result) for result in results]
        )
        module = fx.GraphModule(self._lasting, self._graph)
        # found at once, and not by a search among buffers
        vars(module).update(self._lasting)
        repeated: Callable[[], Results] = module.forward
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
            if _is_the_same(made, of):
                self._name(made, self._node(of))
                return made
            if operation is _TIMES and arguments[1] == 1 and made.dtype == of.dtype:
                self._name(made, self._node(of))
                self._once.update((made, of))
                return made
        if not isinstance(made, Tensor | Sequence):
            raise RuntimeError(
                f"{operation} reads a value, on which what follows may depend"
            )
        nodes = map_aggregate((tuple(arguments), keywords or {}), self._node)
        node = self._graph.call_function(_binding(operation), *nodes)
        if isinstance(made, Tensor):
            self._name(made, node)
        else:
            for place, each in enumerate(made):
                if isinstance(each, Tensor):
                    self._name(
                        each, self._graph.call_function(operator.getitem, (node, place))
                    )
        return made

    def _lasts(self, tensor: Tensor) -> bool:
        """Return True if `tensor` is an input or a view of one: the same when the operations are repeated."""
        return (
            tensor not in self._nodes
            and tensor.untyped_storage().data_ptr() in self._places
        )

    def _node(self, argument: Any) -> Any:
        """Return the node that makes a tensor; what no operation has made stays where it is."""
        if not isinstance(argument, Tensor):
            return argument
        if argument in self._nodes:
            return self._nodes[argument]
        name = f"lasting_{len(self._graph.nodes)}"
        self._lasting[name] = argument.detach()
        return self._graph.get_attr(name)

    def _name(self, tensor: Tensor, node: fx.Node) -> None:
        self._nodes[tensor] = node


def _is_the_same(view: Tensor, of: Tensor) -> bool:
    """Return True if `view` has the elements of `of` in the same places."""
    same_place = view.data_ptr() == of.data_ptr() and view.dtype == of.dtype
    return same_place and view.shape == of.shape and view.stride() == of.stride()


def _binding(operation: Any) -> Callable[..., Any]:
    """Return torch's own function of that name, which is called in half of the time of `operation`, if it has one."""
    name = operation._schema.name.removeprefix("aten::")
    found: Callable[..., Any] = getattr(torch._C._VariableFunctions, name, operation)
    return found
