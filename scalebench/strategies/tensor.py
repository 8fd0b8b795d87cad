"""Models whose layers several workers share: products by columns and rows, attention by heads."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import Field

from scalebench.cluster.mesh import Mesh
from scalebench.strategies.base import Move
from scalebench.strategies.parts import PartsOfModel, whole_batch
from scalebench.strategies.registry import register
from scalebench.strategies.traits import Traits


@register()
class TensorParallel(PartsOfModel):
    """Worker k of t holds columns of a product A and the rows of the next one, B, that take what these give.

        forward:   y = sum_k f(x A_k) B_k        one sum of the outputs over the t workers
        backward:  dx = sum_k df(x A_k) A_k^T    one sum of the gradients

    f works element by element, or channel by channel: activations, pooling, batch
    normalisation. A convolution is divided by output channels, then by input channels,
    attention by heads. What is neither is computed by every worker. With K workers K /
    t replicas average the gradients of each share after every batch.
    """

    degree: int = Field(
        2,
        ge=1,
        le=65536,
        description="t: workers that share every layer; it divides their widths",
    )

    name = "tensor"
    summary = "each layer shared by several workers (option degree): columns, rows, heads, channels"
    source = "Shoeybi et al., arXiv 1909.08053 (Megatron-LM)"

    divides_by = (("tensor", "degree"),)

    def replica(self) -> Mesh:
        return Mesh(tensor=self.degree)

    def order(self, stage: int, stages: int, micro_batches: int) -> Iterator[Move]:
        return whole_batch()

    # Stated again: a class that changes the program loses what its bases state of it.
    @property
    def traits(self) -> Traits:
        return self.repeated()
