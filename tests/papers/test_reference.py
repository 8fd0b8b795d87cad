"""The rows kept in results/reference: they are of the shipped studies, give docs/claims.md, and draw the same bytes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from scalebench.models.pinning import pinned
from scalebench.papers.paper_folder import find_papers
from scalebench.papers.side_by_side import claims_page
from scalebench.records.folder import RUNS
from scalebench.records.study_file import changes
from tests.conftest import some

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "results" / "reference"
PAPERS = find_papers(Path("experiments"))
STUDIES = [
    (paper, name)
    for paper in PAPERS
    for name in paper.studies
    if (REFERENCE / paper.study_at(name, "laptop").name / RUNS).is_file()
]
REFRESH = "scalebench reproduce --claims --results results/reference > docs/claims.md"


@pytest.mark.parametrize(
    ("paper", "name"), STUDIES, ids=lambda part: getattr(part, "name", part)
)
def test_rows_are_of_the_study_as_it_is_shipped_and_of_a_clean_commit(paper, name):
    study = pinned(paper.study_at(name, "laptop"))
    assert changes(REFERENCE / study.name, study) == []
    (results,) = paper.load([name], "laptop", REFERENCE).values()
    assert results.failed.empty
    assert not results.runs["git_dirty"].any()
    points = results.completed.groupby(["label", "workers"]).size()
    assert set(points) == {study.repetitions}
    assert {label for label, _ in points.index} == {
        str(component) for component in study.strategies
    }


def test_the_page_of_claims_is_of_these_rows():
    assert STUDIES
    page = (ROOT / "docs" / "claims.md").read_text(encoding="utf-8")
    assert page == claims_page(PAPERS, "laptop", REFERENCE.relative_to(ROOT)), REFRESH


ONE_FIGURE = ("besch1995", "--figure", "ring")


@pytest.mark.parametrize(
    "words",
    some([ONE_FIGURE, *((paper.name,) for paper in PAPERS)], ONE_FIGURE),
    ids=" ".join,
)
def test_another_process_draws_the_same_bytes(tmp_path, words):
    drawn = []
    for hash_seed in ("1", "2"):
        output = tmp_path / hash_seed
        command = [sys.executable, "-m", "scalebench", "reproduce", *words, "--redraw"]
        subprocess.run(
            [*command, "--results", str(REFERENCE), "--output", str(output)],
            cwd=ROOT, env={**os.environ, "PYTHONHASHSEED": hash_seed}, check=True, capture_output=True,
        )  # fmt: skip
        drawn.append(
            {
                path.relative_to(output): path.read_bytes()
                for path in output.rglob("*")
                if path.is_file()
            }
        )
    assert drawn[0] == drawn[1]
    assert any(path.suffix == ".svg" for path in drawn[0])
