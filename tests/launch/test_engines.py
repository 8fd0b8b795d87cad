import subprocess
import sys

import pytest

from scalebench.cluster.load import load_cluster
from scalebench.comm.base import Capability
from scalebench.errors import EngineError
from scalebench.launch import engines
from scalebench.launch.sweep import expand
from scalebench.study.spec import Study


def test_the_baselines_run_where_their_real_parts_are():
    assert Capability.HOROVOD_OPTIMIZER in engines.provides("horovod")
    assert Capability.PROCESS_GROUP in engines.provides("gloo") & engines.provides("nccl")
    assert not {Capability.HOROVOD_OPTIMIZER, Capability.PROCESS_GROUP} & engines.provides("mpi")
    assert [name for name in engines.PROGRESS_THREADS if Capability.SHARED_STATE in engines.provides(name)] == ["mpi"]


def test_an_unknown_engine_is_named_with_its_nearest():
    with pytest.raises(EngineError, match="unknown engine 'glo'; did you mean 'gloo'"):
        engines.provides("glo")


def test_progress_threads_count_as_busy_cores():
    assert not engines.is_oversubscribed("mpi", 2, available_cores=2)
    assert engines.is_oversubscribed("mpi", 3, available_cores=2)
    assert engines.is_oversubscribed("mpi", 2, threads_per_worker=2, available_cores=2)
    assert engines.is_oversubscribed("horovod", 2, available_cores=2)
    assert not engines.is_oversubscribed("gloo", 1, available_cores=1)
    assert not engines.is_oversubscribed("nccl", 8, available_cores=2), "they compute on GPUs"


@pytest.mark.parametrize(
    ("given", "count"),
    [("0,1,3", 3), ("", 0), ("-1", 0), ("NoDevFiles", 0), ("0,-1,1", 1), ("GPU-3a5e,MIG-GPU-1/2/0", 2)],
)
def test_the_gpus_a_process_is_given_count(monkeypatch, given, count):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    assert engines.gpus() == count


def test_what_is_missing_is_said_with_the_command_that_adds_it(monkeypatch):
    monkeypatch.setattr(engines, "find_mpirun", lambda: None)
    with pytest.raises(EngineError, match=r'engine mpi .*no mpirun.*pip install "scalebench\[mpi\]"'):
        engines.require("mpi")


def test_asking_for_engines_imports_neither_torch_nor_horovod_nor_mpi():
    program = (
        "import sys; from scalebench.launch import engines; "
        "[engines.available(e) for e in engines.PROGRESS_THREADS]; "
        "print([m for m in ('torch', 'horovod', 'mpi4py') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("variables", "nodes"),
    [
        ({}, 1),
        ({"SLURM_NNODES": "2"}, 2),
        ({"SLURM_JOB_NUM_NODES": "4", "SLURM_NNODES": "2"}, 4),
        ({"SLURM_JOB_NUM_NODES": "two"}, 1),
        ({"SLURM_JOB_NUM_NODES": "0"}, 1),
    ],
)
def test_real_ranks_may_use_the_cores_of_every_node_of_the_job(monkeypatch, variables, nodes):
    for name in ("SLURM_JOB_NUM_NODES", "SLURM_NNODES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(engines, "cores", lambda: 16)
    assert not engines.is_oversubscribed("mpi", 16 * nodes)
    assert engines.is_oversubscribed("mpi", 16 * nodes + 1)
    study = Study(name="spread", workers="1..64", strategies=["allreduce"], dataset="wine", execution="auto")
    runs = expand(study, load_cluster("this-machine"), timed=False).runs
    assert max(run.workers for run in runs if run.engine == "mpi") == 16 * nodes
