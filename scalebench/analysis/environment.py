"""Machine, packages and calibration of a study, from its folder, and differences between two environments."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from scalebench.analysis.loading import Results, cached
from scalebench.calibration.calibration_file import (
    THIS_MACHINE,
    Calibration,
    read_calibration,
)
from scalebench.errors import ClusterError
from scalebench.pricing.machine import STATED_STEPS
from scalebench.records.folder import CALIBRATION
from scalebench.records.machine_facts import TRANSPORTS
from scalebench.study.spec import SIMULATED
from scalebench.system.file_access import read_text

# Packages whose version determines the speed of a run; named first where several
# differ.
DECISIVE = ("torch", "numpy", *TRANSPORTS, "scalebench")
ABSENT = "absent"  # in place of a version
_SUPPOSED = (
    "slowdown",
    "slow_windows",
)  # options of virtual runs that native runs do not have
# of a file of provenance, as far as it is read
_SHAPES: dict[str, type] = {"cpu": dict, "gpus": list, "packages": dict, "nodes": dict}
_SHAPES |= dict.fromkeys(("host_hash", "packages_hash"), str)


def provenance_in(folder: Path) -> list[dict[str, Any]]:
    """Contents of the files in `folder`/provenance, with their names as in rows; unreadable files are left out."""
    files = sorted((folder / "provenance").glob("*.json"))
    found = []
    for path in files:
        facts = _mapping(path)
        if facts is not None:
            found.append(facts | {"provenance": path.stem})
    # Files may be edited or written by others: what has another form is as good as
    # missing.
    return [facts for facts in found if _has_shape(facts)]


def _has_shape(facts: dict[str, Any]) -> bool:
    """Return True if the keys that are read are of the expected type, or absent."""
    return all(
        isinstance(facts.get(key) or expected(), expected)
        for key, expected in _SHAPES.items()
    )


def nodes_in(facts: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Map host_hash to facts, for each node that the native runs of one provenance file used."""
    # Runs of several nodes describe each of them; others the one that wrote the file.
    return facts.get("nodes") or {str(facts.get("host_hash")): facts}


def machines_of(
    runs: pd.DataFrame, provenance: Iterable[dict[str, Any]]
) -> dict[str, dict[str, Any] | None]:
    """Map host_hash to facts, None if undescribed, for each node that `runs` used."""
    nodes = {facts["provenance"]: nodes_in(facts) for facts in provenance}
    known = {host: facts for own in nodes.values() for host, facts in own.items()}
    used = [
        host
        for name in runs["provenance"].dropna().unique()
        for host in nodes.get(name, {})
    ]
    hosts = dict.fromkeys([*used, *runs["host_hash"].dropna().unique()])
    return {host: known.get(host) for host in hosts}


def hardware(facts: dict[str, Any]) -> str:
    """Processor, cores and accelerators of one provenance file."""
    cpu = facts.get("cpu") or {}
    cores = cpu.get("usable_cores")
    return ", ".join(
        [
            f"{cpu.get('model')}",
            f"{cores} core{'' if cores == 1 else 's'}",
            *map(str, facts.get("gpus") or ()),
        ]
    )


def changed_packages(
    provenance: Iterable[dict[str, Any]], hashes: Sequence[str]
) -> dict[str, list[str]]:
    """Map each package with several versions under these `packages_hash`es to its versions, in their order.

    Decisive packages come first. Empty where one of the sets is not described.
    """
    sets = {facts.get("packages_hash"): facts.get("packages") for facts in provenance}
    described = [
        packages for name in hashes if (packages := sets.get(name)) is not None
    ]
    # Comparing the described sets alone would call the rest equal.
    if len(described) < len(hashes):
        return {}
    names = sorted(
        {name for packages in described for name in packages},
        # False sorts before True.
        key=lambda name: (name not in DECISIVE, name),
    )
    versions = {
        name: [str(packages.get(name, ABSENT)) for packages in described]
        for name in names
    }
    return {
        name: list(dict.fromkeys(found))
        for name, found in versions.items()
        if len(set(found)) > 1
    }


