"""The studies, scales, published numbers and claims that are shipped in experiments/."""

from __future__ import annotations

import math
import tomllib
from pathlib import Path

import pytest

from scalebench.cluster.cluster_file import load_cluster
from scalebench.errors import DataError, UsageError
from scalebench.launch.planning import plan_study
from scalebench.papers.obtained import QUANTITIES, read_what_ifs, sources, without_run
from scalebench.papers.paper_folder import (
    CLAIMS,
    INSTALLED,
    PUBLISHED,
    SCALE_NAMES,
    WHAT_IFS,
    default_experiments,
    find_paper,
    find_papers,
    read_published,
)
from scalebench.papers.side_by_side import read_claims
from scalebench.study.load import load_study
from tests.conftest import needs_mpi

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
PAPERS = find_papers(EXPERIMENTS)
STUDIES = [
    *EXPERIMENTS.glob("*.yaml"),
    *(paper.folder / f"{study}.yaml" for paper in PAPERS for study in paper.studies),
]


@pytest.mark.parametrize(
    "path", STUDIES, ids=lambda path: str(path.relative_to(EXPERIMENTS))
)
def test_every_study_plans_as_it_is(path):
    assert plan_study(load_study(path, {}, [])).sweep.runs


@pytest.mark.parametrize("paper", PAPERS, ids=lambda paper: paper.name)
@pytest.mark.parametrize(
    "scale",
    [
        pytest.param(scale, marks=[needs_mpi] * (scale == "cluster"))
        for scale in SCALE_NAMES
    ],
)
def test_every_study_plans_at_every_scale(paper, scale):
    # of which nothing is run
    assert bool(paper.studies) == (paper.name not in ("barrachina2021", "mlperf-batch"))
    for name in paper.studies:
        study = paper.study_at(name, scale)
        assert study.name == f"{paper.name}-{name}" + (
            f"-{scale}" if scale != "laptop" else ""
        )
        if study.dataset.name in ("cifar100", "cinic10"):  # not shipped
            with pytest.raises(DataError, match=study.dataset.name):
                plan_study(study)
        else:
            assert plan_study(study).sweep.runs


@pytest.mark.parametrize("paper", PAPERS, ids=lambda paper: paper.name)
def test_every_published_number_has_a_source_and_a_study_that_exists(paper):
    rows = read_published(paper.folder / PUBLISHED)
    assert rows
    assert paper.title
    for row in rows:
        assert row.source
        assert row.study in ("", *sources(paper.folder), *paper.studies), row
        assert (
            row.study not in paper.studies
            or row.quantity.partition("@")[0] in QUANTITIES
        ), row


@pytest.mark.parametrize("paper", PAPERS, ids=lambda paper: paper.name)
def test_every_claim_is_checked_by_a_study_that_exists(paper):
    claims = read_claims(paper.folder / CLAIMS)
    # which has measurements alone
    assert any(claim.checks for claim in claims) == (paper.name != "mlperf-batch")
    for claim in claims:
        for check in claim.checks:
            assert check.study in (*sources(paper.folder), *paper.studies)
            assert (
                check.study not in paper.studies
                or check.quantity.partition("@")[0] in QUANTITIES
            )


def test_the_optimum_of_besch_1995_follows_from_its_files():
    folder = EXPERIMENTS / "besch1995"
    study, cluster = (
        load_study(folder / "tree.yaml", {}, []),
        load_cluster(folder / "machine.yaml"),
    )
    link, weights = cluster.links.inter, 33 * 128 + 129 * 8
    sent = 4 * weights / link.bandwidth_bytes_per_s
    step = (
        2 * link.latency_s + 2 * sent + 4 * weights * cluster.reduction.seconds_per_byte
    )
    (row,) = read_published(folder / PUBLISHED)
    assert row.value == pytest.approx(
        study.device_step_time * math.log(2) / step, abs=0.05
    )


def test_efficiencies_of_horovod_follow_from_rows_of_other_systems():
    folder = EXPERIMENTS / "horovod2018"
    rows = [row for row in read_published(folder / PUBLISHED) if row.study == "rows"]
    assert len(rows) == 9
    for row in rows:
        ours = without_run(folder, row.study, row.quantity, row.workers)
        assert ours.measured.low < row.value < ours.measured.high
        assert ours.measured.low < ours.measured.value < 1
    assert without_run(folder, "rows", "predicted_efficiency@VGG-16", 3) is None
    assert without_run(folder, "vgg16", "efficiency", 512) is None


def test_shares_that_components_bind_follow_from_a_what_if():
    folder = EXPERIMENTS / "barrachina2021"
    parts = (
        "compute",
        "network bandwidth",
        "network latency",
        "memory bandwidth",
        "launch overhead",
    )
    shares = [
        without_run(
            folder, "vgg16-batch", f"share_bound_by@{part}", None
        ).measured.value
        for part in parts
    ]
    assert sum(shares) == pytest.approx(1.0)
    assert 0 < shares[0] < shares[1]
    with pytest.raises(UsageError, match="unknown component 'network'"):
        without_run(folder, "vgg16-batch", "share_bound_by@network", None)
    with pytest.raises(UsageError, match="unknown quantity 'bound'"):
        without_run(folder, "vgg16-batch", "bound@compute", None)


def test_papers_are_found_from_any_folder(tmp_path, monkeypatch, invoke):
    monkeypatch.chdir(tmp_path)
    assert "besch1995  " in invoke("reproduce")
    (tmp_path / "experiments").mkdir()
    assert "besch1995  " in invoke("reproduce"), (
        "an experiments/ without papers is another one"
    )
    paper = find_paper(default_experiments(), "besch1995")
    (name, *_) = paper.studies
    study = paper.study_at(name, "smoke")
    assert (
        plan_study(study).cluster.name
        == load_cluster(EXPERIMENTS / "besch1995" / "machine.yaml").name
    )
    what_ifs = read_what_ifs(INSTALLED / "barrachina2021" / WHAT_IFS)
    assert all(plane.price().train_s.size for plane in what_ifs.values())


def test_papers_are_package_data():
    """A wheel has the files of experiments/: the folder in the package is a link to it, which setuptools follows."""
    assert INSTALLED.resolve() == EXPERIMENTS.resolve()
    patterns = tomllib.loads((EXPERIMENTS.parent / "pyproject.toml").read_text())[
        "tool"
    ]["setuptools"]["package-data"]
    assert "experiments/**" in patterns["scalebench"]
