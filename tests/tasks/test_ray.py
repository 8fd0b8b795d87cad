"""Tasks on Ray, on this node: the weights of processes, and a worker that is killed."""

from __future__ import annotations

import os
import signal
import threading
import time

import numpy as np
import pytest

from scalebench.comm.engines.tasks import backend_lacks
from scalebench.tasks.run import _Tasks
from tests.tasks.conftest import SLOW, task_run

pytestmark = pytest.mark.skipif(backend_lacks("ray") is not None, reason="ray is not installed")


def on_ray(**changes):
    return task_run(tasks={"backend": "ray"}, **changes)


def test_weights_are_those_of_processes_bit_for_bit(executed):
    momentum = {"sgd": {"momentum": 0.9}}
    outcome, weights = executed(on_ray(run_id="ray", optimizer=momentum))
    assert outcome.status == "completed", outcome.error
    assert outcome.facts.launcher == "ray"
    assert outcome.facts.blocks_retrained == 0
    assert np.array_equal(weights["final"], executed(task_run(optimizer=momentum))[1]["final"])


def test_a_dead_worker_s_block_is_trained_again_once(executed, monkeypatch, tmp_path):
    told = tmp_path / "pid"
    tells = f"time.sleep(0.05)\n            Path({str(told)!r}).write_text(str(os.getpid()))"
    imports = "import os\nimport time\nfrom pathlib import Path"
    (tmp_path / "slow.py").write_text(SLOW.replace("time.sleep(0.05)", tells).replace("import time", imports))
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
    outcome, weights = executed(on_ray(model=f"{tmp_path / 'slow.py'}:build", epochs=2, run_id="killed"))
    monkeypatch.undo()
    assert outcome.status == "completed", outcome.error
    assert outcome.facts.blocks_retrained == 1
    calm = task_run(model=f"{tmp_path / 'slow.py'}:build", epochs=2, run_id="calm")
    assert np.array_equal(weights["final"], executed(calm)[1]["final"])
