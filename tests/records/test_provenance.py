"""Provenance describes hardware and software, without personal data."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from scalebench.comm import engines
from scalebench.records import machine_facts, provenance
from scalebench.records.provenance import allowed_environment, collect, redact
from scalebench.records.schema import RunRow, columns

PLANTED = "hunter2"


def test_collect_returns_machine_packages_and_commit():
    facts = collect()
    assert {
        "host_hash",
        "packages_hash",
        "git_commit",
        "git_dirty",
        "scheduler_job_id",
    } <= set(columns(RunRow))
    assert facts["cpu"]["logical_cores"] == os.cpu_count()
    assert facts["packages"]["numpy"]
    assert facts["memory_mib"] > 100
    assert facts["torch"]["version"] == facts["packages"]["torch"]
    assert {"numa_nodes", "governor"} <= set(facts["cpu"])
    assert {"gpus", "network", "container", "modules"} <= set(facts)
    assert json.loads(json.dumps(facts)) == facts


def test_collect_returns_builds_of_mpi_horovod_and_torch():
    facts = collect({"LOADEDMODULES": "gcc/12.2:openmpi/4.1.5"})
    assert facts["modules"] == ["gcc/12.2", "openmpi/4.1.5"]
    assert {"gloo", "nccl"} <= set(facts["torch"])
    assert facts["torch"]["settings"]["USE_GLOO"] in ("ON", "1")
    assert "tcp" in facts["torch"]["gloo"]["transports"]
    if engines.available("mpi") is None:
        build = facts["mpi_build"]
        assert facts["mpi"] == f"mpirun (Open MPI) {build['version']}"
        assert {"self", "sm"} <= set(build["components"]["btl"])
        assert any(option.startswith("--with") for option in build["options"])
        assert not [
            option for option in build["options"] if "/" in option or "prefix" in option
        ]


def test_horovod_facts_agree_with_check_build():
    if reason := engines.available("horovod"):
        pytest.skip(reason)
    ask = (
        "import json; from horovod.torch import mpi_ops as ops; names = 'NCCL', 'DDL', 'CCL', 'MPI', 'Gloo'; "
        "print(json.dumps({name: bool(getattr(ops, name.lower() + '_built')()) for name in names}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", ask],
        capture_output=True,
        text=True,
        check=True,
    )
    said = [name for name, built in json.loads(done.stdout).items() if built]
    told = machine_facts.horovod()
    assert told["frameworks"] == ["PyTorch"]
    assert told["tensor_operations"] == said
    assert told["controllers"] == [name for name in ("MPI", "Gloo") if name in said]


@pytest.mark.parametrize(
    ("line", "kept"),
    [
        (
            " '--prefix=/home/carla/mpi' '--with-ucx=/home/carla/ucx' '--with-cuda' 'CC=/home/carla/gcc' "
            "'--enable-mpi-fortran=mpifh' '--with-device=ch4:ofi' '--without-verbs' '--with-slurm=carla@host'",
            "--enable-mpi-fortran=mpifh --with-cuda --with-device=ch4:ofi --with-slurm --with-ucx --without-verbs",
        ),
        (
            "--enable-fast=O3,ndebug --disable-doc 'CFLAGS=-O2",
            "--disable-doc --enable-fast=O3,ndebug",
        ),
        ("", ""),
    ],
)
def test_configure_options_keep_switches_without_paths(line, kept):
    assert " ".join(machine_facts.configure_options(line)) == kept


def test_mpich_build_has_its_configure_options(monkeypatch):
    """Output of MPICH's mpiexec --version."""
    told = "HYDRA build details:\n    Version:    4.1\n    Configure options:   '--with-device=ch4:ofi' '--prefix=/x'\n"
    monkeypatch.setattr(
        machine_facts,
        "output_of",
        lambda *command: told if command[1:] == ("--version",) else "",
    )
    assert machine_facts.mpi() == "HYDRA build details:"
    assert machine_facts.mpi_build() == {"options": ["--with-device=ch4:ofi"]}
    monkeypatch.setattr(machine_facts, "output_of", lambda *command: "")
    assert machine_facts.mpi() is machine_facts.mpi_build() is None


def test_packages_are_read_again_only_after_an_installation(monkeypatch, tmp_path):
    read = []
    versions = {"torch": "2.0"}
    monkeypatch.setattr(
        machine_facts, "package_versions", lambda: read.append(1) or dict(versions)
    )
    monkeypatch.syspath_prepend(tmp_path)
    before = [collect() for _ in range(2)]
    versions["horovod"] = "0.28"
    (tmp_path / "horovod").mkdir()
    after = collect()
    assert len(read) == 2
    assert [facts["packages"] for facts in before] == 2 * [{"torch": "2.0"}]
    assert after["packages"] == {"torch": "2.0", "horovod": "0.28"}
    assert after["packages_hash"] != before[0]["packages_hash"]


