"""The papers in experiments/: a folder each, with studies, scales, published numbers and claims.

`published.csv` has the numbers, each with the place where it was read.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field, ValidationError, field_validator

import scalebench
from scalebench.analysis import Results, load
from scalebench.errors import ResultsError, StudyError, UsageError, nearest
from scalebench.records.folder import RUNS
from scalebench.study.load import load_study
from scalebench.study.spec import Study
from scalebench.study.validation import StrictModel, explain, read_mapping
from scalebench.system.file_access import read_text

NEVER = "never"
_Text = Annotated[str, Field(min_length=1)]
PUBLISHED, SCALES, CLAIMS = "published.csv", "scales.yaml", "claims.yaml"
WHAT_IFS, PLANS = "what_if.yaml", "plans.yaml"
SMOKE = "smoke"  # shows that everything runs; too small to compare anything
SCALE_NAMES = (SMOKE, "laptop", "cluster")
# a link in a checkout, files in a wheel
INSTALLED = Path(scalebench.__file__).parent / "experiments"
_OWN = "laptop"  # the scale at which a study keeps its own name
_NOT_STUDIES = (SCALES, CLAIMS, WHAT_IFS, PLANS, "machine.yaml", "device.yaml")


@dataclass(frozen=True)
class Paper:
    """A folder of experiments/ with a `published.csv`."""

    folder: Path

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def title(self) -> str:
        """First heading of the README, without the name."""
        readme = self.folder / "README.md"
        first = (
            readme.read_text(encoding="utf-8").splitlines()[0]
            if readme.is_file()
            else ""
        )
        return first.lstrip("# ").removeprefix(f"{self.name}:").strip()

    @property
    def studies(self) -> list[str]:
        """Names of the study files, without `.yaml`."""
        return sorted(
            path.stem
            for path in self.folder.glob("*.yaml")
            if path.name not in _NOT_STUDIES
        )

    def studies_of(self, figure: str | None) -> list[str]:
        """Return the studies of a figure or table: `4` and `fig4` mean fig4, fig4-time and so on; None: all.

        Raises:
            UsageError: the paper has no such study.
        """
        if figure is None:
            return self.studies
        # Papers number figures, and studies are named after them: `4` is `fig4`.
        wanted = (
            f"fig{figure}" if figure.isdecimal() else figure.lower().replace(" ", "")
        )
        found = [
            study
            for study in self.studies
            if study == wanted or study.startswith(f"{wanted}-")
        ]
        if not found:
            known = sorted({study.partition("-")[0] for study in self.studies})
            having = (
                nearest(wanted, known)
                if known
                else "it has no studies, only published numbers"
            )
            raise UsageError(
                f"--figure {figure}: {self.name} has no study {wanted!r}; {having}"
            )
        return found

    def study_at(self, name: str, scale: str, data_dir: Path | None = None) -> Study:
        """Return study `name` with the changes of `scale`; beside the laptop's it is named after the scale.

        `data_dir` is given to studies whose data set reads files.

        Raises:
            StudyError: the study or `scales.yaml` is not valid.
        """
        changes = self._changes(name, scale)
        path = self.folder / f"{name}.yaml"
        dataset = changes.get("dataset")
        if (
            data_dir is not None
            and isinstance(dataset, dict)
            # Made data reads no files: a folder would be a key that it does not know.
            and dataset.get("name") not in (None, "synthetic")
        ):
            changes["data_dir"] = data_dir
        study = load_study(path, changes, [])
        # Paths in a study are written from the folder that has experiments/.
        study = study.model_copy(
            update={"cluster": found_file(self.folder, study.cluster)}
        )
        return (
            study
            if scale == _OWN
            else study.model_copy(update={"name": f"{study.name}-{scale}"})
        )

    def load(
        self, studies: Iterable[str], scale: str, results: Path
    ) -> dict[str, Results]:
        """Return the records at `scale` of those of the `studies` that have a folder in `results`.

        Raises:
            ResultsError: the records of a study are damaged.
        """
        folders = {name: results / self.study_at(name, scale).name for name in studies}
        return {
            name: load(folder)
            for name, folder in folders.items()
            if (folder / RUNS).is_file()
        }

    def _changes(self, name: str, scale: str) -> dict[str, Any]:
        path = self.folder / SCALES
        scales = (
            read_mapping(path, StudyError, "file of scales") if path.is_file() else {}
        )
        if unknown := sorted(set(scales) - set(SCALE_NAMES)):
            raise StudyError(
                f"{path}: unknown scale {unknown[0]!r}; {nearest(unknown[0], SCALE_NAMES)}"
            )
        changes: dict[str, Any] = {}
        for names, some in (scales.get(scale) or {}).items():
            studies = re.split(r",\s*", names)
            if unknown := sorted(set(studies) - {"all", *self.studies}):
                raise StudyError(
                    f"{path}: {scale} names {unknown[0]!r}; {nearest(unknown[0], ['all', *self.studies])}"
                )
            # In the order of the file: a later entry of one study changes what `all`
            # has.
            if {"all", name} & set(studies):
                changes |= some or {}
        return changes


def default_experiments() -> Path:
    """Return experiments/ of the current folder if it holds papers, else the one that is installed with scalebench."""
    here = Path("experiments")
    # A folder of that name may be anything: papers are what is looked for.
    return here if any(here.glob(f"*/{PUBLISHED}")) else INSTALLED


def found_file(paper: Path, name: str) -> str:
    """Return the file `name`, as experiments/PAPER/machine.yaml, seen from here or from the folder of experiments/."""
    there = paper.parent.parent / name
    return str(there) if not Path(name).exists() and there.is_file() else name


def find_papers(experiments: Path) -> list[Paper]:
    """Return the papers in the folder `experiments`, by name.

    Raises:
        UsageError: there are none.
    """
    found = [Paper(path.parent) for path in sorted(experiments.glob(f"*/{PUBLISHED}"))]
    if not found:
        raise UsageError(
            f"no papers in {experiments}/; expected folders with a {PUBLISHED}: leave --experiments out for those that "
            "are installed with scalebench"
        )
    return found


def find_paper(experiments: Path, name: str) -> Paper:
    """Return the paper `name`.

    Raises:
        UsageError: no such paper; the nearest is named.
    """
    papers = {paper.name: paper for paper in find_papers(experiments)}
    if name not in papers:
        raise UsageError(f"unknown paper {name!r}; {nearest(name, papers)}")
    return papers[name]


class Published(StrictModel):
    """One number of a paper: `quantity` of `strategy` at `workers`, and the study that obtains ours."""

    model_config = ConfigDict(allow_inf_nan=True)

    quantity: _Text
    strategy: str
    workers: int | None
    value: float = Field(description="infinite for an accuracy that was never reached")
    unit: _Text
    figure: _Text
    study: str
    source: _Text = Field(description="where it was read")
    digitised: bool = Field(description="read off a drawn curve")
    note: str

    @field_validator("workers", "value", mode="before")
    @classmethod
    def _never_or_none(cls, value: Any) -> Any:
        # CSV has neither: an empty cell is no number, `never` an accuracy that was not
        # reached.
        return {"": None, NEVER: math.inf}.get(value, value)


COLUMNS = tuple(Published.model_fields)


def read_published(path: Path) -> list[Published]:
    """Read `published.csv`.

    Raises:
        ResultsError: unreadable, other columns, a value that is no number, or a row without a source.
    """
    try:
        rows = list(csv.DictReader(read_text(path).splitlines()))
    except (OSError, UnicodeDecodeError) as error:
        raise ResultsError(
            f"cannot read {path}: {getattr(error, 'strerror', None) or 'not text in UTF-8'}"
        ) from None
    found = []
    # The first line has the names of the columns.
    for number, row in enumerate(rows, start=2):
        try:
            found.append(Published.model_validate(row))
        except ValidationError as error:
            raise ResultsError(
                explain(error, Published, f"{path}, line {number}")
            ) from None
    return found
