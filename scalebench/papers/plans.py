"""Peak memory of strategies, and what `adaptive` chooses for each component: priced from `plans.yaml` of a paper."""

from __future__ import annotations

import math
from functools import cached_property
from pathlib import Path

from matplotlib.figure import Figure
from pydantic import Field, PositiveFloat, PositiveInt

from scalebench.cluster.cluster_file import load_cluster
from scalebench.errors import StudyError
from scalebench.figures.plotting import house_style
from scalebench.figures.style import REPORT
from scalebench.models.layer_files import load_layers
from scalebench.papers.paper_folder import found_file
from scalebench.pricing.devices import Stated
from scalebench.pricing.memory import WorkerMemory
from scalebench.pricing.platform import Platform
from scalebench.pricing.prediction import Predictor, Workload
from scalebench.pricing.validity import memory_of
from scalebench.strategies.adaptive import Costs, Shared, chosen, components_of
from scalebench.strategies.base import LayerProfile
from scalebench.strategies.registry import create
from scalebench.study.spec import Component
from scalebench.study.validation import StrictModel, read_as
from scalebench.system.atomic_write import open_own

_GIB = 2**30
_PARTS = {
    "parameters": "#0072B2",
    "gradients": "#56B4E9",
    "optimizer": "#009E73",
    "strategy": "#CC79A7",
    "activations": "#E69F00",
}
_SIZE_IN = (9.0, 3.2)


class Plan(StrictModel):
    """A model on a number of devices at a global batch."""

    description: str
    model: str = Field(description="layer table")
    cluster: str
    devices: PositiveInt
    batch: PositiveInt = Field(description="samples of a step of all devices")
    step_time: PositiveFloat = Field(description="seconds of a step of that batch on one device")
    strategies: list[Component]

    def memories(self) -> dict[str, WorkerMemory]:
        """Return the memory of the fullest worker by strategy; of serial on one device."""
        found = {}
        for strategy in self.strategies:
            workers = self.devices if create(strategy.name, strategy.options).requires else 1
            found[str(strategy)] = memory_of(self._predictor, strategy, workers)
        return found

    def components(self) -> list[Shared]:
        """Return the components of the layout that moves the least numbers in a step."""
        return components_of(self._layers, self._degrees)

    def numbers_saved(self) -> float:
        """Return the share of the numbers of data parallelism that this layout does not move."""
        whole = self._costs.of_layout(self._layers, [1] * len(self._layers))
        return 1 - self._costs.of_layout(self._layers, self._degrees) / whole

    def draw(self, path: Path) -> None:
        """Write the figure to `path`: memory by strategy, and parameters by layer with the devices that share it."""
        memories = self.memories()
        with house_style(REPORT):
            figure = Figure(figsize=_SIZE_IN, layout="constrained")
            memory, choice = figure.subplots(1, 2)
            names, left = list(memories), [0.0] * len(memories)
            for part, colour in _PARTS.items():
                values = [getattr(each, part) / _GIB for each in memories.values()]
                memory.barh(names, values, left=left, color=colour, label=part)
                left = [before + value for before, value in zip(left, values, strict=True)]
            memory.invert_yaxis()
            memory.set_xlabel("memory of the fullest worker [GiB]")
            memory.legend(fontsize="small")
            layers = self._layers
            millions = [layer.parameters / 1e6 for layer in layers]
            bars = choice.bar(range(len(layers)), millions, color=_PARTS["parameters"])
            choice.bar_label(bars, [str(degree) for degree in self._degrees])
            choice.set_xticks(range(len(layers)), [layer.name for layer in layers], rotation=90)
            choice.set_ylabel("parameters [millions]")
            choice.set_title(f"above each layer: how many of {self.devices} devices share it")
            with open_own(path, "wb") as file:
                figure.savefig(file, format=path.suffix[1:], metadata={"Date": None})

    @cached_property
    def _predictor(self) -> Predictor:
        workload = Workload(load_layers(self.model), self.batch, 1, self.batch, in_all=True)
        return Predictor(workload, Platform(load_cluster(self.cluster), Stated(self.step_time, self.batch)))

    @cached_property
    def _layers(self) -> list[LayerProfile]:
        return self._predictor.cut(self.batch / self.devices).profiles(self.devices)

    @property
    def _costs(self) -> Costs:
        return Costs(self.devices, self.batch / self.devices)

    @cached_property
    def _degrees(self) -> tuple[int, ...]:
        found = chosen(self._layers, self._costs, math.inf, "viterbi")
        assert found is not None, "without a cap every layout fits"
        return found


class _Plans(StrictModel):
    plans: dict[str, Plan]


def read_plans(path: Path) -> dict[str, Plan]:
    """Read `plans.yaml`; no plans where there is no such file.

    Raises:
        StudyError: not a mapping of plans; one line that names file and key.
    """
    if not path.is_file():
        return {}
    plans = read_as(path, _Plans, StudyError, "file of plans").plans
    return {
        name: plan.model_copy(update={"cluster": found_file(path.parent, plan.cluster)}) for name, plan in plans.items()
    }
