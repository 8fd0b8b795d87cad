"""Any number of samples labelled by a fixed random network, for weak scaling."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt, model_validator

from scalebench.data.builder import DATASETS, Allocate, Arrays, DatasetBuilder

# rows drawn at once; another number makes other data
_CHUNK = 1024
_HIDDEN = 32
_COARSE = 4
_TEACHER, _REFERENCE, _TRAIN, _TEST = range(4)  # independent streams of random numbers


@DATASETS.add
class Synthetic(DatasetBuilder):
    """Inputs from a normal distribution, targets from a teacher: a random tanh network of 32 hidden units.

    Row i depends on (seed, i) only, for any `n_train`: rows are made in chunks of
    1,024, each with its own counter of a Philox generator. The class is the largest of
    the teacher's outputs, which are centred and scaled on reference inputs so that no
    class dominates; `noise` is the standard deviation of noise added to the outputs.
    `images` are C x H x W: a coarse random image, the input of the teacher, enlarged,
    plus noise in each pixel.
    """

    name = "synthetic"
    summary = "any number of samples from a fixed random teacher network; kind: classification, regression, images"
    grows: ClassVar[bool] = True

    kind: Literal["classification", "regression", "images"] = "classification"
    n_train: PositiveInt = 8192
    n_test: PositiveInt = 2048
    features: PositiveInt = 32
    shape: tuple[PositiveInt, ...] | None = None
    classes: PositiveInt = 10
    outputs: PositiveInt = 1
    noise: NonNegativeFloat = 0.1
    seed: NonNegativeInt = 0

    @model_validator(mode="after")
    def _shape_fits(self) -> Synthetic:
        if self.kind == "images" and self.shape is not None and len(self.shape) != 3:
            raise ValueError("shape of images is [channels, height, width]")
        if self.kind != "regression" and self.classes < 2:
            raise ValueError("classes must be at least 2")
        return self

    def grown(self, factor: int) -> Synthetic:
        return self.model_copy(update={"n_train": self.n_train * factor})

    def build(self, files: list[Path], allocate: Allocate) -> Arrays:
        is_regression = self.kind == "regression"
        outputs = self.outputs if is_regression else self.classes
        teacher = _Teacher(self.seed, self._seen, outputs)
        arrays: dict[str, Any] = {}
        for part, rows, stream in (
            ("train", self.n_train, _TRAIN),
            ("test", self.n_test, _TEST),
        ):
            x = arrays[f"x_{part}"] = allocate(
                f"x_{part}", (rows, *self._input_shape), np.float32
            )
            y_shape, y_dtype = (
                ((rows, outputs), np.float32) if is_regression else ((rows,), np.int64)
            )
            y = arrays[f"y_{part}"] = allocate(f"y_{part}", y_shape, y_dtype)
            for chunk, start in enumerate(range(0, rows, _CHUNK)):
                # Always a whole chunk, as the last bits of a matrix product may depend
                # on its size.
                inputs, scores = self._make_chunk(teacher, stream, chunk)
                stop = min(start + _CHUNK, rows)
                x[start:stop] = inputs[: stop - start]
                y[start:stop] = (scores if is_regression else scores.argmax(axis=1))[
                    : stop - start
                ]
        return Arrays(
            "regression" if is_regression else "classification", outputs, **arrays
        )

    @property
    def _input_shape(self) -> tuple[int, ...]:
        if self.shape is not None:
            return tuple(self.shape)
        return (3, 32, 32) if self.kind == "images" else (self.features,)

    @property
    def _coarse_shape(self) -> tuple[int, int, int]:
        channels, height, width = self._input_shape
        return channels, min(_COARSE, height), min(_COARSE, width)

    @property
    def _seen(self) -> int:
        """Number of teacher inputs of one sample."""
        return math.prod(
            self._coarse_shape if self.kind == "images" else self._input_shape
        )

    def _make_chunk(
        self, teacher: _Teacher, stream: int, chunk: int
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        rng = _random(self.seed, stream, chunk)
        seen = rng.standard_normal((_CHUNK, self._seen), dtype=np.float32)
        scores = teacher.scores(seen)
        scores += self.noise * rng.standard_normal(scores.shape)
        if self.kind != "images":
            return seen.reshape(_CHUNK, *self._input_shape), scores
        _, height, width = self._input_shape
        coarse = seen.reshape(_CHUNK, *self._coarse_shape)
        down = np.arange(height) * coarse.shape[2] // height
        across = np.arange(width) * coarse.shape[3] // width
        images: NDArray[Any] = coarse[:, :, down[:, None], across[None, :]]
        images += 0.5 * rng.standard_normal(images.shape, dtype=np.float32)
        return images, scores


class _Teacher:
    """Teacher with scores (W2 tanh(W1 x / sqrt(d)) - mean) / std, mean and std over 4,096 reference inputs."""

    def __init__(self, seed: int, inputs: int, outputs: int) -> None:
        rng = _random(seed, _TEACHER, 0)
        self._hidden = 2 * rng.standard_normal((inputs, _HIDDEN)) / math.sqrt(inputs)
        self._out = rng.standard_normal((_HIDDEN, outputs))
        raw = self._raw(
            _random(seed, _REFERENCE, 0).standard_normal(
                (4 * _CHUNK, inputs), dtype=np.float32
            )
        )
        # Of reference inputs, as those of the samples would change with their number.
        self._mean, self._std = raw.mean(axis=0), raw.std(axis=0)

    def scores(self, x: NDArray[Any]) -> NDArray[Any]:
        scores: NDArray[Any] = (self._raw(x) - self._mean) / self._std
        return scores

    def _raw(self, x: NDArray[Any]) -> NDArray[Any]:
        hidden: NDArray[Any] = np.tanh(x.astype(np.float64) @ self._hidden)
        scores: NDArray[Any] = hidden @ self._out
        return scores


def _random(seed: int, stream: int, chunk: int) -> np.random.Generator:
    return np.random.Generator(
        # The last word of the counter: chunks are 2^192 numbers apart.
        np.random.Philox(key=[seed % 2**64, stream], counter=[0, 0, 0, chunk])
    )
