"""The artifact description: contributions, figures, expected results, hardware and software, gathered from the records.

Its parts are those of the SC conferences. The authors state in a YAML file (`Paper`)
what the records cannot hold.

It is rendered as LaTeX, Markdown, reproduce.sh and RO-Crate metadata; names in it are
never markup. RO-Crate 1.2 (https://w3id.org/ro/crate/1.2) is JSON-LD: a descriptor
about the root `./`, which has every file as a part; running the study and drawing the
figures are CreateActions with scalebench as their instrument.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from fnmatch import fnmatchcase
from importlib.metadata import requires
from mimetypes import MimeTypes
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from pydantic import Field

from scalebench import __version__
from scalebench.analysis import Results
from scalebench.analysis.environment import hardware, nodes_in
from scalebench.analysis.summary import summary
from scalebench.artifact import anonymising, verification
from scalebench.data.builder import DATASETS
from scalebench.errors import StudyError, nearest
from scalebench.figures import Drawn, describe_figures, figure_names
from scalebench.records.machine_facts import TRANSPORTS
from scalebench.report import comparison, origin
from scalebench.report.answer import answer
from scalebench.study import spec, validation
from scalebench.tables import Entry, Table
from scalebench.tables.latex import escape_latex

NO_LICENSE = "not stated by the authors; ask them before using the records further"
_ORDER = (
    "strong-scaling",
    "weak-scaling",
    "time-reduction",
    "convergence",
    "breakdown",
    "agreement",
)
_TRAINING_ONLY = (
    "torch",
    "scikit-learn",
)  # not needed to read records and draw figures
_Line = Annotated[str, Field(min_length=1, max_length=2000)]

CRATE = "ro-crate-metadata.json"
_TEMPLATES = Path(__file__).with_name("templates")
_SPDX = "https://spdx.org/licenses/"
_FORMATS = MimeTypes()  # of Python, whatever the machine has


class Author(validation.StrictModel):
    """A person who answers for the artifact."""

    name: _Line
    orcid: str | None = Field(None, pattern=r"^\d{4}-\d{4}-\d{4}-\d{3}[\dX]$")
    affiliation: _Line | None = None


class Contribution(validation.StrictModel):
    """A claim of the paper, and the figures of the study that support it."""

    text: _Line
    figures: list[str] = Field(min_length=1)


class PaperFile(validation.StrictModel):
    """The paper that the artifact belongs to; every key may be left out."""

    title: _Line | None = None
    authors: list[Author] = Field([])
    license: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9.+-]+$",
        description="SPDX identifier, such as CC-BY-4.0",
    )
    doi: str | None = Field(
        None,
        pattern=r"^10\.\d{4,9}/\S+$",
        description="of the artifact, not of the paper",
    )
    url: str | None = Field(
        None, pattern=r"^https?://\S+$", description="address of the artifact"
    )
    published: date | None = Field(None, description="default: the day of the last run")
    contributions: list[Contribution] = Field([])
    elements: dict[str, _Line] = Field(
        {}, description="place of each figure in the paper: {strong-scaling: Figure 3}"
    )


def load_paper(path: Path | None) -> PaperFile:
    """Read the YAML file `path`; None: an empty paper.

    Raises:
        StudyError: the file cannot be read, a key or value is wrong, or it names an unknown figure.
    """
    if path is None:
        return PaperFile()
    paper = validation.read_as(path, PaperFile, StudyError, "paper")
    known = figure_names()
    # Before anything is drawn: a wrong name would be found after minutes.
    for name in [
        *paper.elements,
        *(name for one in paper.contributions for name in one.figures),
    ]:
        if name not in known:
            raise StudyError(f"{path}: unknown figure {name!r}; {nearest(name, known)}")
    return paper


class Element(NamedTuple):
    """A figure of the study: its place in the paper, the contributions it supports, its file without suffix."""

    figure: str
    paper: str
    contributions: tuple[str, ...]
    file: str


@dataclass(frozen=True)
class Description:
    """The facts that the templates and the RO-Crate metadata state."""

    study: str
    title: str
    paper: PaperFile
    license: str
    answer: str
    contributions: tuple[tuple[str, Contribution], ...]
    elements: tuple[Element, ...]
    not_drawn: tuple[tuple[str, str], ...]
    expected: Table
    executions: tuple[str, ...]
    again: tuple[str, ...]
    minutes: verification.Minutes
    machines: tuple[tuple[tuple[str, str], ...], ...]
    python: str
    packages: tuple[tuple[str, str], ...]
    pins: tuple[tuple[str, str], ...]
    commits: tuple[str, ...]
    dirty: bool
    data: str
    data_from: str
    dataset_sha256: tuple[str, ...]
    shipment: anonymising.Shipment
    engines: tuple[str, ...]
    runs: int
    failed: int
    notes: tuple[str, ...]
    first_run: str
    last_run: str
    version: str = __version__

    @property
    def published(self) -> str:
        """Date of publication: the authors', else the day of the last run, else the first that a zip can hold."""
        return str(self.paper.published or self.last_run[:10] or "1980-01-01")


