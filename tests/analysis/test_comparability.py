"""Refusal to compare studies under different conditions."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from scalebench.analysis import load
from scalebench.analysis.verdicts import KEYS, compare_studies
from scalebench.errors import ResultsError, UsageError
from tests.doctored import Doctored, described, make_sound


@pytest.fixture
def compare(tmp_path):
    """Compare the sound study with a doctored one."""

    def make(
        doctor: Callable[[Doctored], object] = lambda study: None,
        before: Callable[[Doctored], object] = lambda study: None,
        **options,
    ):
        folders = []
        for name in ("a", "b"):
            study = make_sound()
            before(study)
            if name == "b":
                doctor(study)
            folders.append(study.write(tmp_path / name))
        return compare_studies(*map(load, folders), **options)

    return make


def rows(**changes):
    return lambda study: study.change(**changes)


def study_key(**changes):
    return lambda study: study.study.update(changes)


CASES = {
    "lr": (rows(lr=0.5), "lr is 0.1 and 0.5"),
    "model": (rows(model="cnn"), "model is mlp(hidden=[128]) and cnn"),
    "dataset_sha256": (rows(dataset_sha256="f00d"), "dataset_sha256 is empty and f00d"),
    "epochs": (rows(epochs=7), "epochs is 6 and 7"),
    "target_metric": (rows(target_metric=0.95), "target_metric is 0.9 and 0.95"),
    "batch_policy": (
        rows(batch_policy="global"),
        "batch_policy is per_worker and global",
    ),
    "batch_per_worker": (rows(batch_per_worker=4), "batch_per_worker is 8 and 4 ("),
    "n_train": (rows(n_train=7), " and 7 ("),
    "workers_per_node": (rows(workers_per_node=1), "workers_per_node is 2 and 1 ("),
    "warmup_steps": (rows(warmup_steps=0), "warmup_steps is 10 and 0 ("),
    "machine": (
        rows(host_hash="f00d"),
        "machine is cafe and f00d. Run both on one machine",
    ),
    "cluster": (rows(cluster="dgx-h100"), "cluster is this-machine and dgx-h100"),
    "blocks": (study_key(blocks=3), "blocks is auto and 3"),
    "virtual.ties": (
        study_key(virtual={"ties": "rank"}),
        "compared: virtual.ties is seeded and rank. ",
    ),
    "virtual.slow_links": (
        study_key(virtual={"slow_links": {"0": 2}}),
        "compared: virtual.slow_links is {} and {'0': 2.0}.",
    ),
    "study.yaml": (
        lambda study: study.study.clear(),
        "study.yaml is there and missing",
    ),
}


def test_clusters_differ_by_content(compare):
    said = (
        "cluster is this-machine and this-machine (sha256 aaaaaaaaaaaa). "
        "Make them equal, or override with --ignore c"
    )
    with pytest.raises(ResultsError, match=re.escape(said)):
        compare(rows(cluster_sha256="a" * 64))


@pytest.mark.parametrize("key", CASES)
def test_a_key_that_differs_is_named_and_can_be_overridden(compare, key):
    doctor, said = CASES[key]
    before = study_key(blocks="auto", virtual={})
    with pytest.raises(ResultsError, match=re.escape(said)) as refused:
        compare(doctor, before)
    assert f"--ignore {key}" in str(refused.value)


def test_overridden_keys_are_kept(compare):
    found = compare(rows(lr=0.5, epochs=7), ignore=["lr", "epochs", "machine"])
    assert [str(difference) for difference in found.overridden] == [
        "lr is 0.1 and 0.5",
        "epochs is 6 and 7",
    ]


def test_all_keys_that_differ_are_named_at_once(compare):
    with pytest.raises(
        ResultsError,
        match=r"lr is 0\.1 and 0\.5; epochs is 6 and 7\..*--ignore KEY for each",
    ):
        compare(rows(lr=0.5, epochs=7))


def test_only_keys_of_compared_cells_count(compare):
    found = compare(rows(host_hash="f00d", warmup_steps=0), execution="virtual")
    assert found.count("unchanged") == len(found.table)


def test_a_key_that_an_older_version_did_not_write_has_its_default(compare):
    assert (
        compare(
            study_key(blocks="auto", virtual={"slow_links": {}, "ties": "seeded"})
        ).overridden
        == []
    )
    with pytest.raises(ResultsError, match="blocks is auto and 3"):
        compare(study_key(blocks=3))


def test_a_key_that_does_not_exist_cannot_be_overridden(compare):
    with pytest.raises(
        UsageError, match="--ignore lrr: no such key; did you mean 'lr'"
    ):
        compare(ignore=["lrr"])
    assert len(set(KEYS)) == len(KEYS)


def test_uncommitted_changes_are_listed(compare):
    assert compare(rows(git_dirty=True)).changed == ["commit 0000000000 → 0000000000+"]


def test_a_strategy_with_another_option_is_another_cell_and_named(compare):
    def rename(study):
        study.change(
            lambda row: row.strategy == "epoch_average", strategy_options='{"every": 2}'
        )

    found = compare(rename, execution="native")
    assert {cell[2] for cell in found.missing} == {"epoch_average"}
    assert {cell[2] for cell in found.added} == {"epoch_average(every=2)"}


def test_code_and_packages_may_differ_and_are_listed(compare):
    def update(study):
        study.change(git_commit="1" * 40, packages_hash="f00d")
        study.provenance = [
            described(packages="f00d") | {"packages": {"torch": "2.14.0"}}
        ]

    assert compare(update).changed == [
        "commit 0000000000 → 1111111111",
        "torch 2.13.0 → 2.14.0",
    ]
    assert compare().changed == []


def test_further_packages_are_counted(compare):
    many = {f"tool-{number}": "1.0" for number in range(40)} | {
        f"lib-{number}": "2.0" for number in range(9)
    }
    before = {f"lib-{number}": "1.0" for number in range(9)}

    def update(study):
        study.change(packages_hash="f00d")
        study.provenance = [
            described() | {"packages": {"torch": "2.13.0", **before}},
            described(packages="f00d") | {"packages": {"numpy": "2.4.6", **many}},
        ]

    changed = compare(update).changed
    assert len("; ".join(changed)) < 300
    assert changed[:2] == ["numpy absent → 2.4.6", "torch 2.13.0 → absent"], (
        "the decisive ones are named"
    )
    assert changed[-1] == "45 more packages"


@pytest.mark.parametrize("given", [False, True])
def test_virtual_times_of_two_calibrations_are_refused_and_of_one_are_not(
    tmp_path, given
):
    """A study may use the calibration of another one; the key in the file is ignored."""
    folders = [make_sound().write(tmp_path / name) for name in ("a", "b")]
    for folder, numbers in zip(folders, (1, 2), strict=True):
        (folder / "calibration.json").write_text(
            json.dumps({"key": folder.name, "tables": [numbers]})
        )
    if given:  # a study keeps a copy of what it was given
        (folders[1] / "calibration.json").write_text(
            json.dumps({"key": "b", "tables": [1]})
        )
        (folders[1] / "study.yaml").write_text(
            f"name: synthetic\ncalibration: {folders[0] / 'calibration.json'}\n"
        )
        assert compare_studies(*map(load, folders)).table["paired"].any()
        return
    with pytest.raises(
        ResultsError,
        match=r"calibration is .* Run the second with --calibration FIRST/calibration\.json",
    ):
        compare_studies(*map(load, folders))
    assert len(compare_studies(*map(load, folders), execution="native").table) == 7


def test_the_page_names_every_key():
    page = (Path(__file__).parents[2] / "docs" / "comparing.md").read_text(
        encoding="utf-8"
    )
    assert [key for key in KEYS if f"`{key}`" not in page] == []
