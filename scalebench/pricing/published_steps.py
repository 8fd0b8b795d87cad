"""Step times that others published for a model on a device, from the table that is shipped."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from importlib import resources

import yaml
from pydantic import PositiveFloat, PositiveInt, TypeAdapter

from scalebench.cluster.device import Device
from scalebench.formatting import digits
from scalebench.pricing.devices import Stated, StepError
from scalebench.study.validation import StrictModel

# ResNet-50 on an A100 80 GB: 938 and 993 images/s in tf32, 2,470 and 2,711 in mixed
# precision, by the PyTorch and the PaddlePaddle examples of NVIDIA.
PUBLISHED_ERROR = StepError(
    1 / 1.1, 1.1, "published steps of two frameworks differed by up to 10 %"
)


class PublishedStep(StrictModel):
    """Samples per second of one device in training a model, and who measured them."""

    model: str
    device: str
    dtype: str
    batch: PositiveInt
    samples_per_s: PositiveFloat
    source: str


@dataclass(frozen=True, eq=False)
class Published(Stated):
    """A published step time, in proportion to the samples of a batch."""

    device: Device
    dtype: str

    @property
    def name(self) -> str:
        return self.device.name

    @property
    def gpu(self) -> bool:
        return self.device.kind == "gpu"

    @property
    def memory_gib(self) -> float:
        return self.device.memory_gib

    @property
    def source(self) -> str:
        rate = digits(self.batch / self.step_s)
        return f"published: {rate} samples/s of {self.device.name} in {self.dtype} at batch {self.batch}"

    def error(self, batch: float) -> StepError:
        return PUBLISHED_ERROR.at_batch(batch, [self.batch])

    def outside(self, layers: object, batch: float, busy: int) -> list[str]:
        near = 0.5 <= batch / self.batch <= 2
        return (
            []
            if near
            else [f"step time published at batch {self.batch}, taken as proportional"]
        )


@lru_cache
def published_steps() -> tuple[PublishedStep, ...]:
    """Return the shipped step times."""
    file = (
        resources.files("scalebench.models") / "layer_tables" / "published_steps.yaml"
    )
    return TypeAdapter(tuple[PublishedStep, ...]).validate_python(
        yaml.safe_load(file.read_text())
    )


def published_step(model: str, device: Device, dtype: str) -> Published | None:
    """Return the published step of a layer table on a device; None where none is in the table of published steps."""
    for row in published_steps():
        if (row.model, row.device, row.dtype) == (model, device.name, dtype):
            return Published(row.batch / row.samples_per_s, row.batch, device, dtype)
    return None
