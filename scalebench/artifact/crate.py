"""RO-Crate metadata (https://w3id.org/ro/crate/1.2): what the artifact is and where each file comes from, for machines.

The metadata descriptor is about the root `./`, which has name, description, datePublished, license and every file as a
part; the runs and the drawing of the figures are CreateActions whose instrument is scalebench.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from scalebench.artifact.contents import Description

FILE = "ro-crate-metadata.json"
_SPDX = "https://spdx.org/licenses/"
_FORMATS = {
    ".csv": "text/csv",
    ".json": "application/json",
    ".md": "text/markdown",
    ".npz": "application/octet-stream",
    ".pdf": "application/pdf",
    ".png": "image/png",
    ".py": "text/x-python",
    ".sh": "application/x-sh",
    ".svg": "image/svg+xml",
    ".tex": "application/x-tex",
    ".txt": "text/plain",
    ".whl": "application/zip",
    ".yaml": "application/yaml",
    ".yml": "application/yaml",
}
_SAID = {
    "README.md": "Artifact description",
    "artifact-description.tex": "Artifact description in LaTeX",
    "reproduce.sh": "Script that verifies, installs, draws the figures again and, if asked, runs the study again",
    "constraints.txt": "Version of every package that was installed when the study ran",
    "requirements-analysis.txt": "Packages that reading the records and drawing the figures needs",
    "runs.csv": "One row per run and attempt",
    "epochs.csv": "One row per run, attempt and epoch",
    "study.yaml": "The study, resolved: every key with the value that was used",
    "calibration.json": "Measured step times and engine costs that virtual runs were charged by",
    "planned.json": "The runs that the study consists of",
    "durations.json": "How long the commands on the study took, in seconds",
}


def crate(folder: Path, description: Description) -> str:
    """The metadata of the files in `folder`, as JSON-LD."""
    d, study = description, f"results/{description.study}"
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != FILE)
    entities = [_file(folder, file, d) for file in files]
    names = [str(entity["@id"]) for entity in entities]
    records = [name for name in names if name in (f"{study}/runs.csv", f"{study}/epochs.csv")]
    inputs = [name for name in names if name.startswith((f"{study}/study", f"{study}/calibration", "inputs/"))]
    authors = [_author(number, author) for number, author in enumerate(d.paper.authors, start=1)]
    licences = [_licence(name) for name in sorted({d.paper.license or "Apache-2.0", "Apache-2.0"})]
    root: dict[str, Any] = {
        "@id": "./",
        "@type": "Dataset",
        "name": d.title,
        "description": f"Artifact of the scaling study {d.study}: records of {d.runs} completed runs, figures with "
        f"their data, and the software that made them. {d.answer}",
        "datePublished": d.published,
        "license": _link(_SPDX + d.paper.license) if d.paper.license else d.license,
        "keywords": "scaling study, distributed training, synchronisation, benchmark",
        "hasPart": [_link(name) for name in names],
        "mentions": [_link("#run"), *([_link("#figures")] if d.elements else [])],
    }
    if authors:
        root["author"] = [_link(author["@id"]) for author, _ in authors]
        root["publisher"] = root["author"][0]
    if d.paper.doi:
        root |= {"identifier": _link(f"https://doi.org/{d.paper.doi}"), "cite-as": f"https://doi.org/{d.paper.doi}"}
    if d.paper.url:
        root["url"] = d.paper.url
    agents = {"agent": root["author"]} if authors else {}
    graph: list[dict[str, Any] | None] = [
        {
            "@id": FILE,
            "@type": "CreativeWork",
            "about": _link("./"),
            "conformsTo": _link("https://w3id.org/ro/crate/1.2"),
        },
        root,
        *entities,
        *licences,
        *(entity for pair in authors for entity in pair),
        _identifier(d),
        {
            "@id": "#scalebench",
            "@type": "SoftwareApplication",
            "name": "scalebench",
            "version": d.version,
            "url": next((_link(name) for name in names if name.startswith("software/")), ""),
            "description": "Benchmarks how much time synchronising less often saves in distributed training",
            "license": _link(_SPDX + "Apache-2.0"),
        },
        {
            "@id": "#bash",
            "@type": "ComputerLanguage",
            "name": "Bash",
            "version": "4 or later",
            "url": "https://www.gnu.org/software/bash/",
        },
        {
            "@id": "#run",
            "@type": "CreateAction",
            "name": f"Run the study {d.study}",
            "description": "scalebench run",
            "instrument": _link("#scalebench"),
            "object": [_link(name) for name in inputs],
            "result": [_link(name) for name in records],
            **({"startTime": d.first_run, "endTime": d.last_run} if d.last_run else {}),
            **agents,
        },
        {
            "@id": "#figures",
            "@type": "CreateAction",
            "name": "Draw the figures",
            "description": "scalebench plot",
            "instrument": _link("#scalebench"),
            "object": [_link(name) for name in records],
            "result": [_link(name) for name in names if name.startswith("plots/")],
            "endTime": d.published,
            **agents,
        }
        if d.elements
        else None,
    ]
    whole = {"@context": "https://w3id.org/ro/crate/1.2/context", "@graph": [entity for entity in graph if entity]}
    return json.dumps(whole, indent=2, ensure_ascii=False) + "\n"


def _file(folder: Path, file: Path, d: Description) -> dict[str, Any]:
    name = file.relative_to(folder).as_posix()
    entity: dict[str, Any] = {
        "@id": name,
        "@type": ["File", "SoftwareSourceCode"] if file.suffix == ".sh" else "File",
        "name": file.name,
        "description": _SAID.get(file.name) or _describe(name, file),
        "encodingFormat": _FORMATS.get(file.suffix, "application/octet-stream"),
        "contentSize": str(file.stat().st_size),
    }
    with file.open("rb") as stream:
        entity["sha256"] = hashlib.file_digest(stream, "sha256").hexdigest()
    if file.suffix == ".sh":
        entity["programmingLanguage"] = _link("#bash")
    return entity


def _describe(name: str, file: Path) -> str:
    if name.startswith("plots/"):
        return f"Data that the figure {file.stem} shows" if file.suffix == ".csv" else f"Figure {file.stem}"
    if "/provenance/" in name:
        return "Where and with what the study ran"
    if name.startswith("software/"):
        return "scalebench, to be installed with pip"
    return "Input that the study names"


def _licence(name: str) -> dict[str, Any]:
    return {
        "@id": _SPDX + name,
        "@type": "CreativeWork",
        "name": name,
        "description": f"The licence with the SPDX identifier {name}",
    }


def _author(number: int, author: Any) -> tuple[dict[str, Any], dict[str, Any] | None]:
    person: dict[str, Any] = {
        "@id": f"https://orcid.org/{author.orcid}" if author.orcid else f"#author-{number}",
        "@type": "Person",
        "name": author.name,
    }
    if not author.affiliation:
        return person, None
    place = {"@id": f"#affiliation-{number}", "@type": "Organization", "name": author.affiliation}
    return person | {"affiliation": _link(place["@id"])}, place


def _identifier(d: Description) -> dict[str, Any] | None:
    if not d.paper.doi:
        return None
    return {
        "@id": f"https://doi.org/{d.paper.doi}",
        "@type": "PropertyValue",
        "name": "DOI",
        "propertyID": "https://registry.identifiers.org/registry/doi",
        "value": f"doi:{d.paper.doi}",
        "url": f"https://doi.org/{d.paper.doi}",
    }


def _link(identity: str) -> dict[str, str]:
    return {"@id": identity}