@cached
def calibration_of(results: Results) -> str:
    """Checksum of the calibration that charged virtual runs; empty without one."""
    given = results.study.get("calibration")
    kept = results.folder / CALIBRATION  # also a copy of a given one
    path = Path(str(given)) if given and not kept.is_file() else kept
    if (facts := _mapping(path)) is not None:
        # the key identifies the request
        numbers = {key: value for key, value in facts.items() if key != "key"}
        return hashlib.sha256(json.dumps(numbers, sort_keys=True).encode()).hexdigest()[
            :12
        ]
    return f"{path} (not found)" if given else ""


def calibration_in(folder: Path) -> Calibration | None:
    """Return the calibration kept in `folder`; None where it is missing or not one of this version."""
    try:
        return read_calibration(folder / CALIBRATION)
    except ClusterError:
        return None


@cached
def states_steps(results: Results) -> bool:
    """Return True if the step times of all virtual runs were stated, by the study or by its cluster."""
    if results.study.get("device_step_time") is not None:
        return True
    virtual = results.runs[results.runs["execution"].isin(SIMULATED)]
    return (
        # A study without virtual runs states nothing about them.
        len(virtual) > 0
        and not (virtual["cluster"] == THIS_MACHINE).any()
        and not calibration_of(results)
    )


def stated_in_words(results: Results) -> str:
    """Costs that virtual times at stated step times leave out, as text; empty where step times were measured."""
    several = (
        (results.runs["execution"] == "virtual") & (results.runs["workers"] > 1)
    ).any()
    return STATED_STEPS if several and states_steps(results) else ""


def supposed(results: Results) -> str:
    """Stated properties of virtual workers that native workers on this machine do not have, as text."""
    said = (
        ["device_step_time"]
        if results.study.get("device_step_time") is not None
        else []
    )
    return ", ".join(said + [name for name in _SUPPOSED if _virtual(results).get(name)])


def charged_engine(results: Results) -> str:
    """Engine whose costs the study charges for virtual collectives; empty for each strategy's preferred one."""
    said = _virtual(results).get("engine", "auto")
    if said == "auto":
        said = results.study.get("engine", "auto")
    return "" if said == "auto" else str(said)


@cached
def jitter_in_words(results: Results) -> str:
    """Jitter of single steps of virtual workers, stated or measured, as text; empty if unknown."""
    kind = _virtual(results).get("jitter", "measured")
    sigma = _virtual(results).get("jitter_sigma")
    if kind == "none":
        return "no jitter"
    if kind != "measured":
        return f"{kind} jitter" + (
            f" of {100 * sigma:.2g} %" if sigma is not None else ""
        )
    calibration = calibration_in(results.folder)
    tables = (
        [table for table in calibration.tables if table.jitter] if calibration else []
    )
    if not tables:
        return ""
    spread = max(float(np.std(table.jitter)) for table in tables)
    delayed = max(float(table.outliers) for table in tables)
    return (
        f"jitter of {100 * spread:.1f} % as measured, "
        f"{100 * delayed:.0f} % of the steps, delayed by other programs, left out"
    )


@cached
def measured_nodes(results: Results) -> int:
    """Largest number of nodes on which the engines in the calibration were measured."""
    calibration = calibration_in(results.folder)
    return (
        max((entry.nodes for entry in calibration.engines.entries), default=1)
        if calibration
        else 1
    )


def _virtual(results: Results) -> dict[str, Any]:
    return results.study.get("virtual") or {}


def _mapping(path: Path) -> dict[str, Any] | None:
    """The JSON object in `path`, if there is one."""
    try:
        facts = json.loads(read_text(path))
    except (OSError, ValueError, RecursionError):
        return None
    return facts if isinstance(facts, dict) else None
