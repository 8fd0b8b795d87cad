"""A native training step against the loop that one writes by hand on the same engine, on two real processes.

    python benchmarks/native_step.py

Same model, same weights, same batches, epochs in turn within one process. `allreduce`
is compared with mpi4py over one flat buffer of gradients, once with torch's optimizer
over the model's parameters, as one writes it, and once with the parameters in one flat
buffer too, the leanest loop there is; `horovod` with `hvd.DistributedOptimizer` as its
documentation shows it. Nothing hand-written keeps books, beats or learning rates.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import torch
from ranks import findings_of_ranks
from ratios import Finding, Goal, compare, show
from torch import Tensor, nn

STRATEGIES = {"mpi": "allreduce", "horovod": "horovod"}
PAIRS = 61
GOALS = {"mpi": Goal("<=", 0.8), "horovod": Goal("<=", 1.0)}
Loop = Callable[[], None]


def main() -> Iterator[Finding]:
    for engine in STRATEGIES:
        yield from findings_of_ranks("native_step", engine)


def measure_here(engine: str) -> list[Finding]:
    """Every rank: scalebench's step as a real run takes it, and the hand-written one, in turn."""
    from mpi4py import MPI

    from scalebench.comm.engines import named
    from scalebench.comm.engines.base import Place
    from scalebench.data.batch_plan import BatchPlan
    from scalebench.data.catalog import prepare
    from scalebench.data.dataset import open_dataset
    from scalebench.native.heartbeat import Heartbeat, create_heartbeats
    from scalebench.strategies import registry
    from scalebench.study.spec import Component, Run, Training
    from scalebench.system.clock import WallClock
    from scalebench.training.replica import Replica

    world = MPI.COMM_WORLD
    torch.set_num_threads(1)
    training = Training(epochs=1)
    run = Run(
        **training.model_dump(), study="bench", run_id="step", config_hash="", execution="native", engine=engine,
        strategy=Component(name=STRATEGIES[engine]), workers=world.size, repetition=0, seed=0,
    )  # fmt: skip
    dataset = open_dataset(prepare(training, world.size))
    plan = BatchPlan.of(run, world.size, run.seed, dataset)
    with tempfile.TemporaryDirectory() as folder:
        beats = Path(folder) / "heartbeats"
        create_heartbeats(beats, world.size)
        clock = WallClock(Heartbeat(beats, world.rank).beat)
        with named(engine).connect(Place(world, clock, one_node=True)) as comm:
            replica = Replica(run, dataset, plan, comm, clock)
            strategy = registry.create(run.strategy.name, {}, engine)
            strategy.setup(replica)
            clock.start()
            ours, steps = scalebench_loop(replica, strategy), replica.steps_in(0)
            return [
                compare(ours, by_hand(replica), PAIRS).finding(
                    f"native step: {name}", GOALS[engine], steps
                )
                for name, by_hand in HAND_WRITTEN[engine].items()
            ]


def scalebench_loop(replica: Any, strategy: Any) -> Loop:
    """An epoch as a real run takes it."""
    epochs = count()
    return lambda: strategy.train_epoch(replica, next(epochs))


def with_mpi4py(replica: Any, flat_parameters: bool = False) -> Loop:
    """Gradients in one flat buffer, one Allreduce in place, torch's SGD: nothing else."""
    from mpi4py import MPI

    world, size = MPI.COMM_WORLD, MPI.COMM_WORLD.size
    model = network(replica)
    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    gradients = torch.zeros_like(flat)
    begin = 0
    for p in model.parameters():
        end = begin + p.numel()
        p.data, p.grad = flat[begin:end].view_as(p), gradients[begin:end].view_as(p)
        begin = end
    everything = nn.Parameter(flat)
    everything.grad = gradients
    trained = [everything] if flat_parameters else list(model.parameters())
    optimizer = torch.optim.SGD(trained, lr=0.1, momentum=0.9)
    wire = gradients.numpy()
    loss_of = nn.CrossEntropyLoss()
    batches = batches_of(replica)
    total = torch.zeros(())

    def epoch() -> None:
        for x, y in batches():
            gradients.zero_()
            loss = loss_of(model(x), y)
            loss.backward()
            world.Allreduce(MPI.IN_PLACE, wire)
            gradients.div_(size)
            optimizer.step()
            total.add_(loss.detach())

    return epoch


def with_horovod(replica: Any) -> Loop:
    """As Horovod's documentation writes it."""
    import horovod.torch as hvd

    model = network(replica)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters()
    )
    loss_of = nn.CrossEntropyLoss()
    batches = batches_of(replica)
    total = torch.zeros(())

    def epoch() -> None:
        for x, y in batches():
            optimizer.zero_grad()
            loss = loss_of(model(x), y)
            loss.backward()
            optimizer.step()
            total.add_(loss.detach())

    return epoch


HAND_WRITTEN: dict[str, dict[str, Callable[[Any], Loop]]] = {
    "mpi": {
        "allreduce / mpi4py": with_mpi4py,
        "allreduce / mpi4py, all flat": lambda replica: with_mpi4py(
            replica, flat_parameters=True
        ),
    },
    "horovod": {"horovod / DistributedOptimizer": with_horovod},
}


def network(replica: Any) -> nn.Module:
    """The default study's model, from the replica's weights, in a buffer of its own."""
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)
    )
    nn.utils.vector_to_parameters(replica.initial.clone(), model.parameters())
    return model


def batches_of(replica: Any) -> Callable[[], Iterator[tuple[Tensor, Tensor]]]:
    """The replica's batches of the first epoch, again with each call, cut from tensors in memory."""
    x, y = (tensor.clone() for tensor in replica.samples_of(0))
    sizes = replica.plan.batches(0, replica.rank).sizes
    return lambda: zip(torch.split(x, sizes), torch.split(y, sizes), strict=True)


if __name__ == "__main__":
    show(main())
