"""Models whose layers several workers share: products by columns and rows, attention by heads; and torch's own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from scalebench.cluster.mesh import Mesh
from scalebench.comm.base import Capability
from scalebench.comm.engines import providing
from scalebench.strategies.base import Move, Worker
from scalebench.strategies.parts import PartsOfModel, whole_batch
from scalebench.strategies.registry import register
from scalebench.strategies.traits import Traits

if TYPE_CHECKING:
    from scalebench.models.parts import Layer


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
        # Shares of a layer are computed at the same time: micro-batches would win
        # nothing.
        return whole_batch()

    # Stated again: a class that changes the program loses what its bases state of it.
    @property
    def traits(self) -> Traits:
        return self.repeated()


@register("virtual")
class VirtualTorchTensor(TensorParallel):
    """ColwiseParallel of the first of two products, RowwiseParallel of the second: DTensors in place of parameters.

    A virtual run takes the steps of `tensor`, which sums as much, and is charged the
    overhead that calibration measures of `torch_tensor`. Torch has styles for `nn.Linear`
    alone: models in which `tensor` would divide convolutions, or batch normalisation
    between two products, are refused.
    """

    recompute: Literal["none"] = Field(
        "none", description="torch keeps all activations"
    )

    name = "torch_tensor"
    summary = "the real ColwiseParallel and RowwiseParallel (DTensor) of each layer (option degree)"
    source = "torch.distributed.tensor.parallel"
    engines = providing(Capability.PROCESS_GROUP)

    def require_shares(
        self, layers: Sequence[Layer], sizes: Sequence[int], mesh: Mesh
    ) -> None:
        from scalebench.models.sharding import held_by, require_linear

        # The first part stands for all, whose shares are equal.
        require_linear(held_by(layers, sizes, mesh, 0, "of the study"), "of the study")

    # Stated again: a class that changes the program loses what its bases state of it.
    @property
    def traits(self) -> Traits:
        return self.repeated()


@register()
class TorchTensor(VirtualTorchTensor):
    """Torch's own styles; gradients of replicas are averaged as by `allreduce`, after the step.

    Torch communicates inside both passes: compute and communication are not separate.
    """

    requires = frozenset({Capability.PROCESS_GROUP, Capability.SPLIT})

    def setup(self, worker: Worker) -> None:
        super().setup(worker)
        if worker.mesh.parts > 1:
            worker.use_styles()

    @property
    def traits(self) -> Traits:
        return replace(super().traits, split_is_measured=False)
