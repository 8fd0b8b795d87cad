"""Arithmetic of collectives over tensors in one process: reductions in rank order, and recursive pairwise merges.

A pairwise merge takes lg K exchanges; partners are 2^i apart in exchange i and end with the same vector, so that the
K/2 merges of level i have only K/2^(i+1) different results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from scalebench.comm.wire import divide_

ExchangeLap = tuple[float, float, float]  # (end, seconds of waiting, those of the message) of an exchange
_ELEMENTWISE = {"max": torch.maximum, "min": torch.minimum}


def reduce_tensors(
    tensors: Sequence[Tensor], op: str, weights: Sequence[float | None], wire: str | None = None
) -> Tensor:
    """Return sum_i w_i x_i, sum_i w_i x_i / sum_i w_i (`mean`), elementwise `max` or `min`; weights default to 1.

    With `wire` contributions and their sum are rounded to that dtype; sums and quotients have the tensors' dtype.
    """
    if op in _ELEMENTWISE:
        result = tensors[0].clone()
        for tensor in tensors[1:]:
            result = _ELEMENTWISE[op](result, tensor)
        return result
    result = _contribution(tensors[0], weights[0], wire).clone()
    for tensor, weight in zip(tensors[1:], weights[1:], strict=True):
        result.add_(_contribution(tensor, weight, wire))
    result = _rounded(result, wire)
    if op == "mean":
        divide_(result, sum(1.0 if weight is None else weight for weight in weights))
    return result


def _contribution(tensor: Tensor, weight: float | None, wire: str | None) -> Tensor:
    return _rounded(tensor if weight is None else tensor * weight, wire)


def _rounded(tensor: Tensor, wire: str | None) -> Tensor:
    return tensor if wire is None else tensor.to(getattr(torch, wire)).to(tensor.dtype)


def merge_pairs_(vectors: Sequence[Tensor], merge: Callable[[Tensor, Tensor], None]) -> None:
    """Replace each vector by the merge of all; each different merge is computed once."""
    stride = 1
    while stride < len(vectors):
        for rank in range(0, len(vectors), 2 * stride):
            merge(vectors[rank], vectors[rank + stride])
        stride *= 2
    torch._foreach_copy_(list(vectors[1:]), [vectors[0]] * (len(vectors) - 1))


def exchange_laps(
    starts: Sequence[float], seconds: Callable[[int, int], float], merging: float = 0.0
) -> list[list[ExchangeLap]]:
    """Return the exchanges of each rank arriving at `starts`: a message to the higher rank and its answer.

    `seconds(a, b)` is the time of a message from rank a to b, `merging` that of the merge before the answer.
    """
    now = list(starts)
    laps: list[list[ExchangeLap]] = [[] for _ in now]
    for low, high in _partners(len(now)):
        for source, rank in ((low, high), (high, low)):
            message = seconds(source, rank)
            until = max(now[rank], now[source] + message) + (merging if rank == high else 0.0)
            laps[rank].append((until, max(0.0, now[source] - now[rank]), message))  # transfer is not waiting
            now[rank] = until
    return laps


def _partners(size: int) -> Iterator[tuple[int, int]]:
    stride = 1
    while stride < size:
        yield from ((low, low | stride) for low in range(size) if not low & stride)
        stride *= 2
