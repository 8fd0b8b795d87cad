"""Every communicator against numpy, the shared state and the server, on real processes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from scalebench.comm.engines import available
from scalebench.launch.processes import environment, launch_command
from tests.conftest import some

PROGRAMS = Path(__file__).parent / "programs"
LACKS = {
    "mpi": [],
    "gloo": [],
    "horovod": ["bfloat16", "bfloat16", "sub-communicators", "point-to-point"],
}


def run(program, ranks, *arguments):
    command = [
        *launch_command(ranks)[0],
        sys.executable,
        "-W",
        "error",
        str(PROGRAMS / program),
        *arguments,
    ]
    done = subprocess.run(command, env=environment(1), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def found():
    """Results by number of ranks and available engine, of one launch of four ranks."""
    here = [engine for engine in LACKS if available(engine) is None]
    return run("operations.py", 4, *here) if here else {}


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("engine", LACKS)
def test_every_operation_equals_numpy(found, engine, ranks):
    if reason := available(engine):
        pytest.skip(reason)
    result = found[str(ranks)][engine]
    assert result["size"] == ranks
    assert {
        "allreduce mean",
        "mean in pieces",
        "mean of several",
        "weighted mean by float16",
        "iallreduce max",
        "weighted mean",
        "alltoallv",
        "reduce",
        "allgather",
        "reduce-scatter mean",
    } <= set(result["checked"])
    assert len(result["lacks"]) == len(LACKS[engine])
    for said, expected in zip(result["lacks"], LACKS[engine], strict=True):
        assert f"engine {engine}" in said
        assert expected in said


@pytest.mark.parametrize("ranks", some([2, 4], 2))
def test_shared_state_loses_no_merge_and_server_keeps_arrival_order(ranks):
    if reason := available("mpi"):
        pytest.skip(reason)
    found = run("shared_and_server.py", ranks)
    # every access saw its own, none twice
    assert found["positions"] == list(range(10 * ranks))
    assert found["ascending"]
    assert found["handled"] == 3 * (ranks - 1)
    assert found["tickets"] == list(range(ranks - 1, 0, -1))
    assert "leaves every worker waiting" in found["deaf"]
    # by a server whose reply to worker 0 is still on its way
    assert found["served_meanwhile"] == ranks - 2
    # while a reply was on its way to a worker that did not take it
    assert found["beats"] >= 1000