def describe(
    results: Results,
    drawn: Sequence[Drawn],
    paper: PaperFile,
    shipment: anonymising.Shipment,
    earlier: Path | None = None,
) -> Description:
    """Describe the artifact that holds `results` and the figures `drawn`.

    `earlier` is the folder of an earlier artifact of the study, for the step times that
    reproduce.sh left there.
    """
    runs = results.runs
    name = results.folder.name
    figures = _in_order(drawn)
    numbered = _numbered_claims(paper, [figure.name for figure in figures])
    provenance = anonymising.recorded_machines(results.folder)
    pins = provenance[-1].get("packages", {}) if provenance else {}
    started = sorted(runs["started_utc"].dropna())
    last = runs.iloc[-1]
    executions = tuple(dict.fromkeys(runs["execution"]))
    return Description(
        study=name,
        title=paper.title or f"Scaling study {name}",
        paper=paper,
        license=paper.license or NO_LICENSE,
        answer=comparison.as_text(
            answer(results, comparison.comparisons(results)).sentence
        ),
        contributions=numbered,
        elements=tuple(
            _element(figure.name, paper, numbered, f"plots/{spec.slug(name)}")
            for figure in figures
        ),
        not_drawn=tuple(
            (figure.name, figure.absent) for figure in drawn if figure.absent
        ),
        expected=_expected(summary(results)),
        executions=executions,
        again=verification.expected_again(executions, shipment),
        minutes=verification.expected_minutes(results, earlier),
        machines=tuple(_machine(facts) for facts in provenance),
        python=str(provenance[-1].get("python", "")) if provenance else "",
        packages=tuple(_packages(pins)),
        pins=_pins(pins),
        commits=tuple(sorted(runs["git_commit"].dropna().unique())),
        dirty=bool(runs["git_dirty"].fillna(False).any()),
        data=dict(origin.study_facts(results))["data"],
        data_from=dict(DATASETS.describe()).get(
            str(last["dataset"]).partition("(")[0], ""
        ),
        dataset_sha256=tuple(sorted(runs["dataset_sha256"].dropna().unique())),
        shipment=shipment,
        engines=tuple(sorted(set(runs["engine"]))),
        runs=len(results.completed),
        failed=len(results.failed),
        notes=tuple(results.notes),
        first_run=started[0] if started else "",
        last_run=started[-1] if started else "",
    )


def _in_order(drawn: Sequence[Drawn]) -> list[Drawn]:
    """Return the figures that have files, those that answer the question first."""
    order = {name: place for place, name in enumerate(_ORDER)}
    with_files = [figure for figure in drawn if figure.files]
    return sorted(with_files, key=lambda one: order.get(one.name, len(order)))


