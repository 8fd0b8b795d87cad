"""The description of an artifact as LaTeX, Markdown, reproduce.sh and RO-Crate metadata; names in it are never markup.

RO-Crate 1.2 (https://w3id.org/ro/crate/1.2) is JSON-LD: a descriptor about the root `./`, which has every file as a
part; running the study and drawing the figures are CreateActions with scalebench as their instrument.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from mimetypes import MimeTypes
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from scalebench.artifact.description import Author, Description
from scalebench.artifact.verification import sha256
from scalebench.tables.latex import escape_latex

CRATE = "ro-crate-metadata.json"
_TEMPLATES = Path(__file__).with_name("templates")
_SPDX = "https://spdx.org/licenses/"
_FORMATS = MimeTypes()  # of Python, whatever the machine has
_FORMATS.add_type("application/yaml", ".yaml")
_FORMATS.add_type("application/yaml", ".yml")
_FORMATS.add_type("application/zip", ".whl")
_FORMATS.add_type("text/markdown", ".md")
_DESCRIPTIONS = {  # of files, by the first pattern that fits
    "README.md": "Artifact description",
    "artifact-description.tex": "Artifact description in LaTeX",
    "reproduce.sh": "Script that verifies, installs, draws the figures again and, if asked, runs the study again",
    "constraints.txt": "Version of every package that was installed when the study ran",
    "requirements-analysis.txt": "Packages that reading the records and drawing the figures needs",
    "results/*/runs.csv": "One row per run and attempt",
    "results/*/epochs.csv": "One row per run, attempt and epoch",
    "results/*/study.yaml": "The study, resolved: every key with the value that was used",
    "results/*/calibration.json": "Measured step times and engine costs that virtual runs were charged by",
    "results/*/planned.json": "The runs that the study consists of",
    "results/*/durations.json": "How long the commands on the study took, in seconds",
    "results/*/provenance/*": "Where and with what the study ran",
    "plots/*.csv": "Data that a figure shows",
    "plots/*": "Figure",
    "software/*": "scalebench, to be installed with pip",
    "*": "Input that the study names",
}
_SAFE_LINK = re.compile(r"https?://[A-Za-z0-9./_~:-]+")
_MARKDOWN = re.compile(r"([\\`*_{}\[\]<>()#+!|~$&])")


class Tex(str):
    """LaTeX that is not escaped again."""

    __slots__ = ()


def latex_link(address: str) -> str:
    """Return an address as \\url, which LaTeX may break, or as text if \\url cannot hold it."""
    return Tex(rf"\url{{{address}}}") if _SAFE_LINK.fullmatch(address) else address


def escape_markdown(text: str) -> str:
    """Escape `text` for Markdown: on one line, without markup or HTML."""
    return _MARKDOWN.sub(r"\\\1", " ".join(text.split()))


DOCUMENTS: dict[str, tuple[str, Callable[[str], str]]] = {  # template, and escape of its language
    "README.md": ("artifact.md.j2", escape_markdown),
    "artifact-description.tex": ("artifact.tex.j2", escape_latex),
    "reproduce.sh": ("artifact.sh.j2", str),
}
_LATEX = {
    "block_start_string": r"\BLOCK{",
    "block_end_string": "}",
    "variable_start_string": r"\VAR{",
    "variable_end_string": "}",
    "comment_start_string": r"\NOTE{",
    "comment_end_string": "}",
}


def render(document: str, description: Description) -> str:
    """Return one of DOCUMENTS; the one in LaTeX is of class IEEEtran."""
    template, escape = DOCUMENTS[document]
    settings: dict[str, Any] = _LATEX if document.endswith(".tex") else {}

    def finalize(value: object) -> object:
        return escape(value) if isinstance(value, str) and not isinstance(value, Tex) else value

    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=False,  # noqa: S701 - finalize escapes for the language of the template
        undefined=StrictUndefined,
        finalize=finalize,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        **settings,
    )
    environment.filters["link"] = latex_link
    return environment.get_template(template).render(d=description)


def crate(folder: Path, description: Description) -> str:
    """Return the RO-Crate metadata of the files in `folder` as JSON-LD."""
    d, study = description, f"results/{description.study}"
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != CRATE)
    entities = [_file(folder, file) for file in files]
    names = [str(entity["@id"]) for entity in entities]
    records = [name for name in names if name in (f"{study}/runs.csv", f"{study}/epochs.csv")]
    inputs = [name for name in names if name.startswith((f"{study}/study", f"{study}/calibration", "inputs/"))]
    authors = [_author(number, author) for number, author in enumerate(d.paper.authors, start=1)]
    agents = {"agent": [_link(author[0]["@id"]) for author in authors]} if authors else {}
    doi = f"https://doi.org/{d.paper.doi}" if d.paper.doi else ""
    root = _root(d, names, doi) | ({"author": agents["agent"], "publisher": agents["agent"][0]} if authors else {})
    for licence in sorted({d.paper.license or "Apache-2.0", "Apache-2.0"}):
        about = f"The licence with the SPDX identifier {licence}"
        entities.append(_entity(_SPDX + licence, "CreativeWork", name=licence, description=about))
    entities += [entity for author in authors for entity in author]
    if doi:
        registry = "https://registry.identifiers.org/registry/doi"
        value = f"doi:{d.paper.doi}"
        entities.append(_entity(doi, "PropertyValue", name="DOI", propertyID=registry, value=value, url=doi))
    entities += [
        _entity(
            "#scalebench",
            "SoftwareApplication",
            name="scalebench",
            version=d.version,
            url=next((_link(name) for name in names if name.startswith("software/")), ""),
            description="Benchmarks how much time synchronising less often saves in distributed training",
            license=_link(_SPDX + "Apache-2.0"),
        ),
        _entity(
            "#bash",
            "ComputerLanguage",
            name="Bash",
            version="4 or later",
            url="https://www.gnu.org/software/bash/",
        ),
        _action("#run", f"Run the study {d.study}", "scalebench run", inputs, records)
        | ({"startTime": d.first_run, "endTime": d.last_run} if d.last_run else {})
        | agents,
    ]
    if d.elements:
        plots = [name for name in names if name.startswith("plots/")]
        drawing = _action("#figures", "Draw the figures", "scalebench plot", records, plots)
        entities.append(drawing | {"endTime": d.published} | agents)
    conforms = _link("https://w3id.org/ro/crate/1.2")
    graph = [_entity(CRATE, "CreativeWork", about=_link("./"), conformsTo=conforms), root, *entities]
    whole = {"@context": "https://w3id.org/ro/crate/1.2/context", "@graph": graph}
    return json.dumps(whole, indent=2, ensure_ascii=False) + "\n"


def _root(d: Description, names: Sequence[str], doi: str) -> dict[str, Any]:
    """Return the entity of the artifact, whose parts have these `names`."""
    root = _entity(
        "./",
        "Dataset",
        name=d.title,
        description=f"Artifact of the scaling study {d.study}: records of {d.runs} completed runs, figures with "
        f"their data, and the software that made them. {d.answer}",
        datePublished=d.published,
        license=_link(_SPDX + d.paper.license) if d.paper.license else d.license,
        keywords="scaling study, distributed training, synchronisation, benchmark",
        hasPart=[_link(name) for name in names],
        mentions=[_link("#run"), *([_link("#figures")] if d.elements else [])],
    )
    if doi:
        root |= {"identifier": _link(doi), "cite-as": doi}
    return root | ({"url": d.paper.url} if d.paper.url else {})


def _entity(identity: str, kind: str | list[str], **facts: Any) -> dict[str, Any]:
    return {"@id": identity, "@type": kind, **facts}


def _link(identity: str) -> dict[str, str]:
    return {"@id": identity}


def _action(identity: str, name: str, command: str, objects: list[str], results: list[str]) -> dict[str, Any]:
    return _entity(
        identity,
        "CreateAction",
        name=name,
        description=command,
        instrument=_link("#scalebench"),
        object=[_link(each) for each in objects],
        result=[_link(each) for each in results],
    )


def _file(folder: Path, file: Path) -> dict[str, Any]:
    name, is_script = file.relative_to(folder).as_posix(), file.suffix == ".sh"
    return _entity(
        name,
        ["File", "SoftwareSourceCode"] if is_script else "File",
        name=file.name,
        description=next(words for pattern, words in _DESCRIPTIONS.items() if fnmatchcase(name, pattern)),
        encodingFormat=_FORMATS.guess_type(file.name)[0] or "application/octet-stream",
        contentSize=str(file.stat().st_size),
        sha256=sha256(file),
        **({"programmingLanguage": _link("#bash")} if is_script else {}),
    )


def _author(number: int, author: Author) -> list[dict[str, Any]]:
    """Return the person and, if stated, the affiliation."""
    person = _entity(
        f"https://orcid.org/{author.orcid}" if author.orcid else f"#author-{number}", "Person", name=author.name
    )
    if not author.affiliation:
        return [person]
    place = f"#affiliation-{number}"
    affiliation = _entity(place, "Organization", name=author.affiliation)
    return [person | {"affiliation": _link(place)}, affiliation]
