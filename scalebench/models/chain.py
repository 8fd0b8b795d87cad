"""The modules of a model whose forward is ordinary Python, one after the other, found by tracing it.

A forward is a graph of calls. Where one value alone is needed behind a call, the model
can be cut there: residual connections keep what they span in one piece.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional

from scalebench.errors import ModelError

# Functions and methods whose module takes the same arguments: what is known of the module, such as
# that shares of a layer pass through it, is then known of the call.
_MODULES: dict[Any, Callable[..., nn.Module]] = {
    functional.relu: nn.ReLU,
    torch.relu: nn.ReLU,
    functional.gelu: nn.GELU,
    functional.silu: nn.SiLU,
    torch.tanh: nn.Tanh,
    torch.sigmoid: nn.Sigmoid,
    functional.max_pool2d: nn.MaxPool2d,
    functional.avg_pool2d: nn.AvgPool2d,
    functional.adaptive_avg_pool2d: nn.AdaptiveAvgPool2d,
    torch.flatten: nn.Flatten,
    "flatten": nn.Flatten,
    "relu": nn.ReLU,
}


def chain_of(model: nn.Module, name: str) -> list[tuple[str, nn.Module]]:
    """Return modules that compute, one after the other, what `model` does, with their names.

    A module that is called as it is stands there itself, parts of an `nn.Sequential`
    each by itself; other calls between two cuts are a module made of them, with the
    model's own parameters. A module of a user's class that holds more than half of the
    parameters is opened in turn, where that can be.

    Raises:
        ModelError: the forward of the model that is called `name` cannot be traced.
    """
    most = _parameters(model) / 2
    return [
        named
        for label, module in _pieces(model, name)
        for named in (
            _opened(label, module, name)
            if _parameters(module) > most and not _is_of_a_library(module)
            else [(label, module)]
        )
    ]


def _opened(label: str, module: nn.Module, name: str) -> list[tuple[str, nn.Module]]:
    try:
        return [(f"{label}.{below}", each) for below, each in chain_of(module, name)]
    except ModelError:
        return [(label, module)]


def _parameters(module: nn.Module) -> int:
    return sum(each.numel() for each in module.parameters() if each.requires_grad)


def _is_of_a_library(module: nn.Module) -> bool:
    # a graph has a class of its own that is in no module
    made_here = isinstance(module, fx.GraphModule)
    return made_here or type(module).__module__.startswith(("torch.", "scalebench."))


def _pieces(model: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules between the cuts of the forward itself."""
    graphs = [_traced(model, name, training=training) for training in (True, False)]
    training, evaluation = ([*_segments(graph)] for graph in graphs)
    if len(training) != len(evaluation):
        raise _refusal(model, name, "its forward differs in evaluation mode")
    for one, other in zip(training, evaluation, strict=True):
        label, trained = one.of(model)
        _, evaluated = other.of(model)
        # dropout of torch.nn.functional, for instance: the mode is a constant of a graph
        same = _computes(trained) == _computes(evaluated)
        yield label, trained if same else _ByMode(trained, evaluated)


def _computes(module: nn.Module) -> object:
    """Return what is equal for modules of two graphs that compute the same."""
    if isinstance(module, fx.GraphModule):
        return module.code
    # a module of the model is one object in both; one that was made here has no state
    return module if module.state_dict() else repr(module)


def _traced(model: nn.Module, name: str, *, training: bool) -> fx.Graph:
    """Return the graph of the forward in a mode, with the modules that it calls as nodes."""
    was_training = model.training
    model.training = training
    try:
        given = inspect.signature(model.forward).parameters.values()
        # one tensor is passed on; other arguments are what they are without being given
        otherwise = {each.name: each.default for each in [*given][1:]}
        graph = _Tracer().trace(model, otherwise)
    except Exception as error:
        said = " ".join(str(error).split())
        raise _refusal(model, name, f"{type(error).__name__}: {said}") from error
    finally:
        model.training = was_training
    _erase_assertions(graph)
    for node in reversed(graph.nodes):
        # `made, _ = lstm(x)` reads a part that nothing takes
        if node.target is operator.getitem and not node.users:
            graph.erase_node(node)
    return graph


