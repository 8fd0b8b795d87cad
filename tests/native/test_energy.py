"""Energy counters that wrap around, with a fake /sys, NVML (conftest.py) and sstat."""

from __future__ import annotations

import csv
import shutil

import pytest

from scalebench.comm import engines
from scalebench.native.sensors import (
    EnergyMeter,
    Gpu,
    SlurmCounter,
    nvml,
    rapl,
    slurm_joules,
    total_energy,
)

STRATEGY = """
from pathlib import Path

from scalebench.native import sensors
from scalebench.strategies.epoch_average import EpochAverage

sensors.RAPL_ZONES = Path("powercap").absolute()

class Taking(EpochAverage):
    name = summary = source = "takes 3 J an epoch"

    def train_epoch(self, worker, epoch):
        super().train_epoch(worker, epoch)
        if worker.rank == 0 and (counter := sensors.RAPL_ZONES / "intel-rapl:0" / "energy_uj").exists():
            counter.write_text(str(int(counter.read_text()) + 3_000_000))
"""


@pytest.fixture
def zones(tmp_path):
    """Two packages, of which the second wraps around soon, the first one's cores and memory, and the whole platform."""
    root = tmp_path / "powercap"
    for zone, name, now, largest in (
        ("intel-rapl:0", "package-0", 1_000_000, 262143328850),
        ("intel-rapl:0:0", "core", 700_000, 262143328850),
        ("intel-rapl:0:1", "dram", 500_000, 65712999613),
        ("intel-rapl:1", "package-1", 90, 99),
        ("intel-rapl:2", "psys", 5, 262143328850),
        ("intel-rapl-mmio:0", "package-0", 7, 262143328850),
    ):
        (root / zone).mkdir(parents=True)
        (root / zone / "name").write_text(f"{name}\n")
        (root / zone / "energy_uj").write_text(f"{now}\n")
        (root / zone / "max_energy_range_uj").write_text(f"{largest}\n")
    return root


def take(root, zone, microjoules):
    """Let the zone's counter go on, around its end too."""
    counter = root / zone / "energy_uj"
    largest = int((root / zone / "max_energy_range_uj").read_text())
    counter.write_text(str((int(counter.read_text()) + microjoules) % (largest + 1)))


def test_packages_and_memory_are_counted_once(zones):
    counter = rapl(zones)
    counter.begin()
    for zone in sorted(zones.iterdir()):
        take(zones, zone.name, 2_000_000 if zone.name != "intel-rapl:1" else 0)
    for _ in range(3):
        take(zones, "intel-rapl:1", 60)  # from 90 to 50, to 10, to 70 of 99
        counter.look()
    assert counter.joules() == pytest.approx((2 * 2_000_000 + 180) / 1e6, rel=1e-12)
    counter.begin()
    assert counter.joules() == 0


@pytest.mark.parametrize(
    "gone", ["intel-rapl:0:1/energy_uj", "intel-rapl:1/max_energy_range_uj", "."]
)
def test_unreadable_counter_gives_no_energy(zones, gone):
    shutil.rmtree(zones) if gone == "." else (zones / gone).unlink()
    counter = rapl(zones)
    counter.begin()
    assert counter.joules() is None


def test_counter_that_vanishes_during_the_run_gives_no_energy(zones):
    counter = rapl(zones)
    counter.begin()
    text = (zones / "intel-rapl:0/energy_uj").read_text()
    (zones / "intel-rapl:0/energy_uj").write_text("")
    counter.look()
    (zones / "intel-rapl:0/energy_uj").write_text(text)
    assert counter.joules() is None


def test_a_gpu_counts_millijoules(nvml_library):
    gpu = nvml(Gpu("3a5e", nvml_library))
    gpu.begin()
    assert [gpu.joules(), gpu.joules()] == [0.25, 0.5]
    other = nvml(Gpu("another", nvml_library))
    other.begin()
    assert other.joules() is None


# the form of sstat 22.05
STEPS = "echo '17.extern|4580000'; echo '17.batch|4580000'; echo '17.0|4570000'"


