"""Work of a worker under torch's styles: the share of the model's step by which a pace is divided."""

from __future__ import annotations

from collections import Counter

import pytest

from scalebench.comm.torch_dist import silent_group
from scalebench.data.batch_plan import BatchPlan
from scalebench.strategies import registry
from scalebench.strategies.base import Batch
from scalebench.system.clock import Task, WallClock
from scalebench.training.replica import Replica


def test_torchs_styles_take_the_share_of_a_step_that_our_program_takes(make_run, blobs):
    """Half of the products' work: a paced step took the time of the whole model on each of both workers."""
    run = make_run({"torch_tensor": {"degree": 2}}, 2)
    shares = {engine: Counter() for engine in ("virtual", "gloo")}
    for engine, found in shares.items():
        strategy = registry.create("torch_tensor", {"degree": 2}, engine)
        mesh = strategy.traits.mesh(2)
        plan = BatchPlan.of(run, 2, run.seed, blobs, mesh.parts)
        with silent_group(2, WallClock()) as comm:
            comm.clock.did = lambda task, samples=0, share=1.0, to=found: to.update(
                {task: share}
            )
            replica = Replica(run, blobs, plan, comm, comm.clock, mesh=mesh)
            strategy.setup(replica)
            x, y = replica.shard.epoch(0)
            replica.gradient(Batch(x[:4], y[:4], 1.0, 0, first_of_block=True))
    for task in (Task.FORWARD, Task.BACKWARD):
        assert 0.4 < shares["virtual"][task] < 1
        assert shares["gloo"][task] == pytest.approx(shares["virtual"][task])
