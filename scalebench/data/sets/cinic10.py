"""CINIC-10, or any other data set in folders train, valid, test with one folder of PNG images for each class."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import PositiveInt

from scalebench.data.builder import DATASETS, Allocate, Arrays, DatasetBuilder
from scalebench.data.files import need_folder
from scalebench.errors import DataError

_SOURCE = "get it from https://doi.org/10.7488/ds/2448 and unpack it"
_LAYOUT = "train/CLASS/*.png, valid/CLASS/*.png and test/CLASS/*.png"


@DATASETS.add
class Cinic10(DatasetBuilder):
    """Photographs of 10 kinds of things, 90,000 each for training, validation and test (arXiv 1810.03505).

    The validation part belongs to training (180,000 images, as in the epoch-averaging
    paper) unless `train_on_valid: false`. `resize: 64` enlarges images to 64 x 64
    (bilinear). Values are from 0 to 1. Images are in order of their paths, so that
    partition: by_order gives each worker few classes.
    """

    name = "cinic10"
    summary = "photographs in folders train/valid/test/CLASS/*.png of --data-dir, 10 classes (resize: 64)"

    resize: PositiveInt | None = None
    train_on_valid: bool = True

    def files(self, data_dir: Path | None) -> list[Path]:
        root = need_folder(self.name, data_dir, _LAYOUT, _SOURCE)
        # The folder may be the one around it, too.
        if not (root / "train").is_dir() and (root / "CINIC-10").is_dir():
            root = root / "CINIC-10"
        parts = ("train", "valid", "test") if self.train_on_valid else ("train", "test")
        files = []
        for part in parts:
            found = sorted((root / part).glob("*/*.png"))
            if not found:
                raise DataError(
                    f"data set {self.name}: no images {root / part}/CLASS/*.png (expected {_LAYOUT}); {_SOURCE}"
                )
            files += found
        return files

    def build(self, files: list[Path], allocate: Allocate) -> Arrays:
        classes = sorted(
            {path.parent.name for path in files if path.parent.parent.name == "train"}
        )
        side = self.resize
        # The shape of all: arrays are allocated before the other images are read.
        first = _read_image(files[0], side)
        arrays: dict[str, Any] = {}
        for part, is_in_part in (("train", False), ("test", True)):
            own = [
                path
                for path in files
                if (path.parent.parent.name == "test") is is_in_part
            ]
            x = arrays[f"x_{part}"] = allocate(
                f"x_{part}", (len(own), *first.shape), np.float32
            )
            y = arrays[f"y_{part}"] = np.empty(len(own), dtype=np.int64)
            for row, path in enumerate(own):
                if path.parent.name not in classes:
                    raise DataError(
                        f"{path}: class {path.parent.name!r} is not in train, which has {', '.join(classes)}"
                    )
                image = _read_image(path, side)
                if image.shape != first.shape:
                    raise DataError(
                        f"{path}: {image.shape[2]}x{image.shape[1]} pixels, {files[0]} has {first.shape[2]}x"
                        f"{first.shape[1]}; give the option resize to make them equal"
                    )
                x[row] = image
                y[row] = classes.index(path.parent.name)
        return Arrays("classification", len(classes), **arrays)


def _read_image(path: Path, side: int | None) -> NDArray[np.float32]:
    """Return an image as (3, height, width), values from 0 to 1."""
    from PIL import Image

    try:
        with Image.open(path) as opened:
            # A PNG may be grey, have a palette, or an alpha channel.
            image = opened.convert("RGB")
    except (OSError, SyntaxError, ValueError) as error:
        # A SyntaxError is Pillow's, of a broken PNG.
        raise DataError(
            f"{path}: not a readable image ({error}); get it again"
        ) from None
    if side is not None:
        image = image.resize((side, side), Image.Resampling.BILINEAR)
    return np.asarray(image, dtype=np.float32).transpose(2, 0, 1) / np.float32(255)
