"""Step times of a layer table without training: measured, stated, by a roofline, or of another device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, groupby
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from scalebench.cluster.device import Device
from scalebench.errors import ClusterError, UsageError
from scalebench.formatting import counted
from scalebench.models.layers import ELEMENT_BYTES, LayerTable
from scalebench.pricing import machine
from scalebench.pricing.costs import GradientTensor
from scalebench.system.clock import BACKWARD_SHARE, FORWARD_SHARE

Seconds = NDArray[np.float64]
BY_OPERATIONS = "by their floating-point operations, which share the step"
_PASSES = ("forward", "backward")
_LONGEST_STEP_S = 1e9
# ratio up to which a batch goes without mention, as the mean one of an epoch is a
# little smaller
_NEAR_BATCH = 1.1


class LayerTimes(NamedTuple):
    """Seconds of one step, by layer in the order of the forward pass."""

    forward: Seconds
    backward: Seconds
    update_s: float
    data_s: float = 0.0  # fetching the batch

    @property
    def step_s(self) -> float:
        """Seconds of the whole step."""
        return float(self.forward.sum() + self.backward.sum()) + self.update_s


class StepError(NamedTuple):
    """Seconds of a real step relative to the modelled ones, from `low` to `high`, and what is known to say so."""

    low: float
    high: float
    why: str

    def at_batch(self, batch: float, known: Sequence[int]) -> StepError:
        """Widen the interval for a batch beyond those `known`, whose time was taken as proportional.

        The time of a smaller batch lies between the proportional and the whole one: the
        interval reaches the middle of both on a log scale; likewise for a larger batch.
        """
        least, most = min(known), max(known)
        if least <= batch <= most:
            return self
        smaller, larger = max(1.0, least / batch), max(1.0, batch / most)
        why = self.why
        if max(smaller, larger) > _NEAR_BATCH:
            why += f"; batch {batch:,.0f} taken as proportional to {least if batch < least else most:,}"
        return StepError(
            self.low / math.sqrt(larger), self.high * math.sqrt(smaller), why
        )

    def times(self, other: StepError) -> StepError:
        """Return the interval of the product of two independent ratios, in quadrature on logs."""
        low = math.exp(-math.hypot(math.log(self.low), math.log(other.low)))
        high = math.exp(math.hypot(math.log(self.high), math.log(other.high)))
        return StepError(low, high, f"{self.why}; {other.why}")


# What docs/prediction.md and docs/accuracy.md found, as seconds measured / modelled.
MEASURED_ERROR = StepError(
    1 / 1.12, 1.12, "measured steps: 95 % of native runs within 12 %"
)
STATED_ERROR = StepError(1.0, 1.0, "the stated step time is taken as exact")
ROOFLINE_ERROR = StepError(
    1 / 1.42, 1 / 0.29, "devices reached 29 to 142 % of their roofline"
)
SCALED_ERROR = StepError(
    1 / 1.9, 1.9, "a step scaled by rooflines was up to 1.9 times off"
)
LEARNED_ERROR = StepError(
    1 / 1.07, 1 / 0.64, "steps by learned kernels were 36 % too short to 7 % too long"
)


class TimeModel:
    """Seconds of the layers of a table at a batch size."""

    components: tuple[str, ...] = ("compute",)  # what `changed` can change

    @property
    def source(self) -> str:
        """How the times are obtained."""
        raise NotImplementedError

    @property
    def memory_gib(self) -> float | None:
        """Memory of the device, None where it is not known."""
        return None

    def times(self, layers: LayerTable, batch: int) -> LayerTimes:
        """Return the times of a step of `batch` samples."""
        raise NotImplementedError

    @property
    def gpu(self) -> bool:
        """Return True if the device is known to be a GPU."""
        return False

    @property
    def name(self) -> str:
        """Name of the device, empty where it is not known."""
        return ""

    def counted(self, number: int) -> str:
        """Return `4 workers`, or `4 a100-40gb` of a device that is known."""
        return f"{number:,} {self.name}" if self.name else counted(number, "worker")

    def of_layers(self, layers: LayerTable) -> str:
        """Return how the times of single layers are obtained."""
        return "each as modelled"

    def error(self, batch: float) -> StepError:
        """Return how far a step of `batch` samples may be off."""
        raise NotImplementedError

    def outside(self, layers: LayerTable, batch: float, busy: int) -> list[str]:
        """Return where a step of `batch` samples beside `busy` workers of the node is outside what is known."""
        return []

    def under(self, workers: int) -> TimeModel:
        """Return the times under the load of so many busy workers of a node."""
        return self

    def changed(self, component: str, factor: float) -> TimeModel:
        """Return the device with `factor` times the rate (of `launch overhead`: the time) of `component`.

        Raises:
            UsageError: the times do not say what part of them that component has.
        """
        if component != "compute":
            raise UsageError(
                f"{component}: cannot be changed for times that are {self.source}; give a --device"
            )
        return self._faster(factor)

    def slower(self, factor: float) -> TimeModel:
        """Return the device whose steps take `factor` times as long, whatever binds them."""
        return self._faster(1 / factor)

    def _faster(self, factor: float) -> TimeModel:
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class Stated(TimeModel):
    """A step of `batch` samples takes `step_s`, in proportion to its samples, a third of it forward.

    Layers share both passes in proportion to their flops.
    """

    step_s: float
    batch: int

    def __post_init__(self) -> None:
        if not 0 < self.step_s < _LONGEST_STEP_S:
            raise ClusterError(
                f"step time: expected seconds greater than 0, below 1e9, got {self.step_s:g}"
            )
        if self.batch < 1:
            raise ClusterError(
                f"batch of the step time: expected 1 or more samples, got {self.batch}"
            )

    @property
    def source(self) -> str:
        return f"stated: {self.step_s:g} s a step of {self.batch} samples"

    def of_layers(self, layers: LayerTable) -> str:
        return BY_OPERATIONS

    def times(self, layers: LayerTable, batch: int) -> LayerTimes:
        seconds = self.step_s * batch / self.batch
        forward, backward = _shares(layers)
        return LayerTimes(
            seconds * FORWARD_SHARE * forward, seconds * BACKWARD_SHARE * backward, 0.0
        )

    def error(self, batch: float) -> StepError:
        return STATED_ERROR.at_batch(batch, [self.batch])

    def outside(self, layers: LayerTable, batch: float, busy: int) -> list[str]:
        near = 0.5 <= batch / self.batch <= 2
        return (
            []
            if near
            else [f"step time stated at batch {self.batch}, taken as proportional"]
        )

    def _faster(self, factor: float) -> Stated:
        return replace(self, step_s=self.step_s / factor)


@dataclass(frozen=True, eq=False)
class MeasuredSteps(TimeModel):
    """Step times that a calibration measured, under one load of a node or under several.

    Between the measured batches linear, proportional beyond. Layers share both passes
    as measured at the nearest batch, or, where they were not, in proportion to their
    flops.
    """

    tables: tuple[machine.StepTable, ...]
    where: str = ""
    on_gpu: bool = False

    @property
    def gpu(self) -> bool:
        return self.on_gpu

    @property
    def source(self) -> str:
        return f"measured{' on ' * bool(self.where)}{self.where}"

    @property
    def sizes(self) -> list[int]:
        """The measured batches, ascending."""
        return sorted(batch.samples for batch in self.tables[0].batches)

    @property
    def shuffle_s_per_sample(self) -> float:
        """Seconds of laying out a sample for an epoch."""
        return self.tables[0].shuffle_s_per_sample

    def error(self, batch: float) -> StepError:
        return MEASURED_ERROR.at_batch(batch, self.sizes)

    def outside(self, layers: LayerTable, batch: float, busy: int) -> list[str]:
        least, most, found = self.sizes[0], self.sizes[-1], []
        if not least <= batch <= most:
            found.append(f"steps measured at {least} to {most} samples")
        if busy not in [table.busy_workers for table in self.tables]:
            beside = (
                f"beside {counted(busy - 1, 'busy worker')}" if busy > 1 else "alone"
            )
            found.append(f"steps not measured {beside}")
        return found

    def under(self, workers: int) -> MeasuredSteps:
        table = machine.table_under(self.tables, workers)
        # One object for a load: step times are kept by the device itself.
        return self._alone.setdefault(
            table.busy_workers, replace(self, tables=(table,))
        )

    @cached_property
    def _alone(self) -> dict[int, MeasuredSteps]:
        return {}

    @cached_property
    def _mean(self) -> machine.StepTimes:
        return machine.StepTimes(self.tables[0], repetition=None)

    def _faster(self, factor: float) -> MeasuredSteps:
        return replace(
            self, tables=tuple(table.scaled(1 / factor) for table in self.tables)
        )

    def times(self, layers: LayerTable, batch: int) -> LayerTimes:
        data, forward, backward, update = (
            float(self._mean.seconds(task, np.array(batch)))
            for task in machine.STEP_TASKS
        )
        shares = _measured_shares(layers, self.tables[0].layers_at(batch)) or _shares(
            layers
        )
        return LayerTimes(forward * shares[0], backward * shares[1], update, data)

    def of_layers(self, layers: LayerTable) -> str:
        found = [
            each.samples
            for each in self.tables[0].batches
            if _measured_shares(layers, each.layers)
        ]
        if not found:
            return BY_OPERATIONS
        return f"as measured at batches of {', '.join(map(str, sorted(found)))}"


@dataclass(frozen=True, eq=False)
class Roofline(TimeModel):
    """Kernel time = max(flops / F, bytes / M) + launch overhead, layer by layer.

    F is the peak in `dtype`, M the memory bandwidth; parameters, gradients and the
    optimizer's vectors are `stored` in another one with mixed precision. A kernel reads
    its inputs and weights and writes its activations. The backward pass has a kernel
    for the gradient of the inputs and one for that of the weights, each with the flops
    and bytes of the forward one, and writes the gradients of all parameters; layers
    without weights have the first only. The update reads parameters, gradients and
    `optimizer_states`, and writes all but the gradients, in one kernel. Devices reach a
    part of it; convolutions with fewer multiplications (Winograd) may be faster.
    Williams, Waterman and Patterson, CACM 52(4), 2009.
    """

    device: Device
    dtype: str = "float32"
    optimizer_states: int = 1
    stored: str = ""
    components = ("compute", "memory bandwidth", "launch overhead")

    def __post_init__(self) -> None:
        # It refuses a dtype that the device has no peak of, before anything is priced.
        self.device.peak(self.dtype)

    @property
    def memory_gib(self) -> float:
        return self.device.memory_gib

    @property
    def gpu(self) -> bool:
        return self.device.kind == "gpu"

    @property
    def name(self) -> str:
        return self.device.name

    @property
    def source(self) -> str:
        kept = (
            f" with {self.stored} parameters"
            if self.stored not in ("", self.dtype)
            else ""
        )
        return f"roofline of {self.device.name} in {self.dtype}{kept}"

    def error(self, batch: float) -> StepError:
        return ROOFLINE_ERROR

    def slower(self, factor: float) -> Roofline:
        slow = self
        for component in ("compute", "memory bandwidth"):
            slow = slow.changed(component, 1 / factor)
        return slow.changed("launch overhead", factor)

    def times(self, layers: LayerTable, batch: int) -> LayerTimes:
        element, stored = (
            ELEMENT_BYTES[self.dtype],
            ELEMENT_BYTES[self.stored or self.dtype],
        )
        flops = batch * layers.column("flops")
        moved = batch * (layers.column("inputs") + layers.column("activations"))
        weights = layers.column("weights")
        forward = self.kernels(flops, element * (moved + weights))
        forward[moved == 0] = 0.0  # parameters without use
        products = np.where(
            weights > 0,
            layers.backward_products,
            np.minimum(layers.backward_products, 1),
        )
        written = (
            stored
            * layers.column("parameters")
            / self.device.memory_bandwidth_bytes_per_s
        )
        # Parameters are read and written, gradients read, each state read and written.
        numbers = (3 + 2 * self.optimizer_states) * layers.parameters
        update = self.kernels(np.zeros(1), np.array([stored * numbers]))
        return LayerTimes(forward, products * forward + written, float(update[0]))

    def kernels(self, flops: Seconds, nbytes: Seconds) -> Seconds:
        """Return seconds of kernels by their flops and bytes."""
        bound = np.maximum(
            flops / self.device.peak(self.dtype),
            nbytes / self.device.memory_bandwidth_bytes_per_s,
        )
        return bound + self.device.launch_overhead_s

    def changed(self, component: str, factor: float) -> Roofline:
        own = self.device
        if component == "compute":
            peaks = {
                dtype: peak * factor for dtype, peak in own.peak_flops_per_s.items()
            }
            return replace(
                self, device=own.model_copy(update={"peak_flops_per_s": peaks})
            )
        name = (
            "memory_bandwidth_bytes_per_s"
            if component == "memory bandwidth"
            else "launch_overhead_s"
        )
        return replace(
            self, device=own.model_copy(update={name: getattr(own, name) * factor})
        )


@dataclass(frozen=True, eq=False)
class Scaled(TimeModel):
    """Times of the device `here`, of each task times the ratio of the rooflines of `there` and `here`.

    forward' = forward x sum(roofline of there) / sum(roofline of here), shared among
    layers as `there` has it; likewise backward and update. Loading of data is left out:
    it is the host's.
    """

    base: TimeModel
    here: Roofline
    there: Roofline
    components = Roofline.components

    @property
    def memory_gib(self) -> float:
        return self.there.memory_gib

    @property
    def gpu(self) -> bool:
        return self.there.gpu

    @property
    def name(self) -> str:
        return self.there.name

    def error(self, batch: float) -> StepError:
        return SCALED_ERROR.times(self.base.error(batch))

    def slower(self, factor: float) -> Scaled:
        return replace(self, base=self.base.slower(factor))

    def outside(self, layers: LayerTable, batch: float, busy: int) -> list[str]:
        return self.base.outside(layers, batch, busy)

    @property
    def source(self) -> str:
        return (
            f"{self.base.source}, scaled by {self.there.source} over {self.here.source}"
        )

    def times(self, layers: LayerTable, batch: int) -> LayerTimes:
        base = self.base.times(layers, batch)
        here, there = self.here.times(layers, batch), self.there.times(layers, batch)
        return LayerTimes(
            there.forward * (base.forward.sum() / here.forward.sum()),
            there.backward * (base.backward.sum() / here.backward.sum()),
            there.update_s * base.update_s / here.update_s,
        )

    def under(self, workers: int) -> Scaled:
        base = self.base.under(workers)
        return (
            self
            if base is self.base
            else self._alone.setdefault(base, replace(self, base=base))
        )

    @cached_property
    def _alone(self) -> dict[TimeModel, Scaled]:
        return {}

    def changed(self, component: str, factor: float) -> Scaled:
        return replace(self, there=self.there.changed(component, factor))


def _shares(layers: LayerTable) -> tuple[Seconds, Seconds]:
    """Return the share of each layer of the flops of the forward pass and of those of the backward pass."""
    flops = layers.column("flops") if layers.flops else layers.column("parameters")
    backward = flops * layers.backward_products
    return (
        flops / flops.sum(),
        backward / backward.sum() if backward.sum() > 0 else flops / flops.sum(),
    )


def _measured_shares(
    layers: LayerTable, measured: Sequence[machine.LayerShare]
) -> tuple[Seconds, Seconds] | None:
    """Return the share of each row of the passes by those of the `measured` layers; None if these are of other rows.

    Rows belong to the layer whose name theirs begin with, others to the layer before
    them. They share its time by their flops, rows without any equally.
    """
    named = [
        next(
            (
                number
                for number, each in enumerate(measured)
                if f"{row.name}.".startswith(f"{each.name}.")
            ),
            None,
        )
        for row in layers.layers
    ]
    met = [
        number
        for number, _ in groupby(number for number in named if number is not None)
    ]
    # Names of another model, or in another order: its shares say nothing of these rows.
    if not measured or met != list(range(len(measured))):
        return None
    owners = np.array(
        list(
            accumulate(
                named, lambda before, own: before if own is None else own, initial=0
            )
        )[1:]
    )
    flops = layers.column("flops")
    of_layer = np.bincount(owners, flops)[owners]
    rows = np.bincount(owners)[owners]
    within = np.divide(flops, of_layer, out=1 / rows, where=of_layer > 0)
    forward, backward = (
        np.array([getattr(each, task) for each in measured])[owners] for task in _PASSES
    )
    return forward * within, backward * within


def step_table(
    model: TimeModel, layers: LayerTable, batches: Sequence[int], busy_workers: int = 1
) -> machine.StepTable:
    """Return the step times of `layers` at `batches`, with the release of gradients at the largest of them.

    `release` has one share for each layer with parameters, in the order of the forward
    pass: that of the backward pass after which its gradient is complete. Modelled times
    have no spread.
    """
    sizes = sorted(set(batches))
    if not sizes or sizes[0] < 1:
        raise ClusterError(
            f"batch: expected 1 or more samples, got {sizes[0] if sizes else 'none'}"
        )
    times = [model.times(layers, size) for size in sizes]
    rows = [
        machine.BatchTimes(
            samples=size,
            data_s=[0.0],
            forward_s=[float(each.forward.sum())],
            backward_s=[float(each.backward.sum())],
            update_s=[each.update_s],
            release=_release(each, layers),
        )
        for size, each in zip(sizes, times, strict=True)
    ]
    return machine.StepTable(
        source=model.source,
        busy_workers=busy_workers,
        batches=rows,
        shuffle_s_per_sample=0.0,
        jitter=[],
    )


def _release(times: LayerTimes, layers: LayerTable) -> list[float]:
    done = np.cumsum(times.backward[::-1])[::-1]  # the last layer first
    return [
        float(end / done[0])
        for end, layer in zip(done, layers.layers, strict=True)
        if layer.parameters
    ]


def gradients_of(
    layers: LayerTable, release: Sequence[float], dtype: str = "float32"
) -> list[GradientTensor]:
    """Return the gradient of each layer with parameters, and the share of the backward pass at which it is complete."""
    sizes = [
        ELEMENT_BYTES[dtype] * layer.parameters
        for layer in layers.layers
        if layer.parameters
    ]
    return [
        GradientTensor(nbytes, share)
        for nbytes, share in zip(sizes, release, strict=True)
    ]
