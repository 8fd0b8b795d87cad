"""All papers, run at the smallest scale by the command."""

import subprocess
import sys
from pathlib import Path

import pytest

from scalebench.papers.paper_folder import find_papers

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(900)
def test_all_papers_run_and_get_a_page(tmp_path):
    words = ["reproduce", "all", "--scale", "smoke", "--jobs", "1"]
    places = ["--results", tmp_path / "results", "--output", tmp_path / "plots"]
    process = subprocess.run(
        [sys.executable, "-m", "scalebench", *words, *places], cwd=ROOT, timeout=840
    )
    assert process.returncode == 0
    pages = {page.parent.name for page in (tmp_path / "plots").glob("*/index.html")}
    assert pages == {paper.name for paper in find_papers(ROOT / "experiments")}
