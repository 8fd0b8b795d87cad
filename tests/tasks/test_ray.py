"""Tasks on Ray: the weights of processes, a worker that is killed, a Ray that runs already, and silent addresses."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from scalebench.comm.engines.tasks import backend_lacks
from scalebench.errors import EngineError
from scalebench.tasks import backends
from scalebench.tasks.run import TaskRuns, _Tasks
from tests.hosts.machines import until
from tests.tasks.conftest import SLOW, task_run

pytestmark = pytest.mark.skipif(
    backend_lacks("ray") is not None, reason="ray is not installed"
)


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    """The address of a Ray of three CPUs that was started by someone else."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    head = [
        "start",
        "--head",
        "--block",
        f"--port={port}",
        "--num-cpus=3",
        "--include-dashboard=false",
    ]
    words = [
        sys.executable,
        "-c",
        "from ray.scripts.scripts import main; main()",
        *head,
        "--disable-usage-stats",
    ]
    environment = os.environ | {"RAY_AUTH_MODE": "disabled"}
    with (tmp_path_factory.mktemp("ray") / "said").open("w") as said:
        process = subprocess.Popen(
            words, stdout=said, stderr=said, env=environment, start_new_session=True
        )
    try:
        until(lambda: answers(port), "Ray answers", 120)
        yield f"127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=60)


def answers(port):
    try:
        backends._require_ray(f"127.0.0.1:{port}")
    except EngineError:
        return False
    return True


def on_ray(scheduler=None, **changes):
    return task_run(tasks={"backend": "ray", "scheduler": scheduler}, **changes)


def test_an_address_that_does_not_answer_is_refused_in_ten_seconds(monkeypatch):
    assert backends.ANSWER_S == 10
    monkeypatch.setattr(backends, "ANSWER_S", 1.0)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()  # takes connections and says nothing
        for host in (
            f"127.0.0.1:{silent.getsockname()[1]}",
            "127.0.0.1:9",
            "ray://127.0.0.1:9",
        ):
            began = time.monotonic()
            with pytest.raises(
                EngineError, match=f"tasks.scheduler {host}: no Ray answers there"
            ):
                TaskRuns({}, 2)._backend(on_ray(host))
            assert time.monotonic() - began < 60  # 1 s; generous on a busy machine


def test_a_running_ray_is_used_as_far_as_its_cpus_reach(executed, running):
    with pytest.raises(
        EngineError,
        match=r"a Ray of 3 CPUs there, and the largest run takes 4; .*--workers 1\.\.3",
    ):
        TaskRuns({}, 4)._backend(on_ray(running))
    outcome, weights = executed(on_ray(running, run_id="running"))
    assert outcome.status == "completed", outcome.error
    assert np.array_equal(weights["final"], executed(task_run())[1]["final"])


def test_weights_are_those_of_processes_bit_for_bit(executed):
    momentum = {"sgd": {"momentum": 0.9}}
    # processes first: the Ray that is started here is that of the next test
    _, expected = executed(task_run(optimizer=momentum))
    outcome, weights = executed(on_ray(run_id="ray", optimizer=momentum))
    assert outcome.status == "completed", outcome.error
    assert outcome.facts.launcher == "ray"
    assert outcome.facts.blocks_retrained == 0
    assert np.array_equal(weights["final"], expected["final"])


def test_a_dead_worker_s_block_is_trained_again_once(executed, monkeypatch, tmp_path):
    told = tmp_path / "pid"
    tells = f"time.sleep(0.05)\n            Path({str(told)!r}).write_text(str(os.getpid()))"
    imports = "import os\nimport time\nfrom pathlib import Path"
    (tmp_path / "slow.py").write_text(
        SLOW.replace("time.sleep(0.05)", tells).replace("import time", imports)
    )
    begin, killed = _Tasks._computed, []

    def kill_soon(self, worker, place, arguments):
        if not killed:
            killed.append(True)
            told.unlink(missing_ok=True)  # written by the warm-up
            threading.Thread(target=kill_one).start()
        return begin(self, worker, place, arguments)

    def kill_one():
        while not (told.exists() and told.read_text()):
            time.sleep(0.01)
        os.kill(int(told.read_text()), signal.SIGKILL)  # its block takes 0.6 s

    monkeypatch.setattr(_Tasks, "_computed", kill_soon)
    outcome, weights = executed(
        on_ray(model=f"{tmp_path / 'slow.py'}:build", epochs=2, run_id="killed")
    )
    monkeypatch.undo()
    assert outcome.status == "completed", outcome.error
    assert outcome.facts.blocks_retrained == 1
    calm = task_run(model=f"{tmp_path / 'slow.py'}:build", epochs=2, run_id="calm")
    assert np.array_equal(weights["final"], executed(calm)[1]["final"])
