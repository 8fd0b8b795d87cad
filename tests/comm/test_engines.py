import subprocess
import sys

import pytest

from scalebench.comm import engines
from scalebench.comm.base import Capability
from scalebench.comm.launchers import mpirun
from scalebench.errors import EngineError


def test_baselines_need_their_own_engine():
    assert Capability.HOROVOD_OPTIMIZER in engines.provides("horovod")
    assert Capability.PROCESS_GROUP in engines.provides("gloo") & engines.provides("nccl")
    assert not {Capability.HOROVOD_OPTIMIZER, Capability.PROCESS_GROUP} & engines.provides("mpi")
    assert [name for name in engines.PROGRESS_THREADS if Capability.SHARED_STATE in engines.provides(name)] == [
        "mpi",
        "tasks",
    ]


def test_unknown_engine_suggests_the_nearest_name():
    with pytest.raises(EngineError, match="unknown engine 'glo'; did you mean 'gloo'"):
        engines.provides("glo")


def test_progress_threads_count_as_busy_cores():
    assert [engines.busy_threads(engine, 2) for engine in engines.NAMES] == [1, 2, 2, 0, 1], "nccl computes on GPUs"
    assert engines.busy_threads("mpi", 2, threads_per_worker=3) == 3
    assert engines.busy_threads("gloo", 1) == 1, "a lone worker moves no bytes"


@pytest.mark.parametrize(
    ("given", "count"),
    [("0,1,3", 3), ("", 0), ("-1", 0), ("NoDevFiles", 0), ("0,-1,1", 1), ("GPU-3a5e,MIG-GPU-1/2/0", 2)],
)
def test_gpus_follow_cuda_visible_devices(monkeypatch, given, count):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    assert engines.gpus() == count


def test_missing_engine_names_the_command_that_adds_it(monkeypatch):
    monkeypatch.setattr(mpirun, "find", lambda: None)
    with pytest.raises(EngineError, match=r'engine mpi .*no mpirun.*pip install "scalebench\[mpi\]"'):
        engines.require("mpi")


def test_availability_check_imports_nothing_heavy():
    program = (
        "import sys; from scalebench.comm import engines; "
        "[engines.available(e) for e in engines.PROGRESS_THREADS]; "
        "print([m for m in ('torch', 'horovod', 'mpi4py') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
