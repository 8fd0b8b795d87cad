"""Strategies whose workers hold parts of a model against the library's own, on real processes with gloo.

    python benchmarks/parts_of_models.py

Same model (a vision transformer of 4.8 million parameters), same batch, same cut, step after step in turn within one
launch: `pipeline` against `torch_pipeline`, whose steps are those of torch.distributed.pipelining, and `tensor` against
`torch_tensor`, whose products are divided by torch.distributed.tensor.parallel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from ranks import findings_of_ranks
from ratios import Finding, Goal, compare, show
from torch import Tensor, nn

PAIRS, STEPS = 15, 2  # pairs; steps of each
GOAL = Goal("<=", 1.05)
BATCH = 32
LINES: dict[
    str, tuple[str, dict[str, Any]]
] = {  # strategy, beside torch_NAME, and options of both
    "pipeline / torch's, gpipe": ("pipeline", {"schedule": "gpipe"}),
    "pipeline / torch's, 1f1b": ("pipeline", {"schedule": "1f1b"}),
    "pipeline / torch's, interleaved": ("pipeline", {"schedule": "interleaved"}),
    "tensor / torch's": ("tensor", {}),
}


class Patches(nn.Module):
    """Patches of 4 x 4 pixels, with learned positions."""

    def __init__(self, planes: int, side: int, width: int) -> None:
        super().__init__()
        self.project = nn.Conv2d(planes, width, 4, stride=4)
        self.positions = nn.Parameter(0.02 * torch.randn(1, (side // 4) ** 2, width))

    def forward(self, x: Tensor) -> Tensor:
        patches: Tensor = self.project(x).flatten(2).transpose(1, 2)
        return patches + self.positions


class Mean(nn.Module):
    """Mean over the patches."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(dim=1)


def vit(
    input_shape: tuple[int, ...], outputs: int, width: int = 256, depth: int = 6
) -> nn.Module:
    """A vision transformer whose blocks are layers."""
    blocks = [
        nn.TransformerEncoderLayer(
            width, 8, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
        )
        for _ in range(depth)
    ]
    patches = Patches(input_shape[0], input_shape[1], width)
    return nn.Sequential(
        patches, *blocks, nn.LayerNorm(width), Mean(), nn.Linear(width, outputs)
    )


def main() -> Iterator[Finding]:
    yield from findings_of_ranks("parts_of_models", "gloo")


def measure_here(engine: str) -> list[Finding]:
    """Every rank: a step of ours and of torch's, in turn, for each strategy."""
    from mpi4py import MPI

    from scalebench.comm.engines import named
    from scalebench.comm.engines.base import Place
    from scalebench.data.catalog import prepare
    from scalebench.data.dataset import open_dataset
    from scalebench.study.spec import Component, Training
    from scalebench.system.clock import WallClock

    world = MPI.COMM_WORLD
    torch.set_num_threads(1)
    data = Component(
        name="synthetic",
        options={
            "kind": "images",
            "n_train": 4 * BATCH,
            "n_test": BATCH,
            "shape": [3, 32, 32],
        },
    )
    training = Training(
        epochs=1, batch_per_worker=BATCH, model=f"{__file__}:vit", dataset=data, lr=1e-3
    )
    dataset = open_dataset(prepare(training, world.size))
    clock = WallClock()
    found = []
    with named(engine).connect(Place(world, clock, one_node=True)) as comm:
        clock.start()
        for line, (name, options) in LINES.items():
            ours, theirs = (
                steps_of(strategy, options, training, dataset, comm, clock)
                for strategy in (name, f"torch_{name}")
            )
            named_line = f"ViT on {world.size} ranks: {line}"
            found.append(compare(ours, theirs, PAIRS).finding(named_line, GOAL, STEPS))
    return found


def steps_of(
    strategy: str,
    options: dict[str, Any],
    training: Any,
    dataset: Any,
    comm: Any,
    clock: Any,
) -> Callable[[], None]:
    """Return the first steps of an epoch as a real run takes them."""
    from scalebench.data.batch_plan import BatchPlan
    from scalebench.strategies import registry
    from scalebench.study.spec import Component, Run
    from scalebench.training.replica import Replica

    run = Run(
        **training.model_dump(), study="bench", run_id="step", config_hash="", execution="native", engine=comm.engine,
        strategy=Component(name=strategy, options=options), workers=comm.size, repetition=0, seed=0,
    )  # fmt: skip
    program = registry.create(strategy, options, comm.engine)
    mesh = program.traits.mesh(comm.size)
    plan = BatchPlan.of(run, comm.size, run.seed, dataset, mesh.parts)
    replica = Replica(run, dataset, plan, comm, clock, mesh=mesh)
    program.setup(replica)
    batch = next(replica.batches(0))

    def take() -> None:
        for _ in range(STEPS):
            replica.gradient(batch)
            replica.update()

    return take


if __name__ == "__main__":
    show(main())
