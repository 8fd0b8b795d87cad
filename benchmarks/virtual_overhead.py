"""64 virtual workers against a bare PyTorch loop that takes the same number of optimizer steps on the same batches.

    python benchmarks/virtual_overhead.py [STRATEGY ...]

CPU seconds of one thread, in turn, as in a study: where gradients are averaged one
batch is computed for all workers. Batches have 8 samples, as when the goals were set;
the default of a study is 16, which halves the steps of both sides. Goals: at most 0.15
for these, 0.25 for averaging of weights, 0.5 for every other strategy.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from ratios import Finding, Goal, compare, show

from scalebench.cluster.cluster_file import load_cluster
from scalebench.cluster.engine_costs import EngineCost, EngineCosts
from scalebench.data.batch_plan import BatchPlan
from scalebench.data.catalog import prepare
from scalebench.data.dataset import Dataset, open_dataset
from scalebench.pricing.machine import BatchTimes, Machine, StepTable
from scalebench.strategies import registry
from scalebench.study.spec import Component, Run, Training
from scalebench.virtual.pool import simulate_alike

WORKERS, EPOCHS, BATCH, PAIRS = 64, 3, 8, 5
DEFAULTS = ("allreduce", "horovod", "ddp", "epoch_average", "epoch_async")
VARIANTS = tuple(
    Component(name=name, options=options)
    for name, options in (
        ("allreduce", {"accumulate": 2}),
        ("allreduce", {"compression": "fp16"}),
        ("allreduce", {"compression": "bf16"}),
        ("allreduce", {"compression": "topk"}),
        ("allreduce", {"compression": "powersgd"}),
        ("allreduce", {"collective": "tree"}),
        ("allreduce", {"collective": "hierarchical"}),
        ("horovod", {"accumulate": 2}),
        ("horovod", {"compression": "fp16"}),
        ("ddp", {"accumulate": 2}),
        ("ddp", {"compression": "fp16"}),
        ("ddp", {"compression": "bf16"}),
        ("ddp", {"compression": "powersgd"}),
    )
)
GOALS = dict.fromkeys(("allreduce", "horovod", "ddp", "bsp"), Goal("<=", 0.15))
GOALS |= dict.fromkeys(("epoch_average", "local_sgd", "epoch_async"), Goal("<=", 0.25))
GOAL = Goal("<=", 0.5)


def main(wanted: Sequence[str] = ()) -> Iterator[Finding]:
    """Every strategy of more than one worker, or those `wanted`."""
    torch.set_num_threads(1)
    training = Training(epochs=EPOCHS, batch_per_worker=BATCH, evaluate_every=0)
    dataset = open_dataset(prepare(training, WORKERS))
    machine = stated_machine()
    gc.freeze()  # what imports have made, as in the processes of `--jobs`
    bare = make_run(training, "allreduce")
    for strategy in strategies(wanted):
        run = make_run(training, strategy.name).model_copy(
            update={"strategy": strategy}
        )
        comparison = compare(
            lambda run=run: completed(run, dataset, machine),
            lambda: bare_loop(bare, dataset),
            PAIRS,
            time.process_time,
        )
        goal = GOAL if strategy.options else GOALS.get(strategy.name, GOAL)
        yield comparison.finding(
            f"{WORKERS} virtual workers / bare loop: {strategy}", goal
        )


def strategies(wanted: Sequence[str] = ()) -> list[Component]:
    """The default study's first, then the others by name, then options that change what is computed."""
    others = sorted(set(registry.names()) - {"serial", *DEFAULTS})
    every = [*(Component(name=name) for name in (*DEFAULTS, *others)), *VARIANTS]
    return [component for component in every if not wanted or component.name in wanted]


def completed(run: Run, dataset: Dataset, machine: Machine) -> None:
    ((_, outcome, _),) = simulate_alike([run], dataset, machine)
    if outcome.status != "completed":
        raise SystemExit(f"{run.strategy}: {outcome.status}: {outcome.error}")


def make_run(training: Training, strategy: str) -> Run:
    return Run(
        **training.model_dump(), study="bench", run_id=strategy, config_hash="", execution="virtual", engine="virtual",
        strategy=Component(name=strategy), workers=WORKERS, repetition=0, seed=0,
    )  # fmt: skip


def bare_loop(run: Run, dataset: Dataset) -> None:
    """A loop written by hand: one model, batches sliced from a shuffled tensor, torch's SGD with its defaults."""
    plan = BatchPlan.of(run, run.workers, run.seed, dataset)
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=run.lr, momentum=0.9)
    x, y = torch.tensor(dataset.x_train), torch.tensor(dataset.y_train)
    steps = int(plan.batch_sizes(0).size)
    for _ in range(run.epochs):
        order = torch.randperm(len(x))
        xs, ys = x[order], y[order]
        bounds = torch.linspace(0, len(x), steps + 1).long().tolist()
        for low, high in pairwise(bounds):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(
                model(xs[low:high]), ys[low:high]
            ).backward()
            optimizer.step()


def stated_machine() -> Machine:
    """Costs do not matter here: only the wall time of the simulation is looked at."""
    times = {
        "data_s": [1e-6],
        "forward_s": [1e-4],
        "backward_s": [1e-4],
        "update_s": [5e-5],
    }
    batch = BatchTimes(samples=8, **times, release=[1.0, 0.9, 0.7, 0.6])
    jitter = [0.9, 1.0, 1.1]
    table = StepTable(
        source="stated",
        busy_workers=2,
        batches=[batch],
        shuffle_s_per_sample=0.0,
        jitter=jitter,
    )
    names = ("mpi", "horovod", "gloo", "mpi-onesided")
    costs = [
        EngineCost(
            engine=name, ranks=2, alpha_s=1e-5, points=[(4, 1e-5)], source="stated"
        )
        for name in names
    ]
    return Machine(load_cluster("this-machine"), EngineCosts(entries=costs), [table])


if __name__ == "__main__":
    show(main(sys.argv[1:]))
