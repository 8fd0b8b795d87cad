"""Base class and registry of models, and the conversion of samples to images."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar, Literal

from scalebench.errors import ModelError
from scalebench.registry import Choice, Registry

if TYPE_CHECKING:
    from torch import nn

Layout = Literal["chw", "hwc"]  # order of channels, height and width in a sample
_CHANNELS = (1, 3, 4)


class Architecture(Choice):
    """Builder of a model: its fields are its options."""

    # False: it has no arithmetic, and can only be priced
    trainable: ClassVar[bool] = True

    def notes(self, input_shape: tuple[int, ...]) -> list[str]:
        """Return notes on how samples are read, without importing torch. Raises ModelError as `build`."""
        return []

    def build(self, input_shape: tuple[int, ...], outputs: int) -> nn.Module:
        """Return a module from (n, *input_shape) to (n, outputs). Raises ModelError for an unsuitable input."""
        raise NotImplementedError


class ImageArchitecture(Architecture):
    """Builder of a model of images; `layout` says where the channels of samples of three axes are."""

    layout: Layout | None = None

    def notes(self, input_shape: tuple[int, ...]) -> list[str]:
        """Return a note on channels that were found in the last axis."""
        if (
            len(input_shape) != 3
            or self.layout is not None
            or not self._channels_last(input_shape)
        ):
            return []
        height, width, planes = input_shape
        return [
            f"model {self.name}: samples of shape {input_shape} are taken as images of {height} x {width} pixels with "
            f"{planes} channel{'s' * (planes > 1)}, which come last; the option layout: chw takes the first axis "
            "instead"
        ]

    def into_images(
        self, input_shape: tuple[int, ...]
    ) -> tuple[list[nn.Module], tuple[int, int, int]]:
        """Return layers from (n, *input_shape) to (n, planes, height, width), and these three.

        A sample is C x H x W, which needs no layer, H x W x C (`_channels_last`), H x
        W, or a flat square such as 64 values for 8 x 8.

        Raises:
            ModelError: the sample has another shape, or its channels are not found.
        """
        from torch import nn

        if len(input_shape) == 3:
            if not self._channels_last(input_shape):
                return [], (input_shape[0], input_shape[1], input_shape[2])
            from scalebench.models.blocks import ChannelsFirst

            return [ChannelsFirst()], (input_shape[2], input_shape[0], input_shape[1])
        # Of a flat sample the side of its square, if it is one.
        sides = (
            input_shape
            if len(input_shape) == 2
            else (math.isqrt(math.prod(input_shape)),) * 2
        )
        if len(input_shape) not in (1, 2) or math.prod(sides) != math.prod(input_shape):
            raise ModelError(
                f"model {self.name}: cannot read samples of shape {input_shape} as images; expected C x H x W, "
                "H x W x C, H x W or a square number of values; use model: mlp for features"
            )
        shape = (1, sides[0], sides[1])
        return [nn.Flatten(), nn.Unflatten(1, shape)], shape

    def _channels_last(self, input_shape: tuple[int, ...]) -> bool:
        """Return True if samples of three axes are H x W x C: the axis of 1, 3 or 4 is that of the channels.

        Where the first and the last axis may be it, the other two are the sides if they
        are equal, else it is the first.

        Raises:
            ModelError: neither axis may be it, and no `layout` is stated.
        """
        if self.layout is not None:
            return self.layout == "hwc"
        first, middle, last = input_shape
        if first in _CHANNELS and last in _CHANNELS:
            return first == middle != last
        if first not in _CHANNELS and last not in _CHANNELS:
            raise ModelError(
                f"model {self.name}: samples of shape {input_shape} have no first or last axis of 1, 3 or 4 channels; "
                "say where the channels are with the option layout: chw or layout: hwc"
            )
        return last in _CHANNELS


MODELS: Registry[Architecture] = Registry(
    "model", ModelError, "scalebench.models.zoo", "scalebench.models"
)
