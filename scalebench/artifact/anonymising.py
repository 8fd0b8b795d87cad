"""Copy a study's records without homes, secrets, names and paths of this machine.

Files that the study names (a cluster, weights, own models and strategies, a
calibration) are copied to `inputs/`, where the copied study names them. Data files are
not copied; the study expects them in `inputs/data`.
"""

from __future__ import annotations

import csv
import io
import re
import shutil
import tokenize
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

from scalebench.analysis.environment import provenance_in
from scalebench.cluster.cluster_file import load_cluster, own_file, preset
from scalebench.errors import ClusterError, reading
from scalebench.models import pinning, registry
from scalebench.records import folder as files
from scalebench.records.append_only import from_line, to_lines, to_text
from scalebench.records.progress import begun_in
from scalebench.records.provenance import redact
from scalebench.study.load import dump_study, load_study
from scalebench.study.spec import Study, slug

DATA = "inputs/data"
_HERE = "this-machine"
_FREE_TEXTS = (
    "error",
    "launcher",
    "binding",
    "device",
    "energy_source",
)  # columns that may hold users and hosts
# Tokens that do not end or begin a statement.
_LAYOUT = (tokenize.NL, tokenize.COMMENT)
_STATEMENT_ENDS = (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)


@dataclass
class Shipment:
    """The copied study, and inputs that are missing."""

    # as in the artifact; None: the records have no study.yaml
    study: Study | None = None
    begun_in: Path = Path()  # folder that the study's relative paths refer to
    # file of the machine of the records, if virtual runs simulated `this-machine`
    cluster: str = ""
    needs_data: bool = False
    has_calibration: bool = False
    # all costs of virtual runs are stated by study and cluster, not measured
    is_stated: bool = False
    # cores, workers and GiB of a node of the records' machine
    sizes: dict[str, float] = field(default_factory=dict)
    # places in the artifact of files that are gone or have changed
    missing: list[str] = field(default_factory=list)

    def resolve_cluster(self, text: str) -> str:
        """Replace sizes that a cluster file reads from `this-machine` by those of the records' machine."""
        text = redact(text)
        for key, size in self.sizes.items():
            text = re.sub(rf"\b({key}: *){_HERE}\b", rf"\g<1>{size}", text)
        return text


def ship_records(folder: Path, target: Path, name: str) -> Shipment:
    """Copy the records in `folder` to `target`/results/`name` and their inputs to `target`/inputs.

    Raises:
        ResultsError: a file cannot be read.
        StudyError: study.yaml is not one of this version.
    """
    shipment = Shipment(begun_in=begun_in(folder) or Path(), sizes=_node_sizes(folder))
    inputs = _Inputs(target, shipment)
    records = target / "results" / name
    records.mkdir(parents=True)
    calibration = folder / files.CALIBRATION
    if (folder / files.STUDY).is_file():
        study = load_study(folder / files.STUDY, {}, [])
        # Without a copy beside the records the file that the study names is shipped.
        if study.calibration is not None and not calibration.is_file():
            calibration = shipment.begun_in / study.calibration.expanduser()
        shipment.study = inputs.ship(study)
        (records / files.STUDY).write_text(
            redact(dump_study(shipment.study), names=False), encoding="utf-8"
        )
    for table in (files.RUNS, files.EPOCHS, files.PLANNED, files.DURATIONS):
        if (folder / table).is_file():
            # Redacted first: names of inputs are looked for as they are written then.
            text = inputs.rename(redact(_read(folder / table), names=False))
            if table == files.RUNS:
                text = _without_names(text)
            if table == files.PLANNED:  # in the artifact, paths refer to its top
                text = re.sub(r'"begun_in": "[^"]*"', '"begun_in": "../.."', text)
            (records / table).write_text(text, encoding="utf-8")
    copies = {
        file: records / files.PROVENANCE / file.name
        for file in sorted((folder / files.PROVENANCE).glob("*.json"))
    }
    shipment.has_calibration = calibration.is_file()
    if shipment.has_calibration:
        copies[calibration] = records / files.CALIBRATION
    for source, copy in copies.items():
        copy.parent.mkdir(exist_ok=True)
        copy.write_text(redact(_read(source), names=False), encoding="utf-8")
    return shipment


