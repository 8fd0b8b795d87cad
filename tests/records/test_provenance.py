"""Provenance says what a study ran on, and nothing about who ran it."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from pathlib import Path

from scalebench.launch import engines
from scalebench.records import provenance
from scalebench.records.provenance import allowed_environment, collect, redact
from scalebench.records.schema import RunRow, columns

PLANTED = "hunter2"


def test_it_names_machine_packages_and_commit():
    facts = collect()
    assert {"host_hash", "packages_hash", "git_commit", "git_dirty", "scheduler_job_id"} <= set(columns(RunRow))
    assert facts["cpu"]["logical_cores"] == os.cpu_count()
    assert facts["packages"]["numpy"]
    assert facts["memory_mib"] > 100
    assert facts["torch"]["version"] == facts["packages"]["torch"]
    assert {"numa_nodes", "governor"} <= set(facts["cpu"])
    assert {"gpus", "network", "container", "modules"} <= set(facts)
    assert json.loads(json.dumps(facts)) == facts


def test_it_tells_how_mpi_horovod_and_torch_communicate():
    facts = collect({"LOADEDMODULES": "gcc/12.2:openmpi/4.1.5"})
    assert facts["modules"] == ["gcc/12.2", "openmpi/4.1.5"]
    assert {"gloo", "nccl"} <= set(facts["torch"])
    if engines.available("mpi") is None:
        assert facts["mpi"].startswith("mpirun (Open MPI)")
    if engines.available("horovod") is None:
        assert "mpi" in facts["horovod"]["transports"]


def test_the_commit_is_that_of_the_checkout_it_runs_from():
    folder = Path(provenance.__file__).parent
    head = subprocess.run(["git", "-C", folder, "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    tracked = subprocess.run(["git", "-C", folder, "ls-files", "store.py"], capture_output=True, text=True, check=False)
    expected = head.stdout.strip() if tracked.stdout else None
    assert collect()["git_commit"] == expected


def test_the_same_place_has_the_same_hashes():
    first, second = collect(), collect()
    assert first == second
    assert platform.node() not in json.dumps(first["host_hash"])


def test_secrets_and_names_in_the_environment_are_not_kept():
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


def test_a_text_loses_what_names_a_person_or_opens_a_door():
    environment = {"HOME": "/srv/carla", "USER": "serial", "HF_TOKEN": "hf_0123456789", "PIN_TOKEN": "4711"}
    text = "serial read /srv/carla/m.py, /home/dora/x and git+https://dora:pw@host/x with hf_0123456789, 4711 times"
    assert redact(text, environment, names=False) == (
        "serial read ~/m.py, ~/x and git+https://<credentials>@host/x with <secret>, 4711 times"
    )
    assert redact(text, environment).startswith("<user> read ~/m.py")
    path = redact("/scratch/serial/m.py:make and /sw/serially/x", environment, names=False)
    assert path == "/scratch/<user>/m.py:make and /sw/serially/x", "a folder that is called as the user"
