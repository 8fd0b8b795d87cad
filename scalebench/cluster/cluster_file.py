"""Clusters: shipped presets by name, or YAML files, of nodes, links and measured step times.

Every number has a source.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)

from scalebench.errors import ClusterError, nearest
from scalebench.study.heterogeneity import Heterogeneity, SlowLinks
from scalebench.study.spec import Name, Training
from scalebench.study.validation import StrictModel, explain, read_mapping
from scalebench.system.hardware import cores, memory_mib

_HERE = "this-machine"  # value read from this machine at loading
_Source = Field(
    min_length=3,
    description="source of the numbers of this block; `assumed` with a range if there is none",
)


class Node(StrictModel):
    """One node of the cluster."""

    cores: PositiveInt
    gpus: int = Field(0, ge=0)
    workers_per_node: PositiveInt = Field(
        description="workers that a node holds, one per GPU as a rule"
    )
    memory_gib: PositiveFloat | None = None
    network_cards: PositiveInt = Field(
        1, description="cards of links.inter; ranks that send at once share them"
    )
    device: str | None = Field(
        None,
        description="of a worker, as a device is called; predictions take it by default",
    )
    source: str = _Source


_SLOWEST = 1e4  # bytes/s; below it a bandwidth was given in another unit


class Link(StrictModel):
    """Link with cost latency_s + n / bandwidth_bytes_per_s (s) for n bytes, in each direction."""

    latency_s: PositiveFloat = Field(description="seconds of an empty message")
    bandwidth_bytes_per_s: PositiveFloat = Field(
        description="bytes/s in each direction"
    )
    source: str = _Source

    @model_validator(mode="after")
    def _in_si_units(self) -> Link:
        # No link takes a second: the number was of microseconds.
        if self.latency_s >= 1:
            raise ValueError(
                f"latency_s: expected seconds, 2 us as 2e-6, got {self.latency_s:g}"
            )
        if (rate := self.bandwidth_bytes_per_s) < _SLOWEST:
            raise ValueError(
                f"bandwidth_bytes_per_s: expected bytes/s, 25 GB/s as 25e9, got {rate:g}"
            )
        return self


class SharedLink(Link):
    """Link inside a node, for one rank or for several that share it."""

    shared_by: PositiveInt = Field(
        1, description="ranks of a node that share such a link, as below a PCIe switch"
    )


def doublings(nodes: int) -> float:
    """Return lg(m/2) for m `nodes`; 0 up to two."""
    return math.log2(nodes / 2) if nodes > 2 else 0.0


class Congestion(StrictModel):
    """Growth of transfers between nodes with their number m: seconds x (1 + per_doubling lg(m / 2)) from two nodes on.

    The form is linear in its parameter, so that it is fitted together with latency and
    bandwidth (`cluster.link_fit`), and grows slower beyond the measured nodes than a
    power of m.
    """

    per_doubling: NonNegativeFloat = Field(
        description="growth with each doubling of the nodes, 0.1 is 10 %"
    )
    source: str = _Source

    def factor(self, nodes: int) -> float:
        """Return how many times longer latency and transfer between `nodes` nodes are than between two."""
        return 1 + self.per_doubling * doublings(nodes)


class Links(StrictModel):
    """Links inside a node, and between nodes (of one network card)."""

    intra: SharedLink
    inter: Link
    congestion: Congestion | None = Field(
        None, description="growth with the number of nodes; none without it"
    )
    slow: SlowLinks = Field(
        {},
        description="node, or node-node: how many times slower its cards, or the way between them, are; 2 halves",
    )

    @property
    def slow_nodes(self) -> set[int]:
        """Numbers of the nodes that `slow` names."""
        return {int(node) for ends in self.slow for node in ends.split("-")}

    def bandwidth_between(self, nodes: Collection[int]) -> float:
        """Return the bandwidth (bytes/s) of the slowest card of `nodes` and the slowest path between them."""
        slowest = 1.0
        for ends, factor in self.slow.items():
            # A slow card counts with its node, a slow path with both of its ends.
            if all(int(node) in nodes for node in ends.split("-")):
                slowest = max(slowest, factor)
        return self.inter.bandwidth_bytes_per_s / slowest

    def total_bandwidth(self, nodes: Collection[int]) -> float:
        """Return the sum of the bandwidths (bytes/s) of one card of each of `nodes`."""
        # Paths between two nodes slow no card down.
        cards = {
            ends: factor
            for ends, factor in self.slow.items()
            if "-" not in ends and int(ends) in nodes
        }
        lost = sum(1 - 1 / factor for factor in cards.values())
        return self.inter.bandwidth_bytes_per_s * (len(nodes) - lost)

    def congestion_among(self, nodes: int) -> float:
        """Return the factor of congestion between `nodes` nodes."""
        return self.congestion.factor(nodes) if self.congestion else 1.0


class Reduction(StrictModel):
    """Reduction cost gamma: adding n bytes to n bytes moves 3 n bytes at memory speed."""

    seconds_per_byte: PositiveFloat = Field(description="of adding a vector to another")
    source: str = _Source


class StepTime(StrictModel):
    """Seconds of one worker for one batch of one model."""

    model: str = Field(description="model as printed: name, with options in brackets")
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"
    batch: PositiveInt
    forward_s: PositiveFloat
    backward_s: PositiveFloat
    update_s: PositiveFloat
    source: str = _Source

    @property
    def step_s(self) -> float:
        """Seconds of forward, backward and update."""
        return self.forward_s + self.backward_s + self.update_s


class Cluster(StrictModel):
    """Cluster simulated by a virtual run."""

    name: Name
    description: str = ""
    nodes: PositiveInt = Field(description="number of nodes")
    node: Node
    links: Links = Field(
        description="intra and inter, each with latency_s, bandwidth_bytes_per_s and source"
    )
    reduction: Reduction = Field(
        description="seconds_per_byte of adding two vectors, and source"
    )
    compute: Literal["this-machine", "stated"] = Field(
        "stated",
        description="this-machine: its nodes are machines like this one, so compute is measured here",
    )
    step_times: list[StepTime] = Field([])
    uneven: Heterogeneity = Field(
        Heterogeneity(),
        description="slow workers, windows, jitter: where a study says nothing",
    )

    @model_validator(mode="after")
    def _slow_nodes_exist(self) -> Cluster:
        for key, slow in (
            ("links.slow", self.links.slow),
            ("uneven.slow_links", self.uneven.slow_links),
        ):
            for ends in slow:
                if (node := max(map(int, ends.split("-")))) >= self.nodes:
                    raise ValueError(
                        f"{key} names node {node}; the cluster has the nodes 0 to {self.nodes - 1}"
                    )
        return self

    def with_slow_links(self, slow: SlowLinks) -> Cluster:
        """Return the cluster with additional slow links."""
        links = self.links.model_copy(update={"slow": {**self.links.slow, **slow}})
        return self.model_copy(update={"links": links}) if slow else self

    def nodes_for(self, workers: int) -> int:
        """Return the number of nodes for `workers`.

        Raises:
            ClusterError: the cluster has fewer nodes.
        """
        # Nodes are filled one after the other, as `SlowLinks` and prices number them.
        needed = math.ceil(workers / self.node.workers_per_node)
        if needed > self.nodes:
            room = self.nodes * self.node.workers_per_node
            raise ClusterError(
                f"cluster {self.name}: {workers} workers need {needed} nodes of {self.node.workers_per_node}, "
                f"it has {self.nodes}; ask for at most {room} workers or describe a larger cluster"
            )
        return needed

    def step_times_of(self, model: str, dtype: str) -> dict[int, StepTime]:
        """Return the step times of one model by batch size."""
        return {
            entry.batch: entry
            for entry in self.step_times
            if (entry.model, entry.dtype) == (model, dtype)
        }


def require_step_times(cluster: Cluster, training: Training) -> None:
    """Refuse a virtual run without measured compute: steps of this machine on the network of another.

    Raises:
        ClusterError: the cluster does not consist of machines like this one, the study states no device_step_time, and
            the cluster has no step times for the model, dtype and (if fixed) batch per worker.
    """
    # Steps are measured here, or stated by the study.
    if cluster.compute == "this-machine" or training.device_step_time is not None:
        return
    model = str(training.model)
    known = cluster.step_times_of(model, training.dtype)
    batch = training.batch_per_worker
    # A global batch makes a batch of its own at each worker count, found where its step
    # is priced.
    if known and (batch is None or batch in known):
        return
    wanted = f"model {model!r} in {training.dtype}" + (
        f" at batch {batch}" if batch else ""
    )
    others = dict.fromkeys(
        f"{entry.model} in {entry.dtype}" for entry in cluster.step_times
    )
    have = f" (it has batches {', '.join(map(str, sorted(known)))})" if known else ""
    have = have or (f" (it has {', '.join(others)})" if others else "")
    raise ClusterError(
        f"cluster {cluster.name}: no measured step time for {wanted}{have}; state the seconds of one step on its "
        "device with --device-step-time (`scalebench predict` with --device estimates them), add them to a cluster "
        "file's step_times, or use --cluster this-machine"
    )


@cache
def cluster_names() -> list[str]:
    """Return the names of the shipped clusters."""
    folder = resources.files("scalebench.cluster") / "presets"
    return sorted(
        entry.name.removesuffix(".yaml")
        for entry in folder.iterdir()
        if entry.name.endswith(".yaml")
    )


def preset(name: str) -> Path:
    """Return the file of the shipped cluster `name`."""
    return Path(str(resources.files("scalebench.cluster") / "presets" / f"{name}.yaml"))


def describe_clusters() -> list[tuple[str, str]]:
    """Return (name, one-line summary) of each shipped cluster."""
    return [(name, load_cluster(name).description) for name in cluster_names()]


def own_file(name_or_path: str) -> Path | None:
    """Return the YAML file of a study's cluster; None for a shipped cluster."""
    return None if name_or_path in cluster_names() else Path(name_or_path)


