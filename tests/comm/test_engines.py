"""The contract of every engine, with real ranks where it is installed; tests/comm/test_native.py has its operations."""

import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import get_args

import pytest

from scalebench.calibration.probes import engine_probe
from scalebench.cli.options import STUDY_OPTIONS
from scalebench.comm import engines
from scalebench.comm.base import Capability
from scalebench.comm.engines.base import Place
from scalebench.comm.launchers import mpirun
from scalebench.errors import EngineError
from scalebench.launch.processes import environment, launch_command
from scalebench.records.schema import RunRow
from scalebench.study.heterogeneity import VirtualOptions
from scalebench.study.spec import Study
from scalebench.system import hardware
from scalebench.system.clock import WallClock

PROGRAM = Path(__file__).parent / "programs" / "joined.py"
every_engine = pytest.mark.parametrize("name", engines.NAMES)


@every_engine
def test_an_engine_says_what_others_rely_on(name):
    engine = engines.named(name)
    assert engine.name == name
    assert Capability.COLLECTIVES in engine.provides
    assert Capability.OVERLAP not in engine.provides, (
        "gradients are really overlapped, not charged as such"
    )
    assert engine.progress_threads in (0, 1)
    assert (
        not engine.moves_by
        or Capability.COLLECTIVES in engines.named(engine.moves_by).provides
    )
    assert "float32" not in engine.cannot_carry
    assert engine.has_ranks or not engine.is_measured


@every_engine
def test_studies_commands_and_rows_can_name_an_engine(name):
    assert Study(name="one", engine=name).engine == name
    assert name in STUDY_OPTIONS["engine"]["type"].choices
    assert name in str(RunRow.model_fields["engine"].annotation)
    charges = {
        each
        for kind in get_args(VirtualOptions.model_fields["engine"].annotation)
        for each in get_args(kind)
    }
    assert name in charges


@every_engine
def test_an_engine_that_is_measured_has_a_probe(name):
    probe = Path(engine_probe.__file__).parent / f"probe_{name}.py"
    assert probe.is_file() == engines.named(name).is_measured


def _ranks(engine):
    return min(2, hardware.gpus()) if engine.on_gpus else 2


def _can_join(engine):
    return engine.has_ranks and not (engine.on_gpus and not hardware.gpus())


@pytest.fixture(scope="module")
def joined():
    """What ranks saw that engines joined, by engine; engines of as many ranks share a launch."""
    by_ranks = defaultdict(list)
    for name in engines.NAMES:
        engine = engines.named(name)
        if _can_join(engine) and not (engine.lacks() or engines.available("mpi")):
            by_ranks[_ranks(engine)].append(name)
    seen = {}
    for ranks, names in by_ranks.items():
        command = [*launch_command(ranks)[0], sys.executable, str(PROGRAM), *names]
        done = subprocess.run(
            command, env=environment(1), capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        seen |= json.loads(done.stdout.splitlines()[-1])
    return seen


@every_engine
def test_an_engine_joins_its_ranks_again_and_again(name, joined):
    engine = engines.named(name)
    if not engine.has_ranks:
        with pytest.raises(EngineError, match=f"engine {name} joins no ranks"):
            engine.connect(Place(None, WallClock(), one_node=True))
        return
    if not _can_join(engine):
        pytest.skip("no GPU here")
    if reason := engine.lacks() or engines.available("mpi"):
        pytest.skip(reason)
    ranks = _ranks(engine)
    expected = {"engine": name, "size": ranks, "mean": [(ranks - 1) / 2] * 5}
    assert joined[name] == [[expected | {"rank": rank}] * 2 for rank in range(ranks)]


def test_baselines_need_their_own_engine():
    assert Capability.HOROVOD_OPTIMIZER in engines.named("horovod").provides
    assert (
        Capability.PROCESS_GROUP
        in engines.named("gloo").provides & engines.named("nccl").provides
    )
    assert (
        not {Capability.HOROVOD_OPTIMIZER, Capability.PROCESS_GROUP}
        & engines.named("mpi").provides
    )
    shared = [
        name
        for name in engines.NAMES
        if Capability.SHARED_STATE in engines.named(name).provides
    ]
    assert shared == ["mpi", "tasks"]


def test_unknown_engine_suggests_the_nearest_name():
    with pytest.raises(EngineError, match="unknown engine 'glo'; did you mean 'gloo'"):
        engines.named("glo")


def test_progress_threads_count_as_busy_cores():
    busy = {
        "mpi": 1,
        "horovod": 2,
        "gloo": 2,
        "nccl": 0,
        "tasks": 1,
    }  # nccl computes on GPUs
    assert {name: engines.named(name).busy_threads(2) for name in busy} == busy
    assert engines.named("mpi").busy_threads(2, threads_per_worker=3) == 3
    assert engines.named("gloo").busy_threads(1) == 1, "a lone worker moves no bytes"


@pytest.mark.parametrize(
    ("given", "count"),
    [
        ("0,1,3", 3),
        ("", 0),
        ("-1", 0),
        ("NoDevFiles", 0),
        ("0,-1,1", 1),
        ("GPU-3a5e,MIG-GPU-1/2/0", 2),
    ],
)
def test_gpus_follow_cuda_visible_devices(monkeypatch, given, count):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    assert hardware.gpus() == count


def test_missing_engine_names_the_command_that_adds_it(monkeypatch):
    monkeypatch.setattr(mpirun, "find", lambda: None)
    with pytest.raises(
        EngineError, match=r'engine mpi .*no mpirun.*pip install "scalebench\[mpi\]"'
    ):
        engines.require("mpi")


def test_availability_check_imports_nothing_heavy():
    program = (
        "import sys; from scalebench.comm import engines; "
        "[engines.available(e) for e in engines.NAMES]; "
        "print([m for m in ('torch', 'horovod', 'mpi4py') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
