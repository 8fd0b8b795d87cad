"""Where a prediction lies outside what its inputs are known to hold for, and what of it does not fit into memory."""

from __future__ import annotations

from scalebench.pricing.devices import MeasuredSteps
from scalebench.pricing.memory import WorkerMemory, worker_memory
from scalebench.pricing.prediction import Predictor, optimizer_states
from scalebench.study.spec import Component

_FEW_STEPS = 8


def memory_of(
    predictor: Predictor, strategy: Component, workers: int, batch: int | None = None
) -> WorkerMemory:
    """Return the memory of a worker at the workload's batch, or at another one; that of the part with most."""
    workload = predictor.workload
    _, samples = predictor.batches(strategy, workers, batch)
    states = optimizer_states(workload.optimizer)
    size = max(1, round(samples))
    of_parts = [
        worker_memory(
            workload.layers, size, workload.dtype, states, schedule, workload.products
        )
        for schedule in predictor.schedules(strategy, workers, batch)
    ]
    return max(of_parts, key=lambda memory: memory.total)


def lacking(
    predictor: Predictor, strategy: Component, workers: int, batch: int | None = None
) -> str:
    """Return one line that says by how much a worker does not fit; empty if it fits, or if no memory is known."""
    memory_gib = predictor.platform.memory_gib
    memory = memory_of(predictor, strategy, workers, batch)
    return "" if memory_gib is None else memory.lacking(memory_gib, "the device")


def outside(
    predictor: Predictor, strategy: Component, workers: int, batch: int | None = None
) -> tuple[str, ...]:
    """Return where a training lies outside the range of its inputs."""
    platform, node = predictor.platform, predictor.platform.cluster.node
    steps, samples = predictor.batches(strategy, workers, batch)
    samples /= predictor.micro_batches(strategy, workers)
    program, found = predictor.strategy(strategy), []
    if workers > (room := platform.cluster.nodes * node.workers_per_node):
        found.append(f"beyond the {room:,} workers of {platform.cluster.name}")
    found += platform.device.outside(
        predictor.workload.layers, samples, min(workers, node.workers_per_node)
    )
    measured = any(
        not entry.stated for entry in platform.engines.entries
    ) or isinstance(platform.device, MeasuredSteps)
    besides = program.arithmetic(workers) is None
    if (
        workers > 1
        and measured
        and besides
        and str(strategy) not in platform.operations
    ):
        found.append(f"what {strategy} computes beside steps was not measured")
    if workers > 1:
        found += _of_engine(predictor, predictor.engine(strategy), workers)
    if steps < _FEW_STEPS:
        found.append(f"fewer than {_FEW_STEPS} steps an epoch")
    if not program.deterministic:
        found.append("steady state of a queue")
    if program.traits.adapts and workers > 1:
        found.append("the first layout is kept")
    return tuple(found)


def _of_engine(predictor: Predictor, engine: str, workers: int) -> list[str]:
    """Return what of the collectives among `workers` was not measured, if any was."""
    nodes = -(-workers // predictor.platform.cluster.node.workers_per_node)
    own = predictor.platform.engines.measured(engine)
    if not own:
        return []
    most_nodes = max(entry.nodes for entry in own)
    if nodes > most_nodes:
        return [
            f"{engine} measured on {most_nodes} node{'s' * (most_nodes > 1)}, its links are modelled beyond"
        ]
    most = max(entry.ranks for entry in own if (entry.nodes > 1) == (nodes > 1))
    return [f"{engine} measured among {most} ranks"] if workers > most else []
