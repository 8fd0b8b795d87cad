"""What-if planes of a paper: `what_if.yaml`, each priced in seconds, drawn with what binds each cell."""

from __future__ import annotations

import math
from pathlib import Path

from pydantic import Field, PositiveFloat, PositiveInt, ValidationError

from scalebench.cluster.device import load_device
from scalebench.cluster.load import load_cluster
from scalebench.errors import StudyError, UsageError, nearest
from scalebench.figures.what_if import draw_what_if
from scalebench.models.layer_files import load_layers
from scalebench.papers.obtained import Obtained
from scalebench.pricing.devices import Roofline, Stated
from scalebench.pricing.platform import Platform
from scalebench.pricing.prediction import Predictor, Workload
from scalebench.pricing.what_if import Axis, Plane, what_if
from scalebench.study.spec import Component
from scalebench.study.validation import StrictModel, explain, read_mapping


class WhatIf(StrictModel):
    """The training of a model along one axis or two, as `scalebench what-if` prices it."""

    description: str
    model: str = Field(description="layer table")
    cluster: str
    device: str | None = Field(None, description="roofline of this device, in place of a stated step")
    step_time: PositiveFloat | None = Field(None, description="seconds of a worker's step")
    strategy: Component = Component(name="allreduce")
    workers: PositiveInt = 64
    batch: PositiveInt = 64
    samples: PositiveInt
    epochs: PositiveInt = 1
    collective: str = "auto"
    vary: list[str] = Field(min_length=1, max_length=2, description="AXIS=LOW..HIGH[:POINTS] or AXIS=VALUE,VALUE,...")

    def price(self) -> Plane:
        """Return the priced plane."""
        workload = Workload(load_layers(self.model), self.samples, self.epochs, self.batch)
        axes = [Axis.parse(text) for text in self.vary]
        return what_if(Predictor(workload, self._platform()), self.strategy, self.workers, axes)

    def draw(self, plane: Plane, path: Path) -> None:
        """Write the figure of `plane` to `path`."""
        place = "" if any(axis.name == "workers" for axis in plane.axes) else f" at {self.workers:,} workers"
        platform = self._platform()
        what = f"{self.model} by {self.strategy}{place} on {platform.cluster.name}; {platform.device.source}"
        draw_what_if(path, plane, what)

    def _platform(self) -> Platform:
        if (self.device is None) == (self.step_time is None):
            raise UsageError(f"what-if of {self.model}: give device or step_time, one of them")
        if self.device is not None:
            return Platform(load_cluster(self.cluster), Roofline(load_device(self.device)), collective=self.collective)
        stated = Stated(self.step_time or 0.0, self.batch)
        return Platform(load_cluster(self.cluster), stated, collective=self.collective)


class _WhatIfs(StrictModel):
    planes: dict[str, WhatIf]


def read_what_ifs(path: Path) -> dict[str, WhatIf]:
    """Read `what_if.yaml`; no planes where there is no such file.

    Raises:
        StudyError: not a mapping of planes; one line that names file and key.
    """
    if not path.is_file():
        return {}
    try:
        return _WhatIfs.model_validate(read_mapping(path, StudyError, "file of what-ifs")).planes
    except ValidationError as error:
        raise StudyError(explain(error, _WhatIfs, str(path))) from None


def in_plane(plane: Plane, quantity: str) -> Obtained:
    """Return `share_bound_by@COMPONENT` of a plane, the share of its cells that a component binds.

    Raises:
        UsageError: another quantity, or a component that the plane does not have.
    """
    name, _, component = quantity.partition("@")
    if name != "share_bound_by":
        raise UsageError(f"unknown quantity {name!r} of a what-if; expected share_bound_by@COMPONENT")
    if component not in plane.components:
        raise UsageError(f"{quantity}: unknown component {component!r}; {nearest(component, plane.components)}")
    return Obtained(plane.share_bound_by(component), math.nan, math.nan, "modelled", plane.train_s.size)