@pytest.mark.parametrize(
    ("script", "joules"),
    [
        (STEPS, {"17.extern": 4580000.0, "17.batch": 4580000.0, "17.0": 4570000.0}),
        ("echo '17.batch|0'", {"17.batch": 0.0}),
        ("echo '17.batch|'; echo '17.0|5'", {"17.0": 5.0}),
        ("echo '17.batch|18446744073709551614'; echo '17.0|4294967294'", {}),
        ("echo '17.batch|12M'", {}),
        ("exit 1", {}),
        (None, {}),
    ],
)
def test_slurm_gives_the_energy_of_each_step_of_the_job(
    tmp_path, monkeypatch, script, joules
):
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    if script is not None:
        (tmp_path / "sstat").write_text(
            f'#!/bin/sh\ncase "$*" in *"--jobs 17"*) ;; *) exit 3;; esac\n{script}\n'
        )
        (tmp_path / "sstat").chmod(0o755)
    elif shutil.which("sstat"):
        monkeypatch.setenv("PATH", str(tmp_path))
    assert slurm_joules() == joules
    monkeypatch.delenv("SLURM_JOB_ID")
    assert slurm_joules() == {}


@pytest.mark.parametrize(
    ("readings", "expected"),
    [
        ([{"rapl": 30.0}, {}, {"rapl": 30.0}], (60.0, "rapl")),
        ([{"rapl": 30.0}, {}, {"rapl": None}], None),
        ([{"rapl": None}, {}], None),
        ([{"rapl": 0.0}], None),
        ([{"rapl": 30.0, "nvml": 200.0}, {"nvml": 100.0}], (330.0, "rapl+nvml")),
        ([{"rapl": None, "nvml": 200.0}, {"nvml": 100.0}], (300.0, "nvml")),
        ([{"rapl": 30.0, "nvml": 200.0}, {"nvml": None}], None),
        ([{"rapl": None, "slurm": 500.0}, {}], (500.0, "slurm")),
        ([{"rapl": 30.0, "slurm": 500.0}, {}], (30.0, "rapl")),
        ([{"rapl": None, "slurm": 0.0}, {}], None),
    ],
)
def test_total_needs_every_part(readings, expected):
    assert total_energy(readings) == expected


def test_meter_reads_slurm_before_and_after_the_run(monkeypatch):
    readings = iter([{"17.batch": 100.0}, {"17.batch": 130.0}])
    meter = EnergyMeter(
        first_on_node=False, first=True, gpu=None, slurm=lambda: next(readings)
    )
    meter.begin()
    meter.look()
    assert meter.end() == {"slurm": 30.0}


@pytest.mark.parametrize(
    ("before", "after", "joules"),
    [
        (
            {"17.extern": 90.0, "17.batch": 90.0, "17.0": 10.0},
            {"17.extern": 120.0, "17.batch": 120.0, "17.0": 39.0},
            30.0,
        ),
        ({"17.batch": 90.0, "17.0": 10.0}, {"17.batch": 120.0, "17.0": 70.0}, 60.0),
        ({"17.batch": 90.0}, {"17.batch": 120.0, "17.1": 500.0}, 30.0),
        ({"17.0": 90.0}, {"17.1": 120.0}, None),
        ({}, {"17.0": 120.0}, None),
    ],
    ids=[
        "the same nodes",
        "more nodes",
        "a step that began meanwhile",
        "another step",
        "unknown at first",
    ],
)
def test_steps_of_a_job_are_not_added_up(before, after, joules):
    """Each step has the energy of its nodes; batch, extern and 0 of a job on one node have all the same."""
    readings = iter([before, after])
    counter = SlurmCounter(lambda: next(readings))
    counter.begin()
    assert counter.joules() == joules


@pytest.mark.parametrize(
    ("there", "execution", "joules", "source"),
    [
        (True, "native", "12.0", "rapl"),
        pytest.param(True, "paced", "", "", marks=pytest.mark.thorough),
        pytest.param(False, "native", "", "", marks=pytest.mark.thorough),
    ],
)
def test_row_of_a_native_run_holds_its_energy(
    zones, tmp_path, monkeypatch, invoke, there, execution, joules, source
):
    """Two real ranks, the first of which increases the counters; without counters and in paced runs cells are empty."""
    if reason := engines.available("mpi"):
        pytest.skip(reason)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    if not there:
        shutil.rmtree(zones)
    (tmp_path / "taking.py").write_text(STRATEGY)
    words = (
        "--strategy",
        "taking.py:Taking",
        "--workers",
        "2",
        "--dataset",
        "wine",
        "--epochs",
        "4",
        "--name",
        "own",
    )
    invoke(
        "run",
        *words,
        "--repetitions",
        "1",
        "--execution",
        execution,
        "--device-step-time",
        "0.001",
    )
    with (tmp_path / "results" / "own" / "runs.csv").open(newline="") as table:
        (row,) = csv.DictReader(table)
    assert (row["execution"], row["energy_j"], row["energy_source"]) == (
        execution,
        joules,
        source,
    )
