"""Facts about the machine, read from synthetic /sys and /proc folders."""

from __future__ import annotations

import uuid

import pytest

from scalebench.records import machine_facts
from scalebench.records.machine_facts import container, cpu, network


def write(root, **files):
    for path, text in files.items():
        target = root / path.replace("__", "/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    return root


def test_numa_nodes_and_governor_are_those_of_the_kernel(tmp_path):
    nodes = "sys/devices/system/node"
    governor = "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"
    write(
        tmp_path,
        **{f"{nodes}/node0/cpulist": "0-31\n", f"{nodes}/node1/cpulist": "32-63\n"},
    )
    write(
        tmp_path,
        **{
            governor: "performance\n",
            "proc/cpuinfo": "processor: 0\nmodel name\t: A CPU\n",
        },
    )
    facts = cpu(tmp_path)
    assert facts["numa_nodes"] == {"node0": "0-31", "node1": "32-63"}
    assert (facts["governor"], facts["model"]) == ("performance", "A CPU")


def test_network_lists_active_physical_cards(tmp_path):
    net = tmp_path / "sys/class/net"
    for name, state in (("eth0", "up"), ("eth1", "down"), ("lo", "unknown")):
        write(net, **{f"{name}/operstate": state, f"{name}/speed": "25000\n"})
    for name in ("eth0", "eth1"):
        (net / name / "device").mkdir()
    (tmp_path / "drivers/mlx5_core").mkdir(parents=True)
    (net / "eth0/device/driver").symlink_to(tmp_path / "drivers/mlx5_core")
    port = "sys/class/infiniband/mlx5_0/ports/1"
    write(
        tmp_path,
        **{
            f"{port}/rate": "400 Gb/sec (4X NDR)\n",
            f"{port}/link_layer": "InfiniBand\n",
        },
    )
    assert network(tmp_path) == [
        {"name": "eth0", "driver": "mlx5_core", "speed_mbit_s": 25000},
        {"name": "mlx5_0:1", "rate": "400 Gb/sec (4X NDR)", "link_layer": "InfiniBand"},
    ]


def test_card_without_speed_has_none(tmp_path):
    write(
        tmp_path,
        **{"sys/class/net/eth0/operstate": "up", "sys/class/net/eth0/speed": "-1\n"},
    )
    (tmp_path / "sys/class/net/eth0/device").mkdir()
    assert network(tmp_path) == [{"name": "eth0", "driver": None, "speed_mbit_s": None}]


def test_no_container_outside_of_one(tmp_path):
    assert container({}, tmp_path) is None


@pytest.mark.parametrize(
    ("files", "environment", "expected"),
    [
        ({".dockerenv": ""}, {}, ("docker", None, None)),
        (
            {".dockerenv": ""},
            {"SCALEBENCH_IMAGE": "lab/bench:1", "SCALEBENCH_IMAGE_DIGEST": "sha256:ab"},
            ("docker", "lab/bench:1", "sha256:ab"),
        ),
        (
            {
                "run/.containerenv": 'engine="podman-4"\nimage="quay.io/x:1"\nimageid="cafe"\n'
            },
            {},
            ("podman", "quay.io/x:1", "cafe"),
        ),
        ({}, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, ("kubernetes", None, None)),
        ({}, {"SCALEBENCH_IMAGE_DIGEST": "sha256:ab"}, ("stated", None, "sha256:ab")),
    ],
)
def test_container_kinds_are_detected(tmp_path, files, environment, expected):
    told = container(environment, write(tmp_path, **files))
    assert tuple(told.values()) == expected


def test_apptainer_image_has_name_and_header_id(tmp_path):
    own = uuid.uuid4()
    image = tmp_path / "bench.sif"
    image.write_bytes(
        b"#!/usr/bin/env run-singularity\n\0"
        + b"SIF_MAGIC\0"
        + b"01\0"
        + b"02\0"
        + own.bytes
        + bytes(80)
    )
    told = container({"APPTAINER_CONTAINER": str(image)}, tmp_path)
    assert told == {"kind": "apptainer", "image": "bench.sif", "digest": f"sif:{own}"}
    image.write_bytes(b"another format")
    assert container({"APPTAINER_CONTAINER": str(image)}, tmp_path)["digest"] is None


def test_gpus_have_name_driver_and_memory(monkeypatch):
    monkeypatch.setattr(
        machine_facts,
        "output_of",
        lambda *command: "NVIDIA H100 80GB HBM3, 550.54.15, 81559 MiB\n" * 2,
    )
    assert machine_facts.gpus() == 2 * [
        {"name": "NVIDIA H100 80GB HBM3", "driver": "550.54.15", "memory": "81559 MiB"}
    ]
