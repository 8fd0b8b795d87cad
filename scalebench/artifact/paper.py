"""What only the authors know of an artifact: the paper it belongs to. All of it may be left out."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError

from scalebench.errors import StudyError, nearest
from scalebench.figures import figure_names
from scalebench.study.strict import StrictModel
from scalebench.study.validation import explain, read_mapping

Line = Annotated[str, Field(min_length=1, max_length=2000)]


class Author(StrictModel):
    """Who answers for the artifact."""

    name: Line
    orcid: str | None = Field(None, pattern=r"^\d{4}-\d{4}-\d{4}-\d{3}[\dX]$")
    affiliation: Line | None = None


class Contribution(StrictModel):
    """A claim of the paper, and the figures of the study that carry it."""

    text: Line
    figures: list[str] = Field(min_length=1)


class Paper(StrictModel):
    """`elements` says where in the paper a figure of the study stands: `{strong-scaling: Figure 3}`."""

    title: Line | None = None
    authors: list[Author] = Field([])
    license: str | None = Field(None, pattern=r"^[A-Za-z0-9.+-]+$", description="SPDX identifier, such as CC-BY-4.0")
    doi: str | None = Field(None, pattern=r"^10\.\d{4,9}/\S+$", description="of the artifact, not of the paper")
    url: str | None = Field(None, pattern=r"^https?://\S+$", description="where the artifact can be had")
    published: date | None = Field(None, description="when; by default the day of the last run")
    contributions: list[Contribution] = Field([])
    elements: dict[str, Line] = Field({})


def load_paper(path: Path | None) -> Paper:
    """The file `path`, or a paper of which nothing is known.

    Raises:
        StudyError: the file cannot be read, a key or value is wrong, or it names an unknown figure.
    """
    if path is None:
        return Paper()
    try:
        paper = Paper.model_validate(read_mapping(path, StudyError, "paper"))
    except ValidationError as error:
        raise StudyError(explain(error, Paper, str(path))) from None
    known = figure_names()
    for name in [*paper.elements, *(name for one in paper.contributions for name in one.figures)]:
        if name not in known:
            raise StudyError(f"{path}: unknown figure {name!r}; {nearest(name, known)}")
    return paper
