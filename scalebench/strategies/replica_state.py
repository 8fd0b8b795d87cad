"""Averaging of a replica's tensors in one collective: packed into a vector, or from where they lie."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from scalebench.comm.base import Communicator
from scalebench.strategies.base import Worker
from scalebench.system.late import torch

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer


# Above it a copy into one vector takes longer than a collective of its own.
LARGE = 1 << 20  # bytes


def joined(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The same memory in as few tensors as possible: adjacent ones in a storage become one flat view.

    Computed at each call, in microseconds: a forward pass may replace a buffer by
    another tensor.
    """
    if len(tensors) == 1:
        return list(tensors)
    found: list[Tensor] = []
    first, dtype, begin, end, limit = tensors[0], None, 0, 0, 0
    for tensor in tensors:
        place, nbytes = tensor.data_ptr(), tensor.nbytes
        if (
            place == end
            and tensor.dtype is dtype
            and place + nbytes <= limit
            and tensor.is_contiguous()
        ):
            end += nbytes
            continue
        if found:
            found[-1] = _over(first, end - begin)
        found.append(tensor)
        first, begin, end, limit = tensor, place, place + nbytes, 0
        if tensor.is_contiguous():
            # memory behind its end belongs to another storage
            storage = tensor.untyped_storage()
            dtype, limit = tensor.dtype, storage.data_ptr() + storage.nbytes()
    found[-1] = _over(first, end - begin)
    return found


