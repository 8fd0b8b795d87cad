"""Two ranks over gloo: DDP with torch's powerSGD_hook, and our factors over the same gradients.

Prints the largest difference of the weights after ten steps, how far they moved, how
many collectives of the second kind ours made per step, and torch's buckets: as our ddp
asks for them, and as it would make them of this model.
"""

import copy
import os
import sys
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import (
    PowerSGDState,
    powerSGD_hook,
)
from torch.nn.parallel import DistributedDataParallel

from scalebench.strategies.compression import PowerSgd
from scalebench.strategies.ddp import Ddp
from scalebench.system.clock import WallClock

STEPS, START, RANK, LR = 10, 2, 2, 0.05


class Gloo:
    def __init__(self):
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.elements = []

    def allreduce_(self, tensor, op):
        assert op == "mean"
        dist.all_reduce(tensor)
        tensor.div_(self.size)
        self.elements.append(tensor.numel())

    def cached(self, make):
        return make()


def buckets(wrapped):
    """How many it has, once it has seen the order of the gradients."""
    return len(wrapped._get_ddp_logging_data()["rebuilt_bucket_sizes"].split(","))


def usual_buckets(model, rank):
    wrapped = DistributedDataParallel(copy.deepcopy(model))
    for step in range(3):
        loss_of(wrapped, *batch(rank, step)).backward()
    return buckets(wrapped)


def batch(rank, step):
    random = torch.Generator().manual_seed(100 * step + rank)
    return (
        torch.randn(16, 20, generator=random, dtype=torch.float64) for _ in range(2)
    )


def loss_of(model, x, y):
    return (model(x) - y[:, :6]).square().mean()


def work(rank, store, results):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2
    )
    torch.manual_seed(5)
    theirs = nn.Sequential(
        nn.Linear(20, 400), nn.Tanh(), nn.Linear(400, 400), nn.Tanh(), nn.Linear(400, 6)
    ).double()
    ours = copy.deepcopy(theirs)
    start = torch.cat([p.detach().view(-1) for p in theirs.parameters()])
    usual = usual_buckets(theirs, rank)
    wrapped = DistributedDataParallel(
        theirs, bucket_cap_mb=Ddp(compression="powersgd").torchs_cap(start.nbytes)
    )
    state = PowerSGDState(
        None, matrix_approximation_rank=RANK, start_powerSGD_iter=START
    )
    wrapped.register_comm_hook(state, powerSGD_hook)
    comm = Gloo()
    worker = SimpleNamespace(
        state=SimpleNamespace(),
        comm=comm,
        clock=WallClock(),
        model=ours,
        gradients=torch.zeros_like(start),
    )
    rule = PowerSgd(worker, RANK, START)
    for step in range(STEPS):
        x, y = batch(rank, step)
        loss_of(wrapped, x, y).backward()
        loss_of(ours, x, y).backward()
        gradient = torch.cat([p.grad.view(-1) for p in ours.parameters()])
        rule.mean_(gradient)
        with torch.no_grad():
            for p, g in zip(
                ours.parameters(),
                gradient.split([p.numel() for p in ours.parameters()]),
                strict=True,
            ):
                p -= LR * g.view_as(p)
                p.grad = None
            for p in theirs.parameters():
                p -= LR * p.grad
                p.grad = None
    flat = [
        torch.cat([p.detach().view(-1) for p in model.parameters()])
        for model in (theirs, ours)
    ]
    if rank == 0:
        compressed = (len(comm.elements) - START) / (STEPS - START) - 1
        moved = (flat[0] - start).abs().max().item()
        results.put(
            (
                (flat[0] - flat[1]).abs().max().item(),
                moved,
                compressed,
                buckets(wrapped),
                usual,
            )
        )
    dist.barrier()
    # gloo's threads, let go by an interpreter that ends, sometimes abort it
    os._exit(0)


if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    multiprocessing.spawn(work, (sys.argv[1], results), 2)
    print(*results.get())
