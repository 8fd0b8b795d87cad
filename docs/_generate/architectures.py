"""Published architectures as torch modules, of which layer tables are counted."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

Size = int | tuple[int, int]


def conv(
    before: int,
    after: int,
    size: Size,
    stride: int = 1,
    pad: Size = 0,
    *,
    relu: bool = True,
) -> nn.Sequential:
    """Return convolution, batch normalisation and ReLU."""
    layers = OrderedDict[str, nn.Module](
        conv=nn.Conv2d(before, after, size, stride, pad, bias=False),
        norm=nn.BatchNorm2d(after),
    )
    if relu:
        layers["relu"] = nn.ReLU(inplace=True)
    return nn.Sequential(layers)


class Dropout(nn.Module):
    """Dropout as one kernel with a mask of bytes, as on a GPU."""

    def __init__(self, share: float = 0.5) -> None:
        super().__init__()
        self.share = share

    def forward(self, x: Tensor) -> Tensor:
        return torch.native_dropout(x, self.share, True)[0] if self.share > 0 else x


class Bottleneck(nn.Module):
    """Convolutions 1 x 1, 3 x 3 and 1 x 1; the stride is in the second one (ResNet v1.5)."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        after = 4 * width
        self.branch = nn.Sequential(
            conv(before, width, 1),
            conv(width, width, 3, stride, 1),
            conv(width, after, 1, relu=False),
        )
        self.shortcut = (
            conv(before, after, 1, stride, relu=False)
            if stride > 1 or before != after
            else nn.Identity()
        )
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        summed: Tensor = self.relu(self.branch(x).add_(self.shortcut(x)))
        return summed


def resnet(blocks: Sequence[int]) -> nn.Module:
    """He, Zhang, Ren and Sun, CVPR 2016, table 1."""
    layers = OrderedDict[str, nn.Module](
        stem=conv(3, 64, 7, 2, 3), pool=nn.MaxPool2d(3, 2, 1)
    )
    before = 64
    for stage, count in enumerate(blocks):
        width = 64 << stage
        for place in range(count):
            stride = 2 if stage and not place else 1
            layers[f"stage{stage + 1}_{place + 1}"] = Bottleneck(before, width, stride)
            before = 4 * width
    layers.update(
        mean=nn.AdaptiveAvgPool2d(1), flatten=nn.Flatten(), head=nn.Linear(before, 1000)
    )
    return nn.Sequential(layers)


def _classified(convolutions: list[nn.Module], *widths: int) -> nn.Module:
    """Return `convolutions` and fully connected layers, with dropout before each of these but the last."""
    layers: list[nn.Module] = []
    for fan_in, fan_out in pairwise(widths):
        layers += [nn.ReLU(inplace=True), Dropout()] if layers else []
        layers.append(nn.Linear(fan_in, fan_out))
    return nn.Sequential(
        OrderedDict(
            features=nn.Sequential(*convolutions),
            flatten=nn.Flatten(),
            classifier=nn.Sequential(*layers),
        )
    )


def vgg16() -> nn.Module:
    """Simonyan and Zisserman, ICLR 2015, table 1, configuration D."""
    layers: list[nn.Module] = []
    before = 3
    for width, count in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(count):
            layers += [nn.Conv2d(before, width, 3, padding=1), nn.ReLU(inplace=True)]
            before = width
        layers.append(nn.MaxPool2d(2))
    return _classified(layers, 512 * 7 * 7, 4096, 4096, 1000)


def alexnet() -> nn.Module:
    """Krizhevsky, 2014 (arXiv 1404.5997), figure 1: the network of 2012 in one column."""
    layers: list[nn.Module] = []
    before = 3
    for width, size, stride, pad, pooled in (
        (64, 11, 4, 2, True),
        (192, 5, 1, 2, True),
        (384, 3, 1, 1, False),
        (256, 3, 1, 1, False),
        (256, 3, 1, 1, True),
    ):
        layers += [nn.Conv2d(before, width, size, stride, pad), nn.ReLU(inplace=True)]
        layers += [nn.MaxPool2d(3, 2)] if pooled else []
        before = width
    return _classified(layers, 256 * 6 * 6, 4096, 4096, 1000)


