"""A layer table in place of a model: its parameters without values, for runs that are priced and not trained.

Tables are shipped, in a `FILE.csv`, or counted from the model of `file.py:factory`.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Sequence
from dataclasses import astuple, fields
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from scalebench.errors import ModelError, nearest
from scalebench.models.architecture import MODELS, Architecture
from scalebench.models.layers import Layer, LayerTable
from scalebench.models.registry import is_own
from scalebench.study.spec import Component
from scalebench.system.file_access import read_text
from scalebench.system.late import torch

if TYPE_CHECKING:
    from torch import nn

_NEEDED = ("name", "parameters", "flops", "activations")


@MODELS.add
class Layers(Architecture):
    """One tensor for each layer with parameters; its gradient is complete when the layers behind it are computed."""

    name = "layers"
    summary = "layer table (resnet101, vgg16, ... or FILE.csv), priced only: for execution modelled"
    trainable: ClassVar[bool] = False

    table: str

    def build(self, input_shape: tuple[int, ...], outputs: int) -> nn.Module:
        module = without_values(load_layers(self.table))
        # Checks of a model look at the shape of its output; there are no values.
        module.forward = lambda samples: torch.empty(
            len(samples), outputs, device="meta"
        )
        return module


def layers_of(model: Component) -> LayerTable | None:
    """Return the layer table that `model` stands for, None for a model that can be trained."""
    return load_layers(model.options["table"]) if model.name == Layers.name else None


def without_values(table: LayerTable) -> nn.Module:
    """Return a module with the parameters of `table` on torch's meta device, one for each layer that has any."""
    module = torch.nn.Module()
    for place, layer in enumerate(table.layers):
        if layer.parameters:
            # else the table gives no sizes: a vector
            whole = layer.n > 0 and layer.parameters % layer.n == 0
            shape = (
                (layer.n, layer.parameters // layer.n) if whole else (layer.parameters,)
            )
            tensor = torch.empty(shape, device="meta")
            module.register_parameter(f"layer{place}", torch.nn.Parameter(tensor))
    return module


def layer_table_names() -> list[str]:
    """Return the names of the shipped layer tables."""
    return sorted(
        entry.name.removesuffix(".csv")
        for entry in _shipped().iterdir()
        if entry.name.endswith(".csv")
    )


def load_layers(
    name: str, input_shape: Sequence[int] = (), outputs: int = 1000
) -> LayerTable:
    """Return the shipped table of that name, the table in `FILE.csv`, or that of the model of `file.py:factory`.

    The factory is called as for `--model`, with `input_shape` and `outputs`, on torch's
    meta device: nothing is allocated or computed.

    Raises:
        ModelError: no such table, file or factory; a table that does not add up; a model that cannot be counted.
    """
    if is_own(name):
        if not input_shape:
            raise ModelError(
                f"layers of {name!r}: a model is counted on a sample, whose shape is not known here; give it: "
                "--input 3x224x224"
            )
        from scalebench.models.layer_counting import count_own  # imports torch

        return count_own(name, tuple(input_shape), outputs)
    path = Path(name).expanduser()
    if path.suffix == ".csv":
        try:
            return read_layers(
                read_text(path, encoding="utf-8-sig"), path.stem, str(path)
            )
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "not text in UTF-8"
            raise ModelError(
                f"layer table {str(path)!r}: cannot read it: {reason}"
            ) from None
    known = {_spelling(table): table for table in layer_table_names()}
    if _spelling(name) not in known:
        near = nearest(name, layer_table_names()).rstrip("?")
        raise ModelError(
            f"unknown layer table {name!r}; {near}, or give FILE.csv or file.py:factory"
        )
    return _shipped_table(known[_spelling(name)])


def _spelling(name: str) -> str:
    """Return `vitb16` for vit_b16, for torchvision's vit_b_16 and for ViT-B/16 of papers."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _shipped() -> Any:
    return resources.files("scalebench.models") / "layer_tables"


@lru_cache
def _shipped_table(name: str) -> LayerTable:
    file = _shipped() / f"{name}.csv"
    return read_layers(file.read_text(), name, str(file))


def write_layers(table: LayerTable) -> str:
    """Return the CSV text of `table`, with its source and totals as comments before the header."""
    text = io.StringIO()
    text.write(f"# source: {table.source}\n")
    text.write(f"# input: {'x'.join(map(str, table.input_shape))}\n")
    text.write(f"# parameters: {table.parameters}\n")
    text.write(f"# flops: {table.flops}\n")
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow([field.name for field in fields(Layer)])
    rows.writerows(astuple(layer) for layer in table.layers)
    return text.getvalue()


def read_layers(text: str, name: str, where: str) -> LayerTable:
    """Read a layer table: comments `# key: value`, a header, one row a layer; `where` names it in messages.

    Columns: `name`, `parameters`, `flops`, `activations`; `kind`, `inputs` (else the
    activations of the row before), `kept` (else the activations), and `count`, `m`,
    `n`, `k` may be left out. The totals `parameters` and `flops` of the comments are
    checked where stated.

    Raises:
        ModelError: an unknown, missing or repeated column, a missing or negative number, or a wrong total.
    """
    lines = text.splitlines()
    comments = [
        line.lstrip("# ").partition(":") for line in lines if line.startswith("#")
    ]
    # Totals are stated again, so that a table that was edited by hand shows its
    # mistakes.
    stated = {key.strip().lower(): value.strip() for key, _, value in comments}
    numbered = [
        (number, line)
        for number, line in enumerate(lines, 1)
        if line.strip() and not line.startswith("#")
    ]
    rows = list(csv.reader(line for _, line in numbered))
    header = [column.strip() for column in rows[0]] if rows else []
    _check_header(header, where)
    layers: list[Layer] = []
    for (number, _), row in zip(numbered[1:], rows[1:], strict=True):
        if len(row) != len(header):
            raise ModelError(
                f"{where}, line {number}: expected {len(header)} values, got {len(row)}"
            )
        layers.append(
            _layer(
                dict(zip(header, row, strict=True)), layers, f"{where}, line {number}"
            )
        )
    if not layers:
        raise ModelError(
            f"{where}: no layers; expected one row for each layer below the header"
        )
    shape = [int(side) for side in stated.get("input", "").split("x") if side.isdigit()]
    table = LayerTable(name, tuple(layers), stated.get("source", ""), tuple(shape))
    for total in ("parameters", "flops"):
        # Thousands may be marked by commas, as printed.
        if total in stated and stated[total].replace(",", "") != str(
            getattr(table, total)
        ):
            raise ModelError(
                f"{where}: {total} of the layers add up to {getattr(table, total):,}, stated are {stated[total]}; "
                f"correct the rows or the comment '# {total}:'"
            )
    if table.parameters == 0:
        raise ModelError(f"{where}: no layer has parameters; there is nothing to train")
    return table


def _check_header(header: list[str], where: str) -> None:
    known = [field.name for field in fields(Layer)]
    for column in header:
        if column not in known:
            raise ModelError(
                f"{where}: unknown column {column!r}; {nearest(column, known)}"
            )
        if header.count(column) > 1:
            raise ModelError(f"{where}: column {column!r} stands twice in the header")
    if missing := [column for column in _NEEDED if column not in header]:
        raise ModelError(
            f"{where}: column {missing[0]!r} is missing; a layer table has {', '.join(_NEEDED)}"
        )


def _layer(row: dict[str, str], before: Sequence[Layer], where: str) -> Layer:
    numbers = {
        key: _number(row[key], key, where) for key in row if key not in ("name", "kind")
    }
    written = numbers["activations"]
    # A layer reads what the one before it has written, and keeps what it writes, unless
    # stated.
    defaults = {
        "inputs": before[-1].activations if before else written,
        "kept": written,
    }
    layer = Layer(
        name=row["name"].strip(),
        kind=row.get("kind", "layer").strip(),
        **{**defaults, **numbers},
    )
    # A multiplication and an addition for each of m n k.
    products = 2 * layer.count * layer.m * layer.n * layer.k
    if products and products != layer.flops:
        raise ModelError(
            f"{where}: flops are {layer.flops:,}, 2 m n k count is {products:,}; correct either"
        )
    return layer


def _number(text: str, column: str, where: str) -> int:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0 and value == int(value)):
        raise ModelError(
            f"{where}: {column} is {text.strip() or 'missing'}; expected a whole number, 0 or more"
        )
    # Not by way of a float, which rounds above 2^53.
    return int(text) if text.strip().isdigit() else int(value)