def test_commit_is_that_of_the_checkout():
    folder = Path(provenance.__file__).parent
    head = subprocess.run(
        ["git", "-C", folder, "rev-parse", "HEAD"],
        capture_output=True,
        text=True,
        check=False,
    )
    tracked = subprocess.run(
        ["git", "-C", folder, "ls-files", "store.py"],
        capture_output=True,
        text=True,
        check=False,
    )
    expected = head.stdout.strip() if tracked.stdout else None
    assert collect()["git_commit"] == expected


def test_hashes_are_reproducible():
    first, second = collect(), collect()
    assert first == second
    assert platform.node() not in json.dumps(first["host_hash"])


def test_secrets_and_names_in_the_environment_are_redacted():
    environment = {
        "HOME": "/home/carla",
        "USER": "carla",
        "OMP_NUM_THREADS": "4",
        "HOROVOD_SECRET_KEY": PLANTED,
        "NCCL_API_KEY": PLANTED,
        "MY_TOKEN": PLANTED,
        "AWS_ACCESS_KEY_ID": PLANTED,
        "OMPI_MCA_btl": "tcp,self",
        "OMPI_MCA_mca_base_param_files": "/home/carla/.openmpi:/home/dora/x",
        "NCCL_TOPO_FILE": f"https://carla:{PLANTED}@host/topo.xml",
        "GLOO_SOCKET_IFNAME": f"if-{platform.node()}",
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_USER": "carla",
        "LOADEDMODULES": "/home/carla/modules/gcc",
        "APPTAINER_CONTAINER": "/home/carla/bench.sif",
    }
    kept = allowed_environment(environment)
    text = json.dumps(collect(environment))
    assert kept["OMP_NUM_THREADS"] == "4"
    assert kept["OMPI_MCA_btl"] == "tcp,self"
    assert kept["SLURM_JOB_ID"] == "4711"
    assert kept["OMPI_MCA_mca_base_param_files"] == "~/.openmpi:~/x"
    for hidden in (PLANTED, "carla", "dora", f'if-{platform.node()}"'):
        assert hidden not in text, hidden
    assert json.loads(text)["scheduler_job_id"] == "4711"


def test_short_secrets_of_mpi_and_scheduler_variables_are_masked():
    environment = {
        "HOME": "/home/carla",
        "USER": "carla",
        "I_MPI_FABRICS": "shm:ofi",
        "I_MPI_ROOT": "/home/carla/intel",
        "I_MPI_TOKEN": "q7!",
        "MPICH_OFI_NIC_POLICY": "NUMA",
        "MPICH_SECRET": PLANTED,
        "FI_PROVIDER": "verbs;cookie=q7!;key=ab12c",
        "FI_AUTH_KEY": "ab12c",
        "SLURM_JOB_PARTITION": "gpu-hunter2",
        "SLURM_HINT": "nomultithread",
        "DB_PASS": PLANTED,
        "USE_AUTH": "true",
        "GIT_TOKEN": "1",
        "OMP_DYNAMIC": "true",
        "OMP_NUM_THREADS": "1",
        "LOADEDMODULES": "intel/2024:tools-q7!:ab12c",
        "SCALEBENCH_IMAGE": "lab/hunter2:ab12c",
    }
    kept = allowed_environment(environment)
    assert kept == {
        "FI_PROVIDER": "verbs;cookie=<secret>;key=<secret>",
        "I_MPI_FABRICS": "shm:ofi",
        "I_MPI_ROOT": "~/intel",
        "MPICH_OFI_NIC_POLICY": "NUMA",
        "OMP_DYNAMIC": "true",
        "OMP_NUM_THREADS": "1",
        "SCALEBENCH_IMAGE": "lab/<secret>:<secret>",
        "SLURM_HINT": "nomultithread",
        "SLURM_JOB_PARTITION": "gpu-<secret>",
    }
    facts = collect(environment)
    assert facts["modules"] == ["intel/2024", "tools-<secret>", "<secret>"]
    text = json.dumps(facts)
    for hidden in (PLANTED, "q7!", "ab12c", "carla"):
        assert hidden not in text, hidden


def test_redact_removes_names_and_credentials():
    environment = {
        "HOME": "/srv/carla",
        "USER": "serial",
        "HF_TOKEN": "hf_0123456789",
        "PIN_TOKEN": "4711",
    }
    text = "serial read /srv/carla/m.py, /home/dora/x and git+https://dora:pw@host/x with hf_0123456789, 4711 times"
    assert redact(text, environment, names=False) == (
        "serial read ~/m.py, ~/x and git+https://<credentials>@host/x with <secret>, 4711 times"
    )
    assert redact(text, environment).startswith("<user> read ~/m.py")
    path = redact(
        "/scratch/serial/m.py:make and /sw/serially/x", environment, names=False
    )
    assert path == "/scratch/<user>/m.py:make and /sw/serially/x", (
        "a folder that is called as the user"
    )
