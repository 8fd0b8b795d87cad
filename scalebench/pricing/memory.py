"""Memory of a worker by its layers, batch, optimizer and the recorded buffers of its strategy, and whether it fits."""

from __future__ import annotations

from dataclasses import dataclass

from scalebench.formatting import digits, memory_size
from scalebench.models.layers import ELEMENT_BYTES, LayerTable
from scalebench.pricing.prediction import Predictor
from scalebench.pricing.schedule import PartMemory, Schedule
from scalebench.pricing.workload import optimizer_states
from scalebench.study.spec import Component

_GIB = 2**30


@dataclass(frozen=True)
class WorkerMemory:
    """Bytes of a worker by part; without libraries, their workspaces, and fragments between tensors."""

    model: str
    batch: int
    parameters: int
    gradients: int
    optimizer: int
    strategy: int  # initial weights and the strategy's own tensors
    activations: int

    @property
    def fixed(self) -> int:
        """Bytes that the batch does not change."""
        return self.parameters + self.gradients + self.optimizer + self.strategy

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return self.fixed + self.activations

    def largest_batch(self, memory_gib: float) -> int:
        """Return the largest batch that fits into `memory_gib`; 0 if none does."""
        return max(
            0,
            (int(memory_gib * _GIB) - self.fixed)
            * self.batch
            # A model that keeps nothing for the backward pass would divide by zero.
            // max(1, self.activations),
        )

    def lacking(self, memory_gib: float, where: str) -> str:
        """Return one line that says by how much the worker does not fit into `memory_gib` of `where`; empty if it fits.

        The largest part is named, and the largest batch that fits.
        """
        # In bytes, as tables count them; GiB are for people.
        over = self.total - memory_gib * _GIB
        if over <= 0:
            return ""
        parts = {
            name: int(getattr(self, name))
            for name in ("activations", "parameters", "gradients")
        }
        parts |= {
            "states of the optimizer": self.optimizer,
            "tensors of the strategy": self.strategy,
        }
        largest = max(parts, key=lambda name: parts[name])
        batch = self.largest_batch(memory_gib)
        rest = memory_size(self.fixed)
        way_out = (
            f"batch {batch} fits"
            if batch
            else f"no batch fits, as {rest} do not depend on it"
        )
        return (
            f"{self.model} at batch {self.batch} needs {memory_size(self.total)} a worker, "
            f"{memory_size(over)} more than {where} has ({digits(memory_gib)}); "
            f"{largest} take {memory_size(parts[largest])}; {way_out}"
        )


def worker_memory(
    layers: LayerTable,
    batch: int,
    dtype: str = "float32",
    optimizer_states: int = 1,
    schedule: Schedule | None = None,
    kept_in: str = "",
) -> WorkerMemory:
    """Return the memory of a worker that trains `layers` at `batch` samples; activations in `kept_in`, if given.

    `optimizer_states` vectors of the size of the parameters are the optimizer's.
    `schedule` is the strategy's, recorded for a model of as many parameters in `dtype`:
    what it holds beyond parameters, gradients and those vectors is the strategy's.
    """
    if schedule is not None and schedule.part is not None:
        return part_memory(
            layers, batch, dtype, optimizer_states, schedule.part, kept_in
        )
    vector = layers.parameters * ELEMENT_BYTES[dtype]
    # Recorded are all vectors of a worker: parameters, gradients and the optimizer's
    # among them.
    held = schedule.memory_bytes - (2 + optimizer_states) * vector if schedule else 0
    return WorkerMemory(
        model=layers.name,
        batch=batch,
        parameters=vector,
        gradients=vector,
        optimizer=optimizer_states * vector,
        # Below zero where the recorded optimizer has fewer vectors than were stated.
        strategy=max(0, held),
        activations=layers.activation_bytes(batch, kept_in or dtype),
    )


def part_memory(
    layers: LayerTable,
    batch: int,
    dtype: str,
    optimizer_states: int,
    part: PartMemory,
    kept_in: str,
) -> WorkerMemory:
    """Return the memory of a worker that holds a part of the model, or shards of it.

    A stage keeps what it does not compute again of the micro-batches that are between
    forward and backward pass.
    """
    number, place = ELEMENT_BYTES[dtype], ""
    if part.stage is None:
        activations = layers.activation_bytes(batch, kept_in or dtype)
    else:
        activations = round(part.activations * ELEMENT_BYTES[kept_in or dtype])
        # A stage of an interleaved pipeline holds several chunks, each counted as a
        # stage.
        stages = part.stage.stages // len(part.kept or (0,))
        place = f", stage {part.stage.stage} of {stages}" if stages > 1 else ""
    return WorkerMemory(
        model=f"{layers.name}{place}",
        batch=batch,
        parameters=part.parameters * number,
        gradients=part.gradients * number,
        optimizer=optimizer_states * part.updated * number,
        strategy=part.updated * number,  # the initial weights
        activations=activations,
    )


def memory_of(
    predictor: Predictor, strategy: Component, workers: int, batch: int | None = None
) -> WorkerMemory:
    """Return the memory of a worker at the workload's batch, or at another one; that of the part with most."""
    workload = predictor.workload
    _, samples = predictor.batches(strategy, workers, batch)
    states = optimizer_states(workload.optimizer)
    # A batch has whole samples; the mean one may lie between two.
    size = max(1, round(samples))
    of_parts = [
        worker_memory(
            workload.layers, size, workload.dtype, states, schedule, workload.products
        )
        for schedule in predictor.schedules(strategy, workers, batch)
    ]
    # A training fits if its fullest worker does.
    return max(of_parts, key=lambda memory: memory.total)


def lacking(
    predictor: Predictor, strategy: Component, workers: int, batch: int | None = None
) -> str:
    """Return one line that says by how much a worker does not fit; empty if it fits, or if no memory is known."""
    memory_gib = predictor.platform.memory_gib
    memory = memory_of(predictor, strategy, workers, batch)
    return "" if memory_gib is None else memory.lacking(memory_gib, "the device")
