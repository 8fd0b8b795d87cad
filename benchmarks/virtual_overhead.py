"""64 virtual workers against a bare PyTorch loop that takes the same number of optimizer steps on the same batches.

    python benchmarks/virtual_overhead.py

Goal: at most 1.3 for every strategy.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from ratios import Finding, Goal, compare, show

from scalebench.cluster.engine_costs import EngineCost, EngineCosts
from scalebench.cluster.load import load_cluster
from scalebench.data.catalog import prepare
from scalebench.data.dataset import Dataset, open_dataset
from scalebench.data.plan import Plan
from scalebench.study.spec import Component, Run, Training
from scalebench.virtual.engine import Scenery, simulate
from scalebench.virtual.step_times import BatchTimes, StepTable

WORKERS, EPOCHS, PAIRS = 64, 3, 9
STRATEGIES = ("allreduce", "horovod", "ddp", "epoch_average", "epoch_async")
GOAL = Goal("<=", 1.3)


def main() -> Iterator[Finding]:
    torch.set_num_threads(1)
    training = Training(epochs=EPOCHS, evaluate_every=0)
    dataset = open_dataset(prepare(training, WORKERS))
    scenery = stated_scenery()
    for strategy in STRATEGIES:
        run = make_run(training, strategy)
        comparison = compare(
            lambda run=run: simulate(run, dataset, scenery), lambda run=run: bare_loop(run, dataset), PAIRS
        )
        yield comparison.finding(f"{WORKERS} virtual workers / bare loop: {strategy}", GOAL)


def make_run(training: Training, strategy: str) -> Run:
    return Run(
        **training.model_dump(), study="bench", run_id=strategy, config_hash="", execution="virtual", engine="virtual",
        strategy=Component(name=strategy), workers=WORKERS, repetition=0, seed=0,
    )  # fmt: skip


def bare_loop(run: Run, dataset: Dataset) -> None:
    """What one writes by hand: one model, batches sliced from a shuffled tensor, torch's SGD with its defaults."""
    plan = Plan.of(run, run.workers, run.seed, dataset)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=run.lr, momentum=0.9)
    x, y = torch.tensor(dataset.x_train), torch.tensor(dataset.y_train)
    steps = int(plan.batch_sizes(0).size)
    for _ in range(run.epochs):
        order = torch.randperm(len(x))
        xs, ys = x[order], y[order]
        bounds = torch.linspace(0, len(x), steps + 1).long().tolist()
        for low, high in pairwise(bounds):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(xs[low:high]), ys[low:high]).backward()
            optimizer.step()


def stated_scenery() -> Scenery:
    """Costs do not matter here: only the wall time of the simulation is looked at."""
    batch = BatchTimes(samples=8, data_s=[1e-6], forward_s=[1e-4], backward_s=[1e-4], update_s=[5e-5])
    table = StepTable(
        source="stated", busy_workers=2, batches=[batch], shuffle_s_per_sample=0.0, release=[1.0, 0.9, 0.7, 0.6],
        jitter=[0.9, 1.0, 1.1],
    )  # fmt: skip
    names = ("mpi", "horovod", "gloo", "mpi-onesided")
    costs = [EngineCost(engine=name, ranks=2, alpha_s=1e-5, points=[(4, 1e-5)], source="stated") for name in names]
    return Scenery(load_cluster("this-machine"), EngineCosts(entries=costs), [table])


if __name__ == "__main__":
    show(main())
