"""The gradients of several models by batches of their own, in one call; recorded at first, then repeated.

`torch.func.vmap` computes the losses of all samples, from parameters and buffers that
have a row for each model.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from scalebench.virtual.tape import Results, gradients_of, record, write

# of each parameter or buffer: the registries of modules, and its name there
Places = list[list[tuple[dict[str, Any], str]]]


@dataclass(frozen=True)
class Losses:
    """The losses of samples by a `model` whose parameters and buffers, bound at these places, are given with them.

    It is kept with gradients that are recorded. It holds no rows, so that all memory of
    a run is free when the run ends, and not at the next search for cycles.
    """

    model: nn.Module
    of_parameters: Places
    of_buffers: Places
    task: str

    def __call__(
        self,
        buffers: Sequence[Tensor],
        leaves: Sequence[Tensor],
        x: Tensor,
        y: Tensor,
    ) -> Tensor:
        """Return the losses (k, b) of the samples of k batches with the parameters `leaves`, (k, ...) each.

        `buffers`, (k, ...) each, change where they lie.
        """
        # an operation that is batched by a loop is no matter of the model's author:
        with warnings.catch_warnings():
            # which form is faster is measured
            warnings.filterwarnings("ignore", message="There is a performance drop")
            made = torch.func.vmap(self._forward_with, randomness="error")(
                tuple(leaves), tuple(buffers), x
            )
        # outside vmap, where it is one operation
        return losses_of_samples(self.task, made.flatten(0, 1), y.flatten(0, 1)).view(
            len(x), -1
        )

    def _forward_with(
        self, parameters: Sequence[Tensor], buffers: Sequence[Tensor], x: Tensor
    ) -> Tensor:
        for value, places in chain(
            zip(parameters, self.of_parameters, strict=True),
            zip(buffers, self.of_buffers, strict=True),
        ):
            for registry, name in places:
                registry[name] = value  # bound without a search by name
        made: Tensor = self.model(x)
        return made


class Gradients:
    """The gradients of k models by batches of at most b samples each; with `records` recorded at first, then repeated.

    `losses` gives the losses (k, b) of samples, from the parameters `leaves` of all
    models, x and y (k, b, ...). It may read and change `buffers` where they lie.
    """

    def __init__(
        self,
        losses: Callable[[Sequence[Tensor], Tensor, Tensor], Tensor],
        leaves: Sequence[Tensor],
        x: Tensor,
        y: Tensor,
        size: int,
        models: int = 1,
        *,
        records: bool,
        buffers: Sequence[Tensor] = (),
    ) -> None:
        self._losses, self._leaves, self._records = losses, leaves, records
        self._buffers = buffers
        self._x, self._y = (
            like.new_zeros(models, size, *like.shape[1:]) for like in (x, y)
        )
        # of each sample in what is differentiated, and in the mean
        self._shares = leaves[0].new_zeros(2, models, size)
        self._shared: tuple[list[int], list[float]] = (
            [],
            [],
        )  # sizes and weights of these shares
        self._repeat: Callable[[], Results] | None = None

    def into(
        self,
        targets: Sequence[Tensor],
        x: Sequence[Tensor],
        y: Sequence[Tensor],
        sizes: list[int],
        weights: list[float],
        *,
        add: bool,
    ) -> tuple[Tensor, Tensor]:
        """Write (`add`: add) the gradients of weight * mean loss of each batch to `targets`, one for each parameter.

        `targets` have a row for each batch, of which there may be fewer than models.
        Returns the losses of samples (k, b) and of batches (k,).
        """
        # They seldom change: mostly where the batches of an epoch are a sample short.
        if self._shared != (sizes, weights):
            self._share(sizes, weights)
        _fill(self._x, x, sizes)
        _fill(self._y, y, sizes)
        if self._repeat is not None:
            results = self._repeat()
        elif self._records:
            results, self._repeat = record(
                self._compute,
                [self._x, self._y, self._shares, *self._leaves, *self._buffers],
            )
        else:
            results = self._compute()
        of_samples, means, *gradients = results
        if len(x) < self._x.shape[0]:
            gradients = [each if each is None else each[: len(x)] for each in gradients]
        write(gradients, targets, add=add)
        assert of_samples is not None
        assert means is not None
        return of_samples, means

    def _share(self, sizes: list[int], weights: list[float]) -> None:
        self._shared = sizes, weights
        samples = np.array(sizes)[:, None]
        means = np.where(np.arange(self._x.shape[1]) < samples, 1 / samples, 0.0)
        self._shares.zero_()
        shares = torch.from_numpy(np.stack([means * np.array(weights)[:, None], means]))
        self._shares[:, : len(sizes)].copy_(shares)

    def _compute(self) -> Results:
        with torch.enable_grad():
            of_samples = self._losses(self._leaves, self._x, self._y)
        found = gradients_of(of_samples, self._shares[0], self._leaves)
        of_samples = of_samples.detach()
        return (of_samples, (of_samples * self._shares[1]).sum(dim=1), *found)


def losses_of_samples(task: str, outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the loss of each sample, (n,), whose mean is the `loss_for` the task."""
    loss = (
        nn.functional.cross_entropy
        if task == "classification"
        else nn.functional.mse_loss
    )
    found = loss(outputs, targets, reduction="none")
    return found if found.dim() == 1 else found.reshape(len(targets), -1).mean(dim=1)


def _fill(room: Tensor, batches: Sequence[Tensor], sizes: Sequence[int]) -> None:
    """Copy batches into the first rows of `room`, (k, b, ...), filled up with their first samples for finite losses."""
    room = room[: len(batches)]
    size = room.shape[1]
    if min(sizes) == size:
        torch.stack(tuple(batches), out=room)
        return
    pieces: list[Tensor] = []
    for batch, samples in zip(batches, sizes, strict=True):
        pieces.append(batch)
        if samples < size:
            pieces.append(batch[:1].expand(size - samples, *batch.shape[1:]))
    torch.cat(pieces, out=room.view(-1, *room.shape[2:]))


def places_of(model: nn.Module, tensors: Sequence[Tensor]) -> Places:
    """Return where each parameter or buffer is bound; a shared one is bound in several places."""
    found: dict[Tensor, list[tuple[dict[str, Any], str]]] = {}
    for module in model.modules():
        registries: list[dict[str, Any]] = [module._parameters, module._buffers]
        for registry in registries:
            for name, tensor in registry.items():
                if tensor is not None:
                    found.setdefault(tensor, []).append((registry, name))
    return [found[tensor] for tensor in tensors]
