"""A block of a GPT on one of t devices that share it: its kernels, and what they keep for the backward pass.

Attention is divided by heads, the feed-forward part by its inner width (Megatron-LM, arXiv 1909.08053). Norms, dropout
behind the products by rows, and residuals are whole on every device, or divided by the sequence (Korthikanti et al.,
arXiv 2205.05198). Numbers are of a type of two bytes, masks of dropout of one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from scalebench.pricing.devices import Roofline

_NUMBER, _MASK = 2, 1  # bytes
_COMPUTED_AGAIN: dict[str, tuple[str, ...]] = {  # kernels, by what is computed again
    "none": (),
    "selective": ("scores", "softmax", "dropout", "context"),  # little arithmetic, which keeps most
}
_GIVEN_UP = ("softmax", "dropout")  # what these keep, with `selective`


class Kernel(NamedTuple):
    """One kernel of the forward pass of a sample: its floating-point operations, numbers that it moves, bytes it keeps.

    `weights` are numbers that do not grow with the batch. A product has two kernels in the backward pass, another one.
    """

    name: str
    flops: float
    moved: float
    kept: float
    weights: float = 0.0

    @property
    def backward_kernels(self) -> int:
        return 2 if self.flops else 1


@dataclass(frozen=True)
class Gpt:
    """A GPT: blocks, width, heads, tokens of a sample, and the size of its vocabulary."""

    layers: int
    width: int
    heads: int
    tokens: int
    vocabulary: int

    @property
    def block_parameters(self) -> int:
        """Four products of attention, two of the feed-forward part, their biases, and two norms."""
        return 12 * self.width**2 + 13 * self.width

    @property
    def embedding_parameters(self) -> int:
        """Tokens and positions."""
        return (self.vocabulary + self.tokens) * self.width


def block_kernels(model: Gpt, degree: int, *, by_sequence: bool) -> list[Kernel]:
    """Return the kernels of a block for one sample on one of `degree` devices."""
    h, places = float(model.width), model.tokens * float(model.width)
    own, scores = places / degree, model.heads * float(model.tokens) ** 2 / degree
    whole = own if by_sequence else places  # of norms, dropout and residuals

    def product(name: str, wide: float, narrow: float, moved: float, kept: float) -> Kernel:
        weights = wide * narrow / degree
        return Kernel(name, 2 * model.tokens * weights, moved, kept, weights)

    def attention(name: str, moved: float, kept: float) -> Kernel:
        return Kernel(name, 2 * model.tokens * own, moved, kept)

    norm = Kernel("norm", 0.0, 2 * whole, _NUMBER * whole)
    join = Kernel("bias, dropout and residual", 0.0, 3 * whole, _MASK * whole)
    return [
        norm,
        product("queries, keys, values", 3 * h, h, places + 3 * own, _NUMBER * whole),
        attention("scores", 2 * own + scores, _NUMBER * 2 * own),
        Kernel("softmax", 0.0, 2 * scores, _NUMBER * scores),
        Kernel("dropout", 0.0, 2 * scores, (_MASK + _NUMBER) * scores),
        attention("context", scores + 2 * own, _NUMBER * own),
        product("projection", h, h, own + places, _NUMBER * own),
        join,
        norm,
        product("feed-forward, first", 4 * h, h, places + 4 * own, _NUMBER * whole),
        Kernel("gelu", 0.0, 8 * own, _NUMBER * 4 * own),
        product("feed-forward, second", h, 4 * h, 4 * own + places, _NUMBER * 4 * own),
        join,
    ]


def head_kernels(model: Gpt, degree: int) -> list[Kernel]:
    """Return the kernels behind the last block: the product with the vocabulary, and the loss in float32."""
    places, scores = model.tokens * float(model.width), model.tokens * model.vocabulary / degree
    weights = float(model.width) * model.vocabulary / degree
    return [
        Kernel("logits", 2 * model.tokens * weights, places + scores, 0.0, weights),
        Kernel("loss", 0.0, 4 * scores, 0.0),
    ]


def computed_again(kernels: list[Kernel], recompute: str) -> list[Kernel]:
    """Return the kernels that a block computes once more before its backward pass."""
    return kernels if recompute == "full" else [each for each in kernels if each.name in _COMPUTED_AGAIN[recompute]]


def passes_s(kernels: list[Kernel], roofline: Roofline, samples: int) -> tuple[float, float]:
    """Return the seconds of the forward and the backward pass of `samples` through kernels, on the roofline."""
    flops = np.array([each.flops for each in kernels])
    moved = np.array([samples * each.moved + each.weights for each in kernels])
    seconds = roofline.kernels(samples * flops, _NUMBER * moved)
    backward = np.array([each.backward_kernels for each in kernels])
    return float(seconds.sum()), float((backward * seconds).sum())


def kept_bytes(kernels: list[Kernel], recompute: str) -> float:
    """Return the bytes that a block keeps of a sample: all, without those of `selective`, or its input (`full`)."""
    if recompute == "full":
        return kernels[0].kept
    given_up = _GIVEN_UP if recompute == "selective" else ()
    return sum(each.kept for each in kernels if each.name not in given_up)
