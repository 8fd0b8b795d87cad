"""Pack a study for reviewers: records, figures, description, software, and a script that checks them.

An artifact is written as a folder and as a zip; the same records give the same bytes.

results/<study>/   the records       plots/<study>/   the figures with their CSVs       inputs/   files the study names
software/          scalebench as a wheel              constraints.txt, requirements-analysis.txt, reproduce.sh
README.md, artifact-description.tex, ro-crate-metadata.json, SHA256SUMS
"""

from __future__ import annotations

import base64
import hashlib
import os
import shutil
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from importlib.metadata import distribution
from pathlib import Path

import scalebench
from scalebench.analysis import load
from scalebench.artifact import artifact_description, verification
from scalebench.artifact.anonymising import ship_records
from scalebench.errors import ResultsError, writing
from scalebench.figures import plot_folder
from scalebench.records.folder import DURATIONS, durations_in, timed
from scalebench.study.spec import slug
from scalebench.system.file_access import write_atomic

_ZIP_EPOCH = (1980, 1, 1, 0, 0, 0)  # the first date that a zip can hold
_CACHES = {"__pycache__", ".mypy_cache", ".pytest_cache", ".ruff_cache"}
_NOT_PACKED = _CACHES | {"experiments"}  # an artifact has a study of its own


@dataclass(frozen=True)
class Artifact:
    """A written artifact; `remarks` are advice to its author."""

    folder: Path
    archive: Path
    description: artifact_description.Description
    remarks: tuple[str, ...]


def write_artifact(
    results: Path, output: Path, paper: artifact_description.PaperFile, *, jobs: int = 1
) -> Artifact:
    """Write the artifact of the study in `results` as `output`/<study>-artifact/ and -artifact.zip.

    An existing artifact is replaced unless its files were changed by hand.

    Raises:
        ResultsError: the records cannot be read or drawn, `output` cannot be written, or holds a changed artifact.
        StudyError: study.yaml is not one of this version.
    """
    name = slug(str(load(results).runs["study"].iloc[-1]))
    folder = output / f"{name}-artifact"
    # Before minutes of drawing.
    _refuse_if_changed(folder)
    with writing(folder, "choose another --output"):
        output.mkdir(parents=True, exist_ok=True)
        # On the same file system, so that renaming puts the finished folder in place at
        # once.
        with tempfile.TemporaryDirectory(prefix=".artifact-", dir=output) as scratch:
            building = Path(scratch) / folder.name
            building.mkdir()
            description = _fill(results, building, name, paper, jobs, folder)
            archive = Path(scratch) / f"{folder.name}.zip"
            with zipfile.ZipFile(archive, "w") as packed:
                for inner, file in _files(building):
                    # Two modes only: the author's umask must not be in the bytes.
                    mode = 0o755 if os.access(file, os.X_OK) else 0o644
                    _add_file(packed, f"{folder.name}/{inner}", file.read_bytes(), mode)
            if (
                folder / verification.TIMES
            ).is_file():  # the author's own, not a part of the artifact
                shutil.copyfile(
                    folder / verification.TIMES, building / verification.TIMES
                )
            if folder.exists():
                shutil.rmtree(folder)
            building.rename(folder)
            archive = archive.rename(output / archive.name)
    return Artifact(folder, archive, description, tuple(_remarks(description)))


def _refuse_if_changed(folder: Path) -> None:
    if not folder.exists():
        return
    if not (folder / verification.SUMS).is_file():
        raise ResultsError(
            f"{folder} is there and no artifact; choose another --output"
        )
    if changed := verification.changed_files(folder):
        raise ResultsError(
            f"{folder}: {changed[0]} was changed by hand and would be lost; move the folder, or choose another --output"
        )


