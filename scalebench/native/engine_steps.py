"""The reference step as scripts with Horovod and with DDP take it: with their hooks, copies and wrappers."""

from __future__ import annotations

import torch

from scalebench.models.flat import flatten
from scalebench.training.reference_step import Step, reference_network


def horovod_step() -> Step:
    """As a script with Horovod steps: a wrapped optimizer, tensor by tensor."""
    import horovod.torch as hvd

    net, x = reference_network(), torch.randn(8, 96)
    _, gradients = flatten(net)
    plain = torch.optim.SGD(net.parameters(), lr=1e-6, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(plain, named_parameters=net.named_parameters())

    def step() -> None:
        gradients.zero_()
        net(x).sum().backward()
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            optimizer.step()

    return step


def ddp_step() -> Step:
    """As a script with DDP steps: a wrapped module, buckets."""
    from torch.nn.parallel import DistributedDataParallel

    net, x = reference_network(), torch.randn(8, 96)
    _, gradients = flatten(net)
    wrapped = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-6, momentum=0.9)

    def step() -> None:
        gradients.zero_()
        wrapped(x).sum().backward()
        optimizer.step()

    return step
