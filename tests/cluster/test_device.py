"""Shipped devices parse and have sources; invalid files are one-line errors."""

from __future__ import annotations

import pytest

from scalebench.cluster.device import device_names, load_device
from scalebench.errors import ClusterError
from tests.facts import naming

MINIMAL = """\
name: mine
peak_flops_per_s: {float32: 1e13}
memory_bandwidth_bytes_per_s: 9e11
launch_overhead_s: 5e-6
memory_gib: 16
source: data sheet
"""


@pytest.mark.parametrize("name", device_names())
def test_every_shipped_device_parses(name):
    device = load_device(name)
    assert device.name == name
    assert device.description
    assert 1e12 < device.peak("float32") < 1e14
    # of the launch overhead, which no data sheet states
    assert "assumed, range" in device.source


def test_a_file_is_read(tmp_path):
    (tmp_path / "mine.yaml").write_text(MINIMAL)
    assert load_device(tmp_path / "mine.yaml").memory_gib == 16


def test_variants_of_a_device_are_named_where_it_is_given_without_one():
    with pytest.raises(
        ClusterError, match=r"did you mean 'a100-40gb' or 'a100-80gb'\?"
    ):
        load_device("a100")


def test_unknown_names_and_dtypes():
    with pytest.raises(
        ClusterError,
        match=naming("'v100-16g'", "no such file", "'v100-16gb'"),
    ):
        load_device("v100-16g")
    with pytest.raises(
        ClusterError,
        match=naming("k80", "peak_flops_per_s", "bfloat16", "float64, float32"),
    ):
        load_device("k80").peak("bfloat16")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "float32: 1e13",
            "float32: 15.7",
            "expected flop/s, 312 Tflop/s as 312e12, got 15.7 for float32",
        ),
        ("float32: 1e13", "float32: -1e13", "expected a number greater than 0, got -1"),
        ("float32: 1e13", "float8: 1e13", "peak_flops_per_s.float8"),
        ("{float32: 1e13}", "{}", "peak_flops_per_s"),
        ("9e11", "900", "expected bytes/s, 900 GB/s as 900e9, got 900"),
        ("9e11", "0", "expected a number greater than 0, got 0"),
        ("9e11", "900 GB/s", "expected a number, got '900 GB/s'"),
        (
            "memory_bandwidth_bytes_per_s",
            "memory_bandwidth",
            "did you mean 'memory_bandwidth_bytes_per_s'",
        ),
        (
            "launch_overhead_s: 5e-6",
            "launch_overhead_s: 5",
            "expected seconds, 5 us as 5e-6, got 5",
        ),
        (
            "memory_gib: 16\n",
            "",
            "key 'memory_gib' is missing (GiB of the device's memory)",
        ),
        ("data sheet", "''", "source"),
    ],
)
def test_wrong_files(old, new, message, tmp_path):
    assert old in MINIMAL
    path = tmp_path / "mine.yaml"
    path.write_text(MINIMAL.replace(old, new))
    with pytest.raises(ClusterError) as raised:
        load_device(path)
    assert str(path) in str(raised.value)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)
