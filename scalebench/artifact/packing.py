"""Puts an artifact together: a folder, and the same as a zip. The same records give the same bytes.

results/<study>/   the records       plots/<study>/   the figures with their CSVs       inputs/   files the study names
software/          scalebench as a wheel              constraints.txt, requirements-analysis.txt, reproduce.sh
README.md, artifact-description.tex, ro-crate-metadata.json, SHA256SUMS
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import zipfile
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

from scalebench.analysis import load
from scalebench.artifact import crate, text
from scalebench.artifact.contents import Description, describe, light_requirements
from scalebench.artifact.minutes import TIMES
from scalebench.artifact.paper import Paper
from scalebench.artifact.shipping import ship_records
from scalebench.artifact.wheel import add_file, write_wheel
from scalebench.errors import ResultsError
from scalebench.figures import plot_folder
from scalebench.records.durations import FILE as DURATIONS
from scalebench.records.durations import durations_in, timed
from scalebench.study.spec import slug
from scalebench.system.atomic_write import write_whole

SUMS = "SHA256SUMS"


@dataclass(frozen=True)
class Artifact:
    """Where it lies, and what its author should know."""

    folder: Path
    archive: Path
    description: Description
    remarks: tuple[str, ...]


def write_artifact(results: Path, output: Path, paper: Paper, *, jobs: int = 1) -> Artifact:
    """Write the artifact of the study in `results` as `output`/<study>-artifact/ and -artifact.zip.

    An artifact that is there is replaced, but not one that was changed by hand.

    Raises:
        ResultsError: the records cannot be read or drawn, `output` cannot be written, or holds a changed artifact.
        StudyError: study.yaml is not one of this version.
    """
    name = slug(str(load(results).runs["study"].iloc[-1]))
    folder = output / f"{name}-artifact"
    _refuse_if_changed(folder)
    try:
        output.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".artifact-", dir=output) as scratch:
            building = Path(scratch) / folder.name
            building.mkdir()
            description = _fill(results, building, name, paper, jobs, folder)
            archive = _zip(building, Path(scratch) / f"{folder.name}.zip")
            if (folder / TIMES).is_file():  # the author's own: neither packed nor lost
                shutil.copyfile(folder / TIMES, building / TIMES)
            if folder.exists():
                shutil.rmtree(folder)
            building.rename(folder)
            archive = archive.rename(output / archive.name)
    except OSError as error:
        raise ResultsError(f"cannot write {folder}: {error.strerror or error}; choose another --output") from None
    return Artifact(folder, archive, description, tuple(_remarks(description)))


def changed_files(folder: Path) -> list[str]:
    """The files in `folder` that SHA256SUMS does not find as they were packed."""
    changed = []
    for line in (folder / SUMS).read_text(encoding="utf-8").splitlines():
        digest, _, name = line.partition("  ")
        file = folder / name
        if not file.is_file() or _sha256(file) != digest:
            changed.append(name)
    return changed


def _fill(results: Path, building: Path, name: str, paper: Paper, jobs: int, before: Path) -> Description:
    shipment = ship_records(results, building, name)
    records = building / "results" / name
    with nullcontext() if "plot" in durations_in(records) else timed(records, "plot"):
        drawn = plot_folder(records, building / "plots", jobs=jobs)
    with suppress(OSError):  # so that the next packing says the same; a folder that cannot be written stays as it is
        write_whole(results / DURATIONS, (records / DURATIONS).read_text(encoding="utf-8"))
    (building / "software").mkdir()
    write_wheel(building / "software")
    description = describe(load(records), drawn, paper, shipment, before)
    pins = [f"{package}=={version}" for package, version in description.pins]
    files = {
        "constraints.txt": "\n".join([f"# Python {description.python or 'unknown'}", *pins, ""]),
        "requirements-analysis.txt": "\n".join([*light_requirements(), ""]),
        "README.md": text.markdown(description),
        "artifact-description.tex": text.latex(description),
        "reproduce.sh": text.script(description),
    }
    for file, content in files.items():
        (building / file).write_text(content, encoding="utf-8")
    (building / "reproduce.sh").chmod(0o755)
    (building / crate.FILE).write_text(crate.crate(building, description), encoding="utf-8")
    sums = [f"{_sha256(file)}  {inner}\n" for inner, file in _files(building)]
    (building / SUMS).write_text("".join(sums), encoding="utf-8")
    return description


def _zip(folder: Path, archive: Path) -> Path:
    with zipfile.ZipFile(archive, "w") as packed:
        for inner, file in _files(folder):
            add_file(packed, f"{folder.name}/{inner}", file.read_bytes(), 0o755 if os.access(file, os.X_OK) else 0o644)
    return archive


def _files(folder: Path) -> list[tuple[str, Path]]:
    """Every file by its name inside `folder`, sorted as bytes, wherever that is done."""
    return sorted((file.relative_to(folder).as_posix(), file) for file in folder.rglob("*") if file.is_file())


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _refuse_if_changed(folder: Path) -> None:
    if not folder.exists():
        return
    if not (folder / SUMS).is_file():
        raise ResultsError(f"{folder} is there and no artifact; choose another --output")
    if changed := changed_files(folder):
        raise ResultsError(
            f"{folder}: {changed[0]} was changed by hand and would be lost; move the folder, or choose another --output"
        )


def _remarks(description: Description) -> list[str]:
    """What keeps the artifact from being all it could be, and what the author can do about it."""
    d, remarks = description, []
    if not d.paper.license:
        remarks.append(
            "no licence is stated, so others may not use the records; give one in --paper: license: CC-BY-4.0"
        )
    if d.dirty:
        remarks.append(
            "the runs were made with changes that are not in their commit: run the study again from a clean one"
        )
    if len(d.commits) > 1:
        remarks.append(f"the runs were made by {len(d.commits)} commits of scalebench; the wheel holds the present one")
    if not d.shipment.study:
        remarks.append("the records hold no study.yaml: figures can be drawn again, but the study cannot be run again")
    if d.minutes.setup is None:
        remarks.append(
            "set-up was not timed: run reproduce.sh --rerun in the folder once, and pack again; its times.csv is read"
        )
    remarks += [
        f"{place} has changed since the study began and is not packed: put the file that ran back, and pack again"
        if place in d.shipment.changed
        else f"{place} was not found and is missing in the artifact"
        for place in d.shipment.missing
    ]
    if d.shipment.needs_data:
        remarks.append("the data files are not packed: say in the paper where they can be had")
    return [*remarks, *d.notes]
