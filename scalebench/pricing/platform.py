"""Platform of a predicted training: cluster, device and input pipeline; and the same with one component changed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Literal

from scalebench.cluster.cluster_file import Cluster
from scalebench.cluster.engine_costs import EngineCosts
from scalebench.pricing.devices import TimeModel
from scalebench.pricing.machine import OperationTimes
from scalebench.study.choices import EngineName

# Component -> quantity that `changed` multiplies; twice that of a rate, or half of a
# time, is an improvement.
RATES = ("compute", "memory bandwidth", "network bandwidth")
TIMES = (
    "launch overhead",
    "network latency",
    "engine",
    "Horovod cycle",
    "input",
    "epoch overhead",
    "jitter",
)
COMMUNICATION = ("network bandwidth", "network latency", "engine", "Horovod cycle")


@dataclass(frozen=True, eq=False)
class Platform:
    """Cluster, device and costs of a training.

    `engine` carries all strategies, by `auto` each the one that it prefers; `engines`
    are the costs of those known. `input_s` seconds in which the input pipeline of a
    worker makes a sample, beside compute; `epoch_s` are fixed seconds of each epoch;
    `jitter` is the standard deviation of a step's compute relative to its mean, in the
    interval `jitter_range` where nobody stated it, as `jitter_source` says;
    `stated_gib` is the memory of a worker where it is not the device's; `cycle`
    multiplies the time between the turns of Horovod's loop.
    """

    cluster: Cluster
    device: TimeModel
    engines: EngineCosts = field(default_factory=EngineCosts)
    engine: EngineName | Literal["auto"] = "auto"
    operations: OperationTimes = field(default_factory=dict)
    collective: str = "auto"
    input_s: float = 0.0
    epoch_s: float = 0.0
    jitter: float = 0.0
    jitter_range: tuple[float, float] | None = None
    jitter_source: str = "stated"
    cycle: float = 1.0
    stated_gib: float | None = None

    @property
    def memory_gib(self) -> float | None:
        """Memory of a worker, None where it is not known."""
        return self.device.memory_gib if self.stated_gib is None else self.stated_gib

    @property
    def hours(self) -> tuple[str, float]:
        """Unit in which hours are counted, and how many of it an hour of a worker is."""
        node = self.cluster.node
        if node.gpus or self.device.gpu:
            return "GPU-hours", 1.0
        # A worker has an equal part of the node's cores.
        return "core-hours", node.cores / node.workers_per_node

    @property
    def components(self) -> tuple[str, ...]:
        """The components that a training may be bound by here."""
        found = [
            "compute",
            "network bandwidth",
            "network latency",
            *self.device.components[1:],
        ]
        # Without measured costs there is nothing that half of them would change.
        found += ["engine"] if self.engines.entries else []
        extra = {
            "input": self.input_s,
            "epoch overhead": self.epoch_s,
            "jitter": self.jitter,
        }
        return tuple(found + [name for name, value in extra.items() if value > 0])

    def between_nodes(self, factor: float) -> Platform:
        """Return the platform with `factor` times the bandwidth of the links between nodes alone."""
        links = self.cluster.links
        rate = {"bandwidth_bytes_per_s": links.inter.bandwidth_bytes_per_s * factor}
        changed = links.model_copy(
            update={"inter": links.inter.model_copy(update=rate)}
        )
        return replace(self, cluster=self.cluster.model_copy(update={"links": changed}))

    def inside_nodes(self, factor: float) -> Platform:
        """Return the platform with `factor` times the bandwidth of the links inside nodes alone."""
        links = self.cluster.links
        rate = {"bandwidth_bytes_per_s": links.intra.bandwidth_bytes_per_s * factor}
        changed = links.model_copy(
            update={"intra": links.intra.model_copy(update=rate)}
        )
        return replace(self, cluster=self.cluster.model_copy(update={"links": changed}))

    def improved(self, *components: str) -> Platform:
        """Return the platform with half the time of each of `components`."""
        found = self
        for component in components:
            found = found.changed(component, 2.0 if component in RATES else 0.5)
        return found

    def changed(self, component: str, factor: float) -> Platform:
        """Return the platform with `factor` times the rate, or the time, of `component`."""
        if component in ("compute", "memory bandwidth", "launch overhead"):
            operations = self.operations  # they stream vectors of the model's size
            if component == (
                "memory bandwidth"
                if "memory bandwidth" in self.device.components
                else "compute"
            ):
                operations = faster(operations, factor)
            return replace(
                self,
                device=self.device.changed(component, factor),
                operations=operations,
            )
        if component == "network bandwidth":
            return replace(
                self, cluster=_with_links(self.cluster, "bandwidth_bytes_per_s", factor)
            )
        if component == "network latency":
            return replace(self, cluster=_with_links(self.cluster, "latency_s", factor))
        if component == "engine":
            return replace(self, engines=scaled_engines(self.engines, factor))
        if component == "Horovod cycle":
            return replace(self, cycle=self.cycle * factor)
        if component == "input":
            return replace(self, input_s=self.input_s * factor)
        if component == "epoch overhead":
            return replace(self, epoch_s=self.epoch_s * factor)
        assert component == "jitter", component
        return replace(self, jitter=self.jitter * factor)


def parts(components: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return the components of communication, and all others."""
    found = list(components)
    return [name for name in found if name in COMMUNICATION], [
        name for name in found if name not in COMMUNICATION
    ]


def binding(
    components: Iterable[str], communicating: float, halves_s: tuple[float, float]
) -> list[str]:
    """Return the components that may bind: those of communication, or all others.

    They are those of communication where its exposed part is the share `communicating`
    > 1/2 of the time, or where the training takes less time with half of all
    communication than with half of all else (`halves_s`). Singly, each component of the
    part that binds may shorten the training less than one of the other part: where
    communication is the sum of small terms, or where a network is nearly hidden and
    compute has several terms.
    """
    communication, others = parts(components)
    return communication if communicating > 0.5 or halves_s[0] < halves_s[1] else others


def faster(operations: OperationTimes, factor: float) -> OperationTimes:
    """Return operations that take 1 / `factor` of their time."""
    return {
        strategy: {name: time.scaled(1 / factor) for name, time in own.items()}
        for strategy, own in operations.items()
    }


def _with_links(cluster: Cluster, name: str, factor: float) -> Cluster:
    """Return the cluster whose links, inside nodes and between them, have `factor` times the quantity `name`."""
    links = cluster.links
    changed = {
        where: link.model_copy(update={name: getattr(link, name) * factor})
        for where, link in (("intra", links.intra), ("inter", links.inter))
    }
    return cluster.model_copy(update={"links": links.model_copy(update=changed)})


def scaled_engines(engines: EngineCosts, factor: float) -> EngineCosts:
    """Return engines whose operations take `factor` times as long."""
    # Bytes, ranks and nodes of an entry stay: it was measured there.
    times = (
        "alpha_s",
        "message_s",
        "negotiation_s",
        "cycle_s",
        "cycle_spread_s",
        "per_step_s",
        "alone_s",
        "pause_s",
    )
    entries = []
    for entry in engines.entries:
        scaled: dict[str, object] = {
            name: value * factor for name in times if (value := getattr(entry, name))
        }
        scaled["points"] = [
            (nbytes, seconds * factor) for nbytes, seconds in entry.points
        ]
        entries.append(entry.model_copy(update=scaled))
    return engines.model_copy(update={"entries": entries})