def _pins(packages: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Return the packages for a file of requirements, without scalebench, which the artifact brings itself."""
    # without a build's own label: `==2.13.0` accepts 2.13.0+cpu, which no index has
    return tuple(
        (name, version.partition("+")[0])
        for name, version in sorted(packages.items())
        if name != "scalebench"
    )


def _numbered_claims(
    paper: PaperFile, figures: Sequence[str]
) -> tuple[tuple[str, Contribution], ...]:
    """Return the contributions as C1, C2, ...: those that the paper states, else one for each of the `figures`."""
    summaries = dict(describe_figures())
    claims = paper.contributions or [
        Contribution(
            text=f"{summaries[name][:1].upper()}{summaries[name][1:]}.", figures=[name]
        )
        for name in figures
    ]
    return tuple((f"C{number}", claim) for number, claim in enumerate(claims, start=1))


def _element(
    figure: str,
    paper: PaperFile,
    claims: Sequence[tuple[str, Contribution]],
    plots: str,
) -> Element:
    """Return the element of the paper that `figure` is, and the claims that it shows."""
    numbers = tuple(number for number, claim in claims if figure in claim.figures)
    return Element(
        figure, paper.elements.get(figure, figure), numbers, f"{plots}/{figure}"
    )


def light_requirements() -> list[str]:
    """Return the requirements of reading records and drawing figures, such as `numpy>=1.26`."""
    # torch takes gigabytes, and no figure needs it.
    return [line for line in _requirements() if _package(line) not in _TRAINING_ONLY]


def _expected(table: Table) -> Table:
    """Select for each strategy and execution the row with the largest worker count and no mark."""
    names = [column.name for column in table.columns]
    strategy, workers, execution = map(
        names.index, ("strategy", "workers", "execution")
    )
    largest: dict[tuple[str, str], Sequence[Entry]] = {}
    for row in table.rows:
        count = row[workers].number
        assert count is not None
        key = (str(row[strategy].text), str(row[execution].text))
        before = largest[key][workers].number if key in largest else None
        # Marked rows are of crowded or disturbed runs, which no reviewer has to meet.
        if not row[workers].mark and (before is None or count.value >= before.value):
            largest[key] = row
    return replace(table, title="", rows=list(largest.values()), notes=[])


def _machine(facts: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    cpu = facts.get("cpu") or {}
    found = {
        "processor": f"{cpu.get('model', 'unknown')}, {cpu.get('usable_cores', '?')} cores usable",
        "memory": f"{facts['memory_mib'] / 1024:.0f} GiB"
        if facts.get("memory_mib")
        else "",
        "GPUs": "; ".join(_gpu(gpu) for gpu in facts.get("gpus") or []) or "none",
        "operating system": str(facts.get("platform") or ""),
        "MPI": str(facts.get("mpi") or ""),
        "Python": str(facts.get("python") or ""),
    }
    if nodes := nodes_in(facts) if facts.get("nodes") else {}:
        kinds = Counter(hardware(node) for node in nodes.values())
        found["nodes of real runs"] = "; ".join(
            f"{count} of {kind}" for kind, count in kinds.items()
        )
    return tuple((key, value) for key, value in found.items() if value)


def _gpu(gpu: Any) -> str:
    """`NVIDIA H100 (driver 550.54, 81559 MiB)`."""
    if not isinstance(gpu, dict):
        return str(gpu)
    return f"{gpu.get('name', 'unknown')} (driver {gpu.get('driver', 'unknown')}, {gpu.get('memory', 'unknown')})"


def _packages(pins: dict[str, str]) -> list[tuple[str, str]]:
    """Return name and version of the requirements of scalebench, Horovod and MPI, as far as they were installed."""
    wanted = dict.fromkeys([*map(_package, _requirements()), *TRANSPORTS])
    found = {name.lower(): version for name, version in pins.items()}
    return [(name, found[name]) for name in wanted if name in found]


def _requirements() -> list[str]:
    # Requirements of extras are listed with the others, marked so.
    return [line for line in requires("scalebench") or [] if "extra ==" not in line]


def _package(requirement: str) -> str:
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    return re.sub(r"[-_.]+", "-", match[0]).lower() if match else ""


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


DOCUMENTS: dict[
    str, tuple[str, Callable[[str], str]]
] = {  # template, and escape of its language
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
        return (
            escape(value)
            if isinstance(value, str) and not isinstance(value, Tex)
            else value
        )

    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=False,  # noqa: S701 - finalize escapes for the language of the template
        # A name that the description lacks is an error, not an empty text.
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
    d = description
    study = f"results/{description.study}"
    # The metadata does not list itself.
    files = sorted(
        path for path in folder.rglob("*") if path.is_file() and path.name != CRATE
    )
    entities = [_file(folder, file) for file in files]
    names = [str(entity["@id"]) for entity in entities]
    records = [
        name for name in names if name in (f"{study}/runs.csv", f"{study}/epochs.csv")
    ]
    inputs = [
        name
        for name in names
        if name.startswith((f"{study}/study", f"{study}/calibration", "inputs/"))
    ]
    authors = [
        _author(number, author)
        for number, author in enumerate(d.paper.authors, start=1)
    ]
    agents = (
        {"agent": [_link(author[0]["@id"]) for author in authors]} if authors else {}
    )
    doi = f"https://doi.org/{d.paper.doi}" if d.paper.doi else ""
    root = _root(d, names, doi)
    if authors:
        root |= {"author": agents["agent"], "publisher": agents["agent"][0]}
    # That of the records, and that of scalebench, which is packed with them.
    for licence in sorted({d.paper.license or "Apache-2.0", "Apache-2.0"}):
        about = f"The licence with the SPDX identifier {licence}"
        entities.append(
            _entity(_SPDX + licence, "CreativeWork", name=licence, description=about)
        )
    entities += [entity for author in authors for entity in author]
    if doi:
        entities.append(_doi(doi, f"doi:{d.paper.doi}"))
    entities += [
        *_software(d, names),
        _action("#run", f"Run the study {d.study}", "scalebench run", inputs, records)
        | ({"startTime": d.first_run, "endTime": d.last_run} if d.last_run else {})
        | agents,
    ]
    if d.elements:
        plots = [name for name in names if name.startswith("plots/")]
        drawing = _action(
            "#figures", "Draw the figures", "scalebench plot", records, plots
        )
        entities.append(drawing | {"endTime": d.published} | agents)
    conforms = _link("https://w3id.org/ro/crate/1.2")
    graph = [
        _entity(CRATE, "CreativeWork", about=_link("./"), conformsTo=conforms),
        root,
        *entities,
    ]
    whole = {"@context": "https://w3id.org/ro/crate/1.2/context", "@graph": graph}
    return json.dumps(whole, indent=2, ensure_ascii=False) + "\n"


def _doi(url: str, value: str) -> dict[str, Any]:
    registry = "https://registry.identifiers.org/registry/doi"
    return _entity(
        url, "PropertyValue", name="DOI", propertyID=registry, value=value, url=url
    )


def _software(d: Description, names: Sequence[str]) -> list[dict[str, Any]]:
    """Return the entities of scalebench, whose wheel may be among the `names` of files, and of the shell."""
    return [
        _entity(
            "#scalebench",
            "SoftwareApplication",
            name="scalebench",
            version=d.version,
            url=next(
                (_link(name) for name in names if name.startswith("software/")), ""
            ),
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
    ]


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


def _action(
    identity: str, name: str, command: str, objects: list[str], results: list[str]
) -> dict[str, Any]:
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
    name = file.relative_to(folder).as_posix()
    is_script = file.suffix == ".sh"
    return _entity(
        name,
        ["File", "SoftwareSourceCode"] if is_script else "File",
        name=file.name,
        description=next(
            words
            for pattern, words in _DESCRIPTIONS.items()
            if fnmatchcase(name, pattern)
        ),
        encodingFormat=_FORMATS.guess_type(file.name)[0] or "application/octet-stream",
        contentSize=str(file.stat().st_size),
        sha256=verification.sha256(file),
        **({"programmingLanguage": _link("#bash")} if is_script else {}),
    )


def _author(number: int, author: Author) -> list[dict[str, Any]]:
    """Return the person and, if stated, the affiliation."""
    person = _entity(
        f"https://orcid.org/{author.orcid}" if author.orcid else f"#author-{number}",
        "Person",
        name=author.name,
    )
    if not author.affiliation:
        return [person]
    place = f"#affiliation-{number}"
    affiliation = _entity(place, "Organization", name=author.affiliation)
    return [person | {"affiliation": _link(place)}, affiliation]
