"""Copies a study's records so that they hold for others: no homes, no secrets, and no path of this machine.

Files that the study names (a cluster, weights, a model of one's own, a calibration) go to `inputs/` and the study names
them there; data files stay where they are, and the study expects them in `inputs/data`.
"""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scalebench.artifact.code import redact_code
from scalebench.cluster.load import load_cluster, own_file, preset
from scalebench.cluster.spec import Cluster
from scalebench.errors import ClusterError, ResultsError
from scalebench.models.own import is_own
from scalebench.models.pinning import checksum
from scalebench.records.durations import FILE as DURATIONS
from scalebench.records.progress import begun_in
from scalebench.records.provenance import redact
from scalebench.study.load import dump_study, load_study
from scalebench.study.spec import Study, slug

CALIBRATION = "calibration.json"
DATA = "inputs/data"
_HERE = "this-machine"
_TEXTS = ("error", "launcher", "binding", "device", "energy_source")  # columns in which a name may stand


@dataclass
class Shipment:
    """What was copied: `study` as it is in the artifact (None: the records have no study.yaml), and what is missing.

    `cluster` is the file that stands for the machine of the records, where virtual runs were made on this machine.
    `sizes` are what clusters that read theirs from the machine they are loaded on have there.
    `is_stated`: its virtual runs are of a machine all of whose costs are stated, so that no calibration charges them.
    Relative paths of the study are seen from the folder that it was `begun_in`. `changed` are those of the missing ones
    that are there, but not as they were when the study began.
    """

    study: Study | None = None
    begun_in: Path = Path()
    cluster: str = ""
    needs_data: bool = False
    has_calibration: bool = False
    is_stated: bool = False
    sizes: dict[str, float] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)

    def settled(self, cluster: str) -> str:
        """The text of a cluster's file: one that reads its size where it is loaded has that of the records' machine."""
        text = redact(cluster)
        for key, size in self.sizes.items():
            text = re.sub(rf"\b({key}: *){_HERE}\b", rf"\g<1>{size}", text)
        return text


def ship_records(folder: Path, target: Path, name: str) -> Shipment:
    """Copy the records in `folder` to `target`/results/`name` and their inputs to `target`/inputs.

    Raises:
        ResultsError: a file cannot be read.
        StudyError: study.yaml is not one of this version.
    """
    shipment, moved = Shipment(begun_in=begun_in(folder) or Path(), sizes=_sizes(folder)), dict[str, str]()
    records = target / "results" / name
    records.mkdir(parents=True)
    calibration = folder / CALIBRATION
    if (folder / "study.yaml").is_file():
        study = load_study(folder / "study.yaml", {}, [])
        if study.calibration is not None and not calibration.is_file():  # else it has the copy of what charged it
            calibration = shipment.begun_in / study.calibration.expanduser()
        with suppress(ClusterError):  # a file that is missing is told of as such
            shipment.is_stated = _cluster(study, shipment).compute != _HERE
        shipment.study = _ship_inputs(study, target, moved, shipment)
        if study.cluster == _HERE:
            shipment.cluster = _ship(preset(_HERE), target, shipment, shipment.settled)
        (records / "study.yaml").write_text(redact(dump_study(shipment.study), names=False), encoding="utf-8")
    for table in ("runs.csv", "epochs.csv", "planned.json", DURATIONS):
        if (folder / table).is_file():
            text = _moved(redact(_read(folder / table), names=False), moved)
            if table == "runs.csv":
                text = _without_names(text)
            if table == "planned.json":  # in the artifact, paths are seen from its top
                text = re.sub(r'"begun_in": "[^"]*"', '"begun_in": "../.."', text)
            (records / table).write_text(text, encoding="utf-8")
    for file in sorted((folder / "provenance").glob("*.json")):
        (records / "provenance").mkdir(exist_ok=True)
        (records / "provenance" / file.name).write_text(redact(_read(file), names=False), encoding="utf-8")
    shipment.has_calibration = calibration.is_file()
    if shipment.has_calibration:
        (records / CALIBRATION).write_text(redact(_read(calibration), names=False), encoding="utf-8")
    return shipment


def _cluster(study: Study, shipment: Shipment) -> Cluster:
    there = shipment.begun_in / study.cluster
    return load_cluster(there if there.is_file() else study.cluster)


def recorded_machines(folder: Path) -> list[dict[str, Any]]:
    """What provenance/ tells of the launch environments, that of the last run last."""
    facts = [_facts(file) for file in sorted((folder / "provenance").glob("*.json"))]
    keys = ("packages_hash", "git_commit", "host_hash")
    rows = list(csv.DictReader(_read(folder / "runs.csv").splitlines()))
    last = {key: rows[-1].get(key) if rows else None for key in keys}
    return sorted(facts, key=lambda found: sum((found.get(key) or "") == last[key] for key in keys))


def _facts(file: Path) -> dict[str, Any]:
    try:
        facts = json.loads(_read(file))
    except ValueError as error:
        raise ResultsError(f"{file}: not JSON ({error}); repair or remove it") from None
    return facts if isinstance(facts, dict) else {}


