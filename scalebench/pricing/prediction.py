"""Prediction of trainings without training: time by strategy, worker count and platform, and what binds it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from scalebench.cluster.network import Network
from scalebench.formatting import counted
from scalebench.pricing import program
from scalebench.pricing.charges import EqualWorkers, charged_as, gradients
from scalebench.pricing.costs import Costs, GradientTensor, Prices
from scalebench.pricing.devices import (
    MeasuredSteps,
    TimeModel,
    gradients_of,
    step_table,
)
from scalebench.pricing.exchanges import Queue
from scalebench.pricing.platform import Platform
from scalebench.pricing.price import TimeArrays, walk
from scalebench.pricing.recorded_trainings import Recorded, RecordedTrainings
from scalebench.pricing.workload import Workload
from scalebench.study.spec import Component
from scalebench.system.clock import Task

Floats = NDArray[np.float64]
_COLUMNS = 8  # of Times, without `queued`


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


class Predictor(RecordedTrainings):
    """Prices the recorded trainings of one workload; costs and step times are kept between calls."""

    def __init__(self, workload: Workload, platform: Platform) -> None:
        super().__init__(workload, platform)
        self._costs: dict[object, Costs] = {}
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
            shape: self.recorded(strategy, workers, *shape) for shape in set(shapes)
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
        recorded = self.recorded(strategy, workers, *shape)
        cases = [Case(self.platform, self.workload.batch)]
        machines = self._machines(strategy, recorded, cases, [shape[1]])
        return walk(recorded.programs[-1], machines, len(recorded.schedules))[-1]

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