def _fill(
    results: Path,
    building: Path,
    name: str,
    paper: artifact_description.PaperFile,
    jobs: int,
    earlier: Path,
) -> artifact_description.Description:
    shipment = ship_records(results, building, name)
    records = building / "results" / name
    # Timed once: packed again, the artifact states the same minutes.
    with nullcontext() if "plot" in durations_in(records) else timed(records, "plot"):
        drawn = plot_folder(records, building / "plots", jobs=jobs)
    # the next artifact states the same time; a read-only folder is left as it is
    with suppress(OSError):
        write_atomic(
            results / DURATIONS, (records / DURATIONS).read_text(encoding="utf-8")
        )
    (building / "software").mkdir()
    write_wheel(building / "software")
    # From the copy: what is described is what is shipped, without names of this
    # machine.
    description = artifact_description.describe(
        load(records), drawn, paper, shipment, earlier
    )
    pins = [f"{package}=={version}" for package, version in description.pins]
    files = {
        "constraints.txt": "\n".join(
            [f"# Python {description.python or 'unknown'}", *pins, ""]
        ),
        "requirements-analysis.txt": "\n".join(
            [*artifact_description.light_requirements(), ""]
        ),
        **{
            name: artifact_description.render(name, description)
            for name in artifact_description.DOCUMENTS
        },
    }
    for file, content in files.items():
        (building / file).write_text(content, encoding="utf-8")
    (building / "reproduce.sh").chmod(0o755)
    (building / artifact_description.CRATE).write_text(
        artifact_description.crate(building, description), encoding="utf-8"
    )
    # Last, over all other files.
    sums = [
        f"{verification.sha256(file)}  {inner}\n" for inner, file in _files(building)
    ]
    (building / verification.SUMS).write_text("".join(sums), encoding="utf-8")
    return description


def _files(folder: Path) -> list[tuple[str, Path]]:
    """Return every file with its name inside `folder`, sorted by name."""
    return sorted(
        (file.relative_to(folder).as_posix(), file)
        for file in folder.rglob("*")
        if file.is_file()
    )


def _add_file(
    archive: zipfile.ZipFile, name: str, data: bytes, mode: int = 0o644
) -> None:
    """Add a file without the date and the user of this moment."""
    entry = zipfile.ZipInfo(name, _ZIP_EPOCH)
    entry.create_system = 3  # Unix: the mode counts
    entry.external_attr = (0o100000 | mode) << 16
    entry.compress_type = zipfile.ZIP_DEFLATED
    archive.writestr(entry, data, compresslevel=9)


def write_wheel(folder: Path) -> Path:
    """Write the running scalebench as a wheel to `folder`, from the installed files, without a build.

    A wheel (PyPA, "Binary distribution format") is a zip of the package and of
    NAME-VERSION.dist-info, whose RECORD has the SHA-256 and the size of each file.
    """
    info = f"scalebench-{scalebench.__version__}.dist-info"
    wheel = folder / f"scalebench-{scalebench.__version__}-py3-none-any.whl"
    # of an installation, or of a source tree (PKG-INFO)
    installed = distribution("scalebench")
    about = {
        name: installed.read_text(name)
        for name in ("entry_points.txt", "licenses/LICENSE")
    }
    about["METADATA"] = installed.read_text("METADATA") or installed.read_text(
        "PKG-INFO"
    )
    about["WHEEL"] = (
        "Wheel-Version: 1.0\nGenerator: scalebench\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    )
    files = {
        f"{info}/{name}": text.encode() for name, text in about.items() if text
    } | dict(_package_files())
    record = [
        f"{name},sha256={_digest(data)},{len(data)}"
        for name, data in sorted(files.items())
    ]
    # RECORD itself has neither checksum nor size, as the format says.
    files[f"{info}/RECORD"] = "\n".join([*record, f"{info}/RECORD,,", ""]).encode()
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, data in sorted(files.items()):
            _add_file(archive, name, data)
    return wheel


def _package_files() -> Iterator[tuple[str, bytes]]:
    package = Path(scalebench.__file__).parent
    for inner, file in _files(package):
        if not _NOT_PACKED & set(Path(inner).parts) and file.suffix not in (
            ".pyc",
            ".pyo",
            ".so",
        ):
            yield f"scalebench/{inner}", file.read_bytes()


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def _remarks(d: artifact_description.Description) -> Iterator[str]:
    """Yield what the artifact lacks, with what its author can do about it."""
    if not d.paper.license:
        yield "no licence is stated, so others may not use the records; give one in --paper: license: CC-BY-4.0"
    if not d.shipment.study:
        yield "the records hold no study.yaml: figures can be drawn again, but the study cannot be run again"
    if d.minutes.setup == verification.NOT_TIMED:
        yield "set-up was not timed: run reproduce.sh --rerun in the folder once, and pack again; its times.csv is read"
    for place in d.shipment.missing:
        yield f"{place} was not found, or has changed since the study began, and is missing: put back the file that ran"
    if d.shipment.needs_data:
        yield "the data files are not packed: say in the paper where they can be had"
    yield from d.notes
