"""Layouts of a training on a number of devices: the memory and the least time of each, and the best of all.

A layout says how devices divide into replicas, stages and shares of layers, in how many
micro-batches the batch of a replica moves, in which order, and what is sharded or
computed again. The search is exhaustive by branch and bound: a layout is priced unless
its compute and communication alone, without any waiting, take longer than a layout that
was priced.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import NamedTuple, NoReturn, cast, get_args

import torch
from torch import nn

from scalebench.cluster.mesh import Mesh
from scalebench.cluster.operation import Kind, Operation
from scalebench.errors import ModelError, StudyError, UsageError
from scalebench.measured import Measured
from scalebench.models.layers import ELEMENT_BYTES
from scalebench.models.parts import Layer, facts_of, layers_of
from scalebench.models.sharding import sharing_degrees_of
from scalebench.pricing import uncertainty
from scalebench.pricing.memory import WorkerMemory, memory_of, part_memory
from scalebench.pricing.prediction import SERIAL, Case, Predictor, optimizer_states
from scalebench.pricing.schedule import PartMemory
from scalebench.pricing.table_cut import HeldRows, TableCut
from scalebench.strategies.adaptive import (
    Adaptive,
    Costs,
    Shared,
    Solver,
    components_of,
    of_least_numbers,
)
from scalebench.strategies.base import LayerProfile, Recompute
from scalebench.strategies.parts import PartsOfModel, Schedule, dividing, sharding
from scalebench.study.spec import BY_LAYER, Component
from scalebench.training.stage import most_kept

# of the micro-batches on a stage; None: of whole batches, or without stages
Order = Schedule | None
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


class Layout(NamedTuple):
    """A strategy on all devices; of each `kind` the best one is shown."""

    kind: str
    strategy: Component
    mesh: Mesh
    micro_batches: int = 1
    chunks: int = 1  # of layers on each stage
    order: Order = None
    recompute: Recompute = "none"
    sharded: int = 0  # as `Traits.sharded`


@dataclass(frozen=True)
class Step:
    """Prediction of a step by a layout, and the memory of its fullest worker; seconds are means over the workers.

    `ends_s` are those of the step at each of `uncertainty.ENDS`.
    """

    layout: Layout
    time: Measured
    ends_s: tuple[float, ...]
    compute_s: float
    comm_s: float  # exposed, without the bubble
    bubble_s: float
    memory: WorkerMemory


class StageOf(NamedTuple):
    """A stage of a layout: its layers, seconds of both passes of a micro-batch, and memory of one of its workers.

    `first` and `last` are the layers at the ends of each of its chunks; `comm_s`,
    exposed and without the bubble, and `bubble_s` are those of a step.
    """

    first: str
    last: str
    layers: int
    pass_s: float
    comm_s: float
    bubble_s: float
    memory: WorkerMemory


class ComponentOf(NamedTuple):
    """A component of an adaptive layout: seconds of its passes, and bytes that a worker holds and moves in a step.

    `moved`, in `comm_s`, are those of its gradients, of sums among the devices that
    share it, and of the rows that are gathered for it; `moved_by_data` those of its
    gradients if every device held it whole.
    """

    shared: Shared
    pass_s: float
    comm_s: float
    memory: WorkerMemory
    moved: float
    moved_by_data: float


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
    """Prices the layouts of one step of a workload, whose batch is that of all devices.

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
        self._priced: dict[str, Step] = {}
        # layers by group: samples, and number of groups
        self._sizes: dict[tuple[float, int], Sequence[int]] = {}
        self._held: dict[object, list[HeldRows]] = {}
        # micro-batches between their passes
        self._counts: dict[object, set[tuple[int, ...]]] = {}
        self._fullest: dict[str, WorkerMemory] = {}  # by strategy
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
            self.devices, self.batch, len(self._cut(1).layers)
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
                self.degrees(layout) == self.degrees(each) for each in found.values()
            ):
                found[solver] = layout
        return found

    def _adaptive(self, solver: Solver) -> Layout | None:
        """Return the layout of the least numbers that fits, else that of the least numbers.

        None if the modules of the model cannot be shared as its table can.
        """
        layout = Layout(ADAPTIVE, of_least_numbers(solver), Mesh(self.devices))
        if not self._allows(self.degrees(layout)):
            return None
        if not self.fits(layout):
            workload, memory = self.predictor.workload, self.memory(layout)
            over = memory.total - cast(float, self.predictor.platform.memory_gib) * _GIB
            # parameters, initial ones, gradients, states
            vectors = 3 + optimizer_states(workload.optimizer)
            most = (memory.parameters - over / vectors) / _MIB
            # Below what the layout of least memory needs there is none to choose.
            if most > 0:
                capped = layout._replace(strategy=of_least_numbers(solver, most))
                if self._chosen(capped) is not None:
                    return capped
        return layout

    def _chosen(self, layout: Layout) -> tuple[int, ...] | None:
        strategy = cast(Adaptive, self.predictor.strategy(layout.strategy))
        number = ELEMENT_BYTES[self.predictor.workload.dtype]
        return strategy.least(self._profiles, self._moved, number)

    @cached_property
    def _profiles(self) -> list[LayerProfile]:
        return self._cut(self.batch / self.devices).profiles(self.devices)

    @property
    def _moved(self) -> Costs:
        return Costs(self.devices, self.batch / self.devices)

    def degrees(self, layout: Layout) -> tuple[int, ...]:
        """Return the devices that share each layer in an adaptive layout."""
        found = self._chosen(layout)
        assert found is not None, "the cap was tried"
        return found

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

    def components(self, layout: Layout) -> list[ComponentOf]:
        """Return the components of an adaptive layout."""
        number, costs = ELEMENT_BYTES[self.predictor.workload.dtype], self._moved
        samples = self.batch / self.devices
        cut, layers, degrees = (
            self._cut(samples),
            self._profiles,
            self.degrees(layout),
        )
        forward, backward, _ = self.predictor.step_seconds(self.devices, samples, 1)
        place, before, found = 0, 1, []
        parts = components_of(layers, degrees)
        behind = [*(shared.degree for shared in parts[1:]), 1]
        for shared, after in zip(parts, behind, strict=True):
            own = range(place, place + shared.layers)
            neighbours = before, after
            moved = sum(costs.of_layer(layers[each], shared.degree) for each in own)
            moved += costs.of_move(layers[place].takes, before, shared.degree)
            place, before = own.stop, shared.degree
            if place == len(layers):
                moved += costs.of_move(layers[-1].gives, before, 1)
            found.append(
                ComponentOf(
                    shared,
                    pass_s=sum(
                        forward * cut.facts[each].forward
                        + backward * cut.facts[each].backward
                        for each in own
                    ),
                    comm_s=self._exchanged_s(layout, own, shared.degree, neighbours),
                    memory=self._component_memory(own, shared),
                    moved=number * moved,
                    moved_by_data=number
                    * sum(costs.of_layer(layers[each], 1) for each in own),
                )
            )
        return found

    def _component_memory(self, own: range, shared: Shared) -> WorkerMemory:
        """Return the memory of a worker in a component of the layers `own`."""
        workload = self.predictor.workload
        samples = self.batch / self.devices
        held = round(shared.parameters / shared.degree)
        kept = samples * self._cut(samples).kept(own)
        return replace(
            part_memory(
                workload.layers,
                round(samples),
                workload.dtype,
                optimizer_states(workload.optimizer),
                PartMemory(None, held, held, held, (), 0, None),
                workload.products,
            ),
            activations=round(
                kept * ELEMENT_BYTES[workload.products or workload.dtype]
            ),
        )

    def _exchanged_s(
        self, layout: Layout, own: range, degree: int, neighbours: tuple[int, int]
    ) -> float:
        """Return the seconds of a step's communication in a component of the layers `own`; `neighbours` are degrees.

        Its gradients are averaged, its products summed, and rows that its workers lack
        are gathered: outputs before it forward, and gradients behind it backward.
        """
        workload, costs = (
            self.predictor.workload,
            self.predictor.communication(layout.strategy),
        )
        number, samples = ELEMENT_BYTES[workload.dtype], self.batch / self.devices
        cut = self._cut(samples)
        sizes = [own.start, len(own), len(cut.facts) - own.stop]
        # Of the first layers nothing needs the gradient of the samples.
        (held,) = cut.held(sizes[own.start == 0 :], [int(own.start > 0)], degree)

        def seconds(kind: Kind, numbers: float, members: range) -> float:
            return costs.time(Operation(kind, round(numbers * number), members))

        exchanged = 0.0
        if degree < self.devices:
            alike = range(0, self.devices, degree)
            exchanged += seconds(Kind.ALLREDUCE, held.parameters, alike)
        sharing = range(degree)
        for each in held.segments:
            rows = samples * degree
            if each.divided:
                exchanged += seconds(Kind.ALLREDUCE, rows * each.gives[0], sharing)
            if each.divided and each.needed:
                exchanged += seconds(Kind.ALLREDUCE, rows * each.takes[0], sharing)
        before, after = neighbours
        if degree > 1 and before != degree:
            exchanged += seconds(
                Kind.ALLGATHER, samples * self._profiles[own.start].takes, sharing
            )
        if degree > 1 and after != degree:
            exchanged += seconds(
                Kind.ALLGATHER, samples * self._profiles[own.stop - 1].gives, sharing
            )
        return exchanged

    # --- layouts in parts ---------------------------------------------------------------------------------------

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
            if self.fits(layout):
                return layout
            tried.append(layout)
        return min(tried, key=lambda each: self.memory(each).total)

    def _is_shareable(self, degree: int) -> bool:
        """Return True if so many workers can share the layers of the model."""
        if self.whole_layers:
            return degree == 1
        if degree not in self._shareable:
            cut = self._cut(1)
            try:
                # All layers as one stage: what cannot be shared there cannot be in a
                # part of it.
                cut.held([len(cut.layers)], [0], degree)
                self._shareable[degree] = True
            except ModelError:
                self._shareable[degree] = False
        return self._shareable[degree]

    def fits(self, layout: Layout) -> bool:
        """Return True if the fullest worker fits into the memory of a device, or if that is not known."""
        has = self.predictor.platform.memory_gib
        return has is None or self.memory(layout).total <= has * _GIB

    def memory(self, layout: Layout) -> WorkerMemory:
        """Return the memory of the fullest worker."""
        key = str(layout.strategy)
        if key not in self._fullest:
            if layout.mesh.parts == 1:
                self._fullest[key] = memory_of(
                    self.predictor, layout.strategy, self.devices
                )
            else:
                self._fullest[key] = max(
                    self._memories(layout), key=lambda each: each.total
                )
        return self._fullest[key]

    def _memories(self, layout: Layout) -> list[WorkerMemory]:
        """Return the memory of a worker of each stage."""
        workload, strategy, mesh = (
            self.predictor.workload,
            self._strategy(layout),
            layout.mesh,
        )
        states, found = optimizer_states(workload.optimizer), []
        share = self.batch // mesh.data
        piece = share // layout.micro_batches
        for stage in range(mesh.pipeline):
            held = self._held_by(layout, stage)
            in_flight = self._in_flight(layout, strategy, stage)
            samples = tuple(
                tuple(piece * count for count in counts) for counts in in_flight
            )
            own = sum(chunk.parameters for chunk in held)
            kept = tuple(chunk.kept for chunk in held)
            part = PartMemory(held[0].stage, own, own, own, samples, piece, kept)
            found.append(
                part_memory(
                    workload.layers,
                    share,
                    workload.dtype,
                    states,
                    part,
                    workload.products,
                )
            )
        return found

    def _in_flight(
        self, layout: Layout, strategy: PartsOfModel, stage: int
    ) -> set[tuple[int, ...]]:
        """Return the micro-batches of each chunk of a stage that are between their passes at the same time."""
        key = (
            layout.kind,
            layout.mesh.pipeline,
            layout.micro_batches,
            layout.chunks,
            stage,
        )
        if key not in self._counts:
            moves = strategy.order(stage, layout.mesh.pipeline, layout.micro_batches)
            self._counts[key] = most_kept(
                moves, [1] * layout.micro_batches, layout.chunks
            )
        return self._counts[key]

    def stages(self, layout: Layout) -> list[StageOf]:
        """Return the stages of a layout in parts."""
        forward, backward, _ = self._seconds(layout)
        layers, found = self._cut_of(layout).layers, []
        ledger = self.predictor.ledger(layout.strategy, self.devices)
        for stage, memory in enumerate(self._memories(layout)):
            chunks = [chunk.stage for chunk in self._held_by(layout, stage)]
            segments = [
                each
                for chunk in self._held_by(layout, stage)
                for each in chunk.segments
            ]
            seconds = forward * sum(each.forward for each in segments)
            seconds += backward * sum(each.backward for each in segments)
            first, last = (
                ", ".join(layers[place].name for place in ends)
                for ends in (
                    [each.first for each in chunks],
                    [each.last - 1 for each in chunks],
                )
            )
            count = sum(each.last - each.first for each in chunks)
            # the workers that share a stage are in step
            waited = ledger.of(stage * layout.mesh.tensor)
            bubble_s = waited["bubble_s"]
            comm_s = waited["comm_s"] - bubble_s
            found.append(StageOf(first, last, count, seconds, comm_s, bubble_s, memory))
        return found

    def _strategy(self, layout: Layout) -> PartsOfModel:
        return cast(PartsOfModel, self.predictor.strategy(layout.strategy))

    def _cut(self, samples: float) -> TableCut:
        return self.predictor.cut(samples)

    def _cut_of(self, layout: Layout) -> TableCut:
        return self._cut(self._samples(layout))

    def _samples(self, layout: Layout) -> float:
        """Return the samples of a micro-batch."""
        return self.batch / layout.mesh.data / layout.micro_batches

    def _seconds(self, layout: Layout) -> tuple[float, float, float]:
        """Return the seconds of both passes of a micro-batch through the whole model, and of an update of it."""
        samples = self.batch / layout.mesh.data
        return self.predictor.step_seconds(self.devices, samples, layout.micro_batches)

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
        return strategy.with_option(options["balance"], list(self.sizes(layout)))

    def sizes(self, layout: Layout) -> Sequence[int]:
        """Return the number of layers of each stage, or chunk, cut by the seconds of a micro-batch."""
        groups = layout.mesh.pipeline * layout.chunks
        key = self._samples(layout), groups
        if key not in self._sizes:
            self._sizes[key] = self._strategy(layout).place(
                self._cut_of(layout).work, groups
            )
        return self._sizes[key]

    @property
    def _has_layers_of_table(self) -> bool:
        return not self._layers or len(self._layers) == len(self._cut(1).layers)

    def _can_be_held(self, layout: Layout) -> bool:
        try:
            for stage in range(layout.mesh.pipeline):
                self._held_by(layout, stage)
            if self._layers:
                strategy = self._strategy(layout)
                sizes = (
                    self.sizes(layout)
                    if self._has_layers_of_table
                    else strategy.sizes_of(self._work)
                )
                strategy.require_shares(self._layers, sizes, layout.mesh)
        except (ModelError, StudyError):
            return False
        return True

    def _held_by(self, layout: Layout, stage: int) -> list[HeldRows]:
        """Return what a worker of a stage holds, by chunk."""
        cut, mesh = self._cut_of(layout), layout.mesh
        groups = mesh.pipeline * layout.chunks
        key = (
            self._samples(layout),
            groups,
            mesh.pipeline,
            mesh.tensor,
            stage,
            layout.recompute,
        )
        if key not in self._held:
            own = mesh.groups_of(stage * mesh.tensor, groups)
            self._held[key] = cut.held(
                self.sizes(layout), own, mesh.tensor, layout.recompute
            )
        return self._held[key]

    # --- times --------------------------------------------------------------------------------------------------

    def least_s(self, layout: Layout) -> float:
        """Return seconds that a step takes at least: no worker waits, but for the first micro-batch and the last one.

        Stage s begins after the forward pass of a micro-batch through the first chunks
        of the stages before it, and after its last backward pass these have theirs.
        """
        mesh, pieces = layout.mesh, layout.micro_batches
        if mesh.parts == 1:
            return 0.0
        _, _, update = self._seconds(layout)
        costs = self.predictor.communication(layout.strategy)
        number = ELEMENT_BYTES[self.predictor.workload.dtype]
        piece = self.batch // mesh.data // pieces
        before_s = after_s = first_end_s = least = 0.0
        for stage in range(mesh.pipeline):
            held = self._held_by(layout, stage)
            own = range(stage * mesh.tensor, (stage + 1) * mesh.tensor)
            passes = [self._passes_s(layout, chunk, own) for chunk in held]
            parameters = sum(chunk.parameters for chunk in held)
            end_s = update * parameters / self.predictor.workload.layers.parameters
            if mesh.data > 1:
                alike = range(own[0], self.devices, mesh.parts)
                end_s += costs.time(
                    Operation(Kind.ALLREDUCE, parameters * number, alike)
                )
            if stage == 0:
                first_end_s = end_s
            busy = before_s + pieces * sum(map(sum, passes))
            least = max(least, busy + end_s, busy + after_s + first_end_s)
            message = 0.0
            if stage < mesh.pipeline - 1:
                ends = (own[0], own[0] + mesh.tensor)
                message = costs.time(
                    Operation(Kind.SEND, piece * held[0].stage.gives[0] * number, ends)
                )
            before_s += passes[0][0] + message
            after_s += passes[0][1] + message
        return least

    def _passes_s(
        self, layout: Layout, chunk: HeldRows, workers: range
    ) -> tuple[float, float]:
        """Return the seconds of both passes of a micro-batch through a chunk of layers that `workers` share."""
        forward, backward, _ = self._seconds(layout)
        costs, number = (
            self.predictor.communication(layout.strategy),
            ELEMENT_BYTES[self.predictor.workload.dtype],
        )
        piece = self.batch // layout.mesh.data // layout.micro_batches
        forward_s = again = forward * sum(each.forward for each in chunk.segments)
        backward_s = backward * sum(each.backward for each in chunk.segments)
        for each in chunk.segments:
            if each.divided:
                forward_s += costs.time(
                    Operation(Kind.ALLREDUCE, piece * each.gives[0] * number, workers)
                )
            if each.divided and each.needed:
                backward_s += costs.time(
                    Operation(Kind.ALLREDUCE, piece * each.takes[0] * number, workers)
                )
        recomputed_s = {"none": 0.0, "layer": again, "all": forward_s}[layout.recompute]
        return forward_s, backward_s + recomputed_s

    def price(self, layout: Layout) -> Step:
        """Return the prediction of a step."""
        key = str(layout.strategy)
        if key not in self._priced:
            platform, workers = self.predictor.platform, self.devices
            known = uncertainty.uncertainty_of(self.predictor, layout.strategy, workers)
            cases = [
                Case(platform, self.batch),
                *uncertainty.cases_at_ends(platform, known, self.batch),
            ]
            times = self.predictor.times(layout.strategy, workers, cases)
            ends = uncertainty.seconds_at_ends(times, 1)
            self._priced[key] = Step(
                layout,
                uncertainty.with_interval(float(times.time[0]), ends, known.margin),
                ends,
                compute_s=float(times.compute[0]),
                comm_s=float(times.comm[0] - times.bubble[0]),
                bubble_s=float(times.bubble[0]),
                memory=self.memory(layout),
            )
        return self._priced[key]

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
        fitting = [layout for layout in self.layouts if self.fits(layout)]
        if not fitting:
            self._refuse()
        best: dict[str, Step] = {}
        # By ascending bounds: the first one of a kind is likely the best, which spares
        # the others.
        for layout, least in sorted(
            ((each, self.least_s(each)) for each in fitting), key=lambda pair: pair[1]
        ):
            known = best.get(layout.kind)
            if known is None or least < known.time.value:
                step = self.price(layout)
                if known is None or step.time.value < known.time.value:
                    best[layout.kind] = step
        priced = len(self._priced)
        alone_s = float(
            self.predictor.times(
                SERIAL, 1, [Case(self.predictor.platform, self.batch)]
            ).time[0]
        )
        steps = sorted(best.values(), key=lambda step: step.time.value)
        unfitting = [layout for layout in self.layouts if layout not in fitting]
        other = next(
            (
                self.price(layout)
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
        return self.price(chosen) if self.fits(chosen) else None

    def _choose(self, layouts: Sequence[Layout]) -> Layout:
        fitting = [layout for layout in layouts if self.fits(layout)]
        if not fitting:
            return min(layouts, key=lambda each: self.memory(each).total)
        found: Step | None = None
        for layout, least in sorted(
            ((each, self.least_s(each)) for each in fitting), key=lambda pair: pair[1]
        ):
            if found is None or least < found.time.value:
                step = self.price(layout)
                found = (
                    step
                    if found is None or step.time.value < found.time.value
                    else found
                )
        assert found is not None
        return found.layout

    def _refuse(self) -> NoReturn:
        layout = min(self.layouts, key=lambda each: self.memory(each).total)
        memory = self.memory(layout)
        parts = {
            name: int(getattr(memory, name))
            for name in ("activations", "parameters", "gradients", "optimizer")
        }
        largest = max(parts, key=lambda name: parts[name])
        has = self.predictor.platform.memory_gib
        raise UsageError(
            f"--memory: no layout on {self.devices} devices fits into {has:g} GiB: the least is "
            f"{memory.total / _GIB:.3g} GiB a worker, by {layout.strategy}, of {memory.model}, where {largest} take "
            f"{parts[largest] / _GIB:.3g} GiB; use more devices, a smaller --batch, or devices with more memory"
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
