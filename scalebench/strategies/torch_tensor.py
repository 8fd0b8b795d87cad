"""PyTorch's own tensor parallelism, torch.distributed.tensor.parallel, and its model for virtual runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from scalebench.cluster.mesh import Mesh
from scalebench.comm.base import Capability
from scalebench.comm.engines import providing
from scalebench.strategies.base import Worker
from scalebench.strategies.registry import register
from scalebench.strategies.tensor import TensorParallel
from scalebench.strategies.traits import Traits

if TYPE_CHECKING:
    from scalebench.models.parts import Layer


@register("virtual")
class VirtualTorchTensor(TensorParallel):
    """ColwiseParallel of the first of two products, RowwiseParallel of the second: DTensors in place of parameters.

    A virtual run takes the steps of `tensor`, which sums as much. Torch has styles for
    `nn.Linear` alone: models in which `tensor` would divide convolutions, or batch
    normalisation between two products, are refused.
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
        return replace(self.repeated(), split_is_measured=False)
