"""A layer table in place of a model: its parameters without values, for runs that are priced and not trained."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from scalebench.models.architecture import MODELS, Architecture
from scalebench.models.layer_files import load_layers
from scalebench.models.layers import LayerTable
from scalebench.study.spec import Component

if TYPE_CHECKING:
    from torch import nn


@MODELS.add
class Layers(Architecture):
    """One tensor for each layer with parameters; its gradient is complete when the layers behind it are computed."""

    name = "layers"
    summary = "layer table (resnet101, vgg16, ... or FILE.csv), priced only: for execution modelled"
    trainable: ClassVar[bool] = False

    table: str

    def build(self, input_shape: tuple[int, ...], outputs: int) -> nn.Module:
        import torch

        module = without_values(load_layers(self.table))
        module.forward = lambda samples: torch.empty(
            len(samples), outputs, device="meta"
        )
        return module


def layers_of(model: Component) -> LayerTable | None:
    """Return the layer table that `model` stands for, None for a model that can be trained."""
    return load_layers(model.options["table"]) if model.name == Layers.name else None


def without_values(table: LayerTable) -> nn.Module:
    """Return a module with the parameters of `table` on torch's meta device, one for each layer that has any."""
    import torch

    module = torch.nn.Module()
    for place, layer in enumerate(table.layers):
        if layer.parameters:
            # else the table gives no sizes: a vector
            whole = layer.n > 0 and layer.parameters % layer.n == 0
            shape = (
                (layer.n, layer.parameters // layer.n) if whole else (layer.parameters,)
            )
            tensor = torch.empty(shape, device="meta")
            module.register_parameter(f"layer{place}", torch.nn.Parameter(tensor))
    return module
