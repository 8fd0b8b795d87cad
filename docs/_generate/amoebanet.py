"""AmoebaNet-D: Real, Aggarwal, Huang and Le, AAAI 2019 (arXiv 1802.01548), as torchgpipe measured it.

Each cell reads the outputs of the two cells before it, and adds up five pairs of
operations on these and on earlier sums. The pairs, the states that a normal cell gives
(0, 3, 4 and 6, where the paper's figure has 4, 5 and 6) and the average in place of the
maximum of 3 x 3 pixels are those of kakaobrain/torchgpipe@a4710261, benchmarks/models/
amoebanet, with which its authors come to the numbers of parameters of GPipe's paper
(Huang et al., NeurIPS 2019, table 1).
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

import torch
from torch import Tensor, nn

States = tuple[Tensor, Tensor]  # outputs of the last cell and of the one before it


class Pair(NamedTuple):
    """Operations on two states of a cell, whose sum is its next state."""

    first: int
    of_first: str
    second: int
    of_second: str


NORMAL = (
    Pair(1, "1x1", 1, "mean3"),
    Pair(1, "same", 0, "1x7"),
    Pair(0, "1x1", 0, "1x7"),
    Pair(2, "mean3", 2, "same"),
    Pair(1, "mean3", 5, "1x1"),
)
NORMAL_GIVES = (0, 3, 4, 6)

REDUCTION = (
    Pair(0, "max2", 0, "mean3"),
    Pair(2, "same", 1, "3x3"),
    Pair(2, "1x7", 2, "mean3"),
    Pair(3, "same", 1, "max2"),
    Pair(2, "mean3", 3, "1x1"),
)
REDUCTION_GIVES = (4, 5, 6)


def operation(name: str, width: int, stride: int) -> nn.Module:
    """Return an operation that keeps the number of planes; convolutions wider than a pixel have a quarter of them."""
    narrow = width // 4
    if name == "same":
        return nn.Identity()
    if name == "mean3":
        return nn.AvgPool2d(3, stride, padding=1, count_include_pad=False)
    if name == "max2":
        return nn.MaxPool2d(2, stride)
    if name == "1x1":
        return normed(width, width, stride=stride)
    if name == "3x3":
        inner = [normed(narrow, narrow, 3, stride)]
    else:
        inner = [
            normed(narrow, narrow, (1, 7), (1, stride)),
            normed(narrow, narrow, (7, 1), (stride, 1)),
        ]
    return nn.Sequential(normed(width, narrow), *inner, normed(narrow, width))


def normed(
    before: int,
    after: int,
    size: int | tuple[int, int] = 1,
    stride: int | tuple[int, int] = 1,
) -> nn.Sequential:
    """Return ReLU, a padded convolution and batch normalisation."""
    sides = (size, size) if isinstance(size, int) else size
    pad = (sides[0] // 2, sides[1] // 2)
    return nn.Sequential(
        OrderedDict[str, nn.Module](
            relu=nn.ReLU(),
            conv=nn.Conv2d(before, after, size, stride, pad, bias=False),
            norm=nn.BatchNorm2d(after),
        )
    )


class Halving(nn.Module):
    """Convolutions of every second pixel, half of the planes each, of which one begins a pixel later."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.relu = nn.ReLU()
        self.pad = nn.ZeroPad2d((0, 1, 0, 1))
        self.even, self.odd = (
            nn.Conv2d(before, after // 2, 1, 2, bias=False) for _ in range(2)
        )
        self.norm = nn.BatchNorm2d(after)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(x)
        later = self.pad(x[:, :, 1:, 1:])
        halved: Tensor = self.norm(torch.cat([self.even(x), self.odd(later)], 1))
        return halved


class Cell(nn.Module):
    """A cell of `width` planes a state; the cell before it may have halved the sides."""

    def __init__(
        self,
        before: tuple[int, int],
        width: int,
        *,
        reduction: bool,
        after_reduction: bool,
    ) -> None:
        super().__init__()
        self.pairs = REDUCTION if reduction else NORMAL
        self.gives = REDUCTION_GIVES if reduction else NORMAL_GIVES
        last, earlier = before
        self.last = normed(last, width)
        self.earlier = (Halving if after_reduction else normed)(earlier, width)
        self.operations = nn.ModuleList()
        for first, of_first, second, of_second in self.pairs:
            for state, name in ((first, of_first), (second, of_second)):
                # Sums have half the sides already.
                stride = 2 if reduction and state < 2 else 1
                self.operations.append(operation(name, width, stride))

    def forward(self, given: Tensor | States) -> States:
        last, earlier = given if isinstance(given, tuple) else (given, given)
        states = [self.last(last), self.earlier(earlier)]
        operations = iter(self.operations)
        for first, _, second, _ in self.pairs:
            of_first = next(operations)(states[first])
            states.append(of_first + next(operations)(states[second]))
        return torch.cat([states[state] for state in self.gives], 1), last


class Classifier(nn.Module):
    """Mean of 7 x 7 pixels and a fully connected layer, on the output of the last cell."""

    def __init__(self, before: int) -> None:
        super().__init__()
        self.mean = nn.AvgPool2d(7)
        self.head = nn.Linear(before, 1000)

    def forward(self, states: States) -> Tensor:
        logits: Tensor = self.head(self.mean(states[0]).flatten(1))
        return logits


def amoebanet_d(depth: int, filters: int) -> nn.Sequential:
    """Return AmoebaNet-D (L, F): L normal cells in three groups, and reduction cells between and before them.

    The sequence can be cut before each cell, where two tensors cross.
    """
    width = filters // 4
    layers = OrderedDict[str, nn.Module](stem1=normed(3, width, 3, 2))
    before = (width, width)
    after_reduction = False
    group = ["normal"] * (depth // 3)
    cells = ["stem", "stem", *group, "reduction", *group, "reduction", *group]
    for place, kind in enumerate(cells, 2):
        reduction = kind != "normal"
        width *= 2 if reduction else 1
        cell = Cell(before, width, reduction=reduction, after_reduction=after_reduction)
        layers[f"{kind}{place}"] = cell
        before = (width * len(cell.gives), before[0])
        after_reduction = reduction
    layers["classifier"] = Classifier(before[0])
    return nn.Sequential(layers)
