"""Published measurements of training on several workers: their rows, links, and communication on these links."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd

from scalebench.cluster import cluster_file, operation
from scalebench.cluster.network import Network
from scalebench.errors import ResultsError
from scalebench.models.layers import LayerTable
from scalebench.models.zoo.layers import layer_table_names, load_layers
from scalebench.study.choices import NCCL
from scalebench.system.file_access import read_bytes

COLUMNS = (
    "series",
    "split",
    "source",
    "system",
    "devices_per_node",
    "nodes",
    "workers",
    "intra_node",
    "inter_node",
    "inter_gbps_per_node",
    "strategy",
    "model",
    "params_million",
    "batch_per_worker",
    "quantity",
    "value",
    "unit",
    "data",
    "note",
)
QUANTITIES = ("throughput_total", "step_time", "allreduce_time")
# bytes/s in each direction; PCI-SIG, data sheet of PCIe 3.0 x16
_PCIE = 15.75e9
# NVIDIA, data sheets: P100 4 NVLinks, V100 6, A100 12, H100 18. What one carries of the
# 20 or 25 GB/s of a data sheet is that of NCCL's model of them (src/graph/topo.h). All
# links of a device lead to a switch where there is one.
_NVLINK = {"NVLink1": 4 * 18e9, "NVLink2": 6 * 20e9, "4 x NVLink3": 4 * 20e9}
_NVSWITCH = {"v100": 6 * 20e9, "a100": 12 * 20e9, "h100": 18 * 20.6e9}
# bytes/s; Amazon EC2 User Guide, instance network bandwidth: single-flow traffic is
# limited to 5 Gbps
_FLOW = 5e9 / 8
# devices below a PCIe switch: the two GPUs of a K80 board, two of a DGX-1
_PER_SWITCH = 2

_CONFIGURATION = (
    "source",
    "system",
    "device",
    "devices_per_node",
    "intra_node",
    "framework",
    "strategy",
    "comm",
    "model",
    "data",
    "precision",
)
# of a note: sequence length, activations computed again
_SETTINGS = r"(?:seq|act\.ckpt)=\w+"
# batches are chosen in doublings; those closer than half of one count as the same
_NEAR = math.sqrt(2)

_HEADER = 10_000  # most characters of the first line


def read_published(path: Path) -> tuple[pd.DataFrame, list[str]]:
    """Return the rows of data-parallel training and collectives in a CSV, and notes of the held rows left out.

    Rows without a split belong to no series; they calibrate those of their
    configuration (`calibrating_rows`).

    Raises:
        ResultsError: unreadable, a missing column, a split that is neither base nor hold, non-positive numbers, or
            nothing to predict.
    """
    table = read_csv(path)
    if missing := [name for name in COLUMNS if name not in table]:
        raise ResultsError(
            f"{path}: column {missing[0]!r} is missing; expected {', '.join(COLUMNS)}"
        )
    table = table[table["series"].notna() | table["split"].isna()]
    _require(
        table["split"],
        table["split"].isin(["base", "hold"]) | table["split"].isna(),
        "base or hold",
        path,
    )
    families = table["strategy"].astype(str).map(family)
    based = table["split"].isna() | table["series"].isin(
        table.loc[table["split"] == "base", "series"]
    )
    reasons = {
        "of pipeline parallelism, which is not data-parallel": families == "pipeline",
        f"of another quantity than {', '.join(QUANTITIES)}": ~table["quantity"].isin(
            QUANTITIES
        ),
        "of models whose size is not stated, so that their gradients are unknown": pd.Series(
            [
                family(str(row.strategy)) != "collective" and gradient_bytes(row) == 0
                for row in records(table)
            ],
            index=table.index,
        ),
        "of series without a row of split=base to calibrate on": ~based,
    }
    notes, kept = [], pd.Series(True, index=table.index)
    for reason, left_out in reasons.items():
        if count := int((kept & left_out & (table["split"] == "hold")).sum()):
            notes.append(f"{count} held rows are left out: {reason}")
        kept &= ~left_out
    table = table[kept]
    require_positive(table, ("value", "workers", "nodes", "devices_per_node"), path)
    # a step's samples
    require_positive(
        table[table["quantity"] == "throughput_total"], ("batch_per_worker",), path
    )
    if not (table["split"] == "hold").any():
        raise ResultsError(
            f"{path}: no row of split=hold to predict"
            + "".join(f"; {note}" for note in notes)
        )
    return table.reset_index(drop=True), notes


def calibrating_rows(base: Any, table: pd.DataFrame) -> list[Any]:
    """Return the rows that say how long a step of `base` computes: those of its configuration that are not held.

    Equal are the source, system, device, links inside a node, framework, strategy,
    model, data, precision, sequence length, and whether activations are computed again.
    The batch of a worker differs by less than a factor sqrt(2), and there are at most
    as many workers as in `base`, so that a prediction still goes out from few workers
    to more.
    """
    near = table["batch_per_worker"] / base.batch_per_worker
    known = (table["split"] != "hold") & (table["workers"] <= base.workers)
    alike = near.between(1 / _NEAR, _NEAR, "neither")
    same = table[(known & alike) | (table.index == base.Index)]
    configuration = _configuration(same)
    return records(same[configuration == configuration[base.Index]])


def _configuration(table: pd.DataFrame) -> pd.Series[int]:
    """Return a number for each row, the same for rows of one configuration; an optional column may be missing."""
    settings = table["note"].astype(str).str.findall(_SETTINGS).str.join(" ")
    stated = [name for name in _CONFIGURATION if name in table]
    return (
        table.assign(settings=settings)
        .groupby([*stated, "settings"], dropna=False)
        .ngroup()
    )


def read_csv(path: Path) -> pd.DataFrame:
    """Read a CSV of published measurements, or raise ResultsError."""
    try:
        return pd.read_csv(io.BytesIO(read_bytes(path)))
    except (
        OSError,
        UnicodeDecodeError,
        pd.errors.ParserError,
        pd.errors.EmptyDataError,
    ) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise ResultsError(
            f"{path}: not a readable CSV of published measurements: {reason}"
        ) from None


def has_columns(path: Path, columns: Iterable[str]) -> bool:
    """Return True if the first line of `path` names all `columns`."""
    try:
        with path.open() as file:
            return set(columns) <= set(file.readline(_HEADER).strip().split(","))
    except (OSError, UnicodeDecodeError):
        return False  # the reader of the rows says what is wrong


def require_positive(table: pd.DataFrame, columns: Sequence[str], path: Path) -> None:
    """Raise ResultsError at the first line of `path` that has no number above 0 in one of `columns`."""
    for name in columns:
        numbers = pd.to_numeric(table[name], errors="coerce")
        _require(
            table[name], (numbers > 0) & (numbers < math.inf), "a number above 0", path
        )


def _require(
    column: pd.Series[Any], met: pd.Series[bool], expected: str, path: Path
) -> None:
    if len(wrong := column[~met]):
        line = int(wrong.index[0]) + 2
        raise ResultsError(
            f"{path}: line {line}: expected {expected} as {column.name}, got {wrong.iloc[0]}"
        )


def records(table: pd.DataFrame) -> list[Any]:
    """Return the rows as named tuples."""
    return list(table.itertuples())


def family(strategy: str) -> str:
    """Return how a published strategy communicates: server, sharded, allreduce, collective or pipeline."""
    name = strategy.lower()
    if "pipeline" in name:
        return "pipeline"
    if name.startswith("allreduce"):
        return "collective"
    if "shard" in name:
        return "sharded"
    if "server" in name or "without nccl" in name:
        return "server"  # variables on one device, copied over PCIe
    return "allreduce"


def stated_cluster(
    row: Any, share: float = 1.0, *, one_flow: bool = True, flow_share: float = 1.0
) -> cluster_file.Cluster:
    """Return the links that a published row states, at `share` of their bandwidth.

    A network between nodes that is not stated is taken to be as fast as the links
    inside one. `one_flow`: a ring on the network of cloud instances is one TCP flow to
    each neighbour, which that network limits; it reaches `flow_share` of that limit.
    """
    intra = _intra_rate(str(row.intra_node), str(getattr(row, "device", "")))
    if family(str(row.strategy)) == "server":
        # variables lie in the memory of the host, or are copied through it
        intra = _PCIE
    stated = float(row.inter_gbps_per_node)
    inter = stated * 1e9 / 8 if math.isfinite(stated) else intra
    if (
        one_flow
        and "instance" in str(row.inter_node)
        and family(str(row.strategy)) == "allreduce"
    ):
        inter = min(inter, flow_share * _FLOW / share)
    # TCP on Ethernet and on clouds; InfiniBand and the like otherwise.
    slow = any(word in str(row.inter_node) for word in ("instance", "Eth", "GbE"))
    shared_by = _PER_SWITCH if intra == _PCIE else 1
    return _cluster(
        int(row.devices_per_node),
        share * intra,
        shared_by,
        share * inter,
        50e-6 if slow else 4e-6,
    )


def linked(links: str, device: str, devices: int) -> cluster_file.Cluster:
    """Return a node of equal devices that are joined by `links`, as a row names them."""
    rate = _intra_rate(links, device)
    return _cluster(devices, rate, 1, rate, 4e-6)


def _intra_rate(links: str, device: str) -> float:
    """Return bytes/s of a device's links inside a node, as a row names them; PCIe if it names no NVLink.

    Raises:
        ResultsError: how many links lead from such a device to a switch is not known.
    """
    if not links.startswith("NVLink/NVSwitch"):
        return next(
            (rate for name, rate in _NVLINK.items() if links.startswith(name)), _PCIE
        )
    for name, rate in _NVSWITCH.items():
        if device.lower().startswith(name):
            return rate
    raise ResultsError(
        f"links NVLink/NVSwitch of device {device!r}: expected a device that begins with {', '.join(_NVSWITCH)}"
    )


@cache
def _cluster(
    per_node: int, intra: float, shared_by: int, inter: float, latency_s: float
) -> cluster_file.Cluster:
    source = "data sheet or published; latency assumed"
    links = cluster_file.Links(
        intra=cluster_file.SharedLink(
            latency_s=5e-6,
            bandwidth_bytes_per_s=intra,
            shared_by=shared_by,
            source=source,
        ),
        inter=cluster_file.Link(
            latency_s=latency_s, bandwidth_bytes_per_s=inter, source=source
        ),
    )
    node = cluster_file.Node(cores=1, workers_per_node=per_node, source="published")
    reduction = cluster_file.Reduction(seconds_per_byte=1e-12, source="assumed")
    return cluster_file.Cluster(
        name="published", nodes=1_000_000, node=node, links=links, reduction=reduction
    )


def communication_s(
    row: Any, share: float = 1.0, *, one_flow: bool = True, flow_share: float = 1.0
) -> float:
    """Return seconds of one synchronisation of a published row on its stated links, without overlap.

    server: each worker pushes and pulls over its PCIe link (a single one only if variables lie in host memory); a
    variable on a device is summed there, so that the device of the largest one receives it from all others; nodes
    exchange their sums with shards on all nodes. allreduce: NCCL's choice. sharded: ring passes of 2-byte numbers, a
    gather before forward and, unless parameters stay gathered, another before backward, and a scatter; layer by layer
    where the row states how many there are.
    """
    workers = int(row.workers)
    nodes = int(row.nodes)
    nbytes = gradient_bytes(row)
    inside = -(-workers // nodes)
    cluster = stated_cluster(row, share, one_flow=one_flow, flow_share=flow_share)
    kind = family(str(row.strategy))
    if kind == "server":
        intra = cluster.links.intra
        # Workers behind one PCIe switch share the way to the host.
        crossing = nbytes * min(inside, intra.shared_by)
        if not _in_host_memory(str(row.strategy)):
            if workers == 1:
                return 0.0
            crossing = max(
                crossing, (inside - 1) * nbytes * largest_variable(str(row.model))
            )
        own = 2 * crossing / intra.bandwidth_bytes_per_s
        return own + Network(cluster, 1).time(_mean(nbytes, nodes, "rabenseifner"))
    network = Network(cluster, inside)
    if kind == "sharded":
        layers = _layers(row)
        passes = 2 if _stays_gathered(str(row.strategy)) else 3
        return (
            layers
            * passes
            / 2
            * network.time(_mean(nbytes / 2 / layers, workers, "ring"))
        )
    return network.time(_mean(nbytes, workers, NCCL))


def _mean(nbytes: float, ranks: int, algorithm: str) -> operation.Operation:
    return operation.Operation(
        operation.Kind.ALLREDUCE, int(nbytes), range(ranks), algorithm=algorithm
    )


def _layers(row: Any) -> int:
    """Return how many parts of a sharded model are gathered one after another, each in messages of its own."""
    stated = float(getattr(row, "layers", math.nan))
    return max(1, int(stated)) if math.isfinite(stated) else 1


def _stays_gathered(strategy: str) -> bool:
    """Return True if parameters that forward gathered are kept for backward, as by SHARD_GRAD_OP of PyTorch's FSDP."""
    return "SHARD_GRAD_OP" in strategy


