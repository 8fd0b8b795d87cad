"""One step of a small network as a replica takes it, and as scripts with Horovod and with DDP do.

The differences between them are what an engine's hooks, copies and wrappers cost.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from scalebench.flat import flatten
from scalebench.optimizers import build_optimizer
from scalebench.study.spec import Component

Step = Callable[[], None]


def probed_network() -> torch.nn.Module:
    """Two layers: four tensors, as many as the hooks of an MLP hand over."""
    return torch.nn.Sequential(torch.nn.Linear(96, 96), torch.nn.ReLU(), torch.nn.Linear(96, 16))


def plain_step() -> Step:
    """As a replica steps: one flat buffer, and the optimizer for it."""
    net, x = probed_network(), torch.randn(8, 96)
    flat, gradients = flatten(net)
    parameter = torch.nn.Parameter(flat)
    parameter.grad = gradients
    optimizer = build_optimizer(Component(name="sgd", options={"momentum": 0.9}), [parameter], 1e-6, flat=True)

    def step() -> None:
        gradients.zero_()
        net(x).sum().backward()
        optimizer.step()

    return step


def horovod_step() -> Step:
    """As a script with Horovod steps: a wrapped optimizer, tensor by tensor."""
    import horovod.torch as hvd

    net, x = probed_network(), torch.randn(8, 96)
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

    net, x = probed_network(), torch.randn(8, 96)
    _, gradients = flatten(net)
    wrapped = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-6, momentum=0.9)

    def step() -> None:
        gradients.zero_()
        wrapped(x).sum().backward()
        optimizer.step()

    return step
