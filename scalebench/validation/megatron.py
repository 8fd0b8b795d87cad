"""Published steps and memory of GPTs that Megatron-LM divides among data, pipeline and tensor parallel devices.

Of a step of n micro-batches on p stages of v chunks of blocks, each shared by t
devices, d times:

    T = n S_slow + sum of the other stages' S / v + averages + update

S are the seconds of a stage with a micro-batch. Its kernels take those of the device's
roofline, divided by an efficiency that the rows of split=base give (the mean of what
each of them needs); backward kernels, and what is computed again, likewise. A matrix
product takes whole waves: each of the device's multiprocessors computes a tile of the
result at a time, and a tile or a wave that is not full takes as long as a full one. In
each block two sums over t devices follow in each pass, and where a whole block is
computed again; chunks send their outputs and gradients while nothing else happens, each
of the t devices its share, on its share of the node's links; where they are whole on
every device, these gather them again. The last stage has the head, too, which the t
devices share by the vocabulary: its gradients are summed, as are outputs of the
embeddings. The first stage holds these, and both sum the gradients of their tokens,
which are the weights of the head, once a step. The d replicas scatter gradients and
gather parameters of 2 bytes: they are every t-th device, so that several share a node.
The update (Adam) reads the gradient and moves 26 bytes a parameter; of d replicas each
has a share.

A device holds 14 bytes a parameter (2, Adam 12) and its gradient, of 2 or 4 bytes by
how those of micro-batches are added up (`gradient_bytes`), and what its blocks keep of
the micro-batches between their passes: the largest number of them in the order of the
schedule. Embeddings belong to the first stage; what they and the head keep is left out.

In a block on one of t devices attention is divided by heads, the feed-forward part by
its inner width. Norms, dropout behind the products by rows, and residuals are whole on
every device, or divided by the sequence.

Sources: Shoeybi et al., arXiv 1909.08053 (Megatron-LM); Narayanan et al., SC 2021
(arXiv 2104.04473); Korthikanti et al., arXiv 2205.05198; DeepSpeed's ZeRO-1 and
PipeModelDataParallelTopology; NVIDIA, Matrix Multiplication Background User's Guide
(tiles and waves).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from scalebench.cluster.device import load_device
from scalebench.cluster.network import Network
from scalebench.cluster.operation import Kind, Operation
from scalebench.errors import ResultsError
from scalebench.pricing.devices import Roofline
from scalebench.strategies.parts import scheduled
from scalebench.study.choices import NCCL
from scalebench.training.stage import most_kept
from scalebench.validation import measurements, prediction_errors

COLUMNS = (
    "series",
    "split",
    "source",
    "device",
    "devices_per_node",
    "intra_node",
    "inter_gbps_per_node",
    "model",
    "layers",
    "width",
    "heads",
    "tokens",
    "vocabulary",
    "data",
    "pipeline",
    "tensor",
    "chunks",
    "micro_batch",
    "batch",
    "recompute",
    "by_sequence",
    "gradient_bytes",
    "quantity",
    "value",
)
_POSITIVE = (
    "devices_per_node",
    "inter_gbps_per_node",
    "layers",
    "width",
    "heads",
    "tokens",
    "vocabulary",
    "data",
    "pipeline",
    "tensor",
    "chunks",
    "micro_batch",
    "batch",
    "gradient_bytes",
    "value",
)
QUANTITIES = (
    "step_time",
    "states",
    "activations",
)  # seconds; GiB of parameters with all that belongs to them
_GIB = 2**30
# rows and columns: the largest tiles of cuBLAS, which the guide calls the most efficient
_TILES = ((256, 128), (128, 256))
_NUMBER, _MASK = 2, 1  # bytes of an activation, and of dropout's mask of one
_COMPUTED_AGAIN: dict[str, tuple[str, ...]] = {  # kernels, by what is computed again
    "none": (),
    "selective": (
        "scores",
        "softmax",
        "dropout",
        "context",
    ),  # little arithmetic, which keeps most
}
_GIVEN_UP = ("softmax", "dropout")  # what these keep, with `selective`
# bytes a parameter beside its gradient: held, and moved by the update
_HELD, _UPDATED = 14, 26


class StepParts(NamedTuple):
    """Seconds of a step: of the kernels on the roofline, and of communication and update, which it leaves alone."""

    kernels_s: float
    others_s: float

    def at(self, efficiency: float) -> float:
        """Return the seconds of a step whose kernels reach `efficiency` of the roofline."""
        return self.kernels_s / efficiency + self.others_s


def is_megatron(path: Path) -> bool:
    """Return True if the first line of `path` names the columns of divided GPTs."""
    return measurements.has_columns(path, COLUMNS)


def read_megatron(path: Path) -> pd.DataFrame:
    """Read a CSV of divided GPTs.

    Raises:
        ResultsError: unreadable, numbers that are not positive, an unknown quantity, or a series without a base time.
    """
    table = measurements.read_csv(path)
    measurements.require_positive(table, _POSITIVE, path)
    if unknown := sorted(set(table["quantity"]) - set(QUANTITIES)):
        raise ResultsError(
            f"{path}: quantity {unknown[0]!r}: expected {', '.join(QUANTITIES)}"
        )
    timed = table[table["quantity"] == "step_time"]
    for series, group in timed.groupby("series"):
        if not (group["split"] == "base").any():
            raise ResultsError(
                f"{path}: series {series}: expected a row of split=base with quantity step_time"
            )
    return table


def predict_megatron(table: pd.DataFrame) -> pd.DataFrame:
    """Return the predictions of the held rows, by the base rows of their series.

    Linear scaling takes the floating-point operations of a step, as counted with what
    is computed again, at the rate a device of the base rows; memory has none, and
    nothing has an interval.
    """
    rows: list[dict[str, Any]] = []
    for _, group in table.groupby("series", sort=False):
        base = [
            row
            for row in measurements.records(group)
            if row.split == "base" and row.quantity == "step_time"
        ]
        for row in (row for row in measurements.records(group) if row.split == "hold"):
            if row.quantity == "step_time":
                rows.append(_time_prediction(row, base))
            else:
                predicted = memory_gib(row)._asdict()[str(row.quantity)]
                nothing = dict.fromkeys(
                    ("seconds", "predicted_s", "linear_s", "linear"), math.nan
                )
                memory = {
                    "source": f"{row.source}, {row.quantity}",
                    "predicted": predicted,
                    "unit": "GiB",
                }
                rows.append({**_facts(row), **nothing, **memory, "doublings": 0.0})
    return prediction_errors.predictions_of(rows)


def rank_correlations(predictions: pd.DataFrame) -> dict[str, float]:
    """Return Spearman's correlation of predicted and measured seconds a sample, by source."""
    timed = predictions[predictions["seconds"].notna()]
    samples = timed["configuration"].str.extract(r"\| (\d+)$")[0].astype(float)
    each = timed.assign(
        measured=timed["seconds"] / samples, predicted=timed["predicted_s"] / samples
    )
    return {
        str(source): float(
            group["measured"].corr(group["predicted"], method="spearman")
        )
        for source, group in each.groupby("source")
    }