def _erase_assertions(graph: fx.Graph) -> None:
    """Erase what torch asserts of arguments that have their default."""
    _, *others = (node for node in graph.nodes if node.op == "placeholder")
    asserting = dict.fromkeys(others)
    for node in graph.nodes:
        if any(each in asserting for each in node.all_input_nodes):
            asserting[node] = None
    for node in reversed(asserting):
        graph.erase_node(node)


def _refusal(model: nn.Module, name: str, why: str) -> ModelError:
    return ModelError(
        f"model {name}: {type(model).__name__} cannot be cut into layers ({why}); make it an nn.Sequential, or give it "
        "a method layers(), or its file a function layers(model), that returns its modules in the order of forward"
    )


class _Tracer(fx.Tracer):
    """Looks into containers only."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return type(m) is not nn.Sequential


class _Segment:
    """The nodes between two cuts: what they read of the one before them, and what they pass on."""

    def __init__(self, read: fx.Node, nodes: Sequence[fx.Node], result: Any) -> None:
        self.read, self.nodes, self.result = read, nodes, result

    @property
    def _reads_once(self) -> bool:
        return len(self.nodes) == 1 and self.nodes[0].all_input_nodes == [self.read]

    def of(self, model: nn.Module) -> tuple[str, nn.Module]:
        """Return the name of the segment, and the module that computes it with the parameters of `model`."""
        first = next(
            (node for node in self.nodes if node.op in ("call_module", "get_attr")),
            self.nodes[0],
        )
        label = str(first.target if first.op != "call_function" else first.name)
        only = self.nodes[0]
        alone = (
            self.result is only and only.args[:1] == (self.read,) and self._reads_once
        )
        if alone and only.op == "call_module" and len(only.args) == 1:
            return label, model.get_submodule(label)
        if alone and only.target in _MODULES:
            return label, _MODULES[only.target](*only.args[1:], **only.kwargs)
        graph = fx.Graph()
        made = {self.read: graph.placeholder("x")}
        for node in self.nodes:
            made[node] = graph.node_copy(node, made.__getitem__)
        graph.output(fx.map_arg(self.result, made.__getitem__))
        return label, fx.GraphModule(model, graph)


def _segments(graph: fx.Graph) -> Iterator[_Segment]:
    """Yield the segments of a graph, first to last."""
    # Parameters of the model itself are read where they are used: they cross no cut.
    nodes = [node for node in graph.nodes if node.op not in ("placeholder", "get_attr")]
    *nodes, output = nodes
    read = next(node for node in graph.nodes if node.op == "placeholder")
    place = {node: at for at, node in enumerate(nodes)}
    last = {
        node: max((place.get(user, len(nodes)) for user in node.users), default=-1)
        for node in (read, *nodes)
    }
    begin = 0
    for at, node in enumerate(nodes[:-1]):
        needed = [each for each in (read, *nodes[: at + 1]) if last[each] > at]
        if needed == [node] and _is_passed_whole(node):
            yield _Segment(read, _with_attributes(nodes[begin : at + 1]), node)
            begin, read = at + 1, node
    yield _Segment(read, _with_attributes(nodes[begin:]), output.args[0])


def _is_passed_whole(node: fx.Node) -> bool:
    """Return False for a tuple, mapping or object of which parts are read, as `.logits`: a worker passes on tensors."""
    for user in node.users:
        part = user.args[1] if len(user.args) > 1 else None
        if user.target is operator.getitem and isinstance(part, int | str):
            return False
        if user.target is getattr and not hasattr(torch.Tensor, str(part)):
            return False
    return True


def _with_attributes(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """Return nodes behind the parameters of the model itself that they read."""
    attributes = [
        node for each in nodes for node in each.all_input_nodes if node.op == "get_attr"
    ]
    return [*dict.fromkeys(attributes), *nodes]


class _ByMode(nn.Module):
    """One of two modules, by the mode that this one is in."""

    def __init__(self, trained: nn.Module, evaluated: nn.Module) -> None:
        super().__init__()
        self.trained, self.evaluated = trained, evaluated

    def forward(self, x: Any) -> Any:
        return (self.trained if self.training else self.evaluated)(x)


def draws(module: nn.Module) -> bool:
    """Return True if a module that was made of calls has dropout of `torch.nn.functional` among them."""
    return isinstance(module, fx.GraphModule) and any(
        node.target is functional.dropout for node in module.graph.nodes
    )
