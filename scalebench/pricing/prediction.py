"""Prediction of trainings without training: time by strategy, worker count and platform, and what binds it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray

from scalebench.cluster.mesh import Mesh
from scalebench.cluster.network import Network
from scalebench.data.batch_plan import BatchPlan
from scalebench.errors import DataError, StudyError
from scalebench.formatting import counted
from scalebench.models.layers import LayerTable
from scalebench.models.registry import build_model
from scalebench.models.zoo.layers import without_values
from scalebench.pricing import program
from scalebench.pricing.charges import EqualWorkers, charged_as, gradients
from scalebench.pricing.costs import Costs, GradientTensor, Prices
from scalebench.pricing.devices import (
    MeasuredSteps,
    TimeModel,
    gradients_of,
    step_table,
)
from scalebench.pricing.exchanges import Queue, Serving
from scalebench.pricing.held_parts import TableCut
from scalebench.pricing.machine import Trained
from scalebench.pricing.platform import Platform
from scalebench.pricing.price import TimeArrays, walk
from scalebench.pricing.recording import record_each
from scalebench.pricing.schedule import RankGroups, Schedule
from scalebench.strategies import registry
from scalebench.strategies.base import Setting, Strategy
from scalebench.strategies.traits import Traits
from scalebench.study.spec import Component, Run
from scalebench.system.clock import Task

Floats = NDArray[np.float64]
_SAMPLED_RANKS = 16  # recorded where ranks differ by chance, as clients that are drawn
_COLUMNS = 8  # of Times, without `queued`
_MOST_STEPS = 5_000_000  # of a program that is recorded whole: about a minute and 3 GB
# Name of mixed precision -> dtype of parameters and gradients, dtype of products and
# activations.
PRECISIONS = {"tf32": ("float32", "tf32"), "bf16-mixed": ("float32", "bfloat16")}
SERIAL = Component(name="serial")
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


class Case(NamedTuple):
    """A platform and the batch that is asked for on it (per worker or global, as the workload's)."""

    platform: Platform
    batch: int


class Times(NamedTuple):
    """Seconds of whole trainings, each (cases,): that of the last worker, of others the mean; see `price.Ledger`.

    `other` are those of operations of the strategy, `bubble` those of waiting for other
    stages of the replica; `queued` is True where a queue binds.
    """

    time: Floats
    compute: Floats
    data: Floats
    other: Floats
    comm: Floats
    wait: Floats
    transfer: Floats
    bubble: Floats
    queued: NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Recorded:
    """The programs of the recorded workers in an excerpt, for each length of an epoch, and their schedules of one."""

    excerpt: program.Excerpt
    programs: list[list[program.Program]]
    workers: int
    serving: Serving | None
    schedules: list[Schedule]

    @property
    def schedule(self) -> Schedule:
        return self.schedules[0]


class Predictor:
    """Predicts trainings of one workload; recordings, costs and step times are kept between calls."""

    def __init__(self, workload: Workload, platform: Platform) -> None:
        self.workload, self.platform = workload, platform
        self._programs: dict[object, Recorded] = {}
        self._costs: dict[object, Costs] = {}
        self._strategies: dict[str, Strategy] = {}
        self._cuts: dict[int, TableCut] = {}
        self._steps: dict[tuple[TimeModel, float], list[float]] = {}

    @property
    def training(self) -> str:
        """What is trained, and on which cluster."""
        workload, policy = (
            self.workload,
            "of all workers" if self.workload.in_all else "a worker",
        )
        return (
            f"{workload.layers.name} on {self.platform.cluster.name}, batch {workload.batch} {policy}, "
            f"{counted(workload.epochs, 'epoch')} of {workload.samples:,} samples"
        )

    @cached_property
    def _model(self) -> torch.nn.Module:
        """Parameters of the layers, without memory."""
        trained, dtype = self.workload.trained, getattr(torch, self.workload.dtype)
        # Strategies see single parameters, of which a layer table has sums.
        if trained is not None:
            return build_model(
                trained.model,
                trained.input_shape,
                trained.outputs,
                trained.task,
                dtype,
                0,
            ).to("meta")
        return without_values(self.workload.layers).to(dtype)

    @cached_property
    def _shapes(self) -> list[tuple[int, ...]]:
        return [tuple(parameter.shape) for parameter in self._model.parameters()]

    def _gradients(self, workers: int) -> list[GradientTensor]:
        """Gradients, released as on the platform at its batch."""
        device = self._device(self.platform, workers)
        if isinstance(device, MeasuredSteps):
            return gradients(
                self._model,
                device.tables[0].release_at(self.workload.batches(workers)[1]),
            )
        return self._modelled_gradients

    @cached_property
    def _modelled_gradients(self) -> list[GradientTensor]:
        _, samples = self.workload.batches(1)
        table = step_table(
            self.platform.device, self.workload.layers, [max(1, round(samples))]
        )
        return gradients_of(
            self.workload.layers, table.release_at(samples), self.workload.dtype
        )

    def times(self, strategy: Component, workers: int, cases: Sequence[Case]) -> Times:
        """Return the times of the training by `strategy` among `workers` in each case.

        Raises:
            UsageError: the strategy, or the batch, does not suit this number of workers.
        """
        shapes = [self.batches(strategy, workers, case.batch) for case in cases]
        columns, queued = (
            np.empty((_COLUMNS, len(cases))),
            np.zeros(len(cases), dtype=bool),
        )
        # Cases of one recording are walked through together.
        groups: dict[Recorded, list[int]] = {}
        of_shapes = {
            shape: self._recorded(strategy, workers, *shape) for shape in set(shapes)
        }
        for place, shape in enumerate(shapes):
            groups.setdefault(of_shapes[shape], []).append(place)
        for recorded, places in groups.items():
            chosen, sizes = (
                [cases[place] for place in places],
                [shapes[place][1] for place in places],
            )
            steps_of = np.array([float(shapes[place][0]) for place in places])
            machines = self._machines(strategy, recorded, chosen, sizes)
            if recorded.excerpt.joined:
                machines = machines.with_joined(steps_of)
            walks = [
                _walked(programs, recorded, machines) for programs in recorded.programs
            ]
            columns[:, places] = recorded.excerpt.extrapolated(
                [marks for marks, _ in walks], steps_of
            )
            queued[places] = np.any([bound for _, bound in walks], axis=0)
            # Fixed seconds of an epoch are no part of what workers do.
            columns[0, places] += self.workload.epochs * np.array(
                [case.platform.epoch_s for case in chosen]
            )
        time, compute, data, other, comm, wait, transfer, bubble = columns
        return Times(time, compute, data, other, comm, wait, transfer, bubble, queued)

    def ledger(self, strategy: Component, workers: int) -> TimeArrays:
        """Return the times of each recorded worker in the longest recorded epoch, without a server, on the platform."""
        shape = self.batches(strategy, workers)
        recorded = self._recorded(strategy, workers, *shape)
        cases = [Case(self.platform, self.workload.batch)]
        machines = self._machines(strategy, recorded, cases, [shape[1]])
        return walk(recorded.programs[-1], machines, len(recorded.schedules))[-1]

    def schedule(self, strategy: Component, workers: int) -> Schedule:
        """Return a schedule of the excerpt, which has the memory of the whole."""
        return self.schedules(strategy, workers)[0]

    def schedules(
        self, strategy: Component, workers: int, batch: int | None = None
    ) -> list[Schedule]:
        """Return a schedule for each part of a replica, or one for whole replicas."""
        return self._recorded(
            strategy, workers, *self.batches(strategy, workers, batch)
        ).schedules

    def mesh(self, strategy: Component, workers: int) -> Mesh:
        """Return how the workers divide into replicas and parts of these.

        Raises:
            StudyError: they do not.
        """
        parts = self.strategy(strategy).traits
        of_replica = parts.pipeline * parts.tensor
        if workers > 1 and workers % of_replica:
            raise StudyError(
                f"strategy {strategy.name}: {of_replica} workers hold a replica, and {workers} are no multiple of "
                f"{of_replica}; use other options, or other worker counts"
            )
        return parts.mesh(workers)

    def batches(
        self, strategy: Component, workers: int, batch: int | None = None
    ) -> tuple[int, float]:
        """Return the steps of an epoch, and the mean samples of the batch of a replica.

        Raises:
            UsageError: the strategy, or the batch, does not suit this number of workers.
        """
        return self.workload.batches(self.mesh(strategy, workers).data, batch)

    def micro_batches(self, strategy: Component, workers: int) -> int:
        """Return the number of pieces into which a replica cuts its batch."""
        traits = self.strategy(strategy).traits
        return traits.micro_batches if traits.mesh(workers).parts > 1 else 1

    def link_between_nodes(self, component: Component) -> float:
        """Return bytes/s of a link between nodes: those fitted to the measured engine of a strategy, else stated."""
        return self.communication(
            component
        ).network.cluster.links.inter.bandwidth_bytes_per_s

    def communication(self, component: Component) -> Costs:
        """Return the costs of communication by the engine of a strategy."""
        return self._costs_on(self.platform, self.engine(component))

    def step_seconds(
        self, workers: int, samples: float, pieces: int
    ) -> tuple[float, float, float]:
        """Return the seconds of both passes of one of the pieces of a batch, and of an update of all parameters."""
        device = self._device(self.platform, workers)
        forward, backward, update, _ = self._seconds(device, samples, pieces)
        return forward, backward, update

    def components(self, component: Component, platform: Platform) -> tuple[str, ...]:
        """Return the components that a training by a strategy may be bound by on `platform`."""
        cycles = self.strategy(component).traits.cycle_s > 0
        return (
            (*platform.components, "Horovod cycle") if cycles else platform.components
        )

    def strategy(self, component: Component) -> Strategy:
        """Return the strategy of that name with these options."""
        key = str(component)
        if key not in self._strategies:
            self._strategies[key] = registry.create(
                component.name, component.options, "virtual"
            )
        return self._strategies[key]

    def engine(self, component: Component) -> str:
        """Return the engine that carries a strategy on the platform."""
        return charged_as(self.strategy(component), self.platform.engine)

    def engine_source(self, component: Component) -> str:
        """Return where the costs of a strategy's engine are from."""
        own = (
            entry.source
            for entry in self.platform.engines.entries
            if entry.engine == self.engine(component)
        )
        return next(own, f"links of {self.platform.cluster.name} alone")

    # --- recordings ---------------------------------------------------------------------------------------------

    def _recorded(
        self, component: Component, workers: int, steps: int, samples: float
    ) -> Recorded:
        strategy = self.strategy(component)
        traits = strategy.traits
        mesh = traits.mesh(workers)
        excerpt = program.excerpt_of(traits.stretches, self.workload.epochs, steps)
        # Messages between parts are as large as the batch; others are not.
        pieces = self.micro_batches(component, workers)
        batch = max(pieces, round(samples)) if mesh.parts > 1 or traits.mixed else 1
        by_layer = traits.cuts_model(workers)
        cut = self.cut(samples / pieces) if by_layer else None
        # By the excerpt: cells of a what-if that differ in their steps have the same
        # one.
        key = (str(component), workers, excerpt, batch)
        if key not in self._programs:
            self._require_valid(component, workers, steps, cut)
            run = self._run(component, workers, excerpt.epochs)
            serving = _serving(component, traits, workers)
            # One object for all recordings of this strategy: they share the groups that
            # are split from it.
            everyone = RankGroups.of_all(workers)
            *shorter, longest = excerpt.plans(mesh.data, batch)
            last = self._schedules(
                run, strategy, longest, everyone, cut, whole=excerpt.whole
            )
            # The shorter one may have no group yet: as many workers are recorded as of
            # the longer one.
            schedules = [
                self._schedules(run, strategy, plan, everyone, cut, len(last))
                for plan in shorter
            ]
            schedules.append(last)
            priced = (
                [[program.in_batches(one, batch) for one in each] for each in schedules]
                if traits.mixed
                else schedules
            )
            programs = [program.programs_of(each) for each in priced]
            self._programs[key] = Recorded(
                excerpt, programs, workers, serving, schedules[0]
            )
        return self._programs[key]

    def _require_valid(
        self, component: Component, workers: int, steps: int, cut: TableCut | None
    ) -> None:
        """Check a training as before a run: what no run accepts has no time.

        Raises:
            UsageError: the strategy does not suit the workload at this number of workers.
        """
        strategy = self.strategy(component)
        asked = {"batch_per_worker": None, "batch_global": self.workload.batch}
        if not self.workload.in_all:
            asked = {
                "batch_per_worker": self.workload.batch if cut else 1,
                "batch_global": None,
            }
        setting = Setting(
            self._run(component, 1, 1).model_copy(update=asked),
            workers,
            min(workers, self.platform.cluster.node.workers_per_node),
            steps,
            self._shapes,
            layer_work=cut.work if cut else None,
        )
        strategy.check(setting)
        if workers > 1 and not strategy.requires:
            raise StudyError(
                f"strategy {component.name} at {workers} workers: it runs at one worker only"
            )

    def _schedules(
        self,
        run: Run,
        strategy: Strategy,
        plan: program.EvenPlan,
        everyone: RankGroups,
        cut: TableCut | None = None,
        workers: int | None = None,
        *,
        whole: bool = False,
    ) -> list[Schedule]:
        """Record worker 0, and the others of its node where they may do something else; of a whole program all.

        `workers` are so many where that is known.
        """
        per_node = self.platform.cluster.node.workers_per_node
        if whole:
            _require_few_steps(strategy, sum(map(plan.steps, range(run.epochs))))
        each = record_each(
            run,
            strategy,
            cast(BatchPlan, plan),
            self._model,
            per_node,
            everyone,
            cut=cut,
        )
        first, count = next(each), 1
        if workers is not None:
            count = workers
        elif (parts := strategy.traits.mesh(run.workers).parts) > 1:
            count = parts  # one replica stands for all
        elif whole:
            count = run.workers if first.reads_rank else 1
            _require_few_steps(
                strategy, count * sum(map(plan.steps, range(run.epochs)))
            )
        elif strategy.traits.fraction < 1:
            count = min(run.workers, max(_SAMPLED_RANKS, per_node))
        # Where groups are smaller than all, workers of a node may have different roles.
        elif any(
            event.partition is not None and len(event.partition.sizes) > 1
            for event in first.events
        ):
            count = min(run.workers, per_node)
        return [first, *islice(each, count - 1)]

    def _run(self, strategy: Component, workers: int, epochs: int) -> Run:
        update = {"strategy": strategy, "workers": workers, "epochs": epochs}
        return self._any_run.model_copy(update=update)

    @cached_property
    def _any_run(self) -> Run:
        return Run(
            study="prediction",
            run_id="prediction",
            config_hash="prediction",
            execution="modelled",
            engine="virtual",
            strategy=SERIAL,
            workers=1,
            repetition=0,
            seed=0,
            batch_per_worker=1,
            optimizer=self.workload.optimizer,
            dtype=self.workload.dtype,
        )

    # --- machines -----------------------------------------------------------------------------------------------

    def _machines(
        self,
        component: Component,
        recorded: Recorded,
        cases: Sequence[Case],
        sizes: Sequence[float],
    ) -> EqualWorkers:
        """Return the prices of `cases` at batches of `sizes` samples a worker."""
        engine, workers = self.engine(component), recorded.workers
        # Single gradients matter where their averages overlap the backward pass, and
        # differ by the batch then.
        overlapping = workers if recorded.schedule.overlaps else 0
        costs = [self._costs_on(case.platform, engine, overlapping) for case in cases]
        devices = [self._device(case.platform, workers) for case in cases]
        pieces = self.micro_batches(component, workers)
        steps = np.array(
            [
                self._seconds(device, size, pieces)
                for device, size in zip(devices, sizes, strict=True)
            ]
        ).T
        tasks = np.zeros((len(Task), len(cases)))
        tasks[[Task.FORWARD, Task.BACKWARD, Task.UPDATE, Task.DATA]] = steps
        tasks[Task.SHUFFLE] = (
            self.workload.samples
            / workers
            * np.array(
                [
                    device.shuffle_s_per_sample
                    if isinstance(device, MeasuredSteps)
                    else 0.0
                    for device in devices
                ]
            )
        )
        # The input pipeline works beside the step: what is missing at its end is waited
        # for.
        reading = np.array(sizes) * np.array([case.platform.input_s for case in cases])
        tasks[Task.DATA] += np.maximum(0.0, reading - steps.sum(axis=0))
        jitter = np.array([case.platform.jitter for case in cases])
        operations = [
            case.platform.operations.get(str(component), {}) for case in cases
        ]
        return EqualWorkers(Prices(costs), tasks, jitter, operations)

    @staticmethod
    def _device(platform: Platform, workers: int) -> TimeModel:
        """Return the device under the load that `workers` put on a node."""
        return platform.device.under(
            min(workers, platform.cluster.node.workers_per_node)
        )

    def _costs_on(self, platform: Platform, engine: str, overlapping: int = 0) -> Costs:
        """Return the costs by `engine`; of so many workers that overlap averages of gradients, with these."""
        busy = min(overlapping, platform.cluster.node.workers_per_node)
        samples = self.workload.batches(overlapping)[1] if overlapping else 0.0
        links = platform.cluster.links
        key = (
            platform.cluster.name,
            *(
                (link.latency_s, link.bandwidth_bytes_per_s)
                for link in (links.intra, links.inter)
            ),
            # It has lists, and so no hash.
            program.Identity(platform.engines),
            platform.collective,
            platform.cycle,
            engine,
            busy,
            samples,
        )
        if key not in self._costs:
            network = Network(
                platform.cluster,
                platform.cluster.node.workers_per_node,
                platform.collective,
            )
            tensors = self._gradients(overlapping) if overlapping else []
            # The predictor's own platform was measured; those of cases may have other
            # links.
            measured_on = self.platform.cluster
            self._costs[key] = Costs(
                network, platform.engines, engine, tensors, measured_on, platform.cycle
            )
        return self._costs[key]

    def _seconds(self, device: TimeModel, samples: float, pieces: int) -> list[float]:
        """Return those of `_step_seconds`, with forward and backward passes of one of the pieces of a batch."""
        whole = self._step_seconds(device, samples)
        if pieces == 1:
            return whole
        return [*self._step_seconds(device, samples / pieces)[:2], *whole[2:]]

    def cut(self, samples: float) -> TableCut:
        """Return the layers, between which a model can be cut, with shares of a step of so many samples."""
        size = max(1, round(samples))
        if size not in self._cuts:
            times = self.platform.device.times(self.workload.layers, size)
            self._cuts[size] = TableCut(
                self.workload.layers, times.forward, times.backward
            )
        return self._cuts[size]

    def _step_seconds(self, device: TimeModel, samples: float) -> list[float]:
        """Return seconds of the forward pass, the backward pass, the update and the data, between batches linear."""
        key = (device, samples)
        if key not in self._steps:
            # A device has times of whole batches; the mean one may lie between two.
            low = max(1, math.floor(samples))
            times = [
                device.times(self.workload.layers, size)
                for size in sorted({low, max(low, math.ceil(samples))})
            ]
            rows = np.array(
                [
                    [
                        each.forward.sum(),
                        each.backward.sum(),
                        each.update_s,
                        each.data_s,
                    ]
                    for each in times
                ]
            )
            seconds = rows[0] + max(0.0, samples - low) * (rows[-1] - rows[0])
            self._steps[key] = seconds.tolist()
        return self._steps[key]


def _serving(component: Component, traits: Traits, workers: int) -> Serving | None:
    """Return how the strategy's servers answer; None where it has none.

    Raises:
        StudyError: it does not state when they do.
    """
    if not traits.servers:
        return None
    if traits.in_rounds is None:
        raise StudyError(
            f"strategy {component.name}: it does not state when its server answers, which a prediction "
            "depends on; give the class `traits` with in_rounds (docs/prediction.md), or run it with "
            "--execution modelled"
        )
    return Serving(traits.server_ranks(workers), traits.in_rounds)


def _require_few_steps(strategy: Strategy, steps: int) -> None:
    """Refuse to record a program whose steps, of all workers that differ, take minutes and memory.

    Raises:
        StudyError: there are more than `_MOST_STEPS`.
    """
    if steps > _MOST_STEPS:
        raise StudyError(
            f"strategy {strategy.name}: it does not state what repeats, and {steps:,} steps are too many to record; "
            f"give the class `traits` with stretches (docs/prediction.md), or ask for at most {_MOST_STEPS:,} steps of "
            "all workers: fewer epochs, or larger batches"
        )


def _walked(
    programs: list[program.Program], recorded: Recorded, machines: EqualWorkers
) -> tuple[Floats, NDArray[np.bool_]]:
    """Return cumulative columns of `Times` after each epoch and after the end, (epochs + 1, columns, M), and where a
    queue binds."""
    queue = None
    if not recorded.schedule.is_lock_step:
        update = machines.tasks[Task.UPDATE]
        queue = Queue(
            machines.prices, programs, recorded.workers, update, recorded.serving
        )
    ledgers = walk(programs, machines, len(recorded.schedules), queue)
    bound = (
        queue.bound if queue is not None else np.zeros(len(machines.prices), dtype=bool)
    )
    return _columns(ledgers), bound


def _columns(ledgers: Sequence[TimeArrays]) -> Floats:
    fields = zip(*(vars(ledger).values() for ledger in ledgers), strict=True)
    now, seconds, wait, transfer, bubble = (np.array(each) for each in fields)
    tasks = np.moveaxis(seconds.mean(axis=-1), 1, 0)
    compute = tasks[[Task.FORWARD, Task.BACKWARD, Task.UPDATE]].sum(axis=0)
    data = tasks[Task.DATA] + tasks[Task.SHUFFLE]
    means = wait.mean(axis=-1), transfer.mean(axis=-1), bubble.mean(axis=-1)
    return np.stack(
        [now.max(axis=-1), compute, data, tasks[Task.OTHER], tasks[Task.COMM], *means],
        axis=1,
    )


def optimizer_states(optimizer: Component) -> int:
    """Return the vectors that an optimizer keeps beside parameters and gradients."""
    if optimizer.name == "sgd":
        return 1 if optimizer.options.get("momentum") else 0
    return 2
