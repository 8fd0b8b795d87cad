"""Reader of `published.csv`: the numbers of a paper, each with the place where it was read."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field, ValidationError, field_validator

from scalebench.errors import ResultsError
from scalebench.study.validation import StrictModel, explain
from scalebench.system.bounded_read import read_text

NEVER = "never"
_Text = Annotated[str, Field(min_length=1)]


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
        raise ResultsError(f"cannot read {path}: {getattr(error, 'strerror', None) or 'not text in UTF-8'}") from None
    found = []
    for number, row in enumerate(rows, start=2):
        try:
            found.append(Published.model_validate(row))
        except ValidationError as error:
            raise ResultsError(explain(error, Published, f"{path}, line {number}")) from None
    return found
