"""A synchronisation on two processes against a raw in-place allreduce of as many bytes by the same engine.

    python benchmarks/averaging_bandwidth.py

The raw one only adds up one flat vector. `average of 20 M` is the communicator's mean
of such a vector, which divides as well; `whole synchronisation` is what local SGD does
to a real replica: it finds parameters, BatchNorm's statistics and momentum, which lie
side by side, and averages them where they lie. Result: the share of the raw bandwidth.
Goal: at least 0.95; for the small model, where a call takes microseconds and not its
bytes, the ratio is shown without one, and beside it that of the communicator's mean of
as many numbers in one vector, so that one sees what is call and division.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from ranks import findings_of_ranks
from ratios import Comparison, Finding, Goal, compare, show
from torch import Tensor, nn

ENGINES = ("mpi", "horovod", "gloo")
NUMBERS, PAIRS = 20_000_000, 21
WIDTHS = {
    "20 M": 3_120,
    "small model": 64,
}  # of the two hidden layers; momentum makes 20 M of the 10 M parameters
GOAL = Goal(">=", 0.95)
Operation = Callable[[], object]


def main() -> Iterator[Finding]:
    for engine in ENGINES:
        yield from findings_of_ranks("averaging_bandwidth", engine)


def measure_here(engine: str) -> list[Finding]:
    """Every rank: each of ours and the engine's own call, in turn."""
    from mpi4py import MPI

    from scalebench.comm.engines import named
    from scalebench.comm.engines.base import Place
    from scalebench.system.clock import WallClock

    torch.set_num_threads(1)
    clock = WallClock()
    with named(engine).connect(Place(MPI.COMM_WORLD, clock, one_node=True)) as comm:
        clock.start()
        large = beside_raw(
            engine, averaging(comm, torch.zeros(NUMBERS)), NUMBERS, PAIRS
        )
        found = [large.inverse(f"average of 20 M: {engine}", GOAL)]
        for size, width in WIDTHS.items():
            replica, strategy = trained(engine, comm, clock, width)
            numbers = sum(tensor.numel() for tensor in strategy.averaged(replica))
            pairs, goal = (PAIRS, GOAL) if numbers > 1e6 else (601, None)
            if goal is None:
                few = torch.zeros(numbers)
                call = beside_raw(engine, averaging(comm, few), numbers, pairs)
                found.append(
                    call.inverse(f"average of as many as the {size}: {engine}", None)
                )
            whole = beside_raw(engine, synchronising(strategy, replica), numbers, pairs)
            found.append(
                whole.inverse(f"whole synchronisation, {size}: {engine}", goal)
            )
    return found


def beside_raw(engine: str, ours: Operation, numbers: int, pairs: int) -> Comparison:
    """`ours` and the raw call over so many float32, in turn, each begun by both ranks at once."""
    from mpi4py import MPI

    def after_a_meeting(operation: Operation) -> Operation:
        def both() -> None:
            MPI.COMM_WORLD.Barrier()
            operation()

        return both

    return compare(
        after_a_meeting(ours), after_a_meeting(RAW[engine](torch.zeros(numbers))), pairs
    )


def trained(engine: str, comm: Any, clock: Any, width: int) -> tuple[Any, Any]:
    """A replica with BatchNorm that has taken a step, so that there is momentum, and the strategy that averages all."""
    from scalebench.data.batch_plan import BatchPlan
    from scalebench.data.catalog import prepare
    from scalebench.data.dataset import open_dataset
    from scalebench.strategies import registry
    from scalebench.study.spec import Component, Run, Training
    from scalebench.training.replica import Replica

    model = Component(name=f"{__file__}:normalised", options={"width": width})
    training = Training(
        epochs=1,
        model=model,
        optimizer=Component(name="sgd", options={"momentum": 0.9}),
    )
    policies = {"optimizer_state": "average"}
    run = Run(
        **training.model_dump(), study="bench", run_id="average", config_hash="", execution="native", engine=engine,
        strategy=Component(name="local_sgd", options=policies), workers=comm.size, repetition=0, seed=0,
    )  # fmt: skip
    dataset = open_dataset(prepare(training, comm.size))
    replica = Replica(
        run, dataset, BatchPlan.of(run, comm.size, run.seed, dataset), comm, clock
    )
    strategy = registry.create("local_sgd", policies, engine)
    strategy.setup(replica)
    strategy.warm_up(replica, next(iter(replica.batches(0))))
    return replica, strategy


def averaging(comm: Any, vector: Tensor) -> Operation:
    return lambda: comm.allreduce_(vector, "mean")


def synchronising(strategy: Any, replica: Any) -> Operation:
    return lambda: strategy.synchronise(replica)


def normalised(input_shape: tuple[int, ...], outputs: int, width: int) -> nn.Module:
    """Two hidden layers of `width`, each with BatchNorm."""
    layers: list[nn.Module] = [nn.Flatten()]
    for before in (int(torch.tensor(input_shape).prod()), width):
        layers += [nn.Linear(before, width), nn.BatchNorm1d(width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, outputs))


def raw_mpi(tensor: Tensor) -> Operation:
    from mpi4py import MPI

    wire = tensor.numpy()
    return lambda: MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, wire)


def raw_horovod(tensor: Tensor) -> Operation:
    import horovod.torch as hvd

    return lambda: hvd.allreduce_(tensor, name=f"raw {len(tensor)}", op=hvd.Sum)


def raw_gloo(tensor: Tensor) -> Operation:
    return lambda: torch.distributed.all_reduce(tensor)


RAW = {"mpi": raw_mpi, "horovod": raw_horovod, "gloo": raw_gloo}

if __name__ == "__main__":
    show(main())
