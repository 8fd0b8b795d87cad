"""Memory and time of a layout of a training on a number of devices.

A layout says how devices divide into replicas, stages and shares of layers, in how many
micro-batches the batch of a replica moves, in which order, and what is sharded or
computed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, cast

from scalebench.cluster.mesh import Mesh
from scalebench.cluster.operation import Kind, Operation
from scalebench.measured import Measured
from scalebench.models.layers import ELEMENT_BYTES
from scalebench.pricing import uncertainty
from scalebench.pricing.held_parts import HeldRows, TableCut
from scalebench.pricing.memory import WorkerMemory, memory_of, part_memory
from scalebench.pricing.prediction import Case, Predictor
from scalebench.pricing.schedule import PartMemory
from scalebench.pricing.workload import optimizer_states
from scalebench.strategies.adaptive import Adaptive, Costs, Shared, components_of
from scalebench.strategies.base import LayerProfile, Recompute
from scalebench.strategies.parts import PartsOfModel, Schedule
from scalebench.study.spec import Component
from scalebench.training.stage import most_kept

# of the micro-batches on a stage; None: of whole batches, or without stages
Order = Schedule | None
_GIB = 2**30


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


class LayoutCosts:
    """Costs of the layouts of one step of a workload, whose batch is that of all devices."""

    def __init__(self, predictor: Predictor, devices: int) -> None:
        self.predictor, self.devices = predictor, devices
        self.batch = predictor.workload.batch
        self._priced: dict[str, Step] = {}
        # layers by group: samples, and number of groups
        self._sizes: dict[tuple[float, int], Sequence[int]] = {}
        self._held: dict[object, list[HeldRows]] = {}
        # micro-batches between their passes
        self._counts: dict[object, set[tuple[int, ...]]] = {}
        self._fullest: dict[str, WorkerMemory] = {}  # by strategy

    @property
    def priced(self) -> int:
        """Number of layouts that were priced."""
        return len(self._priced)

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
            held = self.held_by(layout, stage)
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

    # --- memory -------------------------------------------------------------------------------------------------

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
            self.strategy(layout),
            layout.mesh,
        )
        states, found = optimizer_states(workload.optimizer), []
        share = self.batch // mesh.data
        piece = share // layout.micro_batches
        for stage in range(mesh.pipeline):
            held = self.held_by(layout, stage)
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

    # --- layouts in parts ---------------------------------------------------------------------------------------

    def stages(self, layout: Layout) -> list[StageOf]:
        """Return the stages of a layout in parts."""
        forward, backward, _ = self._seconds(layout)
        layers, found = self._cut_of(layout).layers, []
        ledger = self.predictor.ledger(layout.strategy, self.devices)
        for stage, memory in enumerate(self._memories(layout)):
            chunks = [chunk.stage for chunk in self.held_by(layout, stage)]
            segments = [
                each for chunk in self.held_by(layout, stage) for each in chunk.segments
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

    def sizes(self, layout: Layout) -> Sequence[int]:
        """Return the number of layers of each stage, or chunk, cut by the seconds of a micro-batch."""
        groups = layout.mesh.pipeline * layout.chunks
        key = self._samples(layout), groups
        if key not in self._sizes:
            self._sizes[key] = self.strategy(layout).place(
                self._cut_of(layout).work, groups
            )
        return self._sizes[key]

    def held_by(self, layout: Layout, stage: int) -> list[HeldRows]:
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

    def strategy(self, layout: Layout) -> PartsOfModel:
        return cast(PartsOfModel, self.predictor.strategy(layout.strategy))

    def cut(self, samples: float) -> TableCut:
        return self.predictor.cut(samples)

    def _cut_of(self, layout: Layout) -> TableCut:
        return self.cut(self._samples(layout))

    def _samples(self, layout: Layout) -> float:
        """Return the samples of a micro-batch."""
        return self.batch / layout.mesh.data / layout.micro_batches

    def _seconds(self, layout: Layout) -> tuple[float, float, float]:
        """Return the seconds of both passes of a micro-batch through the whole model, and of an update of it."""
        samples = self.batch / layout.mesh.data
        return self.predictor.step_seconds(self.devices, samples, layout.micro_batches)

    # --- layouts of `adaptive` ----------------------------------------------------------------------------------

    def degrees(self, layout: Layout) -> tuple[int, ...]:
        """Return the devices that share each layer in an adaptive layout."""
        found = self.chosen(layout)
        assert found is not None, "the cap was tried"
        return found

    def chosen(self, layout: Layout) -> tuple[int, ...] | None:
        strategy = cast(Adaptive, self.predictor.strategy(layout.strategy))
        number = ELEMENT_BYTES[self.predictor.workload.dtype]
        return strategy.least(self._profiles, self._moved, number)

    def components(self, layout: Layout) -> list[ComponentOf]:
        """Return the components of an adaptive layout."""
        number, costs = ELEMENT_BYTES[self.predictor.workload.dtype], self._moved
        samples = self.batch / self.devices
        cut, layers, degrees = (
            self.cut(samples),
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
        kept = samples * self.cut(samples).kept(own)
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
        cut = self.cut(samples)
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

    @cached_property
    def _profiles(self) -> list[LayerProfile]:
        return self.cut(self.batch / self.devices).profiles(self.devices)

    @property
    def _moved(self) -> Costs:
        return Costs(self.devices, self.batch / self.devices)
