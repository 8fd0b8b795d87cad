"""Shipped clusters parse and have sources; invalid files are one-line errors."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from scalebench.cluster.cluster_file import (
    Cluster,
    cluster_names,
    describe_clusters,
    load_cluster,
    require_step_times,
)
from scalebench.errors import ClusterError
from scalebench.study.spec import Study
from tests.facts import naming

MINIMAL = """\
name: mine
nodes: 2
node: {cores: 4, workers_per_node: 4, source: counted}
links:
  intra: {latency_s: 1e-6, bandwidth_bytes_per_s: 1e10, source: measured}
  inter: {latency_s: 2.0e-5, bandwidth_bytes_per_s: 1.25e+9, source: measured}
reduction: {seconds_per_byte: 1e-10, source: measured}
"""


@pytest.mark.parametrize("name", cluster_names())
def test_every_shipped_cluster_parses_and_is_described(name: str) -> None:
    cluster = load_cluster(name)
    assert cluster.name == name
    assert cluster.description == dict(describe_clusters())[name] != ""
    assert (
        cluster.links.intra.bandwidth_bytes_per_s
        >= cluster.links.inter.bandwidth_bytes_per_s
    )


def test_the_shipped_names() -> None:
    assert cluster_names() == [
        "dgx-h100",
        "ethernet-10g",
        "juwels-booster",
        "marenostrum5-acc",
        "this-machine",
    ]


def test_this_machine_has_values_of_the_machine() -> None:
    node = load_cluster("this-machine").node
    assert node.cores == node.workers_per_node == len(os.sched_getaffinity(0))
    assert node.memory_gib is not None
    assert node.memory_gib > 0


def test_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(MINIMAL)
    assert load_cluster(path) == load_cluster(str(path))
    assert load_cluster(path).links.intra.latency_s == 1e-6


def test_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(
        ClusterError,
        match=naming("'juwel-booster'", "no such file", "'juwels-booster'"),
    ):
        load_cluster("juwel-booster")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (", source: counted", "", "key 'node.source' is missing"),
        (
            "cores: 4",
            "cores: 0",
            "key 'node.cores': expected a number greater than 0, got 0",
        ),
        ("cores: 4", "coers: 4", r"unknown key 'node.coers'; did you mean 'cores'\?"),
        ("intra:", "intar:", r"unknown key 'links.intar'; did you mean 'intra'\?"),
        (
            "nodes: 2",
            "nodes: 2\ndescripton: x",
            r"unknown key 'descripton'; did you mean 'description'\?",
        ),
        (
            "nodes: 2",
            "node_count: 2",
            r"unknown key 'node_count'; did you mean 'nodes'\?",
        ),
        (
            "source: counted",
            "source: x",
            "key 'node.source': expected at least 3 characters, got 'x'",
        ),
        (
            "latency_s: 1e-6, ",
            "",
            r"key 'links.in(tra|ter).latency_s' is missing \(seconds of an empty message\)",
        ),
        (
            "latency_s: 1e-6",
            "latency_s: 5",
            "'links.intra': latency_s: expected seconds, 2 us as 2e-6, got 5",
        ),
        (
            "1.25e+9",
            "200",
            "'links.inter': bandwidth_bytes_per_s: expected bytes/s, 25 GB/s as 25e9, got 200",
        ),
        (
            "latency_s: 1e-6",
            "latency_s: fast",
            "key 'links.intra.latency_s': expected a number",
        ),
        (
            "links:",
            "links:\n  congestion: {per_doubling: -0.1, source: measured}",
            "'links.congestion.per_doubling': expected a number greater than or equal to 0, got -0.1",
        ),
        (
            "inter: {",
            "inter: {shared_by: 2, ",
            # cards of a node are `network_cards`
            "unknown key 'links.inter.shared_by'",
        ),
    ],
)
def test_invalid_key_is_named(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(MINIMAL.replace(old, new))
    with pytest.raises(ClusterError, match=message) as caught:
        load_cluster(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        ClusterError, match=r"cannot read the cluster file .*none\.yaml.*No such file"
    ):
        load_cluster(tmp_path / "none.yaml")


def test_too_many_workers_are_refused() -> None:
    cluster = load_cluster("juwels-booster")
    assert cluster.nodes_for(1) == 1
    assert cluster.nodes_for(64) == 16
    with pytest.raises(
        ClusterError,
        match=naming("4000 workers", "1000 nodes of 4", "936", "3744"),
    ):
        cluster.nodes_for(4000)


@pytest.mark.parametrize("name", ["marenostrum5-acc", "juwels-booster", "dgx-h100"])
def test_cluster_without_step_times_is_refused(name: str) -> None:
    cluster = load_cluster(name)
    with pytest.raises(
        ClusterError,
        match=r"no measured step time for model 'mlp\(hidden=\[128\]\)'.*--device-step",
    ):
        require_step_times(cluster, Study())
    require_step_times(cluster, Study(device_step_time=0.01))


@pytest.mark.parametrize("name", ["this-machine", "ethernet-10g"])
def test_this_machine_clusters_need_no_step_times(name: str) -> None:
    require_step_times(load_cluster(name), Study())


def test_step_times_apply_to_their_batches() -> None:
    entry = {
        "model": "mlp(hidden=[128])",
        "batch": 8,
        "forward_s": 1e-4,
        "backward_s": 2e-4,
        "update_s": 1e-5,
        "source": "measured",
    }
    raw = {**load_cluster("dgx-h100").model_dump(), "step_times": [entry]}
    cluster = Cluster.model_validate(raw)
    require_step_times(cluster, Study(batch_per_worker=8))
    require_step_times(cluster, Study(batch_global=64))
    with pytest.raises(ClusterError, match=r"at batch 16 \(it has batches 8\)"):
        require_step_times(cluster, Study(batch_per_worker=16))
    with pytest.raises(ClusterError, match="in float64"):
        require_step_times(cluster, Study(dtype="float64"))
    assert cluster.step_times_of("mlp(hidden=[128])", "float32")[
        8
    ].step_s == pytest.approx(3.1e-4)
