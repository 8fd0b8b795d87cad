"""The training that a prediction is of: its layers, samples, epochs, batch, optimizer and precision."""

from __future__ import annotations

import math
from dataclasses import dataclass

from scalebench.errors import DataError
from scalebench.models.layers import LayerTable
from scalebench.pricing.machine import Trained
from scalebench.study import choices
from scalebench.study.spec import Component

# Name of mixed precision -> dtype of parameters and gradients, dtype of products and
# activations.
PRECISIONS = {"tf32": ("float32", "tf32"), "bf16-mixed": ("float32", "bfloat16")}
SERIAL = Component(name=choices.SERIAL)
SGD = Component(name="sgd", options={"momentum": 0.9})


@dataclass(frozen=True)
class Workload:
    """Training of `layers` on `samples` for `epochs`; `batch` samples a worker, or of all with `in_all`.

    Parameters and gradients are in `dtype`; products and activations are in `products`,
    if another one is given.
    """

    layers: LayerTable
    samples: int
    epochs: int
    batch: int
    in_all: bool = False
    optimizer: Component = SGD
    dtype: str = "float32"
    trained: Trained | None = None  # the model itself, where it is more than its layers
    products: str = ""
    uncut: str = ""  # why the model cannot be divided

    @property
    def precision(self) -> str:
        """The dtype as it is asked for: `float32`, `tf32`, `bf16-mixed`."""
        return next(
            (
                name
                for name, pair in PRECISIONS.items()
                if pair == (self.dtype, self.products)
            ),
            self.dtype,
        )

    def batches(self, workers: int, batch: int | None = None) -> tuple[int, float]:
        """Return the steps of an epoch, and the mean samples of a worker's batch.

        Raises:
            DataError: fewer samples, or samples in a global batch, than workers.
        """
        asked = batch or self.batch
        if workers > self.samples:
            raise DataError(
                f"{workers:,} workers but {self.samples:,} samples; use at most {self.samples:,} workers"
            )
        if self.in_all and asked < workers:
            raise DataError(
                f"a global batch of {asked:,} is smaller than {workers:,} workers; use a global batch of at least "
                f"{workers:,}, or --batch for each worker"
            )
        steps = (
            # Workers take equally many steps, and so as many as the largest shard
            # needs.
            math.ceil(self.samples / asked)
            if self.in_all
            else math.ceil(math.ceil(self.samples / workers) / asked)
        )
        return steps, self.samples / workers / steps


def optimizer_states(optimizer: Component) -> int:
    """Return the vectors that an optimizer keeps beside parameters and gradients."""
    if optimizer.name == "sgd":
        return 1 if optimizer.options.get("momentum") else 0
    return 2