def _facts(row: Any) -> dict[str, Any]:
    devices = int(row.data * row.pipeline * row.tensor)
    return {
        "source": str(row.source),
        "series": str(row.series),
        "system": f"{devices} {row.device}",
        "execution": "published",
        "strategy": f"{row.data} x {row.pipeline} x {row.tensor}, {row.recompute} computed again",
        "model": str(row.model),
        "quantity": str(row.quantity),
        "workers": devices,
        "nodes": -(-devices // int(row.devices_per_node)),
        "measured": float(row.value),
        "configuration": f"{row.series} | {row.model} | {row.micro_batch} | {row.batch}",
    }


def _time_prediction(row: Any, base: list[Any]) -> dict[str, Any]:
    efficiency = float(np.mean([_efficiency(each) for each in base]))
    rate = np.mean([_operations(each) / each.value for each in base])
    devices = int(row.data * row.pipeline * row.tensor)
    fewest = min(int(each.data * each.pipeline * each.tensor) for each in base)
    return {
        **_facts(row),
        "predicted": step_parts(row).at(efficiency),
        "linear": float(_operations(row) / rate),
        "doublings": math.log2(devices / fewest),
    }


def _efficiency(row: Any) -> float:
    """Return the share of the roofline that kernels reach in a measured step."""
    parts = step_parts(row)
    return parts.kernels_s / (float(row.value) - parts.others_s)


def _gpt(row: Any) -> Gpt:
    return Gpt(
        int(row.layers),
        int(row.width),
        int(row.heads),
        int(row.tokens),
        int(row.vocabulary),
    )


def step_parts(row: Any) -> StepParts:
    """Return the seconds of a step by the rule above."""
    model = _gpt(row)
    degree = int(row.tensor)
    stages = int(row.pipeline)
    samples = int(row.micro_batch)
    roofline = Roofline(load_device(str(row.device)), "float16")
    network = _network(row)
    by_sequence = row.by_sequence == "yes"
    blocks = model.layers / stages
    pieces = int(row.batch) // int(row.data) // samples
    kernels = block_kernels(model, degree, by_sequence=by_sequence)
    forward, backward = passes_s(kernels, roofline, samples)
    again, _ = passes_s(computed_again(kernels, str(row.recompute)), roofline, samples)
    stage_s = blocks * (forward + backward + again)
    head_s = sum(passes_s(head_kernels(model, degree), roofline, samples))
    nbytes = _NUMBER * samples * model.tokens * model.width
    sums = 6 if row.recompute == "full" else 4
    summed_s = _sum_s(network, nbytes, range(degree))
    stage_others_s = blocks * sums * summed_s + _messages_s(row, network, nbytes)
    # of the head's input, backward; of embeddings, forward, where they are on its stage
    head_others_s = (1 if stages > 1 else 2) * summed_s
    filling = (stages - 1) / int(row.chunks)
    kernels_s = pieces * (stage_s + head_s) + filling * stage_s
    others_s = pieces * (stage_others_s + head_others_s) + filling * stage_others_s
    parameters = (
        model.layers * model.block_parameters / stages + model.embedding_parameters
    ) / degree
    update_s = (
        (_UPDATED + int(row.gradient_bytes))
        * parameters
        / int(row.data)
        / roofline.device.memory_bandwidth_bytes_per_s
    )
    others_s += update_s + _average_s(row, parameters) + _tied_s(row, model)
    return StepParts(kernels_s, others_s)


def _network(row: Any) -> Network:
    return Network(measurements.stated_cluster(row), int(row.devices_per_node))


def _sum_s(network: Network, nbytes: float, members: range) -> float:
    """Return the seconds of a sum over the devices `members`."""
    return network.time(Operation(Kind.ALLREDUCE, nbytes, members, algorithm=NCCL))


def _card_share(row: Any) -> float:
    """Return bytes/s of a device's share of the links between nodes."""
    return float(row.inter_gbps_per_node) * 1e9 / 8 / int(row.devices_per_node)


def _messages_s(row: Any, network: Network, nbytes: float) -> float:
    """Return the seconds in which a stage passes a micro-batch on: output and gradient of each of its chunks.

    Where they are whole on each of the t devices, these gather them again.
    """
    if int(row.pipeline) == 1:
        return 0.0
    degree = int(row.tensor)
    share = nbytes / degree
    gathered_s = 0.0
    if row.by_sequence != "yes":
        gathered_s = network.time(Operation(Kind.ALLGATHER, share, range(degree)))
    return 2 * int(row.chunks) * (share / _card_share(row) + gathered_s)


def _average_s(row: Any, parameters: float) -> float:
    """Return the seconds in which replicas scatter gradients and gather parameters, half a sum each.

    The replicas of a part are every t-th device, so that 8 / t of them share a node of
    8, whose links the t groups on it share.
    """
    degree = int(row.tensor)
    network = _network(
        row._replace(inter_gbps_per_node=row.inter_gbps_per_node / degree)
    )
    members = range(0, int(row.data) * degree, degree)
    nbytes = (int(row.gradient_bytes) + _NUMBER) / 2 * parameters
    return _sum_s(network, nbytes, members)


def _tied_s(row: Any, model: Gpt) -> float:
    """Return the seconds in which the first and the last stage sum the gradients of the embeddings that they share."""
    if int(row.pipeline) == 1:
        return 0.0
    numbers = model.vocabulary * model.width / int(row.tensor)
    return int(row.gradient_bytes) * numbers / _card_share(row)


def _operations(row: Any) -> float:
    """Return the floating-point operations of a device in a step, with what is computed again."""
    model = _gpt(row)
    kernels = block_kernels(model, 1, by_sequence=False)
    block = 3 * sum(each.flops for each in kernels)
    block += sum(each.flops for each in computed_again(kernels, str(row.recompute)))
    head = 3 * sum(each.flops for each in head_kernels(model, 1))
    return float(
        row.batch
        * (model.layers * block + head)
        / (row.data * row.pipeline * row.tensor)
    )


class Memory(NamedTuple):
    """GiB of the first stage's device: parameters with gradients and optimizer, and activations."""

    states: float
    activations: float


def memory_gib(row: Any) -> Memory:
    """Return the memory of a device of the first stage by the rule above."""
    model = _gpt(row)
    degree = int(row.tensor)
    stages = int(row.pipeline)
    chunks = int(row.chunks)
    parameters = (
        model.layers * model.block_parameters / stages + model.embedding_parameters
    ) / degree
    pieces = int(row.batch) // int(row.data) // int(row.micro_batch)
    moves = scheduled(
        "interleaved" if chunks > 1 else "1f1b", 0, stages, pieces, chunks
    )
    in_flight = max(
        sum(samples)
        for samples in most_kept(moves, [int(row.micro_batch)] * pieces, chunks)
    )
    kernels = block_kernels(model, degree, by_sequence=row.by_sequence == "yes")
    kept = (
        in_flight
        * model.layers
        / stages
        / chunks
        * kept_bytes(kernels, str(row.recompute))
    )
    held = (_HELD + int(row.gradient_bytes)) * parameters
    return Memory(held / _GIB, kept / _GIB)


class Product(NamedTuple):
    """`matrices` products of (rows, depth) and (depth, columns)."""

    rows: float
    columns: float
    depth: float
    matrices: float = 1.0

    @property
    def flops(self) -> float:
        return 2 * self.matrices * self.rows * self.columns * self.depth

    @property
    def gradients(self) -> tuple[Product, Product]:
        """The products of the backward pass: gradients of the left matrix and of the right one."""
        rows, columns, depth, matrices = self
        return Product(rows, depth, columns, matrices), Product(
            depth, columns, rows, matrices
        )

    def whole_waves(self, multiprocessors: int) -> float:
        """Return the floating-point operations if every tile and every wave of tiles were full."""
        wave = multiprocessors * math.prod(_TILES[0])
        tiles = min(
            self.matrices * math.ceil(self.rows / high) * math.ceil(self.columns / wide)
            for high, wide in _TILES
        )
        return 2 * self.depth * wave * math.ceil(tiles / multiprocessors)


class Kernel(NamedTuple):
    """One kernel of the forward pass of a sample: numbers that it moves, bytes it keeps, and its matrix product.

    `weights` are numbers that do not grow with the batch: of a product with weights the
    rows do, of another one the matrices. A product has two kernels in the backward pass,
    another kernel one.
    """

    name: str
    moved: float
    kept: float
    product: Product | None = None
    weights: float = 0.0

    @property
    def flops(self) -> float:
        return self.product.flops if self.product else 0.0

    def products(self, samples: int) -> list[Product]:
        """Return the products of `samples`: of the forward pass, then those of the backward pass."""
        if self.product is None:
            return []
        rows, columns, depth, matrices = self.product
        if self.weights:
            own = Product(samples * rows, columns, depth, matrices)
        else:
            own = Product(rows, columns, depth, samples * matrices)
        return [own, *own.gradients]


@dataclass(frozen=True)
class Gpt:
    """A GPT: blocks, width, heads, tokens of a sample, and the size of its vocabulary."""

    layers: int
    width: int
    heads: int
    tokens: int
    vocabulary: int

    @property
    def block_parameters(self) -> int:
        """Four products of attention, two of the feed-forward part, their biases, and two norms."""
        return 12 * self.width**2 + 13 * self.width

    @property
    def embedding_parameters(self) -> int:
        """Tokens and positions."""
        return (self.vocabulary + self.tokens) * self.width


def block_kernels(model: Gpt, degree: int, *, by_sequence: bool) -> list[Kernel]:
    """Return the kernels of a block for one sample on one of `degree` devices."""
    h = float(model.width)
    tokens = float(model.tokens)
    places = tokens * h
    own = places / degree
    scores = model.heads * tokens**2 / degree
    whole = own if by_sequence else places  # of norms, dropout and residuals

    def product(
        name: str, wide: float, narrow: float, moved: float, kept: float
    ) -> Kernel:
        weights = Product(tokens, wide, narrow)
        return Kernel(name, moved, kept, weights, wide * narrow)

    def attention(
        name: str, wide: float, narrow: float, moved: float, kept: float
    ) -> Kernel:
        heads = Product(tokens, wide, narrow, model.heads / degree)
        return Kernel(name, moved, kept, heads)

    norm = Kernel("norm", 2 * whole, _NUMBER * whole)
    join = Kernel("bias, dropout and residual", 3 * whole, _MASK * whole)
    head, part = h / model.heads, h / degree
    return [
        norm,
        product(
            "queries, keys, values", 3 * part, h, places + 3 * own, _NUMBER * whole
        ),
        attention("scores", tokens, head, 2 * own + scores, _NUMBER * 2 * own),
        Kernel("softmax", 2 * scores, _NUMBER * scores),
        Kernel("dropout", 2 * scores, (_MASK + _NUMBER) * scores),
        attention("context", head, tokens, scores + 2 * own, _NUMBER * own),
        product("projection", h, part, own + places, _NUMBER * own),
        join,
        norm,
        product("feed-forward, first", 4 * part, h, places + 4 * own, _NUMBER * whole),
        Kernel("gelu", 8 * own, _NUMBER * 4 * own),
        product(
            "feed-forward, second", h, 4 * part, 4 * own + places, _NUMBER * 4 * own
        ),
        join,
    ]


def head_kernels(model: Gpt, degree: int) -> list[Kernel]:
    """Return the kernels behind the last block: the product with the vocabulary, and the loss in float32."""
    width, tokens = float(model.width), float(model.tokens)
    words = model.vocabulary / degree
    places, scores = tokens * width, tokens * words
    logits = Product(tokens, words, width)
    return [
        Kernel("logits", places + scores, 0.0, logits, width * words),
        Kernel("loss", 4 * scores, 0.0),
    ]


def computed_again(kernels: list[Kernel], recompute: str) -> list[Kernel]:
    """Return the kernels that a block computes once more before its backward pass."""
    return (
        kernels
        if recompute == "full"
        else [each for each in kernels if each.name in _COMPUTED_AGAIN[recompute]]
    )


def passes_s(
    kernels: list[Kernel], roofline: Roofline, samples: int
) -> tuple[float, float]:
    """Return the seconds of the forward and the backward pass of `samples` through kernels, on the roofline."""
    multiprocessors = roofline.device.multiprocessors
    # operations and bytes of each kernel
    forward: list[tuple[float, float]] = []
    backward: list[tuple[float, float]] = []
    for each in kernels:
        nbytes = _NUMBER * (samples * each.moved + each.weights)
        flops = [
            product.whole_waves(multiprocessors) if multiprocessors else product.flops
            for product in each.products(samples)
        ]
        own, *gradients = flops or [0.0, 0.0]
        forward.append((own, nbytes))
        backward += [(gradient, nbytes) for gradient in gradients]
    ahead, back = (
        float(roofline.kernels(*np.reshape(passes, (-1, 2)).T).sum())
        for passes in (forward, backward)
    )
    return ahead, back


def kept_bytes(kernels: list[Kernel], recompute: str) -> float:
    """Return the bytes that a block keeps of a sample: all, without those of `selective`, or its input (`full`)."""
    if recompute == "full":
        return kernels[0].kept
    given_up = _GIVEN_UP if recompute == "selective" else ()
    return sum(each.kept for each in kernels if each.name not in given_up)