@dataclass
class _Inputs:
    """The files that a study names, copied to `target`/inputs; `renamed` maps names and checksums in rows."""

    target: Path
    shipment: Shipment
    renamed: dict[str, str] = field(default_factory=dict)

    def ship(self, study: Study) -> Study:
        """Copy the inputs of `study`; return the study that names the copies."""
        shipment = self.shipment
        changes: dict[str, object] = {"calibration": None}
        if registry.is_own(study.model.name):
            name, changes["model_sha256"] = self._ship_code(
                study.model.name, study.model_sha256
            )
            changes["model"] = study.model.model_copy(update={"name": name})
        strategies = []
        pins = dict[str, str]()
        for item in study.strategies:
            name = item.name
            if name.rpartition(":")[0].endswith(".py"):
                name, digest = self._ship_code(name, study.strategy_sha256.get(name))
                pins |= {name: digest} if digest else {}
            strategies.append(item.model_copy(update={"name": name}))
        changes |= {"strategies": strategies, "strategy_sha256": pins}
        there = shipment.begun_in / study.cluster
        with suppress(ClusterError):  # a missing file is listed as missing
            shipment.is_stated = (
                load_cluster(there if there.is_file() else study.cluster).compute
                != _HERE
            )
        if cluster := own_file(study.cluster):
            place, digest = self._ship_file(
                cluster, study.cluster_sha256, shipment.resolve_cluster
            )
            self.renamed[study.cluster] = place
            changes |= {"cluster": place, "cluster_sha256": digest}
        elif study.cluster == _HERE:
            shipment.cluster = self._ship_file(
                preset(_HERE), None, shipment.resolve_cluster
            )[0]
        if study.init_weights is not None:
            place, digest = self._ship_file(
                study.init_weights, study.init_weights_sha256, None
            )
            changes |= {"init_weights": Path(place), "init_weights_sha256": digest}
        if study.data_dir is not None:
            shipment.needs_data = True
            changes["data_dir"] = Path(DATA)
        return study.model_copy(update=changes)

    def rename(self, text: str) -> str:
        """Replace the names and checksums of inputs, where they are whole cells of `text`, by those of the copies."""
        for old, new in self.renamed.items():
            for written in {redact(old, names=False), redact(old)}:
                cell = rf"(?<![^,\"'\n]){re.escape(written)}(?=[,\"'(\n])"
                text = re.sub(cell, new, text)  # a slug, without backslashes
        return text

    def _ship_code(self, name: str, pin: str | None) -> tuple[str, str | None]:
        """Copy the file of an own model or strategy, FILE:ATTRIBUTE; return its new name and checksum."""
        path, _, attribute = name.rpartition(":")
        place, digest = self._ship_file(Path(path), pin, redact_code)
        self.renamed[name] = f"{place}:{attribute}"
        return self.renamed[name], digest

    def _ship_file(
        self, file: Path, pin: str | None, redacted: Callable[[str], str] | None
    ) -> tuple[str, str | None]:
        """Copy an input, a text through `redacted`; return its place in the artifact and the checksum of the copy.

        It is missing if it is gone or its checksum is not `pin`. The copy has another
        one if something was redacted; rows then get that one.
        """
        place = f"inputs/{slug(redact(file.name))}"
        source = self.shipment.begun_in / file.expanduser()
        copy = self.target / place
        # A file that was changed since is not the one that ran.
        if not source.is_file() or pin not in (None, pinning.checksum(source)):
            self.shipment.missing.append(place)
            return place, pin
        copy.parent.mkdir(exist_ok=True)
        if redacted is None:
            shutil.copyfile(source, copy)
        else:
            copy.write_text(redacted(_read(source)), encoding="utf-8")
        digest = pinning.checksum(copy)
        if pin not in (None, digest):
            self.renamed[str(pin)] = digest
        return place, digest


def recorded_machines(folder: Path) -> list[dict[str, Any]]:
    """Return the launch environments in provenance/, that of the last run last."""
    rows = list(csv.DictReader(_read(folder / files.RUNS).splitlines()))
    last = rows[-1].get("provenance") if rows else None
    return sorted(
        provenance_in(folder), key=lambda facts: bool(facts["provenance"] == last)
    )


def _node_sizes(folder: Path) -> dict[str, float]:
    """Return the size of the records' machine under the keys of a cluster file; empty if unknown."""
    machines = recorded_machines(folder)
    cpu = machines[-1].get("cpu") if machines else None
    if not isinstance(cpu, dict) or not cpu.get("usable_cores"):
        return {}
    memory = round(machines[-1].get("memory_mib", 0) / 1024, 1)
    return {
        "cores": cpu["usable_cores"],
        "workers_per_node": cpu["usable_cores"],
        "memory_gib": memory,
    }


def _without_names(table: str) -> str:
    """Mask users and hosts in the free texts of runs.csv; rows without any keep their bytes."""
    lines = table.splitlines(keepends=True)
    header = from_line(lines[0].encode()) if lines else []
    for number, line in enumerate(lines[1:], start=1):
        cells = [to_text(cell) for cell in from_line(line.encode())]
        masked = cells.copy()
        # a torn line has fewer cells, or more
        for place, name in enumerate(header[: len(cells)]):
            if name in _FREE_TEXTS:
                masked[place] = redact(cells[place])
        if masked != cells:
            lines[number] = to_lines([masked]).decode()
    return "".join(lines)


def redact_code(text: str) -> str:
    """Mask homes and secrets in the Python program `text`, and names of user and host in comments and docstrings.

    A user's name elsewhere may be an identifier, and stays.
    """
    # Tokens are placed by row and column, pieces of the text by their first character.
    begins = list(accumulate(map(len, io.StringIO(text)), initial=0))
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    # No Python program: what is a name in it cannot be told.
    except (tokenize.TokenError, SyntaxError):
        return redact(text, names=False)
    pieces, end = [], 0
    for token in _comments_and_docstrings(tokens):
        first, last = (
            begins[row - 1] + column for row, column in (token.start, token.end)
        )
        pieces += [text[end:first], redact(text[first:last])]
        end = last
    return redact("".join([*pieces, text[end:]]), names=False)


def _comments_and_docstrings(
    tokens: list[tokenize.TokenInfo],
) -> Iterator[tokenize.TokenInfo]:
    """Yield comments, and strings that are whole statements."""
    before = tokenize.NEWLINE
    for token, after in zip(tokens, [*tokens[1:], tokens[-1]], strict=True):
        ends = after.type in (tokenize.NEWLINE, *_LAYOUT)
        if token.type == tokenize.COMMENT or (
            token.type == tokenize.STRING and before in _STATEMENT_ENDS and ends
        ):
            yield token
        if token.type not in _LAYOUT:
            before = token.type


def _read(path: Path) -> str:
    with reading(path):
        return path.read_text(encoding="utf-8", errors="replace")
