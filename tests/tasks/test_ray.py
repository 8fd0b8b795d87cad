"""Tasks on Ray: the weights of processes, a worker that is killed, a Ray that runs already, and silent addresses."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys

import numpy as np
import pytest

from scalebench.comm.engines.tasks import backend_lacks
from scalebench.errors import EngineError
from scalebench.tasks import backends
from scalebench.tasks.run import TaskRuns
from tests.hosts.machines import until
from tests.tasks.conftest import kill_one_training, task_run

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
        until(lambda: answers(port), "Ray answers")
        yield f"127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def answers(port):
    try:
        backends._require_ray(f"127.0.0.1:{port}")
    except EngineError:
        return False
    return True


def on_ray(scheduler=None, **changes):
    return task_run(tasks={"backend": "ray", "scheduler": scheduler}, **changes)


def test_an_address_that_does_not_answer_is_refused(monkeypatch):
    monkeypatch.setattr(backends, "ANSWER_S", 1.0)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()  # takes connections and says nothing
        for host in (
            f"127.0.0.1:{silent.getsockname()[1]}",
            "127.0.0.1:9",
            "ray://127.0.0.1:9",
        ):
            with pytest.raises(
                EngineError, match=f"tasks.scheduler {host}: no Ray answers there"
            ):
                TaskRuns({}, 2)._backend(on_ray(host))


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
    kill_one_training(tmp_path, monkeypatch)
    model = f"{tmp_path / 'mortal.py'}:build"
    outcome, weights = executed(on_ray(model=model, epochs=2, run_id="killed"))
    assert outcome.status == "completed", outcome.error
    assert outcome.facts.blocks_retrained == 1
    calm = task_run(model=model, epochs=2, run_id="calm")
    assert np.array_equal(weights["final"], executed(calm)[1]["final"])