def load_cluster(name_or_path: str | Path) -> Cluster:
    """Return the shipped cluster of that name, or the cluster in that YAML file.

    The value `this-machine` of `cores`, `workers_per_node` and `memory_gib` is replaced
    by that of this machine.

    Raises:
        ClusterError: unknown name (the nearest is named), unreadable file, or invalid key.
    """
    text = str(name_or_path)
    path = own_file(text)
    if path is None:
        path = preset(text)
    else:
        # Neither a shipped name nor a file: most likely a misspelt name.
        if path.suffix not in {".yaml", ".yml"} and not path.is_file():
            raise ClusterError(
                f"unknown cluster {text!r}, and no such file; {nearest(text, cluster_names())}"
            )
    # Not `read_as`: some values are those of this machine, and put in first.
    raw = read_mapping(path, ClusterError, "cluster")
    if isinstance(raw.get("node"), dict):
        raw["node"] = _resolved(raw["node"])
    try:
        return Cluster.model_validate(raw)
    except ValidationError as error:
        raise ClusterError(explain(error, Cluster, str(path))) from None


def _resolved(node: dict[str, Any]) -> dict[str, Any]:
    here: dict[str, Any] = {
        "cores": cores,
        "workers_per_node": cores,
        "memory_gib": _memory_gib,
    }
    return {
        key: here[key]() if value == _HERE and key in here else value
        for key, value in node.items()
    }


def _memory_gib() -> float:
    return round(memory_mib() / 1024, 1)
