"""ResNet-50 and ViT-B/16 as the library transformers builds them, with random weights; nothing is downloaded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from scalebench.errors import ModelError
from scalebench.models.architecture import MODELS, ImageArchitecture

if TYPE_CHECKING:
    from torch import nn


@MODELS.add
class ResNet50(ImageArchitecture):
    """He et al., CVPR 2016: 3, 4, 6 and 3 bottleneck blocks, for images of 224 x 224.

    23,712,932 parameters at 100 classes. Its batch normalisation keeps running
    statistics.
    """

    name = "resnet50"
    summary = (
        "ResNet-50 of transformers (pip install scalebench[models]), for large images"
    )

    def build(self, input_shape: tuple[int, ...], outputs: int) -> nn.Module:
        library = _transformers(self.name)
        layers, (planes, _, _) = self.into_images(input_shape)
        # From a configuration weights are drawn; `from_pretrained` would download some.
        config = library.ResNetConfig(num_channels=planes, num_labels=outputs)
        # Here, as it imports torch.
        from scalebench.models.blocks import ResNetLogits

        model = ResNetLogits(library.ResNetForImageClassification(config))
        return _in_sequence(layers, model)


@MODELS.add
class VitB16(ImageArchitecture):
    """Dosovitskiy et al., 2021 (arXiv 2010.11929): 12 layers of width 768 on patches of 16 x 16 pixels.

    85,875,556 parameters at 100 classes and 224 x 224 pixels. No batch normalisation.
    Sides must be multiples of 16.
    """

    name = "vit_b16"
    summary = "ViT-B/16 of transformers (pip install scalebench[models]); sides are multiples of 16"

    def build(self, input_shape: tuple[int, ...], outputs: int) -> nn.Module:
        layers, (planes, height, width) = self.into_images(input_shape)
        # Its patches are 16 pixels wide, and positions are learned for a square.
        if height != width or height % 16:
            raise ModelError(
                f"model vit_b16: images of {height} x {width}; expected a square with sides of 16, 32, ..."
            )
        # After the check, which needs no transformers.
        library = _transformers(self.name)
        config = library.ViTConfig(
            image_size=height, num_channels=planes, num_labels=outputs
        )
        # Here, as it imports torch.
        from scalebench.models.blocks import VitLogits

        model = VitLogits(library.ViTForImageClassification(config))
        return _in_sequence(layers, model)


def _transformers(name: str) -> Any:
    try:
        # Takes seconds, and no other model needs it.
        import transformers
    except ImportError:
        raise ModelError(
            f"model {name} needs transformers; install it with pip install 'scalebench[models]'"
        ) from None
    return transformers


def _in_sequence(layers: list[nn.Module], model: nn.Module) -> nn.Module:
    from torch import nn

    return nn.Sequential(*layers, model)
