"""What each worker of a replica holds and computes of a model: by its layer table, or by its modules without memory.

Rows of a table whose names begin alike up to a number (`blocks.0`, `stage1_1`,
`features.3`) are one layer, which is not cut; rows without parameters belong to the
layer before them. Within a layer products are shared as `models.sharding` shares
modules: consecutive products of one input by columns, the next product that reads them
by rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from scalebench.cluster.mesh import Mesh
from scalebench.data.dataset import Dataset
from scalebench.errors import ModelError
from scalebench.models import parts
from scalebench.models.flat import to_meta
from scalebench.models.layers import LayerTable
from scalebench.models.registry import build_model
from scalebench.models.sharding import held_by, sharing_degrees
from scalebench.models.zoo.layers import layers_of
from scalebench.pricing.devices import Stated
from scalebench.pricing.schedule import Kept
from scalebench.strategies.base import LayerProfile, Recompute
from scalebench.study.spec import Component, Training
from scalebench.training.components import facts_of_component, profiles_of
from scalebench.training.stage import (
    SegmentFacts,
    StageFacts,
    segment_facts,
    sizes_of,
)

Floats = NDArray[np.float64]

_WITH_INDICES = 4  # of what pooling gives, at most: an element and an index of 8 bytes
_ELEMENTWISE = ("relu", "gelu", "tanh", "sigmoid", "silu", "dropout", "clone")
_BY_CHANNEL = (
    *_ELEMENTWISE,
    "maxpool2d",
    "avgpool2d",
    "adaptiveavgpool2d",
    "batchnorm2d",
    "flatten",
)


class Rows(NamedTuple):
    """Rows `first` to `last` (exclusive) of a table."""

    name: str
    first: int
    last: int


class HeldRows(NamedTuple):
    """What a worker holds: its stage and segments, its parameters, and what it keeps for the backward pass."""

    stage: StageFacts
    segments: list[SegmentFacts]
    parameters: int
    kept: Kept


class HeldPart(NamedTuple):
    """What a worker holds of a replica: stage and segments of each chunk, and its parameters.

    `kept` is what each chunk keeps for the backward pass, if a table says so.
    """

    chunks: list[tuple[StageFacts, list[SegmentFacts]]]
    parameters: int
    kept: tuple[Kept, ...] | None = None


class TableCut:
    """A layer table whose rows take `forward` and `backward` seconds of the two passes."""

    def __init__(self, table: LayerTable, forward: Floats, backward: Floats) -> None:
        self.table, self._both = table, forward + backward
        self._forward, self._backward = (
            forward / forward.sum(),
            backward / backward.sum(),
        )
        self._parameters, self._kept = table.column("parameters"), table.column("kept")

    @cached_property
    def layers(self) -> list[Rows]:
        """The layers between which the model can be cut."""
        named: list[Rows] = []
        for place, row in enumerate(self.table.layers):
            name = _layer_name(row.name)
            if named and name == named[-1].name:
                named[-1] = named[-1]._replace(last=place + 1)
            else:
                named.append(Rows(name, place, place + 1))
        found: list[Rows] = []
        for rows in named:
            # Rows without parameters go with those before, and so do rows that read
            # more than one result, as of a residual.
            if found and not (
                self._owns(rows)
                and self._owns(found[-1])
                and self._reads_one(rows.first)
            ):
                name = found[-1].name if self._owns(found[-1]) else rows.name
                found[-1] = Rows(name, found[-1].first, rows.last)
            else:
                found.append(rows)
        return found

    def _reads_one(self, place: int) -> bool:
        """Return True if a row reads what the row before it gave, and nothing else.

        That may have given indices beside it, as pooling does.
        """
        given = self.table.layers[place - 1].activations
        return given / _WITH_INDICES <= self.table.layers[place].inputs <= given

    def _owns(self, rows: Rows) -> bool:
        return any(row.parameters for row in self.table.layers[rows.first : rows.last])

    @cached_property
    def facts(self) -> list[parts.LayerFacts]:
        """Sizes of the layers; `shape` is the number of elements that the next one reads."""
        rows, found = self.table.layers, []
        for layer in self.layers:
            here = slice(layer.first, layer.last)
            given = (
                rows[layer.last].inputs
                if layer.last < len(rows)
                else rows[-1].activations
            )
            parameters = sum(row.parameters for row in rows[here])
            work = float(self._forward[here].sum()), float(self._backward[here].sum())
            found.append(parts.LayerFacts(layer.name, parameters, (given,), *work))
        return found

    @cached_property
    def work(self) -> list[float]:
        """Seconds of both passes of each layer."""
        return [
            float(self._both[layer.first : layer.last].sum()) for layer in self.layers
        ]

    def kept(self, layers: range) -> float:
        """Return the numbers a sample that consecutive layers keep for the backward pass."""
        first, last = self.layers[layers.start].first, self.layers[layers.stop - 1].last
        return float(self._kept[first:last].sum())

    def profiles(self, workers: int) -> list[LayerProfile]:
        """Return what the choice of a layout needs to know of each layer."""

        def divide(first: int, last: int, degree: int) -> list[HeldRows]:
            return self.held([first, last - first, len(self.facts) - last], [1], degree)

        degrees = sharing_degrees(divide, len(self.facts), workers)
        found, takes = [], self.table.layers[0].inputs
        for each, own in zip(self.facts, degrees, strict=True):
            (gives,) = each.shape
            found.append(LayerProfile(each.name, each.parameters, takes, gives, own))
            takes = gives
        return found

    def held(
        self,
        sizes: Sequence[int],
        groups: Sequence[int],
        degree: int = 1,
        recompute: Recompute = "none",
    ) -> list[HeldRows]:
        """Return what a worker holds of some of the groups of `sizes` layers, which `degree` workers share.

        It gives up the activations that `recompute` names, between forward and backward
        pass.

        Raises:
            ModelError: a layer cannot be divided among these workers, or there is nothing that can.
        """
        found = [self._held(sizes, group, degree, recompute) for group in groups]
        if degree > 1 and not any(
            segment.divided for each in found for segment in each.segments
        ):
            names = (
                self.layers[found[0].stage.first].name,
                self.layers[found[-1].stage.last - 1].name,
            )
            raise ModelError(
                f"layers of {self.table.name}: none of {names[0]} to {names[1]} can be shared"
            )
        return found

    def part(
        self, sizes: Sequence[int], mesh: Mesh, part: int, recompute: Recompute
    ) -> HeldPart:
        """Return what a part of a replica holds of stages of `sizes` layers."""
        groups = mesh.groups_of(part, len(sizes))
        rows = self.held(sizes, groups, mesh.tensor, recompute)
        chunks = [(each.stage, each.segments) for each in rows]
        kept = tuple(each.kept for each in rows)
        return HeldPart(chunks, sum(each.parameters for each in rows), kept)

    def component(
        self, sizes: Sequence[int], place: int, degree: int, index: int
    ) -> HeldPart:
        """Return the share of a worker in a component, the one at `place` of those of `sizes` layers; all are equal."""
        (rows,) = self.held(sizes, [place], degree)
        stage = replace(rows.stage, stages=len(sizes) + 1)
        return HeldPart([(stage, rows.segments)], rows.parameters)

    def _held(
        self, sizes: Sequence[int], group: int, degree: int, recompute: Recompute
    ) -> HeldRows:
        rows = self.table.layers
        stage = StageFacts.of(self.facts, (rows[0].inputs,), sizes, group)
        first, last = parts.bounds_of(sizes)[group]
        # Nothing needs the gradient of the samples themselves.
        needed, parameters = not stage.is_first, 0
        segments: list[SegmentFacts] = []
        kept: list[float] = []  # by segment
        for begin, end, divided in self._segments(
            self.layers[first:last], degree, recompute == "layer"
        ):
            shares = degree if divided else 1
            parameters += int(np.ceil(self._parameters[begin:end] / shares).sum())
            # Between two products workers hold their share; what the last row gives is
            # summed, and whole on each.
            kept.append(
                float(self._kept[begin : end - 1].sum()) / shares + rows[end - 1].kept
            )
            work = (
                float(self._forward[begin:end].sum()) / shares,
                float(self._backward[begin:end].sum()) / shares,
            )
            segments.append(
                SegmentFacts(
                    divided,
                    (rows[begin].inputs,),
                    (rows[end - 1].activations,),
                    *work,
                    needed,
                )
            )
            needed = needed or bool(self._parameters[begin:end].any())
        taken = [float(segment.takes[0]) for segment in segments]
        of_each = {
            "none": Kept(sum(kept), 0.0),
            "layer": Kept(sum(taken), max(kept)),
            "all": Kept(taken[0], sum(kept)),
        }
        return HeldRows(stage, segments, parameters, of_each[recompute])

    def _segments(
        self, layers: Sequence[Rows], degree: int, by_layer: bool
    ) -> Iterator[tuple[int, int, bool]]:
        """Yield first row, end and whether it is divided of each segment of consecutive layers.

        Of whole layers that is all of them, or each (`by_layer`).
        """
        begin = layers[0].first
        if degree == 1:
            borders = [
                begin,
                *(layer.last for layer in layers if by_layer or layer is layers[-1]),
            ]
            yield from ((first, last, False) for first, last in pairwise(borders))
            return
        for first, end in self._pairs(layers, degree):
            if first > begin:
                yield begin, first, False
            yield first, end, True
            begin = end
        if begin < layers[-1].last:
            yield begin, layers[-1].last, False

    def _pairs(self, layers: Sequence[Rows], degree: int) -> Iterator[tuple[int, int]]:
        """Yield the rows from a product by columns to the product by rows that reads it, or a product alone."""
        rows, layer_of = (
            self.table.layers,
            {n: each for each in layers for n in range(each.first, each.last)},
        )
        products = [
            place
            for place in layer_of
            if rows[place].weights and rows[place].parameters
        ]
        whole: list[int] = []  # products alone whose inputs do not divide
        divided = False
        while products:
            first = last = products.pop(0)
            beside = 0  # further products of the same input
            while beside < len(products) and products[beside] == last + 1:
                beside, last = beside + 1, last + 1
            partner = products[beside] if beside < len(products) else None
            if partner is not None and not self._reads(
                partner, first, last, layer_of[partner] == layer_of[first]
            ):
                partner = None
            if partner is None and rows[first].k % degree:
                whole.append(first)
                continue
            if partner is not None:
                self._require(first, rows[first].n, degree)
            end = first + 1 if partner is None else partner + 1
            for place in range(first, end):
                if rows[place].kind == "bmm":  # of attention, which is divided by heads
                    self._require(place, rows[place].count, degree, "number of heads")
            if partner is not None:
                del products[: beside + 1]
            divided = True
            yield first, end
        if whole and not divided:
            self._require(whole[0], rows[whole[0]].k, degree)

    def _reads(self, partner: int, first: int, last: int, within: bool) -> bool:
        """Return True if a product reads what products `first` to `last` gave, channel by channel between them.

        `within` a layer what is between them is not looked at.
        """
        rows = self.table.layers
        plain = all(
            rows[place].kind in _BY_CHANNEL for place in range(last + 1, partner)
        )
        # Attention may make queries, keys and values by one product.
        packed = within and rows[first].n == 3 * rows[partner].k
        return packed or (rows[partner].k % rows[first].n == 0 and (within or plain))

    def _require(
        self, place: int, width: int, degree: int, what: str = "width"
    ) -> None:
        if width % degree:
            raise ModelError(
                f"layers of {self.table.name}: {self.table.layers[place].name} cannot be shared by {degree} workers, "
                f"as {degree} does not divide its {what} {width}"
            )


@lru_cache
def _cut_by_operations(table: LayerTable) -> TableCut:
    # Any step time would do: the shares are asked for.
    times = Stated(1.0, 1).times(table, 1)
    return TableCut(table, times.forward, times.backward)


def cut_of(model: Component) -> TableCut | None:
    """Return the cut of the layer table that stands for a model, by floating-point operations; None for a model."""
    table = layers_of(model)
    return None if table is None else _cut_by_operations(table)


def _layer_name(name: str) -> str:
    """Return the name up to the first number that ends a part of it; without one the first part."""
    named = name.split(".")
    for count, part in enumerate(named, 1):
        if part[-1:].isdigit():
            return ".".join(named[:count])
    return named[0]


_META_MODELS: dict[str, torch.nn.Module] = {}  # the last one, by its parts


def meta_model(training: Training, dataset: Dataset) -> torch.nn.Module:
    """Return the model of `training` without memory; equal models are built once, as drawing weights takes long."""
    drawn_from = (
        training.model,
        training.model_sha256,
        training.dtype,
        dataset.input_shape,
        dataset.outputs,
        dataset.task,
    )
    if (key := repr(drawn_from)) not in _META_MODELS:
        dtype = getattr(torch, training.dtype)
        model = build_model(
            training.model,
            dataset.input_shape,
            dataset.outputs,
            dataset.task,
            dtype,
            seed=0,
        )
        _META_MODELS.clear()
        _META_MODELS[key] = to_meta(model)
    return _META_MODELS[key]


@dataclass(frozen=True)
class MetaModel:
    """The layers of a model on the meta device, whose samples have `input_shape`; `name` is that of the study."""

    model: torch.nn.Module
    name: str
    input_shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def sample(self) -> Tensor:
        return torch.empty(2, *self.input_shape, dtype=self.dtype, device="meta")

    @property
    def facts(self) -> list[parts.LayerFacts]:
        """Sizes of the layers."""
        return _facts_of(self)

    @property
    def work(self) -> list[float]:
        """Share of each layer in both passes."""
        return [each.work for each in self.facts]

    def profiles(self, workers: int) -> list[LayerProfile]:
        """Return what the choice of a layout needs to know of each layer."""
        return _profiles_of(self, workers)

    def part(
        self, sizes: Sequence[int], mesh: Mesh, part: int, recompute: Recompute
    ) -> HeldPart:
        """Return what a part of a replica holds of stages of `sizes` layers."""
        return _part_of(self, tuple(sizes), mesh, part, by_layer=recompute == "layer")

    def component(
        self, sizes: Sequence[int], place: int, degree: int, index: int
    ) -> HeldPart:
        """Return the share of worker `index` of `degree` in a component, one of several of `sizes` layers."""
        return _component_of(self, tuple(sizes), place, degree, index)


@lru_cache(maxsize=2)
def _layers_of(of: MetaModel) -> list[parts.Layer]:
    return parts.layers_of(of.model, of.name)


@lru_cache(maxsize=2)
def _facts_of(of: MetaModel) -> list[parts.LayerFacts]:
    return parts.facts_of(_layers_of(of), of.sample)


@lru_cache(maxsize=2)
def _profiles_of(of: MetaModel, workers: int) -> list[LayerProfile]:
    return profiles_of(_layers_of(of), of.facts, of.input_shape, workers, of.name)


@lru_cache(maxsize=64)  # parts of a replica, of which a run may have many
def _part_of(
    of: MetaModel, sizes: tuple[int, ...], mesh: Mesh, part: int, *, by_layer: bool
) -> HeldPart:
    held = held_by(_layers_of(of), sizes, mesh, part, of.name, by_layer=by_layer)
    chunks = sizes_of(of.facts, held, sizes, mesh, part, of.sample)
    return HeldPart(chunks, trainable_numbers(held.model))


@lru_cache(maxsize=64)  # shares of components, of which a run may have many
def _component_of(
    of: MetaModel, sizes: tuple[int, ...], place: int, degree: int, index: int
) -> HeldPart:
    mesh = Mesh(1, len(sizes), degree)
    held = held_by(_layers_of(of), sizes, mesh, place * degree + index, of.name)
    shapes = [each.shape for each in of.facts]
    stage = facts_of_component(shapes, of.input_shape, sizes, place)
    takes = torch.empty(2, *stage.takes, dtype=of.dtype, device="meta")
    segments = segment_facts(held.chunks[0], takes, of.facts, first=place == 0)
    return HeldPart([(stage, segments)], trainable_numbers(held.model))


@lru_cache(maxsize=2)
def trainable_numbers(model: torch.nn.Module) -> int:
    """Return the number of trainable parameters."""
    return sum(
        parameter.numel() for parameter in model.parameters() if parameter.requires_grad
    )
