"""Papers, run at the smallest scale by the command."""

import subprocess
import sys
from pathlib import Path

import pytest

from scalebench.papers.paper_folder import find_papers
from tests.conftest import some

ROOT = Path(__file__).parents[2]
ALL = tuple(paper.name for paper in find_papers(ROOT / "experiments"))
# virtual workers; modelled ones beside rows of the paper's own; no study at all
ONE_OF_EACH_KIND = ("federated", "horovod2018", "mlperf-batch")


@pytest.mark.parametrize(
    "names", some([ALL, ONE_OF_EACH_KIND], ONE_OF_EACH_KIND), ids=len
)
def test_all_papers_run_and_get_a_page(tmp_path, names):
    experiments = tmp_path / "experiments"
    experiments.mkdir()
    for name in (*names, "published"):
        (experiments / name).symlink_to(ROOT / "experiments" / name)
    words = ["reproduce", "all", "--scale", "smoke", "--jobs", "1"]
    places = ["--experiments", experiments]
    places += ["--results", tmp_path / "results", "--output", tmp_path / "plots"]
    process = subprocess.run(
        [sys.executable, "-m", "scalebench", *words, *places], cwd=ROOT
    )
    assert process.returncode == 0
    pages = {page.parent.name for page in (tmp_path / "plots").glob("*/index.html")}
    assert pages == set(names)
