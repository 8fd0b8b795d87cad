"""Layer tables: parameters, arithmetic and activations of a model by layer, from which steps are priced untrained."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

ELEMENT_BYTES = {"float64": 8, "float32": 4, "tf32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Layer:
    """One layer of a model; amounts are those of the forward pass of one sample, sizes count elements.

    `count` products of (m, k) by (k, n) are its arithmetic, 2 m n k count flops; a
    convolution is the product of its output pixels (m) by its filters (n), and its
    groups are the count. m grows with the batch, in a `bmm` the count.
    """

    name: str
    kind: str  # conv, gemm, bmm, or the name of the operation
    parameters: int
    # of matrix products and convolutions, a multiplication and an addition being two
    flops: int
    inputs: int  # elements read
    activations: int  # elements written
    # elements held until the backward pass; a mask of bytes counts a quarter, an index
    # of 8 bytes two
    kept: int
    count: int = 0
    m: int = 0
    n: int = 0
    k: int = 0

    @property
    def weights(self) -> int:
        """Elements of the matrices that are multiplied with samples, also where another layer owns them."""
        return self.count * self.n * self.k if self.kind in ("conv", "gemm") else 0


@dataclass(frozen=True)
class LayerTable:
    """Layers of a model in the order of the forward pass, and where they were read."""

    name: str
    layers: tuple[Layer, ...]
    source: str = ""
    input_shape: tuple[int, ...] = ()

    @cached_property
    def parameters(self) -> int:
        """Number of trainable parameters."""
        return sum(layer.parameters for layer in self.layers)

    @property
    def flops(self) -> int:
        """Floating-point operations of the forward pass of one sample."""
        return sum(layer.flops for layer in self.layers)

    @cached_property
    def backward_products(self) -> NDArray[np.float64]:
        """Products of the backward pass for each one of the forward pass, by layer: 2, for inputs and for parameters.

        The first layer with parameters needs no gradient of its inputs (1), the layers
        before it none at all (0).
        """
        first = next(
            (index for index, layer in enumerate(self.layers) if layer.parameters), 0
        )
        return np.array([0.0] * first + [1.0] + [2.0] * (len(self.layers) - first - 1))

    @cached_property
    def _columns(self) -> dict[str, NDArray[np.float64]]:
        return {}

    def column(self, name: str) -> NDArray[np.float64]:
        """Return the numbers of `name` (an attribute of Layer) by layer."""
        if name not in self._columns:
            self._columns[name] = np.array(
                [getattr(layer, name) for layer in self.layers], dtype=np.float64
            )
        return self._columns[name].copy()

    def activation_bytes(self, batch: int, dtype: str = "float32") -> int:
        """Return the bytes that a forward pass of `batch` samples holds until the backward pass."""
        return batch * sum(layer.kept for layer in self.layers) * ELEMENT_BYTES[dtype]

    def memory_bytes(
        self, batch: int, optimizer_states: int = 1, dtype: str = "float32"
    ) -> int:
        """Return bytes of parameters, gradients, `optimizer_states` vectors of that size, and activations."""
        return (2 + optimizer_states) * self.parameters * ELEMENT_BYTES[
            dtype
        ] + self.activation_bytes(batch, dtype)
