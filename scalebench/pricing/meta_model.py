"""Models without memory: their layers, and what a worker holds of one that several hold.

`MetaModel` answers by the modules what `TableCut` answers by a layer table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from scalebench.cluster.mesh import Mesh
from scalebench.data.dataset import Dataset
from scalebench.models.parts import Layer, LayerFacts, facts_of, layers_of
from scalebench.models.registry import build_model
from scalebench.models.sharding import held_by
from scalebench.pricing.table_cut import HeldPart
from scalebench.strategies.base import LayerProfile, Recompute
from scalebench.study.spec import Training
from scalebench.training.components import facts_of_component, profiles_of
from scalebench.training.stage import segment_facts, sizes_of

_META_MODELS: dict[str, torch.nn.Module] = {}  # the last one, by its parts


def meta_model(training: Training, dataset: Dataset) -> torch.nn.Module:
    """Return the model of `training` without memory; equal models are built once, as drawing weights takes long."""
    parts = (
        training.model,
        training.model_sha256,
        training.dtype,
        dataset.input_shape,
        dataset.outputs,
        dataset.task,
    )
    if (key := repr(parts)) not in _META_MODELS:
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
        _META_MODELS[key] = model.to("meta")
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
    def facts(self) -> list[LayerFacts]:
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
def _layers_of(of: MetaModel) -> list[Layer]:
    return layers_of(of.model, of.name)


@lru_cache(maxsize=2)
def _facts_of(of: MetaModel) -> list[LayerFacts]:
    return facts_of(_layers_of(of), of.sample)


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