def _sizes(folder: Path) -> dict[str, float]:
    """The size of the records' machine by the keys of a cluster; empty where it is not known."""
    machines = recorded_machines(folder)
    cpu = machines[-1].get("cpu") if machines else None
    if not isinstance(cpu, dict) or not cpu.get("usable_cores"):
        return {}
    memory = round(machines[-1].get("memory_mib", 0) / 1024, 1)
    return {"cores": cpu["usable_cores"], "workers_per_node": cpu["usable_cores"], "memory_gib": memory}


def _ship_inputs(study: Study, target: Path, moved: dict[str, str], shipment: Shipment) -> Study:
    changes: dict[str, object] = {"calibration": None}
    path, _, factory = study.model.name.rpartition(":")
    if is_own(study.model.name):
        place, digest = _ship_pinned(Path(path), study.model_sha256, target, moved, shipment, redact_code)
        moved[study.model.name] = f"{place}:{factory}"
        changes["model"] = study.model.model_copy(update={"name": moved[study.model.name]})
        changes["model_sha256"] = digest
    changes |= _ship_strategies(study, target, moved, shipment)
    cluster = own_file(study.cluster)
    if cluster is not None:
        place, digest = _ship_pinned(cluster, study.cluster_sha256, target, moved, shipment, shipment.settled)
        moved[study.cluster] = place
        changes["cluster"], changes["cluster_sha256"] = place, digest
    if study.init_weights is not None:
        pin = study.init_weights_sha256
        place, digest = _ship_pinned(study.init_weights, pin, target, moved, shipment, None)
        changes["init_weights"], changes["init_weights_sha256"] = Path(place), digest
    if study.data_dir is not None:
        shipment.needs_data = True
        changes["data_dir"] = Path(DATA)
    return study.model_copy(update=changes)


def _ship_strategies(study: Study, target: Path, moved: dict[str, str], shipment: Shipment) -> dict[str, object]:
    """Ship the files of the study's own strategies; what changes in the study by that."""
    strategies, pins = [], {}
    for item in study.strategies:
        path, _, attribute = item.name.rpartition(":")
        name = item.name
        if path.endswith(".py"):
            pin = study.strategy_sha256.get(name)
            place, digest = _ship_pinned(Path(path), pin, target, moved, shipment, redact_code)
            moved[item.name] = name = f"{place}:{attribute}"
            if digest is not None:
                pins[name] = digest
        strategies.append(item.model_copy(update={"name": name}))
    return {"strategies": strategies, "strategy_sha256": pins}


def _ship_pinned(
    file: Path,
    pin: str | None,
    target: Path,
    moved: dict[str, str],
    shipment: Shipment,
    hide: Callable[[str], str] | None,
) -> tuple[str, str | None]:
    """Ship an input if it is the one that the runs were made with; its place, and the checksum of what is there.

    The two checksums differ where a home or a secret in it was hidden: then rows name the new one.
    """
    source = shipment.begun_in / file.expanduser()
    if pin is not None and source.is_file() and checksum(source) != pin:
        place = f"inputs/{slug(file.name)}"
        shipment.missing.append(place)
        shipment.changed.append(place)
        return place, pin
    place = _ship(file, target, shipment, hide)
    if not (target / place).is_file():
        return place, pin
    digest = checksum(target / place)
    if pin not in (None, digest):
        moved[str(pin)] = digest
    return place, digest


def _ship(file: Path, target: Path, shipment: Shipment, hide: Callable[[str], str] | None) -> str:
    """Copy an input, a text without what `hide` takes out of it; return its place in the artifact.

    The place is the same whether or not the file is still there to be copied.
    """
    place = f"inputs/{slug(file.name)}"
    source = shipment.begun_in / file.expanduser()
    if not source.is_file():
        shipment.missing.append(place)
        return place
    (target / "inputs").mkdir(exist_ok=True)
    if hide is not None:
        (target / place).write_text(hide(_read(source)), encoding="utf-8")
    else:
        shutil.copyfile(source, target / place)
    return place


def _moved(text: str, moved: dict[str, str]) -> str:
    """Cells that name an input by its old place name it by the new one."""
    for old, new in moved.items():
        whole = rf"(?<![^,\"'\n]){re.escape(redact(old, names=False))}(?=[,\"'(\n])"
        text = re.sub(whole, new, text)  # a slug, without backslashes
    return text


def _without_names(text: str) -> str:
    """runs.csv with users and hosts masked where a free text may hold them; other rows keep their bytes."""
    lines = text.splitlines(keepends=True)
    if not lines:
        return text
    header = next(csv.reader([lines[0]]))
    places = [header.index(name) for name in _TEXTS if name in header]
    return "".join([lines[0], *(_row_without_names(line, places) for line in lines[1:])])


def _row_without_names(line: str, places: Iterable[int]) -> str:
    cells = next(csv.reader([line]), [])
    hidden = list(cells)
    for place in places:
        if place < len(hidden) and hidden[place]:
            hidden[place] = redact(hidden[place])
    if hidden == cells:
        return line
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerow(hidden)
    return buffer.getvalue()


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ResultsError(f"cannot read {path}: {error.strerror}") from None
