"""Loading of clusters: shipped presets by name, or YAML files."""

from __future__ import annotations

import os
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from scalebench.cluster.spec import Cluster
from scalebench.errors import ClusterError, nearest
from scalebench.study.validation import explain, read_mapping

_HERE = "this-machine"  # value read from this machine at loading


@cache
def cluster_names() -> list[str]:
    """Return the names of the shipped clusters."""
    folder = resources.files("scalebench.cluster") / "presets"
    return sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))


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

    The value `this-machine` of `cores`, `workers_per_node` and `memory_gib` is replaced by that of this machine.

    Raises:
        ClusterError: unknown name (the nearest is named), unreadable file, or invalid key.
    """
    text = str(name_or_path)
    path = own_file(text)
    if path is None:
        path = preset(text)
    else:
        if path.suffix not in {".yaml", ".yml"} and not path.is_file():
            raise ClusterError(f"unknown cluster {text!r}, and no such file; {nearest(text, cluster_names())}")
    raw = read_mapping(path, ClusterError, "cluster")
    if isinstance(raw.get("node"), dict):
        raw["node"] = _resolved(raw["node"])
    try:
        return Cluster.model_validate(raw)
    except ValidationError as error:
        raise ClusterError(explain(error, Cluster, str(path))) from None


def _resolved(node: dict[str, Any]) -> dict[str, Any]:
    here: dict[str, Any] = {"cores": _cores, "workers_per_node": _cores, "memory_gib": _memory_gib}
    return {key: here[key]() if value == _HERE and key in here else value for key, value in node.items()}


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _memory_gib() -> float:
    return round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1)
