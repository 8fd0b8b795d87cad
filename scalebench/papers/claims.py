"""Claims of papers and verdicts on them, computed from the rows of our studies."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from scalebench.analysis import Results
from scalebench.errors import StudyError
from scalebench.formatting import is_interval
from scalebench.papers.obtained import Obtained, obtain, without_run
from scalebench.papers.paper_folder import CLAIMS, Paper
from scalebench.papers.side_by_side import in_words, number, with_interval
from scalebench.study.validation import StrictModel, read_as

Verdict = Literal["reproduced", "partly", "not reproduced", "not testable here", "not run"]


class Check(StrictModel):
    """Bounds on a quantity of a study or what-if; they hold where the whole interval, or a lone value, lies within."""

    study: str
    quantity: str
    strategy: str = ""
    workers: int | None = None
    at_least: float | None = None
    at_most: float | None = None

    @model_validator(mode="after")
    def _a_bound(self) -> Check:
        if self.at_least is None and self.at_most is None:
            raise ValueError("give at_least, at_most or both")
        return self

    def holds(self, one: Obtained) -> bool | None:
        """Return True if `one` keeps to the bounds, False if not, None if its interval contains one of them."""
        value, low, high = one.measured[:3]
        if not is_interval(low, high):
            low = high = value
        least = -math.inf if self.at_least is None else self.at_least
        most = math.inf if self.at_most is None else self.at_most
        return True if least <= low and high <= most else False if high < least or low > most else None

    @property
    def bound(self) -> str:
        """The bounds in words: `at least 0.95`, `0.85 to 0.95`."""
        if self.at_least is not None and self.at_most is not None:
            return f"{number(self.at_least)} to {number(self.at_most)}"
        return f"at most {number(self.at_most or 0)}" if self.at_least is None else f"at least {number(self.at_least)}"


class Claim(StrictModel):
    """A claim with its place in the paper, the checks that it stands for, and why ours may differ.

    Without checks it cannot be tested here; `why` says the reason.
    """

    claim: str
    source: str
    checks: list[Check] = Field([])
    why: str


class _Claims(StrictModel):
    claims: list[Claim]


@dataclass(frozen=True)
class Judged:
    """A claim, its verdict, and what was obtained for each check and execution."""

    claim: Claim
    verdict: Verdict
    obtained: list[tuple[Check, Obtained]]


def read_claims(path: Path) -> list[Claim]:
    """Read `claims.yaml`; no claims where there is no such file.

    Raises:
        StudyError: not a list of claims; one line that names file and key.
    """
    if not path.is_file():
        return []
    return read_as(path, _Claims, StudyError, "file of claims").claims


def judge(claim: Claim, results: Mapping[str, Results], folder: Path | None = None) -> Judged:
    """Return the verdict on `claim` by the `results` of studies, and by what follows from the paper's `folder` alone.

    Reproduced: all checks hold in every execution; not reproduced: none does; else partly. An interval that contains a
    bound leaves its check open, which is partly, too.
    """
    if not claim.checks:
        return Judged(claim, "not testable here", [])
    found = [
        (check, one)
        for check in claim.checks
        if check.study in results
        for one in obtain(results[check.study], check.quantity, check.strategy, check.workers)
    ]
    found += [
        (check, one)
        for check in claim.checks
        if folder is not None and (one := without_run(folder, check.study, check.quantity, check.workers)) is not None
    ]
    tested = [check for check, _ in found]
    if not all(check in tested for check in claim.checks):
        return Judged(claim, "not run", found)
    answers = [check.holds(one) for check, one in found]
    if all(answers):
        return Judged(claim, "reproduced", found)
    return Judged(claim, "not reproduced" if not any(a is not False for a in answers) else "partly", found)


def claims_page(papers: Iterable[Paper], scale: str, results: Path) -> str:
    """Return all claims of `papers` in Markdown, judged by the rows in the folder `results`."""
    lines = [
        "# Claims of papers, and what was obtained",
        "",
        f"Printed by `scalebench reproduce --claims --scale {scale}` from rows. A claim stands for the checks that "
        "`claims.yaml` of the paper has for it. Reproduced: all hold, with their whole interval; not reproduced: none "
        "does; partly: some do, or an interval contains the bound. The word behind a value is its execution.",
        "",
    ]
    for paper in papers:
        claims = read_claims(paper.folder / CLAIMS)
        loaded = paper.load(paper.studies, scale, results) if claims else {}
        for claim in claims:
            lines += _section(paper, judge(claim, loaded, paper.folder))
    return "\n".join(lines).rstrip() + "\n"


def _section(paper: Paper, judged: Judged) -> list[str]:
    claim = judged.claim
    lines = [f"## {paper.name}: {claim.claim}", "", f"**{judged.verdict.capitalize()}.** {claim.why}", ""]
    lines += [f"Claimed in: {claim.source}.", ""]
    for check, one in judged.obtained:
        answer = {True: "holds", False: "does not hold", None: "open"}[check.holds(one)]
        at = f" at {check.workers} workers" if check.workers else ""
        what = in_words(check.quantity)
        lines.append(
            f"- {', '.join(filter(None, [what, check.strategy]))}{at}: {with_interval(one.measured)} ({one.execution}, "
            f"{'study' if check.strategy else 'from'} {check.study}); "
            f"{check.bound}: {answer}"
        )
    return [*lines, ""] if judged.obtained else lines