def _over(first: Tensor, nbytes: int) -> Tensor:
    """View of `nbytes` from the beginning of `first`."""
    return (
        first
        if first.nbytes == nbytes
        else first.as_strided((nbytes // first.itemsize,), (1,))
    )


def packed(tensors: Sequence[Tensor], dtype: torch.dtype | None = None) -> Tensor:
    """The tensors as one flat vector of `dtype` (default: the first's): a view if they are adjacent, else a copy."""
    dtype, pieces = dtype or tensors[0].dtype, joined(tensors)
    if len(pieces) == 1 and pieces[0].dtype == dtype:
        return pieces[0]

    # most lie as they are to travel: two calls less for each
    return torch.cat(
        [
            each
            if each.dim() == 1 and each.dtype == dtype
            else each.reshape(-1).to(dtype)
            for each in pieces
        ]
    )


def unpack_(vector: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copy a vector made by `packed`, and changed since, back into the tensors."""
    pieces = joined(tensors)
    if len(pieces) == 1:
        if vector.data_ptr() != pieces[0].data_ptr():
            pieces[0].copy_(vector.view_as(pieces[0]))
        return

    cut = zip(
        torch.split_with_sizes(vector, [piece.numel() for piece in pieces]),
        pieces,
        strict=True,
    )
    shaped = [
        values if piece.dim() == 1 else values.view_as(piece) for values, piece in cut
    ]
    torch._foreach_copy_(pieces, shaped)


def average_(
    comm: Communicator, tensors: Sequence[Tensor], weight: float | None = None
) -> None:
    """The mean of each of `tensors` over the workers, in one synchronisation; `weight` is this worker's.

    Adjacent tensors travel from where they lie, as one; so do large ones, whose copy
    would cost more than a call. Small ones travel as one vector.
    """
    tensors = joined(tensors)
    if len(tensors) == 1:
        comm.mean_(tensors, weight)
        return
    dtype = tensors[0].dtype

    def travels_alone(tensor: Tensor) -> bool:
        return (
            tensor.nbytes > LARGE and tensor.dtype == dtype and tensor.is_contiguous()
        )

    apart = [tensor for tensor in tensors if travels_alone(tensor)]
    small = [tensor for tensor in tensors if not travels_alone(tensor)]
    if not small:
        comm.mean_(apart, weight)
        return
    vector = packed(small, dtype)
    comm.mean_([vector, *apart], weight)
    unpack_(vector, small)


def average_at_master_(
    comm: Communicator, tensors: Sequence[Tensor], weight: float | None = None
) -> None:
    """The same through worker 0, which gathers all vectors, adds them in the order of the workers and sends K - 1 back.

    Weighted, each comes as its product, with the weight beside it.
    """
    vector = packed(tensors)
    if weight is None:
        comm.reduce_(vector, 0, "mean", linear=True)
    else:
        sent = packed([vector * weight, vector.new_tensor([weight])])
        comm.reduce_(sent, 0, linear=True)
        if comm.rank == 0:
            vector.copy_(sent[:-1] / sent[-1])
    # One after the other, as a master does, and not by a tree.
    comm.broadcast_(vector, 0, linear=True)
    unpack_(vector, tensors)


def parameter_shapes(worker: Worker) -> list[tuple[int, ...]]:
    """Return the shapes of the parameters that are trained, in their order in the flat vectors.

    A virtual worker whose gradients another model computes builds its own when it is
    asked for, which takes longer than all else of a set-up: it knows the shapes.
    """
    known: list[tuple[int, ...]] | None = getattr(
        worker.state, "parameter_shapes", None
    )
    if known is not None:
        return known
    return [
        tuple(parameter.shape)
        for parameter in worker.model.parameters()
        if parameter.requires_grad
    ]


def model_buffers(worker: Worker) -> list[Tensor]:
    """Return the buffers of the model.

    Asked for at every step: the modules, which stay, are listed once; a forward pass
    may replace their buffers.
    """
    if not hasattr(worker.state, "buffers_of_modules"):
        worker.state.buffers_of_modules = [
            module._buffers for module in worker.model.modules()
        ]
    held = [
        buffer
        for buffers in worker.state.buffers_of_modules
        if buffers
        for buffer in buffers.values()
        if buffer is not None
    ]
    return list(dict.fromkeys(held))  # two modules may share a buffer


def floating_buffers(worker: Worker) -> list[Tensor]:
    """BatchNorm's running statistics and the like; counters are no statistics."""
    return [buffer for buffer in model_buffers(worker) if buffer.is_floating_point()]


def broadcast_bytes_(comm: Communicator, tensors: Sequence[Tensor]) -> None:
    """Broadcast worker 0's `tensors`, of any dtypes, in one collective."""
    # each piece begins where its dtype may
    ordered = sorted(tensors, key=lambda tensor: -tensor.element_size())
    packed = torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in ordered])
    comm.broadcast_(packed, 0)
    if comm.rank > 0:
        for tensor, piece in zip(
            ordered, torch.split(packed, [each.nbytes for each in ordered]), strict=True
        ):
            tensor.copy_(piece.view(tensor.dtype).view_as(tensor))


def optimizer_tensors(worker: Worker) -> list[Tensor]:
    """State tensors of the optimizer, its step counters included; before its first step the initial zeros.

    A worker that has not stepped yet (a client that was not chosen) thus has a part in
    the mean too.
    """
    if not worker.optimizer.state:
        _begin(worker.optimizer)
    return [
        value
        for remembered in worker.optimizer.state.values()
        for value in _tensors(remembered)
    ]


def _tensors(remembered: dict[str, Any]) -> list[Tensor]:
    """Moments and the step counter; the norms that LAMB keeps for its users are no state."""
    kept = (
        (name, value)
        for name, value in remembered.items()
        if isinstance(value, torch.Tensor)
    )
    return [value for name, value in kept if value.dim() > 0 or name == "step"]


def _begin(optimizer: Optimizer) -> None:
    """The state as it is before the first step: torch's optimizers start from zeros, but make them in that step."""
    if begin := getattr(optimizer, "begin", None):  # FlatSgd's
        begin()
        return

    # torch's copy leaves out attributes of a subclass
    twin = object.__new__(type(optimizer))
    groups = copy.deepcopy(optimizer.param_groups)
    vars(twin).update(vars(optimizer), state=defaultdict(dict), param_groups=groups)
    for group in twin.param_groups:
        for parameter in group["params"]:
            # a copy of a parameter has none
            parameter.grad = torch.zeros_like(parameter)
    twin.step()
    for group, made in zip(optimizer.param_groups, twin.param_groups, strict=True):
        for parameter, stepped in zip(group["params"], made["params"], strict=True):
            remembered = dict(twin.state.get(stepped, {}))
            for value in _tensors(remembered):
                value.zero_()
            optimizer.state[parameter] = remembered