def _in_host_memory(strategy: str) -> bool:
    """Return True if variables are copied to a device even for a single worker: stated `on cpu`, or as a PS process."""
    return "cpu" in strategy or "colocated" in strategy


def largest_variable(model: str) -> float:
    """Return the share of the parameters in the largest weight of a published model; 0 without a layer table."""
    layers = layer_table_of(model)
    return float(layers.column("weights").max()) / layers.parameters if layers else 0.0


@cache
def layer_table_of(model: str) -> LayerTable | None:
    """Return the shipped layer table whose name a published model's begins with."""
    # Papers write ResNet-50 for resnet50.
    plain = re.sub("[^a-z0-9]", "", model.lower())
    found = [
        name for name in layer_table_names() if plain.startswith(name.replace("_", ""))
    ]
    return load_layers(max(found, key=len)) if found else None


def gradient_bytes(row: Any) -> float:
    """Return bytes of the gradients in float32: the stated size of the model, else by its parameters; 0 if unknown."""
    stated = re.search(r"model size (\d+) MB", str(row.note))
    if stated:
        return float(stated[1]) * 1e6
    return (
        4e6 * float(row.params_million)
        if math.isfinite(float(row.params_million))
        else 0.0
    )


def message_bytes(row: Any) -> float:
    """Return bytes of a measured collective, stated in its note as `400000 bytes`.

    Raises:
        ResultsError: the note does not state them.
    """
    stated = re.search(r"(\d+) bytes", str(row.note))
    if stated is None:
        raise ResultsError(
            f"series {row.series}: the note of a collective has to state its size, as in '400000 bytes'"
        )
    return float(stated[1])


def step_seconds(row: Any, value: float, *, back: bool = False) -> float:
    """Return seconds of a step from a published `value`; `back`: the value from seconds."""
    if row.quantity == "throughput_total":
        tokens = re.search(r"seq=(\d+)", str(row.note))
        return (
            float(row.batch_per_worker)
            * float(row.workers)
            * (float(tokens[1]) if tokens else 1.0)
            / value
        )
    unit = 1e-3 if row.unit == "ms" else 1.0
    return value / unit if back else value * unit