class Branches(nn.Module):
    """Branches on one input, their planes side by side."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], 1)


class InceptionV3(nn.Module):
    """Szegedy et al., CVPR 2016, table 1, with the auxiliary classifier where `auxiliary`."""

    def __init__(self, *, auxiliary: bool = True) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            conv(3, 32, 3, 2), conv(32, 32, 3), conv(32, 64, 3, 1, 1), nn.MaxPool2d(3, 2),
            conv(64, 80, 1), conv(80, 192, 3), nn.MaxPool2d(3, 2),
        )  # fmt: skip
        self.grids = nn.Sequential(
            *(
                self._grid_35(before, pooled)
                for before, pooled in ((192, 32), (256, 64), (288, 64))
            ),
            Branches(
                conv(288, 384, 3, 2),
                nn.Sequential(
                    conv(288, 64, 1), conv(64, 96, 3, 1, 1), conv(96, 96, 3, 2)
                ),
                nn.MaxPool2d(3, 2),
            ),
            *(self._grid_17(width) for width in (128, 160, 160, 192)),
        )
        self.auxiliary = (
            nn.Sequential(
                nn.AvgPool2d(5, 3),
                conv(768, 128, 1),
                conv(128, 768, 5),
                nn.AdaptiveAvgPool2d(1),
                nn.Flatten(),
                nn.Linear(768, 1000),
            )
            if auxiliary
            else None
        )
        self.last = nn.Sequential(
            Branches(
                nn.Sequential(conv(768, 192, 1), conv(192, 320, 3, 2)),
                nn.Sequential(
                    conv(768, 192, 1), *self._cross(192, 192, 192), conv(192, 192, 3, 2)
                ),
                nn.MaxPool2d(3, 2),
            ),
            self._grid_8(1280),
            self._grid_8(2048),
            nn.AdaptiveAvgPool2d(1),
            Dropout(),
            nn.Flatten(),
            nn.Linear(2048, 1000),
        )

    @staticmethod
    def _grid_35(before: int, pooled: int) -> nn.Module:
        return Branches(
            conv(before, 64, 1),
            nn.Sequential(conv(before, 48, 1), conv(48, 64, 5, 1, 2)),
            nn.Sequential(
                conv(before, 64, 1), conv(64, 96, 3, 1, 1), conv(96, 96, 3, 1, 1)
            ),
            nn.Sequential(nn.AvgPool2d(3, 1, 1), conv(before, pooled, 1)),
        )

    @staticmethod
    def _cross(before: int, between: int, after: int) -> tuple[nn.Module, nn.Module]:
        return conv(before, between, (1, 7), 1, (0, 3)), conv(
            between, after, (7, 1), 1, (3, 0)
        )

    @staticmethod
    def _cross_down(before: int, after: int) -> tuple[nn.Module, nn.Module]:
        return conv(before, before, (7, 1), 1, (3, 0)), conv(
            before, after, (1, 7), 1, (0, 3)
        )

    def _grid_17(self, width: int) -> nn.Module:
        return Branches(
            conv(768, 192, 1),
            nn.Sequential(conv(768, width, 1), *self._cross(width, width, 192)),
            nn.Sequential(
                conv(768, width, 1),
                *self._cross_down(width, width),
                *self._cross_down(width, 192),
            ),
            nn.Sequential(nn.AvgPool2d(3, 1, 1), conv(768, 192, 1)),
        )

    @staticmethod
    def _grid_8(before: int) -> nn.Module:
        def split(width: int) -> nn.Module:
            return Branches(
                conv(width, 384, (1, 3), 1, (0, 1)), conv(width, 384, (3, 1), 1, (1, 0))
            )

        return Branches(
            conv(before, 320, 1),
            nn.Sequential(conv(before, 384, 1), split(384)),
            nn.Sequential(conv(before, 448, 1), conv(448, 384, 3, 1, 1), split(384)),
            nn.Sequential(nn.AvgPool2d(3, 1, 1), conv(before, 192, 1)),
        )

    def forward(self, x: Tensor) -> Tensor:
        grids = self.grids(self.stem(x))
        if self.auxiliary is not None:
            self.auxiliary(grids)
        logits: Tensor = self.last(grids)
        return logits


class Attention(nn.Module):
    """Multi-head attention (Vaswani et al., 2017, section 3.2), with the matrix of scores held in memory."""

    def __init__(self, width: int, heads: int, *, dropout: float, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.softmax, self.dropout = nn.Softmax(dim=-1), Dropout(dropout)
        self.output = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        def split(y: Tensor) -> Tensor:
            return y.reshape(*y.shape[:2], self.heads, -1).transpose(1, 2)

        query, key, value = (
            split(self.query(x)),
            split(self.key(x)),
            split(self.value(x)),
        )
        scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
        if self.causal:
            scores = scores.masked_fill(
                torch.ones(scores.shape[-2:], dtype=torch.bool, device=x.device).triu(
                    1
                ),
                -1e9,
            )
        mixed = self.dropout(self.softmax(scores)) @ value
        merged: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return merged


class Block(nn.Module):
    """Attention and two fully connected layers, each normalised `first` or after the sum."""

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        first: bool,
        dropout: float,
        causal: bool = False,
    ) -> None:
        super().__init__()
        self.first = first
        self.attention = Attention(width, heads, dropout=dropout, causal=causal)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.connected = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.dropout1, self.dropout2 = Dropout(dropout), Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        if self.first:
            x = x + self.dropout1(self.attention(self.norm1(x)))
            summed: Tensor = x + self.dropout2(self.connected(self.norm2(x)))
            return summed
        x = self.norm1(x + self.dropout1(self.attention(x)))
        normed: Tensor = self.norm2(x + self.dropout2(self.connected(x)))
        return normed


class Bert(nn.Module):
    """Devlin, Chang, Lee and Toutanova, NAACL 2019: encoder and pooler, without the heads of pre-training."""

    def __init__(self, depth: int, width: int, heads: int) -> None:
        super().__init__()
        self.words, self.positions, self.segments = (
            nn.Embedding(n, width) for n in (30522, 512, 2)
        )
        self.norm, self.dropout = nn.LayerNorm(width), Dropout(0.1)
        self.blocks = nn.Sequential(
            *(Block(width, heads, first=False, dropout=0.1) for _ in range(depth))
        )
        self.pooler = nn.Sequential(nn.Linear(width, width), nn.Tanh())

    def forward(self, words: Tensor) -> Tensor:
        places = torch.arange(words.shape[1], device=words.device)
        x = (
            self.words(words)
            + self.segments(torch.zeros_like(words))
            + self.positions(places)
        )
        pooled: Tensor = self.pooler(self.blocks(self.dropout(self.norm(x)))[:, 0])
        return pooled


class VisionTransformer(nn.Module):
    """Dosovitskiy et al., ICLR 2021, ViT-B/16: 12 layers of width 768 on patches of 16 x 16 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 768, 16, 16)
        self.token = nn.Parameter(torch.zeros(1, 1, 768))
        self.positions = nn.Parameter(torch.zeros(1, 197, 768))
        self.blocks = nn.Sequential(
            *(Block(768, 12, first=True, dropout=0.0) for _ in range(12))
        )
        self.norm, self.head = nn.LayerNorm(768), nn.Linear(768, 1000)

    def forward(self, x: Tensor) -> Tensor:
        patches = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), patches], 1) + self.positions
        logits: Tensor = self.head(self.norm(self.blocks(x))[:, 0])
        return logits


class Gpt2(nn.Module):
    """Radford et al., 2019, the smallest one: 12 layers of width 768, the output shares the weights of the words."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(50257, 768), nn.Embedding(1024, 768)
        self.dropout, self.norm = Dropout(0.1), nn.LayerNorm(768)
        self.blocks = nn.Sequential(
            *(Block(768, 12, first=True, dropout=0.1, causal=True) for _ in range(12))
        )

    def forward(self, words: Tensor) -> Tensor:
        places = torch.arange(words.shape[1], device=words.device)
        x = self.blocks(self.dropout(self.words(words) + self.positions(places)))
        logits: Tensor = functional.linear(self.norm(x), self.words.weight)
        return logits
