"""Training in micro-batches by torch alone, which workers that hold parts of a model have to reproduce."""

import numpy as np
import torch

from scalebench.data.batch_plan import BatchPlan
from scalebench.data.layout import cut
from scalebench.models.metric import loss_for
from scalebench.models.registry import build_model


def trained_alone(run, dataset, replicas=1, micro_batches=1):
    """Return the final weights of `replicas` whole models, whose gradients are averaged by samples after every batch.

    Each takes its batches in micro-batches, and has statistics of its own.
    """
    dtype = getattr(torch, run.dtype)
    plan = BatchPlan.of(run, replicas, run.seed, dataset)
    models = [
        build_model(
            run.model,
            dataset.input_shape,
            dataset.outputs,
            dataset.task,
            dtype,
            run.seed,
        )
        for _ in range(replicas)
    ]
    options = run.optimizer.options
    if run.optimizer.name == "adam":
        optimizers = [torch.optim.Adam(model.parameters(), run.lr) for model in models]
    else:
        optimizers = [
            torch.optim.SGD(model.parameters(), run.lr, options.get("momentum", 0.0))
            for model in models
        ]
    loss = loss_for(dataset.task)
    for epoch in range(run.epochs):
        bounds = [plan.bounds(epoch, rank) for rank in range(replicas)]
        rows = [plan.indices(epoch, rank) for rank in range(replicas)]
        for step in range(plan.steps(epoch)):
            samples = [int(own[step + 1] - own[step]) for own in bounds]
            for rank, model in enumerate(models):
                here = rows[rank][bounds[rank][step] : bounds[rank][step + 1]]
                x, y = (
                    torch.from_numpy(dataset.x_train[here]).to(dtype),
                    torch.from_numpy(dataset.y_train[here]),
                )
                optimizers[rank].zero_grad()
                sizes = cut(len(here), min(micro_batches, len(here))).tolist()
                for own_x, own_y in zip(x.split(sizes), y.split(sizes), strict=True):
                    (loss(model(own_x), own_y) * len(own_x) / len(here)).backward()
            of_all = [
                [p.grad * n / sum(samples) for p in m.parameters()]
                for m, n in zip(models, samples, strict=True)
            ]
            mean = [sum(same) for same in zip(*of_all, strict=True)]
            for model, optimizer in zip(models, optimizers, strict=True):
                for parameter, gradient in zip(model.parameters(), mean, strict=True):
                    parameter.grad = gradient.clone()
                optimizer.step()
    return torch.cat(
        [parameter.detach().reshape(-1) for parameter in models[0].parameters()]
    )


def images(samples=96, test=24):
    """Return images of 8 x 8 whose classes are patterns with noise."""
    from scalebench.data.dataset import Dataset

    random = np.random.default_rng(5)
    patterns = random.standard_normal((3, 1, 8, 8))
    y = np.arange(samples + test) % 3
    x = (patterns[y] + random.standard_normal((samples + test, 1, 8, 8))).astype(
        np.float32
    )
    y = y.astype(np.int64)
    return Dataset(
        "patterns",
        "classification",
        3,
        x[:samples],
        y[:samples],
        x[samples:],
        y[samples:],
    )
