"""Layouts of a training on a number of devices: which there are, and the best of all.

The search is exhaustive by branch and bound: a layout is priced unless its compute and
communication alone, without any waiting, take longer than a layout that was priced.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import NoReturn, cast, get_args

import torch
from torch import nn

from scalebench.cluster.mesh import Mesh
from scalebench.errors import ModelError, StudyError, UsageError
from scalebench.formatting import counted, memory_size
from scalebench.models.parts import Layer, facts_of, layers_of
from scalebench.models.sharding import sharing_degrees_of
from scalebench.pricing.layout_costs import Layout, LayoutCosts, Order, Step
from scalebench.pricing.prediction import Case, Predictor
from scalebench.pricing.workload import SERIAL, optimizer_states
from scalebench.strategies.adaptive import Solver, of_least_numbers
from scalebench.strategies.base import Recompute
from scalebench.strategies.parts import dividing, sharding
from scalebench.study.spec import BY_LAYER, Component

_GIB, _MIB = 2**30, 2**20
# micro-batches for each stage: they idle for a ninth of the step at most
_MOST_PIECES = 8
_CHUNKS = 2  # of layers on each stage, where micro-batches move interleaved
_RECOMPUTE: tuple[Recompute, ...] = ("none", "layer", "all")  # the fastest first
# kind of the layouts whose layers are shared by numbers of devices of their own
ADAPTIVE = "adaptive"
# kinds of the layouts in stages whose order another one beats in time or memory: priced
# beside these, and never chosen
PLACED, GPIPE = "model_parallel", "gpipe"
DATA = Component(name="ddp")
SHARDED = {shard: sharding(shard) for shard in (1, 2, 3)}


@dataclass(frozen=True)
class Plan:
    """The best layout of each kind that fits, by time, and the one that is found by one decision after the other.

    `adaptive_other` is the slower layout of `adaptive` by its two solvers. `alone_s` are
    the seconds of the step on one device, `tried` and `priced` count layouts.
    """

    steps: list[Step]
    greedy: Step | None
    adaptive_other: Step | None
    alone_s: float
    tried: int
    priced: int
    unfitting: list[Layout]

    @property
    def best(self) -> Step:
        return self.steps[0]

    @property
    def adaptive(self) -> Step | None:
        """The layout that `adaptive` chooses; None if it does not fit, or if the model cannot be cut."""
        return next((step for step in self.steps if step.layout.kind == ADAPTIVE), None)


class Planner:
    """Finds the best layouts of one step of a workload, whose batch is that of all devices.

    Layouts that `model` cannot be divided into are left out, where the workload is of a
    module on torch's meta device; all that divide it if it cannot be cut, `uncut` says
    why.
    """

    def __init__(
        self, predictor: Predictor, devices: int, model: nn.Module | None = None
    ) -> None:
        workload = replace(
            predictor.workload, samples=predictor.workload.batch, epochs=1, in_all=True
        )
        # A step is an epoch of one global batch.
        self.predictor = Predictor(workload, predictor.platform)
        self.devices, self.batch = devices, workload.batch
        self.costs = LayoutCosts(self.predictor, devices)
        self._shareable: dict[int, bool] = {}
        self._layers: list[Layer] = []  # of the module
        self._work: list[float] = []  # of a step in each of them
        self.uncut = ""
        if model is not None:
            self._cut_into_layers(model)

    def _cut_into_layers(self, model: nn.Module) -> None:
        layers = self.predictor.workload.layers
        sample = torch.empty(
            2, *layers.input_shape, device="meta", dtype=next(model.parameters()).dtype
        )
        try:
            found = layers_of(model, layers.name)
            self._work = [each.work for each in facts_of(found, sample)]
        except ModelError as error:
            self.uncut = str(error)
            return
        self._layers = found

    # --- layouts ------------------------------------------------------------------------------------------------

    @cached_property
    def layouts(self) -> list[Layout]:
        """All layouts of the devices: of those in parts each with the first of _RECOMPUTE that fits."""
        found = []
        # A replica needs a sample.
        if self.batch >= self.devices:
            found = [Layout("data", DATA, Mesh(self.devices))]
            for shard, strategy in SHARDED.items():
                # Above 1 layers are sharded, else the whole model.
                if (
                    self.devices > 1
                    and not self.whole_layers
                    and (shard == 1 or not self.uncut)
                ):
                    mesh = Mesh(self.devices)
                    found.append(Layout(str(strategy), strategy, mesh, sharded=shard))
        if self.uncut:
            return found
        for mesh, pieces, order in _divisions(
            self.devices, self.batch, len(self.costs.cut(1).layers)
        ):
            if (
                self._is_shareable(mesh.tensor)
                and (layout := self._in_parts(mesh, pieces, order)) is not None
            ):
                found.append(layout)
        return found + list(self.adaptive_layouts.values())

    @property
    def whole_layers(self) -> bool:
        """True if workers hold no shares of layers, as the optimizer steps by the norms of these."""
        return self.predictor.workload.optimizer.name in BY_LAYER

    def _in_parts(self, mesh: Mesh, pieces: int, order: Order) -> Layout | None:
        """Return the layout of a mesh that computes least again of those that fit, else the one that needs least.

        None if a stage has nothing to share among its workers.
        """
        tried: list[Layout] = []
        for recompute in _RECOMPUTE:
            layout = _in_parts(mesh, pieces, order, recompute)
            # What is computed again does not change what can be shared.
            if not tried and not self._can_be_held(layout):
                return None
            if self.costs.fits(layout):
                return layout
            tried.append(layout)
        return min(tried, key=lambda each: self.costs.memory(each).total)

    def _is_shareable(self, degree: int) -> bool:
        """Return True if so many workers can share the layers of the model."""
        if self.whole_layers:
            return degree == 1
        if degree not in self._shareable:
            cut = self.costs.cut(1)
            try:
                # All layers as one stage: what cannot be shared there cannot be in a
                # part of it.
                cut.held([len(cut.layers)], [0], degree)
                self._shareable[degree] = True
            except ModelError:
                self._shareable[degree] = False
        return self._shareable[degree]

    def _can_be_held(self, layout: Layout) -> bool:
        try:
            for stage in range(layout.mesh.pipeline):
                self.costs.held_by(layout, stage)
            if self._layers:
                strategy = self.costs.strategy(layout)
                sizes = (
                    self.costs.sizes(layout)
                    if self._has_layers_of_table
                    else strategy.sizes_of(self._work)
                )
                strategy.require_shares(self._layers, sizes, layout.mesh)
        except (ModelError, StudyError):
            return False
        return True

    def stated(self, layout: Layout) -> Component:
        """Return the strategy with its stages, or chunks, as numbers of layers in place of a rule.

        A run that is given the rule cuts by counted operations, so that it cuts alike
        on every machine. The rule stays where the modules have other layers than the
        table.
        """
        strategy = layout.strategy
        options = self.predictor.strategy(strategy).traits.options
        if "balance" not in options or not self._has_layers_of_table:
            return strategy
        return strategy.with_option(options["balance"], list(self.costs.sizes(layout)))

    @property
    def _has_layers_of_table(self) -> bool:
        return not self._layers or len(self._layers) == len(self.costs.cut(1).layers)

    # --- layouts of `adaptive` ----------------------------------------------------------------------------------

    @cached_property
    def adaptive_layouts(self) -> dict[Solver, Layout]:
        """The different layouts of `adaptive` by solver.

        The greedy one moves more bytes, but may do so in fewer messages.
        """
        found: dict[Solver, Layout] = {}
        if self.whole_layers or not 1 < self.devices <= self.batch:
            return found
        for solver in get_args(Solver):
            layout = self._adaptive(solver)
            if layout is not None and not any(
                self.costs.degrees(layout) == self.costs.degrees(each)
                for each in found.values()
            ):
                found[solver] = layout
        return found

    def _adaptive(self, solver: Solver) -> Layout | None:
        """Return the layout of the least numbers that fits, else that of the least numbers.

        None if the modules of the model cannot be shared as its table can.
        """
        layout = Layout(ADAPTIVE, of_least_numbers(solver), Mesh(self.devices))
        if not self._allows(self.costs.degrees(layout)):
            return None
        if not self.costs.fits(layout):
            workload, memory = self.predictor.workload, self.costs.memory(layout)
            over = memory.total - cast(float, self.predictor.platform.memory_gib) * _GIB
            # parameters, initial ones, gradients, states
            vectors = 3 + optimizer_states(workload.optimizer)
            most = (memory.parameters - over / vectors) / _MIB
            # A smaller cap than the least that a layout needs leaves nothing to choose.
            if most > 0:
                capped = layout._replace(strategy=of_least_numbers(solver, most))
                if self.costs.chosen(capped) is not None:
                    return capped
        return layout

    def _allows(self, degrees: Sequence[int]) -> bool:
        """Return True if the modules of the model, where it has some, can be shared by so many devices."""
        if not self._layers:
            return True
        of_each = sharing_degrees_of(
            self._layers, self.devices, self.predictor.workload.layers.name
        )
        return len(of_each) == len(degrees) and all(
            degree in own for degree, own in zip(degrees, of_each, strict=True)
        )

    # --- search -------------------------------------------------------------------------------------------------

    def plan(self) -> Plan:
        """Return the best layout of each kind.

        Raises:
            UsageError: none fits into the memory of a device, or there is none.
        """
        if not self.layouts:
            raise UsageError(
                f"--devices: {self.devices} devices cannot share a batch of {self.batch:,}; use a multiple of "
                f"{self.devices}, or fewer devices"
            )
        fitting = [layout for layout in self.layouts if self.costs.fits(layout)]
        if not fitting:
            self._refuse()
        best: dict[str, Step] = {}
        # By ascending bounds: the first one of a kind is likely the best, which spares
        # the others.
        for layout, least in sorted(
            ((each, self.costs.least_s(each)) for each in fitting),
            key=lambda pair: pair[1],
        ):
            known = best.get(layout.kind)
            if known is None or least < known.time.value:
                step = self.costs.price(layout)
                if known is None or step.time.value < known.time.value:
                    best[layout.kind] = step
        priced = self.costs.priced
        alone_s = float(
            self.predictor.times(
                SERIAL, 1, [Case(self.predictor.platform, self.batch)]
            ).time[0]
        )
        steps = sorted(best.values(), key=lambda step: step.time.value)
        unfitting = [layout for layout in self.layouts if layout not in fitting]
        other = next(
            (
                self.costs.price(layout)
                for layout in fitting
                if layout.kind == ADAPTIVE and layout != best[ADAPTIVE].layout
            ),
            None,
        )
        return Plan(
            steps, self._greedy(), other, alone_s, len(self.layouts), priced, unfitting
        )

    def _greedy(self) -> Step | None:
        """Return the layout by one decision after the other: tensor degree, then stages, then micro-batches.

        Each takes the fastest that fits with the decisions before; of those that do not
        fit the one that needs least. None if no layout is found that fits.
        """
        beside = (ADAPTIVE, PLACED, GPIPE)
        uniform = [layout for layout in self.layouts if layout.kind not in beside]
        if not uniform:
            return None
        left = [layout for layout in uniform if layout.mesh.pipeline == 1]
        if not left:
            left = _with_fewest_pieces(uniform)
        tensor = self._choose(left).mesh.tensor
        left = [layout for layout in uniform if layout.mesh.tensor == tensor]
        stages = self._choose(_with_fewest_pieces(left)).mesh.pipeline
        chosen = self._choose(
            [layout for layout in left if layout.mesh.pipeline == stages]
        )
        return self.costs.price(chosen) if self.costs.fits(chosen) else None

    def _choose(self, layouts: Sequence[Layout]) -> Layout:
        fitting = [layout for layout in layouts if self.costs.fits(layout)]
        if not fitting:
            return min(layouts, key=lambda each: self.costs.memory(each).total)
        found: Step | None = None
        for layout, least in sorted(
            ((each, self.costs.least_s(each)) for each in fitting),
            key=lambda pair: pair[1],
        ):
            if found is None or least < found.time.value:
                step = self.costs.price(layout)
                found = (
                    step
                    if found is None or step.time.value < found.time.value
                    else found
                )
        assert found is not None
        return found.layout

    def _refuse(self) -> NoReturn:
        layout = min(self.layouts, key=lambda each: self.costs.memory(each).total)
        memory = self.costs.memory(layout)
        parts = {
            name: int(getattr(memory, name))
            for name in ("activations", "parameters", "gradients", "optimizer")
        }
        largest = max(parts, key=lambda name: parts[name])
        has = self.predictor.platform.memory_gib
        raise UsageError(
            f"--memory: no layout on {counted(self.devices, 'device')} fits into {has:g} GiB: the least is "
            f"{memory_size(memory.total)} a worker, by {layout.strategy}, of {memory.model}, where {largest} take "
            f"{memory_size(parts[largest])}; use more devices, a smaller --batch, or devices with more memory"
        )


def _divisions(
    devices: int, batch: int, layers: int
) -> Iterator[tuple[Mesh, int, Order]]:
    """Yield the meshes whose replicas have several workers, with each number of micro-batches, and their order."""
    for parts in _divisors(devices)[1:]:
        replicas = devices // parts
        if batch % replicas:
            continue
        for stages in _divisors(parts):
            mesh = Mesh(replicas, stages, parts // stages)
            if stages > layers:
                continue
            if stages == 1:
                yield mesh, 1, None
                continue
            # Of more stages than samples the workers are better used otherwise.
            if mesh.tensor == 1 and stages <= batch // replicas:
                yield mesh, 1, None
            for pieces in _divisors(batch // replicas):
                # With fewer micro-batches than stages these idle for half of the step
                # or longer.
                if stages <= pieces <= _MOST_PIECES * stages:
                    yield mesh, pieces, "1f1b"
                    if mesh.tensor == 1:
                        yield mesh, pieces, "gpipe"
                    # Interleaved micro-batches move in rounds of as many as there are
                    # stages.
                    if pieces % stages == 0 and _CHUNKS * stages <= layers:
                        yield mesh, pieces, "interleaved"


def _in_parts(mesh: Mesh, pieces: int, order: Order, recompute: Recompute) -> Layout:
    """Return the layout of a mesh whose stages, or chunks of layers on these, are cut by times."""
    chunks = _CHUNKS if order == "interleaved" else 1
    strategy = dividing(mesh, pieces, order, chunks, recompute)
    kind = GPIPE if order == "gpipe" and mesh.tensor == 1 else strategy.name
    return Layout(kind, strategy, mesh, pieces, chunks, order, recompute)


def _with_fewest_pieces(layouts: Sequence[Layout]) -> list[Layout]:
    """Return the layouts without those of a mesh that have more micro-batches than another of it."""
    fewest: dict[Mesh, int] = {}
    for layout in layouts:
        fewest[layout.mesh] = min(
            layout.micro_batches, fewest.get(layout.mesh, layout.micro_batches)
        )
    return [layout for layout in layouts if layout.micro_batches == fewest[layout.mesh]]


@cache
def _divisors(number: int) -> list[int]:
    """Return the divisors of a number in ascending order."""
    return [each for each in range(1, number + 1) if number % each == 0]
